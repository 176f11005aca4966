"""What pytest does not look into where a package is missing: examples in docstrings of modules that import it."""

from __future__ import annotations

import importlib.util

# Triton comes with a torch for CUDA; a build for a CPU brings none.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/hotsplit/bank/*/*_triton.py"]
