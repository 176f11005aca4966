"""What `hotsplit serve` does: all checks that need no weights, then vLLM's server in this process's place.

    settings, vLLM's flags, headers, counts -> what would be hot -> environment and arguments -> exec

The workers check again what they can see and this cannot: the device, and the tensors that vLLM makes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.recipes_mismatch import recipe_mismatch
from hotsplit.cli.vllm_process import READY_TIMEOUT, Vllm, parallel_sizes, require_plugin, server_arguments
from hotsplit.config import PREFIX, HotsplitConfig, as_written, settings, variable_name
from hotsplit.errors import HistogramError
from hotsplit.files import require_regular
from hotsplit.notices import Notice, enforce
from hotsplit.plan.checkpoint import Checkpoint, read_headers
from hotsplit.plan.choose import PlanChoice, PlanRequest, choose_plan, read_counts
from hotsplit.plan.dialects import split_set
from hotsplit.plan.planner import PlanOptions
from hotsplit.plan.sizes import ExpertSizes, expert_sizes, left_out
from hotsplit.plan.stage import stage_of
from hotsplit.recipes.recipe import Recipe
from hotsplit.units import gib

_READ_BYTES_PER_S = 100_000_000
"""Chosen, not measured: a checkpoint on a network disk on a bad day. Waiting too long costs nothing; giving up does."""
_START_S = 300
"""Beside loading: processes, profiling, compilation, graph capture."""

Execute = Callable[[str, tuple[str, ...], Mapping[str, str]], object]
"""Replaces this process: program, arguments, environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeTask:
    """What `hotsplit serve` was asked for."""

    model: str
    """Folder or hub id."""
    flags: tuple[str, ...]
    """vLLM's own, as they were typed."""
    config: HotsplitConfig
    """Settings."""
    environ: Mapping[str, str]
    """The environment that vLLM gets, but for what changes in it."""
    recipe: Recipe | None = None
    """What the flags and settings are from, beside the user."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of vLLM, from the recipe."""
    notices: tuple[Notice, ...] = ()
    """What was said while the task was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPreview:
    """What each rank of one pipeline stage would hold."""

    stage: int
    """Pipeline stage, 0 for the first."""
    hot_experts: int
    """Hot ones, of all its layers."""
    experts: int
    """All of them."""
    hot_bytes: int
    """Fast memory, spare rows counted."""
    host_bytes: int
    """Slow memory."""
    budget_bytes: int
    """Fast memory that may be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What the workers would plan, with rows as the checkpoint has them."""

    origin: str
    """Which counts were used, with which weight."""
    hit_rate: float | None
    """Expected, on the plan's own counts; None without any."""
    held_out: float | None
    """Expected, on traffic that the plan has not seen; None where it was not tested."""
    ranks: tuple[RankPreview, ...]
    """One per pipeline stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Everything that is settled before vLLM starts."""

    model: str
    """As vLLM gets it."""
    recipe: str | None
    """Name of the recipe, if there is one."""
    vllm: Vllm
    """What starts."""
    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    config: HotsplitConfig
    """Settings."""
    preview: Preview | None
    """None where there is no budget yet, no folder to look into, or hotsplit is off."""
    ready_timeout_s: int
    """How long vLLM's server will wait for the engine, in seconds."""
    arguments: tuple[str, ...]
    """The whole command line, the program first."""
    changes: Mapping[str, str]
    """What differs in the environment."""
    environ: Mapping[str, str]
    """The whole environment."""
    notices: tuple[Notice, ...]
    """To be said aloud."""

    @property
    def command(self) -> str:
        """What a shell would have to be told to start the same: variables and all."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.changes.items()]
        return " ".join((*variables, shlex.join(self.arguments)))


def prepare(task: ServeTask, *, find_vllm: Callable[[], Vllm]) -> Start:
    """Check everything that can be checked before weights are loaded.

    Args:
        task: What was asked for.
        find_vllm: Says which vLLM is here, or raises.

    Raises:
        HotsplitError: A setting, a flag, the model's folder or a file is wrong, nothing fits the budget, or vLLM would
            start without hotsplit.
    """
    tp, pp = parallel_sizes(task.flags)
    notices = list(task.notices)
    preview, checkpoint, is_on = None, None, task.config.enable is not False
    if is_on:
        notices += _idle_settings(task.config)
        preview, checkpoint = _checked(task, tp=tp, pp=pp, notices=notices)
    else:
        notices.append(Notice(name="off", text="hotsplit is off (HOTSPLIT_ENABLE=0): stock vLLM starts", strict=False))
    console.note("loading vLLM, to ask it")  # last, since it takes seconds: what is wrong in the above need not wait
    vllm = find_vllm()
    if is_on:
        require_plugin(vllm, environ=task.environ)
    timeout_s = max(vllm.ready_timeout_s, _loading_s(checkpoint))
    notices += _timeout_notices(timeout_s, vllm=vllm, checkpoint=checkpoint)
    if not vllm.has_command:
        text = "no distribution is called vllm, which vLLM's own command asks for: its older entry point starts instead"
        notices.append(Notice(name="no-vllm-command", text=text, strict=False))
    model = str(Path(task.model).expanduser()) if task.model.startswith("~") else task.model
    ours = _changes(task.config, timeout_s=timeout_s if timeout_s > vllm.ready_timeout_s else None)
    changes = {**task.variables, **ours}
    stays = {name: value for name, value in task.environ.items() if not name.startswith(PREFIX)}
    return Start(
        model=model,
        recipe=None if task.recipe is None else task.recipe.name,
        vllm=vllm,
        tp=tp,
        pp=pp,
        config=task.config,
        preview=preview,
        ready_timeout_s=timeout_s,
        arguments=server_arguments(model, flags=task.flags, has_command=vllm.has_command),
        changes=changes,
        environ=stays | changes,
        notices=tuple(notices),
    )


def launch(start: Start, *, execute: Execute) -> None:
    """Become vLLM's server: this process ends here, and its id, signals and exit code are the server's.

    Args:
        start: From `prepare`.
        execute: os.execve, or what stands in for it.
    """
    console.note(f"vLLM {start.vllm.version} takes over this process")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is in a buffer would be gone
    execute(start.arguments[0], start.arguments, start.environ)


def _idle_settings(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on here: silence would look like obedience."""
    still = "nothing swaps in static mode"
    idle = {
        "kernel": (True, "experts are computed by vLLM's own kernels"),
        "dyn_max_swaps": (not config.dynamic, still),
        "dyn_margin": (not config.dynamic, still),
        "dyn_half_life": (not config.dynamic, still),
        "objective": (config.plan is not None, "a plan file is used as it is"),
    }
    for name, (is_idle, reason) in idle.items():
        if is_idle and config.origin(name) != "default":
            text = f"{variable_name(name)} has no effect: {reason}"
            yield Notice(name="no-effect", text=text, strict=False)


