"""What `hotsplit balance` does: sample traffic through a server, its counts, a plan, and what the plan is worth.

    requests --first half--> counts --> a plan --tested on--> counts <--second half-- requests
                               +---------------- all of them ----------------+--> histogram --> the plan that is kept

Everything that can be refused is refused before a server starts. What was played is in the journal, so that the same
command goes on where it stopped.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotsplit.cli import balance_target, console, serving, vllm_process
from hotsplit.cli.balance_play import Played, Playing
from hotsplit.cli.balance_target import Target
from hotsplit.cli.journal import Journal, locked, open_journal
from hotsplit.cli.openai_client import OpenAIClient
from hotsplit.cli.places import model_files, require_places
from hotsplit.cli.recipes_serving import ServeWish, serve_task
from hotsplit.cli.run_counts import histogram_of, parallel_of
from hotsplit.cli.sample_requests import Sample, read_sample
from hotsplit.config import HotsplitConfig, as_written
from hotsplit.errors import ConfigError, EngineError, HistogramError, HotsplitError
from hotsplit.notices import Notice, enforce
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.evaluate import Evaluation
from hotsplit.plan.evaluate import evaluate as score_plan
from hotsplit.plan.histogram import Histogram, save_histogram, validate
from hotsplit.plan.planfile import Plan, save_plan
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import ExpertSizes, expert_sizes
from hotsplit.plan.verdict import Verdict, few_pairs, judge

HISTOGRAM, PLAN = "histogram.json", "plan.json"
FIRST, SECOND = "first-half.json", "second-half.json"

_KEY = "--api-key"
_MANY_TOKENS = 1.1
"""Tokens counted, in those of our own requests, from which on somebody else's are among them."""
_OF_EVEN = frozenset({"no-histogram", "no-effect"})
"""Notices on a placement that is even because we want it so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceTask:
    """What `hotsplit balance` was asked for."""

    model: str | None
    """Folder or hub id, as it was typed; None for that of the recipe or of the server."""
    recipe: str | None
    """Its name; None for none."""
    url: str | None
    """A server that runs; None to start one."""
    serve: serving.ServeTask | None
    """What `hotsplit serve` would be asked for; None where a server runs."""
    files: tuple[Path, ...]
    """Sample traffic."""
    flags: tuple[str, ...]
    """vLLM's own, as they were typed."""
    output: Path
    """Folder."""
    max_tokens: int
    """Generated per request, at most."""
    max_requests: int | None
    """The first so many; None for all."""
    concurrency: int
    """Requests at the same time."""
    timeout_s: float
    """Longest generation, in seconds."""
    headers: Mapping[str, str]
    """Sent with every request."""
    config: HotsplitConfig
    """Settings."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.url is not None and (self.flags or self.recipe):
            got = f"--url and {'vLLM flags' if self.flags else '--recipe'}"
            raise ConfigError("balance", got=got, wanted="one of them", do="a server that runs has its flags already")
        if self.config.enable is False:
            raise ConfigError("HOTSPLIT_ENABLE", got="0", wanted="hotsplit on, since it counts", do="leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced:
    """The results; the files are written."""

    histogram: Histogram
    """Of all that was played."""
    evaluation: Evaluation
    """Of a plan that was made from the first half, on the second."""
    verdict: Verdict | None
    """On that; None where the second half has nothing to test on."""
    held_out: float | None
    """Hit rate of that plan on the second half, also where it was no better than a blind choice."""
    plan: Plan
    """Made from all of it."""
    played: Played
    """What was played."""
    next_command: str
    """That serves by what was learned."""
    notices: tuple[Notice, ...]
    """To be said aloud."""


def serve_of(wish: ServeWish, *, url: str | None, environ: Mapping[str, str]) -> serving.ServeTask | None:
    """What the server that is to be started would be asked for by `hotsplit serve`; None where one runs.

    Args:
        wish: What was typed.
        url: Of a server that runs.
        environ: The environment.

    Raises:
        ConfigError: A setting or the recipe is wrong, or there is neither a model nor a server.
    """
    if url is not None:
        return None
    if wish.model is None and wish.recipe is None:
        do = "name a model, a recipe, or a server that runs"
        raise ConfigError("balance", got="neither MODEL nor --recipe nor --url", do=do)
    return serve_task(wish, environ=environ)


def balance(task: BalanceTask) -> Balanced:
    """Play, count, plan, score, write.

    Args:
        task: What was asked for.

    Raises:
        HotsplitError: An input is wrong, the server cannot be used or has gone, or nothing fits the budget.
    """
    places = {name: task.output / name for name in (HISTOGRAM, PLAN, FIRST, SECOND)}
    require_places(places, inputs=[*task.files, *model_files(task.model)])
    sample = read_sample(task.files, max_tokens=task.max_tokens, max_requests=task.max_requests)
    with locked(task.output):
        if task.serve is not None:
            return _started(task, serve=task.serve, sample=sample)
        if task.url is not None:
            return _running(task, url=task.url, sample=sample)
    raise ConfigError("balance", got="no server", do="name a model, a recipe, or a server that runs")


def _started(task: BalanceTask, *, serve: serving.ServeTask, sample: Sample) -> Balanced:
    """Through a server of our own; it is not started where the journal has all already."""
    config, notices = balance_target.even_config(task.config, state_dir=task.output.resolve() / "state")
    address = balance_target.address_of(serve.flags, environ=serve.environ)
    environ = balance_target.even_environ(serve.environ)
    even = replace(serve, flags=address.flags, config=config, environ=environ)
    start = serving.prepare(even, find_vllm=vllm_process.find_vllm)
    model = Served(name=start.model, sizes=_sizes(start.model, tp=start.tp), pp=start.pp)
    journal = _journal(task, model=model, sample=sample)
    played = Played(num_requests=len(sample.requests), num_done=len(journal.done))
    if not journal.is_complete:
        console.say(notice for notice in start.notices if notice.name not in _OF_EVEN)
        server = balance_target.started(
            start.arguments,
            environ=start.environ,
            folder=task.output,
            timeout_s=start.ready_timeout_s,
            connect=lambda: _client(task, address.url, headers=address.headers),
        )
        with server as target:
            played = _play(task, target=target, journal=journal, sample=sample, sizes=model.sizes)
    return _finished(task, model=model, journal=journal, played=played, notices=notices)


def _running(task: BalanceTask, *, url: str, sample: Sample) -> Balanced:
    """Through a server that runs."""
    address = balance_target.normalised_url(url)
    with balance_target.running(
        address, state_dir=task.config.state_path, connect=lambda: _client(task, address, headers={})
    ) as target:
        tp, pp = parallel_of(target.run.snapshots())
        name = task.model or target.served.root
        model = Served(name=name, sizes=_sizes(name, tp=tp), pp=pp)
        journal = _journal(task, model=model, sample=sample)
        played = Played(num_requests=len(sample.requests), num_done=len(journal.done))
        if not journal.is_complete:
            played = _play(task, target=target, journal=journal, sample=sample, sizes=model.sizes)
    return _finished(task, model=model, journal=journal, played=played, notices=_others(journal))


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model that is served."""

    name: str
    """Folder or hub id."""
    sizes: ExpertSizes
    """What its experts weigh on one rank."""
    pp: int
    """Pipeline stages."""


