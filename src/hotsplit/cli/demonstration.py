"""The demo: the main job on the bundled model, four parts and a summary, nothing scripted.

Texts of five domains are halved: one half is profiled and planned from, the other half is the traffic that the plan
has not seen.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from hotsplit.cli import console
from hotsplit.cli.console import rate
from hotsplit.cli.views import coverage, print_histogram, print_plan_facts, print_scores
from hotsplit.config import HotsplitConfig
from hotsplit.data import DOMAINS, text_path, tiny_moe_path
from hotsplit.engines.transformers.loading import load
from hotsplit.engines.transformers.places import place_of
from hotsplit.engines.transformers.profile import ProfileOptions, play
from hotsplit.engines.transformers.resolve import load_tokenizer
from hotsplit.engines.transformers.traffic import Prompt, read_prompts
from hotsplit.metrics import UpdateLine
from hotsplit.plan.checkpoint import read_headers
from hotsplit.plan.dialects import load_histogram
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
    """The four parts, each using what the ones before have found.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: str) -> None:
        place_of(device)  # what is not there is said before anything is computed
        self._device = device
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
        console.prose(
            f"Bundled model: 4 MoE layers x 32 routed experts, top-4, {gib(self._sizes.expert_bytes)} of experts. Sample "
            f"traffic: {', '.join(DOMAINS)}; prompts of {PROFILE.prompt_tokens} tokens, {PROFILE.decode_tokens} decoded "
            f"for each, batch {PROFILE.batch_size}."
        )
        self._train_counts = self._count(_all(self._train), "profiling the first half")
        self._test_counts = self._count(_all(self._test), "profiling the second half")
        print_histogram(self._train_counts, name="first half of the texts")
        console.prose("Read: the hottest 30 % of experts serve far more than 30 % of the routed pairs.")
        return {
            phase: {"tokens": counts.tokens, "top_30": round(coverage(counts.counts, share=HOT_SHARE), 4)}
            for phase, counts in self._train_counts.phases.items()
        }

    def _plan(self) -> dict[str, Any]:
        """Part 2: what should be hot."""
        _heading(f"2  plan: which experts are hot in {100 * HOT_SHARE:.0f} % of the bytes?")
        options = PlanOptions(dynamic=False, test=self._test_counts)
        budget = int(self._sizes.expert_bytes * HOT_SHARE)
        plan, notices = make_plan(self._sizes, histogram=self._train_counts, budget_bytes=budget, options=options)
        console.say(notices)
        evaluation = evaluate(plan, histogram=self._train_counts, test=self._test_counts)
        print_plan_facts(plan, has_model=True)
        print_scores(evaluation)
        console.prose(
            "Read: held-out is traffic that the plan has not seen; null is a blind choice of the same bytes; layer order "
            "is whole layers first to last, as engines place without a plan; the oracles are the best in hindsight, "
            "reachable with as many hot experts in each layer and free; worst layer has its number in brackets."
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
        stock = stock.to(self._device)
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
        console.prose(f"First words of one (the model is a routing fixture: it makes no sense): {sample[:40]!r}")
        pairs = sum(served.pairs.values())
        return {"identical": identical, "hit_rate": round(sum(served.hit_pairs.values()) / pairs, 4)}

    def _run_dynamic(self) -> dict[str, Any]:
        """Part 4: traffic moves, the hot set follows."""
        _heading(f"4  run, dynamic: traffic moves from {FROM_DOMAIN} to {TO_DOMAIN}")
        default = HotsplitConfig()
        cadence = (
            f"{name.replace('_', '-')} {value:g} [{getattr(default, name):g}]" for name, value in CADENCE.items()
        )
        console.prose(
            f"Planned anew, from {FROM_DOMAIN} traffic alone. Cadence for so short a run, the default in brackets: "
            f"{', '.join(cadence)}. A window between two updates is a prefill and {CADENCE['dyn_steps'] - 1} decode "
            f"steps at batch {PROFILE.batch_size}: {(CADENCE['dyn_steps'] - 1) * PROFILE.batch_size} decoded tokens."
        )
        counts = self._scratch / "from.json"
        save_histogram(self._count(self._train[FROM_DOMAIN], f"profiling {FROM_DOMAIN}"), counts)
        model = load(self._folder, counts=str(counts), **self._share(counts), **CADENCE, **self._quiet())
        lines: list[UpdateLine] = []
        model.hotsplit.banks.live.on_update.append(lambda update: lines.append(update.line))
        console.out.print(_UPDATE_HEAD, style="dim")
        for domain, num_windows in ((FROM_DOMAIN, _WINDOWS_BEFORE), (TO_DOMAIN, _WINDOWS_AFTER)):
            for i in range(num_windows):
                self._play(model, self._test[domain], i=i)
                console.out.print(_update_row(domain, lines[-1]))
        model.hotsplit.close()
        console.prose(
            "Read: byte hit rate is the lower one because a batch touches most experts, hot and cold, in every step, "
            "each once, however many of its tokens share it. The log line of the last update:"
        )
        console.prose(str(lines[-1]), indent=2)
        return _recovery(lines)

    def _play(self, model: Any, prompts: Sequence[Prompt], *, i: int) -> None:
        """Play the i-th batch, round and round; it takes one window's steps and so brings one update."""
        step = PROFILE.batch_size
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

    def _share(self, counts: Path) -> dict[str, Any]:
        """The budget; on a GPU a plan for it, since whole pages of so small a model are more than its rows."""
        budget = int(self._sizes.expert_bytes * HOT_SHARE)
        if self._device == "cpu":
            return {"hot_gib": budget / GIB}
        histogram, _ = load_histogram(str(counts))
        plan, _ = make_plan(self._sizes, histogram=histogram, budget_bytes=budget, options=PlanOptions())
        save_plan(plan, self._scratch / "dynamic.json")
        return {"plan": self._scratch / "dynamic.json"}

    def _quiet(self) -> dict[str, Any]:
        """Where it runs; nothing of the demo is kept: its state goes with its scratch folder."""
        return {"device": self._device, "learned": "ignore", "state_dir": self._scratch}

    def _summarise(self, results: dict[str, Any]) -> None:
        plan, static, dynamic = results["plan"], results["static"], results["dynamic"]
        top_30, same = results["profile"]["decode"]["top_30"], "NOT identical to stock"
        if static["identical"]:
            same = "token for token identical to stock"
        yardsticks = (
            f"blind choice {rate(plan['null'])}, layer order {rate(plan['layer_order'])}, "
            f"best in hindsight {rate(plan['oracle_free'])}"
        )
        _heading("Summary")
        _line("profile", f"the hottest 30 % of experts serve {rate(top_30)} of decode traffic")
        _line("plan", f"{rate(plan['held_out'])} of unseen traffic served hot in 30 % of the bytes ({yardsticks})")
        _line("static", f"{same}; {rate(static['hit_rate'])} served hot")
        _line(
            "dynamic",
            f"{rate(dynamic['before'])} before the traffic moved, {rate(dynamic['right_after'])} right after, "
            f"{rate(dynamic['recovered'])} recovered (mean of the last three updates; {dynamic['swaps']} swaps; best in "
            f"hindsight {rate(dynamic['oracle_reachable'])})",
        )
        console.prose(f"\nAll of it measured just now, in {results['seconds']:.0f} s.")
        program, folder = _as_typed(Path(sys.argv[0])), _as_typed(self._folder)
        is_installed = Path(sys.argv[0]).name == "hotsplit"
        console.prose("To try more of it at once; then see `--help`, and give it a model and traffic of your own:")
        console.out.print(f"  {program if is_installed else 'hotsplit'} run {folder} \\")
        console.out.print("    --hot-gib 0.002 --dyn-steps 100 --max-new-tokens 400 \\")
        console.out.print('    --prompt "def __init__(self"')


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
    console.prose(f"\n{text}", style="bold")


def _line(name: str, text: str) -> None:
    """A line of the summary."""
    console.prose(text, indent=9, label=name)


_UPDATE_HEAD = "traffic   update      hit   byte hit   oracle   drift   swaps"


def _update_row(domain: str, line: UpdateLine) -> str:
    """One update below that head."""
    drift = "-" if line.drift is None else f"{line.drift:.2f}"
    rates = f"{rate(line.hit):>9}{rate(line.byte_hit):>11}{rate(line.oracle):>9}"
    return f"{domain:8}{line.update:>8}{rates}{drift:>8}{line.swaps:>8}"


def _as_typed(path: Path) -> str:
    """A path as one would type it here: from the working folder, if it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


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
    ids = torch.tensor([prompt.token_ids], device=model.device)
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    new_ids: list[int] = output[0, ids.shape[1] :].tolist()
    return new_ids


def _hit_rate(before: Any, model: Any) -> float:
    after = model.hotsplit.snapshot()
    pairs: int = sum(after.pairs.values()) - sum(before.pairs.values())
    hits: int = sum(after.hit_pairs.values()) - sum(before.hit_pairs.values())
    return hits / pairs
