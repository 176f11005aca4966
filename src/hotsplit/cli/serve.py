"""`hotsplit serve`: vLLM's server with hot and cold experts, all that can be checked checked first."""

from __future__ import annotations

import os
from typing import Any

import click

from hotsplit.cli import console
from hotsplit.cli.options import config_from, json_option, setting_options

_WHERE = "vLLM's own flags stand behind --, as in: hotsplit serve MODEL --hot-gib 40 -- --port 8000"


class _BeforeAndBehind(click.Command):
    """A command whose line goes on behind `--` with the flags of another program, which reach it as `flags`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:end])
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} {_WHERE}", ctx) from error
        flags = tuple(args[end + 1 :])
        _refuse_ours(flags, command=self, ctx=ctx)
        ctx.params["flags"] = flags
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM FLAGS]"]


def _refuse_ours(flags: tuple[str, ...], *, command: click.Command, ctx: click.Context) -> None:
    """Refuse what vLLM would not understand, or would understand as another model than the one that was checked."""
    ours = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in ours:
            raise click.UsageError(f"{name} is hotsplit's: it stands before --, since vLLM does not know it.", ctx)
        if name == "--model":
            raise click.UsageError("--model behind -- would be a second model: MODEL stands before it.", ctx)


@click.command("serve", cls=_BeforeAndBehind)
@click.argument("model")
@setting_options(
    "hot_gib",
    "dynamic",
    "dyn_steps",
    "dyn_max_swaps",
    "dyn_margin",
    "dyn_half_life",
    "dyn_schedule",
    "counts",
    "plan",
    "learned",
    "state_dir",
    "objective",
    "strict",
    "vram_reserve_gib",
    "numa_policy",
    "bank_dir",
    "enable",
)
@click.option("--check", is_flag=True, help="Check and print everything, and start nothing.")
@json_option
def command(model: str, flags: tuple[str, ...], check: bool, as_json: bool, **options: Any) -> None:
    """Serve MODEL (a folder or a hub id) with vLLM, its experts hot and cold by plan.

    Checks the settings, the model's folder and the files, shows what would be hot, and then becomes vLLM's server: its
    signals and its exit code are vLLM's. What stands behind -- is vLLM's own, and goes to it unchanged.
    """
    from hotsplit.cli import serving, vllm_process

    task = serving.ServeTask(model=model, flags=flags, config=config_from(options), environ=dict(os.environ))
    start = serving.prepare(task, find_vllm=vllm_process.find_vllm)
    console.say(start.notices)
    if as_json:
        console.print_json(serving.start_json(start))
    else:
        serving.print_start(start)
    if not check:
        serving.launch(start, execute=os.execve)
