"""Where commands write: a place that can be written, that is no input and no other output, known before long work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hotsplit.cli import console
from hotsplit.errors import ConfigError, HotsplitError
from hotsplit.files import target_of
from hotsplit.plan.dialects import split_set

_MODEL_FILES = (
    "*.safetensors", "*.index.json", "config.json", "generation_config.json", "tokenizer*", "tokenization*", "vocab*",
    "merges.txt", "*.model", "*.tiktoken", "tekken.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*processor_config.json", "*.py",
)  # fmt: skip
"""What a model folder is made of; other files in it, an earlier plan perhaps, may be written over."""


def require_places(outputs: Mapping[str, Path | None], *, inputs: Iterable[Path]) -> None:
    """Refuse, before the work, outputs that cannot be written or that would destroy what the command reads.

    A folder that is not there is made when the output is written; that is said, since a misspelt one is made too.

    Args:
        outputs: By option; None for one that was not given.
        inputs: Every file that is read.

    Raises:
        ConfigError: An output is an input, or two outputs are one file; links are followed.
        HotsplitError: A place cannot be written.
    """
    read, written = [*inputs], dict[str, Path]()
    for option, path in outputs.items():
        if path is None:
            continue
        same = next((other for other in read if _is_same(path, other)), None)
        if same is not None:
            raise ConfigError(option, got=f"{path}, which is read: {same}", wanted="another file", do="name one")
        twin = next((other for other, taken in written.items() if _is_same(path, taken)), None)
        if twin is not None:
            raise ConfigError(option, got=f"{path}, as {twin}", wanted="another file", do="name one")
        require_writable(path)
        written[option] = path
    for folder in dict.fromkeys(path.parent for path in written.values()):
        if not folder.exists():
            console.note(f"{folder} is not there and will be made")


def histogram_files(*names: str | None) -> list[Path]:
    """The files behind histograms that were named.

    Args:
        *names: FILE or FILE#SET; None for none.
    """
    return [split_set(name)[0] for name in names if name is not None]


def model_files(model: str | None) -> list[Path]:
    """The files of a local model folder.

    Args:
        model: Folder or hub id; None for none.
    """
    folder = Path(model or "").expanduser()
    if model is None or not folder.is_dir():
        return []
    return [path for pattern in _MODEL_FILES for path in folder.glob(pattern)]


def require_writable(path: Path) -> None:
    """Refuse a place that cannot be written.

    Args:
        path: File to be; missing folders are made when it is written.

    Raises:
        HotsplitError: It cannot be written, or what is there is no regular file.
    """
    try:
        folder = next(parent for parent in target_of(path).parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise HotsplitError(f"cannot write {path}", got=reason, do="choose another place", path=path) from error


def _is_same(path: Path, other: Path) -> bool:
    """Whether two names mean one file, there already or not."""
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    with contextlib.suppress(OSError):
        return path.samefile(other)
    return False