def _sizes(model: str, *, tp: int) -> ExpertSizes:
    """What the experts weigh; of a hub id, whose files the engine's hub client finds or downloads."""
    path = Path(model).expanduser()
    if not (path.exists() or model.count("/") != 1 or model.startswith((".", "~", "/"))):
        from hotsplit.engines.transformers.resolve import model_folder

        path = model_folder(model)
    return expert_sizes(read_headers(path), tp=tp)


def _client(task: BalanceTask, url: str, *, headers: Mapping[str, str]) -> OpenAIClient:
    return OpenAIClient(
        url, timeout_s=task.timeout_s, connections=task.concurrency, headers={**headers, **task.headers}
    )


def _journal(task: BalanceTask, *, model: Served, sample: Sample) -> Journal:
    """The journal of the output folder, after a last look at whether a plan can be made at all."""
    options = PlanOptions(dynamic=task.config.dynamic, objective=task.config.objective, pp=model.pp)
    if task.config.hot_bytes is not None:
        make_plan(model.sizes, histogram=None, budget_bytes=task.config.hot_bytes, options=options)
    hot_gib = as_written(task.config.hot_gib) if task.config.hot_gib is not None else None
    arguments = {
        "model": model.name,
        "recipe": task.recipe,
        "server": "started" if task.url is None else "running",
        "data": [[Path(name).name, digest] for name, digest in sample.files.items()],
        "max_tokens": task.max_tokens,
        "max_requests": task.max_requests,
        "concurrency": task.concurrency,
        "hot_gib": hot_gib,
        "vllm_flags": _without_keys(task.flags if task.serve is None else task.serve.flags),
    }
    journal = open_journal(task.output, arguments=arguments, num_requests=len(sample.requests))
    ours = (model.sizes.identity.layers, model.sizes.identity.num_experts)
    if any((part.layers, part.shape[1]) != ours for part in journal.parts):  # hours of playing would end in this
        do = "name another -o, or remove this folder to begin anew"
        raise HotsplitError(f"journal {journal.path}", got=f"counts of another model than {model.name}", do=do)
    return journal


