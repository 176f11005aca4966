"""Learned counts on disk: what the last run saw, and how much of it the next start believes.

Beside the histogram at the head of the flow: `counters -> learned file -> next start's histogram`. One file per model
identity and pipeline stage, in the histogram form, under the user's state folder and never in the model's. It is
written under a lock, whole or not at all; a file that does not fit is skipped aloud, never guessed at and never fatal.
Runs that go on at the same time add to one file: each save carries only what its run learned since its last save.

A stage's file holds the stage's own layers, and its identity names those alone: it is written by ranks that count no
others. A plan covers all stages, so at a start every rank reads the files of all of them and has the same counts.

    STATE_DIR/learned/qwen3_moe-1f0c3c1e5a7b9d02-stage0.json        the counts
    STATE_DIR/learned/qwen3_moe-1f0c3c1e5a7b9d02-stage0.json.lock   held while they are written

Shapes: L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hotsplit.errors import HistogramError, HotsplitError, PlanMismatchError
from hotsplit.files import canonical_json, read_json
from hotsplit.notices import Notice
from hotsplit.plan.dialects import Document, parse_ours
from hotsplit.plan.histogram import (
    FORMAT,
    MAX_COUNT,
    PHASES,
    Histogram,
    PhaseCounts,
    name_layers,
    quantisation_notices,
    save_histogram,
    validate,
)
from hotsplit.plan.identity import ModelIdentity, differences
from hotsplit.plan.rerank import MIN_TOKENS, fewest_tokens, rerank

_WEIGHT = 1.0
"""What learned shares weigh beside the reference's."""
_LOCK_TRIES, _LOCK_WAIT_S = 200, 0.01
"""Two seconds in all: a save takes milliseconds, and a run that ends must not wait for one that hangs."""


def learned_path(state_dir: Path, identity: ModelIdentity, *, stage: int = 0) -> Path:
    """Where the counts of one model and pipeline stage are kept.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
        identity: Of the model at hand.
        stage: Pipeline stage.
    """
    digest = hashlib.sha256(canonical_json(identity.to_json())).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9_]+", "_", identity.model_type or "unknown")[:40]
    return Path(state_dir) / "learned" / f"{readable}-{digest}-stage{stage}.json"


def save_learned(histogram: Histogram, state_dir: Path, *, stage: int = 0) -> Path:
    """Replace the learned counts; what the file held is gone.

    Args:
        histogram: Decayed live counts in routed pairs, without the prior; fractions are normal. Its tokens are those
            ever seen; without them they are computed from the counts.
        state_dir: HOTSPLIT_STATE_DIR.
        stage: Pipeline stage.

    Returns:
        The file.

    Raises:
        HistogramError: A count is not one.
        HotsplitError: The folder cannot be written, or another process holds the lock for seconds; what was there
            stays.
    """
    path = learned_path(state_dir, histogram.identity, stage=stage)
    validate(replace(histogram, normalised=True), what=f"learned counts for {path}")
    with _locked(path):
        _write(histogram, path)
    return path


def add_learned(now: Histogram, state_dir: Path, *, decay: float, stage: int = 0) -> Path:
    """Add to the learned counts what one run learned since it last did so.

    Under the lock: file = decay x file + now, tokens = tokens of the file + tokens of now. A run may call this as often
    as it likes, and runs side by side may do so in any order: nothing is added twice and nothing is lost, if each

    - passes in `now` what it learned since its last call that returned: with T(u) its decayed counts after u updates,
      T(u) - decay_per_update^(u - v) x T(v), where its last call was after v updates; and likewise its tokens;
    - passes as `decay` decay_per_update^(u - v), so that what the file holds fades once for each update of each run;
    - takes a call that raised as one that never was: its counts are part of the next one's.

    A file that is damaged, or of another model, is not carried on: `load_learned` has said so at the start. It is kept
    under another name.

    Args:
        now: Decayed live counts since the last save, in routed pairs, without the prior, with the tokens since then.
        state_dir: HOTSPLIT_STATE_DIR.
        decay: What a count keeps over the updates since the last save, 0 to 1; 1 where there were none.
        stage: Pipeline stage.

    Returns:
        The file.

    Raises:
        HistogramError: A count is not one, or the decay is not from 0 to 1.
        HotsplitError: The folder cannot be written, or another process holds the lock for seconds; what was there
            stays.
    """
    path = learned_path(state_dir, now.identity, stage=stage)
    what = f"learned counts for {path}"
    validate(replace(now, normalised=True), what=what)
    if not 0 <= decay <= 1:
        raise HistogramError(f"{what}, decay", got=str(decay), wanted="a number from 0 to 1", value=decay)
    with _locked(path):
        before, _ = load_learned(state_dir, now.identity, stage=stage)
        if before is None and path.exists():
            path.replace(f"{path}.damaged")  # the only copy of it: not ours to throw away
        _write(carry_on(before, _with_tokens(now), decay=decay), path)
    return path


