"""From what a user calls a model to a local folder and a model class.

A local folder is taken as it is; anything else is a hub id, downloaded (or found in the hub's cache) whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotsplit.errors import CheckpointError, UnsupportedEngineError
from hotsplit.files import read_json

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
_TOKENIZER_FILES = ("tokenizer*", "tokenization*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def model_folder(model: str | Path) -> Path:
    """The local folder of a model.

    Args:
        model: A folder, or a hub id such as "org/name".

    Raises:
        CheckpointError: Neither a folder nor a model that the hub gives out.
    """
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1
    if path.exists() or looks_local:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model}",
            got=f"no such folder, and the hub does not give it out ({type(error).__name__})",
            wanted="a folder with config.json and safetensors files, or a hub id",
            do="check the spelling, or download the model first",
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer.

    Args:
        folder: The model's folder.

    Raises:
        CheckpointError: The folder is no model's, has none, or it cannot be read; where config.json is what cannot be
            read, that is named.
    """
    import transformers

    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder}", got="no such folder", wanted="a folder with a model")
    if not (folder / "config.json").is_file():
        do = "give the folder of a transformers model"
        raise CheckpointError(f"model folder {folder}", got="no config.json", do=do)
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        # Without them transformers makes one up that knows no words.
        do = "download its tokenizer files too"
        raise CheckpointError(f"tokenizer of {folder}", got="no tokenizer files", wanted="them beside the model", do=do)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # code of the model's kind reads files of the model's folder: it may raise anything
        _require_config(folder)  # which a tokenizer is looked up by
        raise CheckpointError(
            f"tokenizer of {folder}",
            got=_first_line(error),
            wanted="tokenizer files beside the model",
            do="download them too",
        ) from error


def _require_config(folder: Path) -> None:
    """Name config.json, where that is what cannot be read.

    Raises:
        CheckpointError: It is no JSON object, or transformers does not know such a model.
    """
    import transformers

    path = folder / "config.json"
    config = read_json(path, what="model config", error=CheckpointError, repeats=True)
    if not isinstance(config, dict):
        raise CheckpointError(f"model config {path}", got=type(config).__name__, wanted="a JSON object", file=path)
    try:
        transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # a configuration class checks its fields, and raises what it likes
        got, do = _first_line(error), "check transformers' version, or download the model again"
        wanted = f"a model of transformers {transformers.__version__}"
        raise CheckpointError(f"model config {path}", got=got, wanted=wanted, do=do, file=path) from error


def _first_line(error: Exception) -> str:
    """The gist of what other people's code raised."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def model_class(config: Any) -> type:
    """The class that transformers loads a configuration with.

    Args:
        config: Of the model.

    Raises:
        UnsupportedEngineError: transformers has no such class.
    """
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        kind: type = mapping[type(config)]
        return kind
    raise UnsupportedEngineError(
        f"model_type {config.model_type}",
        got=f"architectures {config.architectures}",
        wanted=f"a class of transformers {transformers.__version__}",
        do="update transformers, or use another engine",
    )
