"""The flags of the vLLM that is installed, asked of its own parser."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys

from hotsplit.recipes.flags import NOTHING, ONE, SEVERAL, VllmFlag, VllmFlags

_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where releases have kept `make_arg_parser`, newest first."""


def installed_flags() -> VllmFlags | None:
    """The flags of `vllm serve` here; None where there is no vLLM, or its parser cannot be had."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it logs to stdout, which is for results
            vllm = importlib.import_module("vllm")
            parser = _parser()
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    if parser is None:
        return None
    options = [_flag(action) for action in parser._actions if action.option_strings]
    version = str(vllm.__version__).partition("+")[0]
    return VllmFlags(version=version, options=tuple(sorted(options, key=lambda option: option.names)))


def _parser() -> argparse.ArgumentParser | None:
    """The parser of vLLM itself, filled."""
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    for name in _PARSERS:
        with contextlib.suppress(ModuleNotFoundError):
            filled: argparse.ArgumentParser = importlib.import_module(name).make_arg_parser(flexible())
            return filled
    return None


def _flag(action: argparse.Action) -> VllmFlag:
    spelt = sorted(action.option_strings, key=lambda name: (not name.startswith("--"), name.startswith("--no-")))
    choices = None if action.choices is None else tuple(sorted(str(choice) for choice in action.choices))
    return VllmFlag(names=tuple(spelt), takes=_takes(action), choices=choices)


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return NOTHING
    return SEVERAL if action.nargs in ("+", "*") else ONE
