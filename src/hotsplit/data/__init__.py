"""The data that ships: a small trained model and labelled sample texts, for the demo and for tests.

Any part may ask for these paths. The model is `data/tiny-moe` (4 MoE layers x 32 routed experts, top-4); its routing is
specialised by the five domains whose texts lie in `data/texts`, one file each. No text was trained on.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

DOMAINS: Final = ("c", "english", "html", "json", "python")


def tiny_moe_path() -> Path:
    """The folder of the bundled model, with its tokenizer."""
    return _folder() / "tiny-moe"


def text_path(domain: str) -> Path:
    """The sample text of one domain.

    Args:
        domain: One of DOMAINS.

    Raises:
        KeyError: There is no such domain.
    """
    if domain not in DOMAINS:
        raise KeyError(f"{domain!r} is none of the bundled domains {', '.join(DOMAINS)}")
    return _folder() / "texts" / f"{domain}.txt"


def _folder() -> Path:
    # A wheel is always unpacked when it is installed, so the resources are files.
    return Path(str(files(__name__)))