def _checked(task: ServeTask, *, tp: int, pp: int, notices: list[Notice]) -> tuple[Preview | None, Checkpoint | None]:
    """Look into the model's folder and the files that go with it; what is said is added to `notices`."""
    if any(flag.partition("=")[0] == "--config" for flag in task.flags):
        text = "the file behind vLLM's --config is not read here: parallel sizes in it are seen by the workers only"
        notices.append(Notice(name="checked-later", text=text, strict=False))
    if not _is_local(task.model):
        for file in (task.config.plan, split_set(task.config.counts or "")[0] if task.config.counts else None):
            if file is not None:
                require_regular(file)
        text = f"{task.model} is no local folder: what needs the model's headers is checked by the workers"
        notices.append(Notice(name="checked-later", text=text, strict=False))
        return None, None
    checkpoint = read_headers(Path(task.model).expanduser())
    sizes = expert_sizes(checkpoint, tp=tp)
    notices += [] if task.recipe is None else recipe_mismatch(task.recipe, sizes=sizes, strict=task.config.strict)
    if task.config.hot_bytes is None and task.config.plan is None:
        _, said = read_counts(task.config.counts, sizes=sizes)
        enforce(said, strict=task.config.strict, error=HistogramError)
        notices += said + left_out(sizes)
        return None, checkpoint
    choice = choose_plan(sizes, request=_request(task.config, pp=pp))
    notices += choice.notices
    preview = _preview(choice, sizes=sizes, dynamic=task.config.dynamic)
    if task.config.plan is None and all(rank.hot_experts == rank.experts for rank in preview.ranks):
        text = "all routed experts fit the hot budget: vLLM runs them unchanged"
        notices.append(Notice(name="fits", text=text, strict=False))
    return preview, checkpoint


def _is_local(model: str) -> bool:
    """Whether a model is meant as a folder; anything else is a hub id, which vLLM downloads."""
    return (
        Path(model).expanduser().exists()
        or model.count("/") != 1
        or model.startswith((".", "~", "/"))
        or model[-1:] == "/"
    )


def _request(config: HotsplitConfig, *, pp: int) -> PlanRequest:
    """What a worker of stage 0 asks for."""
    return PlanRequest(
        budget_bytes=config.hot_bytes or 0,
        is_budget_given=config.hot_bytes is not None,
        plan=config.plan,
        counts=config.counts,
        state_dir=config.state_path if config.learned == "use" else None,
        options=PlanOptions(dynamic=config.dynamic, objective=config.objective, strict=config.strict, pp=pp),
    )


