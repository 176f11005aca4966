/* Forgets what path.h was told of one path, so that the next can tell it again. */
#undef SUFFIX
#undef TARGET
#undef LANES
#undef ROWS
#undef vector
#undef zero
#undef spread
#undef get
#undef put
#undef fused
#undef total
#undef load_float32
#undef load_bfloat16
#undef load_float16
#undef load_float8
#undef narrow_float16
#undef widen_float16