def carry_on(before: Histogram | None, now: Histogram, *, decay: float) -> Histogram:
    """What was learned before, faded, plus what was learned since.

    Args:
        before: What the file holds, or None.
        now: Decayed live counts since then, in routed pairs, with the tokens behind them.
        decay: What an earlier count keeps, 0 to 1.
    """
    if before is None:
        return now
    phases = {}
    for phase, counted in now.phases.items():
        earlier = before.phases.get(phase)
        counts, tokens = counted.counts, counted.tokens
        if earlier is not None:
            counts = np.minimum(counts + decay * earlier.counts, MAX_COUNT)
            tokens = None if tokens is None else min(tokens + (earlier.tokens or 0), MAX_COUNT)
        phases[phase] = PhaseCounts(counts=counts, tokens=tokens)
    return replace(now, phases=phases, normalised=True)


def load_learned(
    state_dir: Path, identity: ModelIdentity, *, stage: int = 0, quantisation: str | None = None
) -> tuple[Histogram | None, list[Notice]]:
    """Take up what an earlier run learned, if it is whole and of this model.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
        identity: Of the model at hand.
        stage: Pipeline stage.
        quantisation: Of the model at hand; another one is only a notice.

    Returns:
        The counts or None, and notices: why a file was skipped, naming the field that differs.
    """
    path = learned_path(state_dir, identity, stage=stage)
    what = f"learned counts {path}"
    if not path.exists():
        return None, _other_models(path, identity)
    try:
        histogram, notices = _read(path)
    except (HotsplitError, ValueError) as failure:
        return None, [_skipped("learned-damaged", f"{what} are damaged and skipped: {failure}")]
    differing, unknown = differences(histogram.identity, identity)
    if differing:
        text = f"{what} are of another model and skipped: {'; '.join(differing)}"
        return None, [_skipped("learned-mismatch", text)]
    if unknown:
        notices.append(_skipped("identity-not-compared", f"{what}: {', '.join(unknown)} not known, not compared"))
    return histogram, notices + quantisation_notices(histogram.quantisation, quantisation, what=what)


def load_learned_stages(
    state_dir: Path, identities: Sequence[ModelIdentity], *, quantisation: str | None = None
) -> tuple[Histogram | None, list[Notice]]:
    """Take up what the ranks of all pipeline stages learned, as one histogram of the model.

    It is of all stages or of none. A stage without counts would be ranked as if its traffic were uniform, while the
    others' skew speaks for the whole; and every token passes all stages, so one that saw nothing saved nothing.

    Args:
        state_dir: HOTSPLIT_STATE_DIR.
        identities: Of the stages, in order: the model's with the layers of each; a stage without layers has no file.
        quantisation: Of the model at hand; another one is only a notice.

    Returns:
        The counts or None, and notices: why files were skipped.
    """
    stages = [(stage, identity) for stage, identity in enumerate(identities) if identity.layers]
    notices, found = list[Notice](), list[Histogram]()
    missing = list[int]()
    for stage, identity in stages:
        learned, said = load_learned(state_dir, identity, stage=stage, quantisation=quantisation)
        notices += said
        if learned is None:
            missing.append(stage)
        else:
            found.append(learned)
    if not missing:
        return join_stages(found), notices
    if found:
        listed = ", ".join(map(str, missing))
        text = f"learned counts are used of all {len(stages)} pipeline stages or of none: stage {listed} has none"
        notices.append(_skipped("learned-skipped", text))
    return None, notices


def join_stages(parts: Sequence[Histogram]) -> Histogram:
    """One histogram of the layers that the stages of one model counted.

    Args:
        parts: Counts per stage, at least one, in the order of their layers.

    Returns:
        Counts of the phases in which every stage has some, with the tokens of the stage that saw the fewest.
    """
    if len(parts) == 1:
        return parts[0]
    parts = [_with_tokens(part) for part in parts]
    names = [name for name in PHASES if all(name in part.phases and part.phases[name].counts.any() for part in parts)]
    phases = {}
    for name in names:
        counted = [part.phases[name] for part in parts]
        tokens = [one.tokens for one in counted if one.tokens is not None]
        phases[name] = PhaseCounts(
            counts=np.concatenate([one.counts for one in counted]),
            tokens=min(tokens) if len(tokens) == len(parts) else None,
        )
    layers = tuple(layer for part in parts for layer in part.layers)
    return replace(parts[0], identity=replace(parts[0].identity, layers=layers), phases=phases)


