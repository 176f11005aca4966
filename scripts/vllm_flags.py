"""Writes the flags that a release of vLLM's server has, from the parser of the one that is installed.

    python scripts/vllm_flags.py            writes src/hotsplit/recipes/data/vllm-flags-0.32.0.json
    python scripts/vllm_flags.py --check    fails if that file is not what this vLLM has

`hotsplit recipe check` holds recipes against it where no vLLM is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hotsplit.cli.recipes_vllm import installed_flags
from hotsplit.recipes.flags import flags_bytes

_DATA = Path(__file__).parents[1] / "src" / "hotsplit" / "recipes" / "data"


def main() -> int:
    """Write or compare; the exit code says whether they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    flags = installed_flags()
    if flags is None:
        print("vLLM is not installed here", file=sys.stderr)
        return 2
    path = _DATA / f"vllm-flags-{flags.version}.json"
    if check:
        return int(path.read_bytes() != flags_bytes(flags))
    path.write_bytes(flags_bytes(flags))
    print(f"{len(flags.options)} flags of vLLM {flags.version} written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