def _preview(choice: PlanChoice, *, sizes: ExpertSizes, dynamic: bool) -> Preview:
    plan, num_experts = choice.plan, sizes.identity.num_experts or 0
    ranks = []
    for stage in range(len(plan.stages)):
        part = stage_of(plan, stage)
        row_bytes = part.rows_of(sizes.row_bytes).tolist()
        fixed_bytes = int(part.rows_of(sizes.fixed_bytes).sum())
        ranks.append(
            RankPreview(
                stage=stage,
                hot_experts=sum(map(len, part.hot)),
                experts=len(part.layers) * num_experts,
                hot_bytes=part.needed_bytes(dynamic=dynamic, row_bytes=row_bytes, fixed_bytes=fixed_bytes),
                host_bytes=sum((num_experts - len(h)) * size for h, size in zip(part.hot, row_bytes, strict=True)),
                budget_bytes=part.budget_bytes,
            )
        )
    proof = plan.proof
    return Preview(origin=choice.origin, hit_rate=proof.hit_rate, held_out=proof.held_out, ranks=tuple(ranks))


def _loading_s(checkpoint: Checkpoint | None) -> int:
    """Seconds that a start may take; 0 where nothing is known of the model."""
    return 0 if checkpoint is None else _START_S + _checkpoint_bytes(checkpoint) // _READ_BYTES_PER_S


def _checkpoint_bytes(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.tensors.values())


def _timeout_notices(timeout_s: int, *, vllm: Vllm, checkpoint: Checkpoint | None) -> Iterator[Notice]:
    if checkpoint is not None and timeout_s > vllm.ready_timeout_s:
        text = (
            f"loading {gib(_checkpoint_bytes(checkpoint))} may take long: {READY_TIMEOUT}={timeout_s} instead of "
            f"{vllm.ready_timeout_s}"
        )
        yield Notice(name="ready-timeout", text=text, strict=False)


def _changes(config: HotsplitConfig, *, timeout_s: int | None) -> dict[str, str]:
    """Every setting that was given, as a variable; and one that turns hotsplit on where none was."""
    given = {info.variable: getattr(config, info.name) for info in settings() if config.origin(info.name) != "default"}
    changes = {variable: as_written(value) for variable, value in given.items() if as_written(value)}
    if not changes:
        changes[variable_name("enable")] = "1"
    return changes | ({} if timeout_s is None else {READY_TIMEOUT: str(timeout_s)})


def start_json(start: Start) -> dict[str, Any]:
    """A start's facts, with stable keys.

    Args:
        start: From `prepare`.
    """
    return {
        "kind": "serve",
        "model": start.model,
        "vllm": start.vllm.version,
        "tp": start.tp,
        "pp": start.pp,
        "settings": {name: {"value": value, "origin": origin} for name, value, origin in start.config.rows()},
        "plan": None if start.preview is None else asdict(start.preview),
        "ready_timeout_s": start.ready_timeout_s,
        "recipe": start.recipe,
        "command": start.command,
        "arguments": list(start.arguments),
        "environment": dict(start.changes),
        "notices": [str(notice) for notice in start.notices],
    }


def print_start(start: Start) -> None:
    """The settings, and what would be hot.

    Args:
        start: From `prepare`.
    """
    title = f"{start.model}: vLLM {start.vllm.version}, tensor-parallel {start.tp}, pipeline-parallel {start.pp}"
    console.table(title, columns=["setting", "value", "from"], rows=start.config.rows())
    console.out.print()
    console.out.print(start.command)
    console.out.print()
    if start.config.enable is False:
        return
    if start.preview is None:
        console.prose("no preview of the plan: the workers settle budget and plan, and log both")
        return
    for rank in start.preview.ranks:
        stage = f"stage {rank.stage}, " if start.pp > 1 else ""
        console.prose(
            f"{stage}{'each rank' if start.tp > 1 else 'the rank'}: {rank.hot_experts} of {rank.experts} experts hot, "
            f"{gib(rank.hot_bytes)} of a budget of {gib(rank.budget_bytes)}, {gib(rank.host_bytes)} in host memory"
        )
    expected = start.preview.hit_rate if start.preview.held_out is None else start.preview.held_out
    kind = "" if expected is None else " (in-sample)" if start.preview.held_out is None else " (held-out)"
    console.prose(f"expected hit rate {console.rate(expected)}{kind}; {start.preview.origin}")