def _without_keys(flags: Sequence[str]) -> list[str]:
    """Flags of vLLM as a file may keep them: a key decides nothing that is counted."""
    kept = list[str]()
    for before, flag in zip(("", *flags), flags, strict=False):
        name, equals, _ = flag.partition("=")
        hidden = f"{name}=***" if equals and name.replace("_", "-") == _KEY else flag
        kept.append("***" if before.replace("_", "-") == _KEY else hidden)
    return kept


def _play(task: BalanceTask, *, target: Target, journal: Journal, sample: Sample, sizes: ExpertSizes) -> Played:
    """Play what the journal lacks; whatever ends it, say what is kept."""
    total = len(sample.requests)
    if journal.done:
        console.note(f"going on: {len(journal.done)} of {total} requests are in {journal.path}")
    playing = Playing(journal, sample=sample, target=target, clients=task.concurrency, sizes=sizes)
    try:
        return playing.play()
    except BaseException:
        console.note(f"{journal.num_saved} of {total} requests are kept; the same command goes on from there")
        raise


def _others(journal: Journal) -> list[Notice]:
    """Say that other traffic than ours was counted, where it must have been."""
    counted = sum(sum(part.tokens.values()) for part in journal.parts)
    ours = journal.prompt_tokens + journal.completion_tokens
    if counted <= _MANY_TOKENS * ours:
        return []
    text = f"the server counted {counted} tokens, our requests have {ours}: other traffic is in the histogram too"
    return [Notice(name="other-traffic-counted", text=text)]


def _finished(task: BalanceTask, *, model: Served, journal: Journal, played: Played, notices: list[Notice]) -> Balanced:
    """Counts to histograms, a plan of the first half tested on the second, and the plan of all of it."""
    first, second = journal.parts
    _require_answers(journal, played=played)
    name, strict = model.name, task.config.strict
    halves = [histogram_of(part, sizes=model.sizes, name=name) for part in (first, second)]
    whole, said = histogram_of(first.plus(second), sizes=model.sizes, name=name)
    notices = [*notices, *said, *validate(whole, what="the histogram"), *_failed(played)]
    for file, histogram in ((FIRST, halves[0][0]), (SECOND, halves[1][0]), (HISTOGRAM, whole)):
        save_histogram(histogram, task.output / file)
    enforce(notices, strict=strict, error=HistogramError)
    budget = task.config.hot_bytes if task.config.hot_bytes is not None else journal.budget_bytes or 0
    options = PlanOptions(dynamic=task.config.dynamic, objective=task.config.objective, strict=strict, pp=model.pp)
    train, test = (histogram for histogram, _ in halves)
    tested, said = make_plan(model.sizes, histogram=train, budget_bytes=budget, options=replace(options, test=test))
    notices += said
    evaluation = score_plan(tested, histogram=train, test=test)
    is_useless = any(notice.name == "held-out-no-better" for notice in said)
    plan, said = make_plan(model.sizes, histogram=None if is_useless else whole, budget_bytes=budget, options=options)
    notices += [notice for notice in said if not (is_useless and notice.name == "no-histogram")]
    save_plan(plan, task.output / PLAN)
    unseen = evaluation.test
    if unseen is not None:
        notices += few_pairs(test, phase=unseen.phase, what=f"the second half, {unseen.phase}")
    return Balanced(
        histogram=whole,
        evaluation=evaluation,
        verdict=None if unseen is None else judge(unseen, null=evaluation.null),
        held_out=tested.proof.held_out,
        plan=plan,
        played=played,
        next_command=_next_command(task, model=model, is_by_counts=not is_useless),
        notices=tuple(notices),
    )


def _require_answers(journal: Journal, *, played: Played) -> None:
    """Name the failure where it is why a half has counted nothing."""
    for which, part in zip(("first", "second"), journal.parts, strict=True):
        if played.examples and not any(counts_LE.any() for counts_LE in part.counts.values()):
            kind, example = next(iter(played.examples.items()))
            do = "see that the server takes such requests, then start again"
            raise EngineError(f"no request of the {which} half was answered", got=f"{kind} ({example})", do=do)


def _failed(played: Played) -> list[Notice]:
    if not played.failures:
        return []
    number = sum(played.failures.values())
    text = f"{number} of {played.num_requests} requests failed and are not counted: the same command plays them again"
    return [Notice(name="requests-failed", text=text, strict=False)]


def _next_command(task: BalanceTask, *, model: Served, is_by_counts: bool) -> str:
    """What serves by these counts, to be pasted into a shell; where they are of no use, without them."""
    words = ["hotsplit", "serve"]
    words += [model.name] if task.recipe is None else ["--recipe", task.recipe, *([task.model] if task.model else [])]
    if task.config.hot_gib is not None and task.config.origin("hot_gib") != "recipe":
        words += ["--hot-gib", as_written(task.config.hot_gib)]
    words += ["--counts", str(task.output / HISTOGRAM)] if is_by_counts else []
    words += ["--", *task.flags] if task.flags else []
    return shlex.join(words)
