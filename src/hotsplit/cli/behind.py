"""A command line that goes on behind `--` with the flags of vLLM: what stands on which side."""

from __future__ import annotations

import click


class BeforeAndBehind(click.Command):
    """A command whose line goes on behind `--` with the flags of another program, which reach it as `flags`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the line up to the dashes for this command, and keep what is behind them."""
        end = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:end])
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} {_where(ctx)}", ctx) from error
        flags = tuple(args[end + 1 :])
        _refuse_ours(flags, command=self, ctx=ctx)
        ctx.params["flags"] = flags
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line, with what may stand behind."""
        return [*super().collect_usage_pieces(ctx), "[-- VLLM FLAGS]"]


def _where(ctx: click.Context) -> str:
    return f"vLLM's own flags stand behind --, as in: hotsplit {ctx.info_name} MODEL --hot-gib 40 -- --port 8000"


def _refuse_ours(flags: tuple[str, ...], *, command: click.Command, ctx: click.Context) -> None:
    """Refuse what vLLM would not understand, or would understand as another model than the one that was checked."""
    if flags and not flags[0].startswith("-"):
        raise click.UsageError(f"{flags[0]} behind -- is no flag: MODEL stands before --, and vLLM takes one.", ctx)
    ours = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in ours:
            raise click.UsageError(f"{name} is hotsplit's: it stands before --, since vLLM does not know it.", ctx)
        if name == "--model":
            raise click.UsageError("--model behind -- would be a second model: MODEL stands before it.", ctx)
