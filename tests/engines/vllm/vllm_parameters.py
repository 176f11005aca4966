"""What vLLM shows its offloader of a model: `python vllm_parameters.py MODEL RESULT.json`, in a process of its own.

result  [[[name inside the layer, bytes of the parameter]] for every decoder layer]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(model: str, result: str) -> None:
    """Load a model while an offloader looks that moves nothing.

    Args:
        model: Folder.
        result: Where to write what it was shown.
    """
    from vllm import LLM
    from vllm.model_executor.offloader.base import NoopOffloader

    shown = []

    def wrap_modules(self, modules_generator, *args, **kwargs):
        made = list(modules_generator)
        shown.extend([[name, one.nbytes] for name, one in module.named_parameters()] for module in made)
        return made

    NoopOffloader.wrap_modules = wrap_modules
    LLM(model=model, enforce_eager=True, max_model_len=128, max_num_seqs=4, disable_log_stats=True)
    Path(result).write_text(json.dumps(shown), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
