"""What a run found, as a table for people and as one JSON file that is whole at every moment.

The file is written again with every finding, so a run that crashes leaves all that it had, and says in which check it
ended. Every check is in it from the beginning: what was not reached, did not fit into the time, or cannot be measured
here, stands there as "not measured", with the reason. In a dry run no number is written at all: figures and facts are
"dry", and only proofs carry what was found.

    >>> figure = Figure(name="reads", value=45e9, unit="bytes/s", bound=50e9, bound_is="copies")
    >>> " ".join(lines(figure, is_dry=False)[0].split())
    'reads 45.0 GB/s of 50.0 GB/s copies: 0.900'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from hotsplit.bank.checks.bench import Check
from hotsplit.bank.checks.findings import Fact, Figure, Finding, Proof, show
from hotsplit.files import write_atomic

Status: TypeAlias = Literal["passed", "failed", "not measured", "begun"]

FORMAT: Final = "hotsplit gpu check"
VERSION: Final = 1
_NOT_REACHED: Final = "the run ended before"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How far a check has come."""

    status: Status = "not measured"
    """"begun" in a file that is read while a run lasts, or after it crashed."""
    seconds: float = 0.0
    """That it took."""
    findings: tuple[Finding, ...] = ()
    """In the order in which they were found."""
    reason: str = _NOT_REACHED
    """Why there is nothing, or no more; empty where there is all."""

    @property
    def failures(self) -> tuple[str, ...]:
        """What was wrong: the error that ended the check, and proofs that do not hold."""
        error = (self.reason,) if self.status == "failed" and self.reason else ()
        return error + tuple(one.name for one in self.findings if isinstance(one, Proof) and not one.holds)