def choose_counts(
    reference: Histogram | None, learned: Histogram | None, *, use_learned: bool, min_tokens: int = MIN_TOKENS
) -> tuple[Histogram | None, str, list[Notice]]:
    """Decide which counts rule, where no plan does: reference merged with learned, else either, else none.

    Args:
        reference: HOTSPLIT_COUNTS, or None.
        learned: From `load_learned`, or None.
        use_learned: HOTSPLIT_LEARNED is "use".
        min_tokens: Decode tokens per layer that learned counts need before they are merged into a reference. Alone
            they need none: the alternative would be to know nothing.

    Returns:
        The counts to plan from, None for uniform; one line for the log: what was used with which weight; notices.
    """
    if learned is not None and not use_learned:
        line, notices = "; learned counts ignored (HOTSPLIT_LEARNED=ignore)", list[Notice]()
        return reference, _reference_line(reference) + line, notices
    if learned is None or not any(counted.counts.any() for counted in learned.phases.values()):
        return reference, _reference_line(reference) + "; no learned counts", []
    if reference is None:
        return learned, f"counts: learned alone, weight {_WEIGHT:g}, {_tokens_line(learned)}", []
    try:
        merged, notices = rerank(reference, learned, live_weight=_WEIGHT, min_tokens=min_tokens)
    except (HistogramError, PlanMismatchError) as failure:
        reason = f"{failure.what}: got {failure.got}" + (f", wanted {failure.wanted}" if failure.wanted else "")
        text = f"learned counts are not merged into the histogram: {reason}"
        return reference, _reference_line(reference) + "; learned counts skipped", [_skipped("learned-skipped", text)]
    line = f"counts: {_name(reference)} weight 1 + learned weight {_WEIGHT:g}, {_tokens_line(learned)}"
    return merged, f"{line}, normalised per layer", notices


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside `path`; the kernel frees it when its holder dies."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            has_lock = _try_lock(stack.enter_context(Path(f"{path}.lock").open("ab")))
        except OSError as error:
            reason = error.strerror or str(error)
            do = "set HOTSPLIT_STATE_DIR to a folder that can be written"
            raise HotsplitError(f"cannot write {path}", got=reason, do=do, path=path) from error
        if not has_lock:
            got = f"another process that has held {path.name}.lock for {_LOCK_TRIES * _LOCK_WAIT_S:g} s"
            raise HotsplitError(f"cannot write {path}", got=got, do="end it, or set HOTSPLIT_STATE_DIR", path=path)
        yield


def _try_lock(file: BinaryIO) -> bool:
    """Whether the lock came free in time."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_WAIT_S)
        else:
            return True
    return False


def _write(histogram: Histogram, path: Path) -> None:
    """Write under the lock, and clear away what a writer that was killed left: nobody else writes now."""
    for leftover in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            leftover.unlink()
    save_histogram(_with_tokens(histogram), path)


def _with_tokens(histogram: Histogram) -> Histogram:
    """Say how many tokens stand behind decayed counts, where nobody has: by the layer with the fewest.

    The engines say it themselves: tokens ever seen. Decayed counts of a steady stream level off at some fifteen
    windows and would never reach the minimum that a merge asks for.
    """
    top_k = histogram.identity.top_k
    phases = {}
    for name, counted in histogram.phases.items():
        fewest = float(counted.counts.sum(axis=1).min())
        tokens = int(fewest / top_k) if top_k and counted.tokens is None else counted.tokens
        tokens = None if tokens is None else min(tokens, MAX_COUNT)
        phases[name] = PhaseCounts(counts=counted.counts, tokens=tokens)
    return replace(histogram, phases=phases, normalised=True)


def _read(path: Path) -> tuple[Histogram, list[Notice]]:
    """Our own form only: whatever else lies there was not written by us."""
    what = f"learned counts {path}"
    content = read_json(path, what="learned counts", error=HistogramError)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise HistogramError(what, got="another form", wanted=FORMAT)
    histogram, notices = parse_ours(Document(content=content, what=what))
    return histogram, notices + validate(histogram, what=what)


def _other_models(path: Path, identity: ModelIdentity) -> list[Notice]:
    """Name the field by which the nearest file of another model differs; nothing where there is no other file."""
    stage = path.name.rpartition("-")[2]
    found: list[tuple[bool, int, str, str]] = []
    for other in sorted(path.parent.glob(f"*-{stage}")) if path.parent.is_dir() else []:
        with contextlib.suppress(HotsplitError, ValueError):
            theirs = _read(other)[0].identity
            differing, unknown = differences(theirs, identity)
            reasons = differing + [f"{name} is not known" for name in unknown]
            is_foreign = any(reason.startswith("model_type") for reason in reasons)
            found.append((is_foreign, len(reasons), "; ".join(reasons), str(other)))
    if not found:
        return []
    reasons_line, other_file = min(found)[2:]
    text = f"no learned counts of this model yet; {other_file} are of another one: {reasons_line}"
    return [_skipped("learned-mismatch", text)]


def _skipped(name: str, text: str) -> Notice:
    """Our own cache is no input that strict mode would refuse."""
    return Notice(name=name, text=text, strict=False)


def _reference_line(reference: Histogram | None) -> str:
    return "counts: none, every layer alike" if reference is None else f"counts: {_name(reference)} alone, weight 1"


def _name(reference: Histogram) -> str:
    return f"reference {reference.name}" if reference.name else "reference"


def _tokens_line(learned: Histogram) -> str:
    """How much was learned, by the layer with the least."""
    fewest = fewest_tokens(learned, top_k=learned.identity.top_k)
    if fewest is None:
        return "number of tokens not known"
    layer, tokens = fewest
    return f"{int(tokens)} decode tokens in its weakest {name_layers([layer])}"
