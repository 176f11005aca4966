"""vLLM as a program of its own: whether it is here, what its flags say, and what command line is its server.

Used by `hotsplit serve` alone, which checks what it can and then becomes that server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotsplit.errors import ConfigError, EngineError

PLUGIN = "hotsplit"
"""Our name among vLLM's plugins."""

READY_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
"""vLLM's variable: how long its server waits for the engine, loading included."""

_SIZES = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}
_SHORTEST = {"--tensor-parallel-size": "--tensor", "--pipeline-parallel-size": "--pipeline"}
"""vLLM's parser takes the beginning of a flag for the flag, where no other begins so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """The vLLM of this environment."""

    version: str
    """As it says."""
    ready_timeout_s: int
    """How long its server waits for the engine, as things stand, in seconds."""
    has_command: bool
    """Whether its own command can run: it asks for a distribution called vllm, and the CPU build is not called that."""
    has_plugin: bool
    """Whether it would find hotsplit among its plugins."""


def find_vllm() -> Vllm:
    """Import vLLM, the cheap part of it, and ask.

    Raises:
        EngineError: It is not there, or cannot be imported.
        ConfigError: Its time-out is set to what is no number.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it logs to stdout, which is for results
            import vllm
            import vllm.envs
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            cure = (
                "in hotsplit's checkout run pip install '.[vllm]', or on a machine without a GPU as docs/vllm.md says"
            )
            raise EngineError("vLLM is not installed", do=cure) from error
        do = "install it into an environment of its own, as docs/vllm.md says"
        raise EngineError("vLLM cannot be imported", got=str(error), do=do) from error
    try:
        ready_timeout_s = int(vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S)
    except ValueError as error:
        raise ConfigError(READY_TIMEOUT, got=str(error), wanted="whole seconds", do="leave it out") from error
    return Vllm(
        version=str(vllm.__version__),
        ready_timeout_s=ready_timeout_s,
        has_command=_has_distribution("vllm"),
        has_plugin=PLUGIN in importlib.metadata.entry_points(group="vllm.general_plugins").names,
    )


def _has_distribution(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def parallel_sizes(flags: Sequence[str]) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size, as vLLM will read them: in any of its spellings, the last one counts.

    Args:
        flags: vLLM's own.

    Raises:
        ConfigError: A size is no integer >= 1.

    >>> parallel_sizes(["--tensor_parallel_size=4", "--port", "8000", "-pp", "2"])
    (4, 2)
    """
    tp, pp = (_size(flags, name=name) for name in _SIZES)
    return tp, pp


def _size(flags: Sequence[str], *, name: str) -> int:
    text = "1"
    for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue=""):
        spelt, equals, value = flag.partition("=")
        if _is_spelling(spelt, name=name):
            text = value if equals else following
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1:
        return int(text)
    got = repr(text) if text else "nothing"
    raise ConfigError(f"vLLM's {name}", got=got, wanted="an integer >= 1", do="leave it out for 1")


def _is_spelling(spelt: str, *, name: str) -> bool:
    spelt = spelt.replace("_", "-") if spelt.startswith("--") else spelt
    return spelt == _SIZES[name] or (name.startswith(spelt) and spelt.startswith(_SHORTEST[name]))


def require_plugin(vllm: Vllm, *, environ: Mapping[str, str]) -> None:
    """Make sure that vLLM will load hotsplit: without it stock would run, and nothing would say so.

    Args:
        vllm: Of this environment.
        environ: That it will get.

    Raises:
        EngineError: hotsplit is not installed as a plugin.
        ConfigError: The user's list of plugins leaves it out.
    """
    if not vllm.has_plugin:
        got = "no entry point of hotsplit among vLLM's plugins"
        raise EngineError(
            "vLLM would run without hotsplit",
            got=got,
            do="in hotsplit's checkout run pip install . with the pip of vLLM's environment",
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        wanted = f"{PLUGIN} among them, since vLLM loads no other plugins"
        raise ConfigError("VLLM_PLUGINS", got=repr(allowed), wanted=wanted, do="add it, or unset VLLM_PLUGINS")


def server_arguments(model: str, *, flags: Sequence[str], has_command: bool) -> tuple[str, ...]:
    """What runs vLLM's server in this interpreter, the program first.

    Args:
        model: As vLLM gets it.
        flags: vLLM's own.
        has_command: Whether vLLM's own command can run.
    """
    ours = (sys.executable, "-P")  # -P: a folder called vllm where one happens to stand is not vLLM
    if has_command:
        return (*ours, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags)
    return (*ours, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags)