@dataclass(kw_only=True, slots=True)
class Report:
    """All outcomes of one run."""

    path: Path
    """Of the JSON."""
    checks: Sequence[Check]
    """In the order in which they run."""
    environment: Mapping[str, Any]
    """Where and with what, plain JSON."""
    is_dry: bool
    """Whether no figure may be written."""
    say: Callable[[str], None]
    """Gets every line of the table."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By name of the check."""
    is_finished: bool = False
    """Whether no check is left."""

    def begin(self, check: Check) -> None:
        """Say which check runs now.

        Args:
            check: One of them.
        """
        self.say(f"\n{check.name}: {check.title}")
        self._put(check.name, Outcome(status="begun", reason="the run ended in this check"))

    def add(self, check: Check, finding: Finding) -> None:
        """Keep one finding of the check that runs.

        Args:
            check: That one.
            finding: Of it.
        """
        outcome = self.outcomes[check.name]
        self._put(check.name, replace(outcome, findings=(*outcome.findings, finding)))
        for line in lines(finding, is_dry=self.is_dry):
            self.say(line)

    def end(self, check: Check, *, status: Status, seconds: float, reason: str = "") -> None:
        """Say how a check ended; a proof that does not hold makes it a failure.

        Args:
            check: The one that ran, or one that was not begun.
            status: How.
            seconds: That it took.
            reason: Why there is nothing, or no more.
        """
        outcome = replace(self.outcomes.get(check.name, Outcome()), status=status, seconds=seconds, reason=reason)
        if outcome.failures:
            outcome = replace(outcome, status="failed")
        self._put(check.name, outcome)
        self.say(
            f"  {outcome.status}{f': {reason}' if reason else ''}" + f" ({seconds:.1f} s)" * (status != "not measured")
        )

    def finish(self) -> None:
        """Say what all of it comes to."""
        self.is_finished = True
        self._write()
        self.say("\nresult")
        for line in self._summary():
            self.say(f"  {line}")

    @property
    def failures(self) -> tuple[str, ...]:
        """Everything that was wrong, with the name of its check."""
        return tuple(f"{name}: {one}" for name, outcome in self.outcomes.items() for one in outcome.failures)

    def as_json(self) -> dict[str, Any]:
        """All that is known, plain JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dry": self.is_dry,
            "finished": self.is_finished,
            "environment": dict(self.environment),
            "failures": list(self.failures),
            "checks": [self._check_json(check) for check in self.checks],
        }

    def _check_json(self, check: Check) -> dict[str, Any]:
        outcome = self.outcomes.get(check.name, Outcome())
        return {
            "name": check.name,
            "title": check.title,
            "status": outcome.status,
            "reason": outcome.reason or None,
            "seconds": None if self.is_dry else round(outcome.seconds, 1),
            "findings": [_finding_json(finding, is_dry=self.is_dry) for finding in outcome.findings],
        }

    def _put(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self.as_json(), indent=1, allow_nan=False).encode() + b"\n")

    def _summary(self) -> list[str]:
        figures = [one for outcome in self.outcomes.values() for one in outcome.findings if isinstance(one, Figure)]
        promised = [one for one in figures if one.goal is not None]
        missed = [] if self.is_dry else [one.name for one in promised if one.meets_goal is False]
        reached = 0 if self.is_dry else sum(one.meets_goal is True for one in promised)
        proofs = [one for outcome in self.outcomes.values() for one in outcome.findings if isinstance(one, Proof)]
        left_out = [
            check.name for check in self.checks if self.outcomes.get(check.name, Outcome()).status == "not measured"
        ]
        return [
            f"{sum(one.holds for one in proofs)} of {len(proofs)} proofs hold",
            "no figure was measured: a dry run" if self.is_dry else f"{reached} of {len(promised)} goals are reached",
            *(f"goal missed: {name}" for name in missed),
            *(f"not measured: {name}" for name in left_out),
            *(f"FAILED: {failure}" for failure in self.failures),
            f"written to {self.path}",
        ]


def lines(finding: Finding, *, is_dry: bool) -> list[str]:
    """A finding in the table.

    Args:
        finding: Any.
        is_dry: Whether it is no measurement.
    """
    if isinstance(finding, Proof):
        verdict = "holds" if finding.holds else "DOES NOT HOLD"
        return [f"  {finding.name:<58} {verdict}{f' ({finding.detail})' if finding.detail else ''}"]
    if is_dry:
        return [f"  {finding.name:<58} dry"]
    if isinstance(finding, Fact):
        return [f"  {finding.name:<58} {finding.value}"]
    return [f"  {finding.name:<58}{_measured(finding)}"]


def _measured(figure: Figure) -> str:
    if figure.value is None:
        return f" not measured ({figure.reason})"
    parts = f" {show(figure.value, unit=figure.unit):>12}"
    if figure.bound is None:
        return f"{parts}  {figure.bound_is}".rstrip()
    ratio = f"{figure.ratio or 0:.3f}"
    parts += f"  of {show(figure.bound, unit=figure.unit):>12}  {figure.bound_is}: {ratio}"
    return parts if figure.goal is None else f"{parts} {figure.goal} {'yes' if figure.meets_goal else 'NO'}"


def _finding_json(finding: Finding, *, is_dry: bool) -> dict[str, Any]:
    """One finding; a dry run's figures and facts without a number."""
    if isinstance(finding, Proof):
        return {"kind": "proof", "name": finding.name, "holds": finding.holds, "detail": finding.detail or None}
    state = "dry" if is_dry else "measured"
    if isinstance(finding, Fact):
        return {"kind": "fact", "name": finding.name, "state": state, "value": None if is_dry else finding.value}
    if finding.value is None and not is_dry:
        state = "not measured"
    written = {
        "value": finding.value,
        "bound": finding.bound,
        "ratio": finding.ratio,
        "meets_goal": finding.meets_goal,
    }
    return {
        "kind": "figure",
        "name": finding.name,
        "state": state,
        "reason": finding.reason or None,
        "unit": finding.unit,
        "bound_is": finding.bound_is or None,
        "goal": None if finding.goal is None else str(finding.goal),
        **(dict.fromkeys(written) if is_dry else written),
    }
