"""The one part of the build that pyproject.toml cannot say: a library of C that is left out where it cannot be built.

It is no module of one Python (bank/kernels/fast_library.py), so its wheel serves every version from 3.11 on.
"""

from setuptools import Extension, setup

experts = Extension(
    "hotsplit.bank.kernels._experts",
    sources=["src/hotsplit/bank/kernels/native/experts.c", "src/hotsplit/bank/kernels/native/paths.c"],
    depends=[f"src/hotsplit/bank/kernels/native/{name}.h" for name in ("experts", "path", "scalars", "unset")],
    # Instructions beyond the baseline are chosen when it runs. No fused product where none is asked for: results must not
    # depend on how a compiler copies a function.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-g0"],
    libraries=["m"],
    optional=True,
    py_limited_api=True,
)

setup(ext_modules=[experts], options={"bdist_wheel": {"py_limited_api": "cp311"}})
