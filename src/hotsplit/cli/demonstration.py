"""The demo: the main job on the bundled model, four parts and a summary, nothing scripted.

Texts of five domains are halved: one half is profiled and planned from, the other half is the traffic that the plan
has not seen.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from hotsplit.bank.live import Update
from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.views import coverage, print_histogram, print_plan_facts, print_scores
from hotsplit.config import HotsplitConfig
from hotsplit.data import DOMAINS, text_path, tiny_moe_path
from hotsplit.engines.transformers.loading import load
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.resolve import load_tokenizer
from hotsplit.engines.transformers.traffic import Prompt, read_prompts
from hotsplit.metrics import UpdateLine
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.evaluate import evaluate
from hotsplit.plan.histogram import Histogram, save_histogram
from hotsplit.plan.planfile import save_plan
from hotsplit.plan.planner import PlanOptions, make_plan
from hotsplit.plan.sizes import expert_sizes
from hotsplit.units import GIB, gib

HOT_SHARE = 0.3
PROFILE = ProfileOptions(prompt_tokens=64, decode_tokens=48, max_prompts=32, batch_size=16)
CADENCE: dict[str, Any] = {"dyn_steps": 32, "dyn_half_life": 4.0, "dyn_max_swaps": 4}
FROM_DOMAIN, TO_DOMAIN = "python", "english"
_WINDOWS_BEFORE, _WINDOWS_AFTER = 4, 12


class Demonstration:
    """The four parts, each using what the ones before have found."""

    def __init__(self) -> None:
        self._folder = tiny_moe_path()
        self._sizes = expert_sizes(read_headers(self._folder))
        self._tokenizer = load_tokenizer(self._folder)
        halves = {domain: self._halves(domain) for domain in DOMAINS}
        self._train = {domain: first for domain, (first, _) in halves.items()}
        self._test = {domain: second for domain, (_, second) in halves.items()}

    def run(self) -> dict[str, Any]:
        """All parts.

        Returns:
            The measured numbers by part.
        """
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="hotsplit-demo-") as scratch, _one_thread():
            self._scratch = Path(scratch)
            results: dict[str, Any] = {
                "profile": self._profile(),
                "plan": self._plan(),
                "static": self._run_static(),
                "dynamic": self._run_dynamic(),
            }
        results["seconds"] = round(time.perf_counter() - started, 1)
        self._summarise(results)
        return results

    def _halves(self, domain: str) -> tuple[list[Prompt], list[Prompt]]:
        prompts = read_prompts(
            [text_path(domain)], tokenizer=self._tokenizer, prompt_tokens=PROFILE.prompt_tokens, max_prompts=64
        )
        return prompts[0::2], prompts[1::2]

    def _profile(self) -> dict[str, Any]:
        """Part 1: what the traffic asks for."""
        _heading("1  profile: what does the traffic ask of every expert?")
        console.out.print(
            f"Bundled model: 4 MoE layers x 32 routed experts, top-4, {gib(self._sizes.expert_bytes)} of experts. Sample "
            f"traffic: {', '.join(DOMAINS)}, {PROFILE.prompt_tokens}-token prompts, {PROFILE.decode_tokens} decoded each."
        )
        self._train_counts = self._count(_all(self._train), "profiling the first half")
        self._test_counts = self._count(_all(self._test), "profiling the second half")
        print_histogram(self._train_counts, name="first half of the texts")
        console.out.print("Read: the hottest 30 % of experts serve far more than 30 % of the routed pairs.")
        return {
            phase: {"tokens": counts.tokens, "top_30": round(coverage(counts.counts, share=HOT_SHARE), 4)}
            for phase, counts in self._train_counts.phases.items()
        }

    def _plan(self) -> dict[str, Any]:
        """Part 2: what should be hot."""
        _heading(f"2  plan: which experts are hot in {HOT_SHARE:.0%} of the bytes?")
        options = PlanOptions(dynamic=False, test=self._test_counts)
        budget = int(self._sizes.expert_bytes * HOT_SHARE)
        plan, notices = make_plan(self._sizes, histogram=self._train_counts, budget_bytes=budget, options=options)
        console.say(notices)
        evaluation = evaluate(plan, histogram=self._train_counts, test=self._test_counts)
        print_plan_facts(plan, has_model=True)
        print_scores(evaluation)
        console.out.print(
            "Read: held-out is traffic that the plan has not seen; null is a blind choice of the same bytes; layer order "
            "is whole layers first to last, as engines place without a plan; reachable and oracle are the best in hindsight."
        )
        save_plan(plan, self._scratch / "plan.json")
        proof = plan.proof
        return {
            "budget_bytes": budget,
            "in_sample": proof.hit_rate,
            "held_out": proof.held_out,
            "null": proof.null,
            "oracle_reachable": proof.oracle_reachable,
            "oracle_free": proof.oracle_free,
            "layer_order": evaluation.test.layer_order if evaluation.test else None,
        }

    def _run_static(self) -> dict[str, Any]:
        """Part 3: same tokens as stock."""
        _heading("3  run, static: the same tokens as the stock model, from hot and cold experts")
        stock = transformers.AutoModelForCausalLM.from_pretrained(self._folder, experts_implementation="eager").eval()
        model = load(self._folder, plan=self._scratch / "plan.json", dynamic=False, **self._quiet())
        rows, identical, sample = [], True, ""
        for domain in DOMAINS:
            prompt = self._test[domain][0]
            before = model.hotsplit.snapshot()
            mine, theirs = (_continue(each, prompt) for each in (model, stock))
            same = mine == theirs
            identical &= same
            rows.append([domain, f"{len(mine)}", "yes" if same else "NO", rate(_hit_rate(before, model))])
            sample = sample or self._tokenizer.decode(mine)
        served = model.hotsplit.snapshot()
        model.hotsplit.close()
        console.table("", columns=["prompt", "tokens", "identical to stock", "hit rate"], rows=rows)
        console.out.print(f"First words of one (the model is a routing fixture: it makes no sense): {sample[:60]!r}")
        pairs = sum(served.pairs.values())
        return {"identical": identical, "hit_rate": round(sum(served.hit_pairs.values()) / pairs, 4)}

    def _run_dynamic(self) -> dict[str, Any]:
        """Part 4: traffic moves, the hot set follows."""
        _heading(f"4  run, dynamic: traffic moves from {FROM_DOMAIN} to {TO_DOMAIN}")
        default = HotsplitConfig()
        cadence = (
            f"{name.replace('_', '-')} {value:g} [{getattr(default, name):g}]" for name, value in CADENCE.items()
        )
        console.out.print(f"Cadence for so short a run, the default in brackets: {', '.join(cadence)}")
        counts = self._scratch / "from.json"
        save_histogram(self._count(self._train[FROM_DOMAIN], f"profiling {FROM_DOMAIN}"), counts)
        hot_gib = self._sizes.expert_bytes * HOT_SHARE / GIB
        model = load(self._folder, hot_gib=hot_gib, counts=str(counts), **CADENCE, **self._quiet())
        updates: list[Update] = []
        model.hotsplit.banks.live.on_update.append(updates.append)
        model.hotsplit.banks.live.on_update.append(lambda update: console.out.print(f"  {update.line}"))
        console.out.print(f"{FROM_DOMAIN}, which the plan was made from:")
        self._play(model, self._test[FROM_DOMAIN], num_windows=_WINDOWS_BEFORE)
        console.out.print(f"{TO_DOMAIN} from here on:")
        self._play(model, self._test[TO_DOMAIN], num_windows=_WINDOWS_AFTER)
        model.hotsplit.close()
        return _recovery([update.line for update in updates])

    def _play(self, model: Any, prompts: Sequence[Prompt], *, num_windows: int) -> None:
        """Play prompts round and round; a round takes one window's steps and so brings one update."""
        step = PROFILE.batch_size
        for i in range(num_windows):
            first = i * step % len(prompts)
            play(model, (list(prompts) * 2)[first : first + step], options=_seeded(i))
            model.hotsplit.banks.tick()  # a window ends with its traffic, not with the first step of the next

    def _count(self, prompts: Sequence[Prompt], what: str) -> Histogram:
        """A profile of these prompts: all experts hot, nothing adapts."""
        model = load(self._folder, hot_gib=1, dynamic=False, run_when_fits=True, **self._quiet())
        with console.progress(what) as bar:
            histogram, _ = play(model, prompts, options=PROFILE, on_progress=bar)
        model.hotsplit.close()
        return histogram

    def _quiet(self) -> dict[str, Any]:
        """Nothing of the demo is kept: its state goes with its scratch folder."""
        return {"learned": "ignore", "state_dir": self._scratch}

    def _summarise(self, results: dict[str, Any]) -> None:
        plan, static, dynamic = results["plan"], results["static"], results["dynamic"]
        top_30, same = results["profile"]["decode"]["top_30"], "NOT identical to stock"
        if static["identical"]:
            same = "token for token identical to stock"
        yardsticks = (
            f"blind choice {plan['null']:.1%}, layer order {plan['layer_order']:.1%}, "
            f"best in hindsight {plan['oracle_free']:.1%}"
        )
        moved = f"{dynamic['before']:.1%} before the traffic moved, {dynamic['right_after']:.1%} right after, "
        _heading("Summary")
        console.out.print(f"profile  the hottest 30 % of experts serve {top_30:.1%} of decode traffic")
        console.out.print(
            f"plan     {plan['held_out']:.1%} of unseen traffic served hot in 30 % of the bytes ({yardsticks})"
        )
        console.out.print(f"static   {same}; {static['hit_rate']:.1%} served hot")
        console.out.print(
            f"dynamic  {moved}{dynamic['recovered']:.1%} recovered ({dynamic['swaps']} swaps; "
            f"best in hindsight {dynamic['oracle_reachable']:.1%})"
        )
        console.out.print(
            f"\nAll of it measured just now, in {results['seconds']:.0f} s. On your own model: hotsplit --help"
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The model is so small that a second thread costs more than it computes; put back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _heading(text: str) -> None:
    console.out.print(f"\n{text}", style="bold")


def _all(halves: dict[str, list[Prompt]]) -> list[Prompt]:
    return [prompt for prompts in halves.values() for prompt in prompts]


def _recovery(lines: Sequence[UpdateLine]) -> dict[str, Any]:
    """Before the traffic moved (mean), the first window after, and the mean of the last three."""
    hits = [line.hit or 0.0 for line in lines]
    oracles = [line.oracle or 0.0 for line in lines]
    return {
        "before": round(sum(hits[:_WINDOWS_BEFORE]) / _WINDOWS_BEFORE, 4),
        "right_after": round(hits[_WINDOWS_BEFORE], 4),
        "recovered": round(sum(hits[-3:]) / 3, 4),
        "oracle_reachable": round(sum(oracles[-3:]) / 3, 4),
        "swaps": sum(line.swaps for line in lines),
    }


def _seeded(i: int) -> ProfileOptions:
    """Another seed for every round, so that rounds differ."""
    return ProfileOptions(
        prompt_tokens=PROFILE.prompt_tokens,
        decode_tokens=int(CADENCE["dyn_steps"]) - 1,
        batch_size=PROFILE.batch_size,
        seed=i,
    )


def _continue(model: Any, prompt: Prompt) -> list[int]:
    ids = torch.tensor([prompt.token_ids])
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    new_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return new_ids


def _hit_rate(before: Any, model: Any) -> float:
    after = model.hotsplit.snapshot()
    pairs: int = sum(after.pairs.values()) - sum(before.pairs.values())
    hits: int = sum(after.hit_pairs.values()) - sum(before.hit_pairs.values())
    return hits / pairs
