"""The one part of the build that pyproject.toml cannot say: libraries of C that are left out where they cannot be built.

They are no modules of one Python (bank/kernels/fast_library.py), so their wheel serves every version from 3.11 on.
"""

from setuptools import Extension, setup

experts = Extension(
    "hotsplit.bank.kernels._experts",
    sources=[f"src/hotsplit/bank/kernels/native/{name}.c" for name in ("experts", "attention", "norms", "paths")],
    depends=[
        f"src/hotsplit/bank/kernels/native/{name}.h"
        for name in ("attention", "attention_path", "experts", "path", "scalars", "unset")
    ],
    # Instructions beyond the baseline are chosen when it runs. No fused product where none is asked for: results must not
    # depend on how a compiler copies a function.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-g0"],
    libraries=["m"],
    optional=True,
    py_limited_api=True,
)

# A library of its own: where signals work otherwise the experts are native all the same.
guard = Extension(
    "hotsplit.bank._guard",
    sources=["src/hotsplit/bank/native/guard.c"],
    extra_compile_args=["-std=c11", "-O2", "-g0"],
    optional=True,
    py_limited_api=True,
)

setup(ext_modules=[experts, guard], options={"bdist_wheel": {"py_limited_api": "cp311"}})
