"""The entry point: `hotsplit COMMAND`. Commands are imported when they run, so that `plan` needs no torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import click

from hotsplit.config import HotsplitConfig
from hotsplit.errors import HotsplitError
from hotsplit.version import __version__

_COMMANDS = {
    "balance": "Play sample traffic through a server: histogram, held-out score, plan.",
    "convert": "Write a histogram in the form of another tool.",
    "demo": "Profile, plan and run the bundled model: the whole job in two minutes.",
    "evaluate": "Score a plan on traffic it was not made from, with a verdict.",
    "fit": "Say what of a model fits these GPUs and this host, and what binds.",
    "forecast": "Forecast tokens per second of a plan on a machine, between bounds.",
    "merge": "Merge several histograms of one model, by shares, pairs or ranks.",
    "plan": "Choose the hot experts from a routing histogram, under a budget, with proof.",
    "probe": "Say what this host really is: GPUs, links, memory, limits, measured.",
    "profile": "Play sample traffic through a model and write its routing histogram.",
    "recipe": "List, show and check what is known of a model on four GPUs.",
    "report": "Write one page that shows what plans do: map, curves, forecast, a run.",
    "rerank": "Merge live counts into a reference histogram.",
    "run": "Generate text with hot and cold experts.",
    "serve": "Start vLLM's server with hot and cold experts, checked first.",
    "simulate": "Replay a routing trace against policies: hits, cold bytes, moved bytes.",
    "show": "Show what a histogram, plan or trace file holds.",
    "top": "Watch a server: hit rate, cold bytes, swaps, tokens/s, per rank.",
}


class _Commands(click.Group):
    """Commands by name, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hotsplit.cli.{cmd_name}").command
        command.short_help = _COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hotsplit")
def group() -> None:
    """Run mixture-of-experts models whose experts do not all fit in fast memory.

    The experts that the traffic uses live in fast memory, the rest is read in place, and which is which follows the
    traffic. Settings may also come from HOTSPLIT_ variables; an option beats them.
    """
    HotsplitConfig.from_env(os.environ)  # a misspelt or impossible variable is an error, also where nothing uses it


class _Ended(BaseException):
    """A signal asked the command to end. No Exception, like KeyboardInterrupt: nothing on the way may take it for one.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main() -> None:
    """Run a command; an error is one line on stderr and the exit code of its class."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A text that took minutes is printed, whatever the terminal can spell.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _ending_in_order():
            group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        _fail("interrupted; nothing was left half-written", code=130)
    except _Ended as ended:
        _fail("ended by a signal; nothing was left half-written", code=ended.exit_code)
    except HotsplitError as error:
        _fail(str(error), code=error.exit_code)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] not in ("torch", "transformers", "accelerate"):
            raise
        _fail(f"{error.name} is not installed; in hotsplit's checkout run pip install '.[transformers]'", code=1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: got {(error.strerror or str(error)).lower()}", code=1)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that what was learned is saved and memory given back.

    A signal that somebody ignores (nohup) or handles already stays theirs. Only a main thread may handle signals.
    """
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM, signal.SIGHUP]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _end:
                signal.signal(number, signal.SIG_DFL)


def _end(number: int, _frame: FrameType | None) -> None:
    """End once: what stops a group of processes may send the signal twice, and a save must not be torn off by it."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise _Ended(number)


def _fail(text: str, *, code: int) -> None:
    click.echo(f"hotsplit: {text}", err=True)
    sys.exit(code)
