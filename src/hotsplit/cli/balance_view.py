"""How the results of `hotsplit balance` look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotsplit.cli import console
from hotsplit.cli.balancing import HISTOGRAM, PLAN, Balanced
from hotsplit.cli.console import rate
from hotsplit.cli.views import histogram_json, print_histogram, print_plan_facts, print_scores
from hotsplit.plan.planfile import plan_hash


def balanced_json(result: Balanced, *, output: Path) -> dict[str, Any]:
    """The facts, with stable keys.

    Args:
        result: From `balance`.
        output: Folder of the files.
    """
    unseen, played = result.evaluation.test, result.played
    return {
        "kind": "balance",
        "histogram": {"file": str(output / HISTOGRAM), **histogram_json(result.histogram)},
        "held_out": {
            "hit_rate": result.held_out,
            "null": result.evaluation.null,
            "oracle_reachable": unseen.oracle_reachable if unseen else None,
            "oracle_free": unseen.oracle_free if unseen else None,
            "drift": result.evaluation.drift,
            "verdict": result.verdict.name if result.verdict else None,
            "captured": result.verdict.captured if result.verdict else None,
        },
        "plan": {"file": str(output / PLAN), "hash": plan_hash(result.plan)},
        "requests": {
            "total": played.num_requests,
            "done": played.num_done,
            "sent_again": played.num_again,
            "failed": dict(sorted(played.failures.items())),
        },
        "next": result.next_command,
        "notices": [str(notice) for notice in result.notices],
    }


def print_balanced(result: Balanced, *, output: Path) -> None:
    """What was counted, what a plan from half of it is worth on the other half, and what to run next.

    Args:
        result: From `balance`.
        output: Folder of the files.
    """
    played = result.played
    again = f", {played.num_again} of them sent more than once" if played.num_again else ""
    console.prose(f"{played.num_done} of {played.num_requests} requests answered{again}")
    for kind, number in sorted(played.failures.items()):
        console.prose(f"{number} failed, {kind}: first {played.examples[kind]}")
    print_histogram(result.histogram, name=str(output / HISTOGRAM))
    console.out.print()
    console.prose(
        "A plan made from the first half of the requests, on that half and on the second, which it has not seen:"
    )
    print_scores(result.evaluation)
    if result.verdict is not None:
        null, told = result.evaluation.null, result.verdict
        gain = f"held-out {rate(result.held_out)}, {100 * ((result.held_out or 0.0) - null):+.1f} points on an even placement"
        part = "" if told.captured is None else f"; {rate(told.captured)} of what these hot rows could add"
        console.prose(f"{told.words}: {gain}{part}", style="bold")
    console.out.print()
    console.prose(f"The plan of all requests, {output / PLAN}:")
    print_plan_facts(result.plan, has_model=True)
    console.out.print()
    console.out.print("next:")
    console.out.print(f"    {result.next_command}")
