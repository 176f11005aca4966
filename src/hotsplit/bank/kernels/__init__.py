"""Kernels over rows: the plain torch twins are the specification, faster ones must equal them."""
