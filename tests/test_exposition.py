"""What a run exports is Prometheus text with every name of every rank, and says what an independent count says.

The count is taken at the routers of the bundled model while hotsplit swaps under them. What it ran into files goes all
the way: snapshot file, collector, text, the format's own parser, and the numbers of `hotsplit top`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hotsplit.cli.scrape import parse
from hotsplit.data import tiny_moe_path
from hotsplit.engines.vllm.exposition import SnapshotCollector

# Name, kind and labels beside rank of every metric of the design, typed in once more.
DESIGN = {
    "hotsplit_tokens_total": ("counter", {"phase": {"decode", "prefill"}}),
    "hotsplit_routed_pairs_total": ("counter", {"phase": {"decode", "prefill"}}),
    "hotsplit_hit_pairs_total": ("counter", {"phase": {"decode", "prefill"}}),
    "hotsplit_touched_bytes_total": ("counter", {"bank": {"hot", "cold"}}),
    "hotsplit_kept_bytes_total": ("counter", {}),
    "hotsplit_steps_total": ("counter", {}),
    "hotsplit_swaps_total": ("counter", {"result": {"done", "refused", "failed"}}),
    "hotsplit_swap_bytes_total": ("counter", {}),
    "hotsplit_shifts_total": ("counter", {}),
    "hotsplit_update_failures_total": ("counter", {}),
    "hotsplit_hot_bytes": ("gauge", {}),
    "hotsplit_host_bytes": ("gauge", {}),
    "hotsplit_budget_bytes": ("gauge", {}),
    "hotsplit_hit_ratio_window": ("gauge", {}),
    "hotsplit_byte_hit_ratio_window": ("gauge", {}),
    "hotsplit_kept_ratio_window": ("gauge", {}),
    "hotsplit_oracle_ratio_window": ("gauge", {}),
    "hotsplit_drift_ratio": ("gauge", {}),
    "hotsplit_update_seconds": ("gauge", {}),
    "hotsplit_info": ("gauge", {"version": None, "plan_hash": None, "mode": None, "backend": None}),
}
TOP_K = 4


@dataclass
class Counted:
    """What was seen at the routers."""

    tokens: dict[str, int] = field(default_factory=lambda: {"decode": 0, "prefill": 0})
    pairs: dict[str, int] = field(default_factory=lambda: {"decode": 0, "prefill": 0})
    hits: dict[str, int] = field(default_factory=lambda: {"decode": 0, "prefill": 0})
    touched: dict[str, int] = field(default_factory=lambda: {"hot": 0, "cold": 0})
    steps: int = 0


@dataclass
class Exported:
    """A run, seen from both sides."""

    counted: Counted
    text: str
    swaps: int
    """Differences between the maps of two steps: experts that became hot."""


def count(model, counted):
    """Hooks on the routers that count into `counted`, and tell which experts became hot."""
    banks, row_bytes = model.hotsplit.banks, model.hotsplit.sizes.row_bytes
    before, became_hot = {}, []

    def watch(layer):
        def hook(_module, _args, output):
            hot = banks.router.hot_mask()[layer].copy()  # as it is at the moment of routing
            became_hot.extend((layer, expert) for expert in (hot & ~before.get(layer, hot)).nonzero()[0])
            before[layer] = hot
            chosen = output[0].float().softmax(-1).topk(TOP_K, dim=-1).indices.tolist()
            phase = "prefill" if len(chosen) > 1 else "decode"
            counted.steps += layer == 0
            counted.tokens[phase] += len(chosen) * (layer == 0)
            counted.pairs[phase] += sum(map(len, chosen))
            counted.hits[phase] += sum(bool(hot[expert]) for token in chosen for expert in token)
            for expert in {expert for token in chosen for expert in token}:
                counted.touched["hot" if hot[expert] else "cold"] += int(row_bytes[layer])

        return hook

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(watch(layer))
    return became_hot


@pytest.fixture(scope="module")
def exported(tmp_path_factory, write_counts_file):
    torch = pytest.importorskip("torch")
    import hotsplit

    state = tmp_path_factory.mktemp("state")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = {"dyn_steps": 4, "dyn_margin": 1, "dyn_half_life": 2, "state_dir": state, "counts": write_counts_file}
    model = hotsplit.load(tiny_moe_path(), hot_gib=0.0018, device="cpu", **settings)
    try:
        counted = Counted()
        became_hot = count(model, counted)
        ids = torch.arange(3, 27).unsqueeze(0)
        model.generate(ids, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    finally:
        model.hotsplit.close()
        torch.set_num_threads(threads)
    (path,) = state.glob("runs/*/rank0.json")
    # A second rank, as under vLLM: its file is the first one's with another number.
    value = json.loads(path.read_text())
    value["snapshot"]["rank"] = 1
    (path.parent / "rank1.json").write_text(json.dumps(value))
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(path.parent))
    return Exported(counted=counted, text=generate_latest(registry).decode(), swaps=len(became_hot))


@pytest.fixture(scope="module")
def write_counts_file(tmp_path_factory):
    """Counts whose hottest experts are whichever: the traffic will want others."""
    import numpy as np

    from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
    from hotsplit.plan.identity import ModelIdentity

    identity = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=TOP_K)
    counts_LE = np.tile(np.arange(32, 0, -1.0) * 40, (4, 1))
    phases = {"decode": PhaseCounts(counts=counts_LE, tokens=int(counts_LE[0].sum()) // TOP_K)}
    path = tmp_path_factory.mktemp("counts") / "counts.json"
    save_histogram(Histogram(identity=identity, phases=phases, name="made up"), path)
    return path


pytestmark = pytest.mark.transformers


def series_of(text):
    """Name -> labels -> value, and name -> kind, by the format's own parser; what is there twice fails."""
    values, kinds = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values.setdefault(sample.name, {})
            values[sample.name][labels] = sample.value
            kinds[sample.name] = family.type
    return values, kinds


def value_of(exported, name, **labels):
    return series_of(exported.text)[0][name][tuple(sorted({"rank": "0", **labels}.items()))]


def test_every_name_of_the_design_is_there_of_every_rank_with_its_kind_and_labels(exported):
    values, kinds = series_of(exported.text)
    assert set(DESIGN) - {"hotsplit_kept_ratio_window"} == set(values)  # memory for all cold rows: there are no slots
    for name, (kind, labels) in DESIGN.items():
        if name not in values:
            continue
        assert kind == kinds[name]
        for rank in ("0", "1"):
            found = [dict(key) for key in values[name] if ("rank", rank) in key]
            assert {"rank", *labels} == set().union(*found)
            for label, allowed in labels.items():
                assert allowed is None or allowed == {one[label] for one in found}


def test_tokens_pairs_hits_and_steps_are_those_seen_at_the_routers(exported):
    counted = exported.counted
    assert {"decode": 59, "prefill": 24} == counted.tokens
    assert 60 == counted.steps == value_of(exported, "hotsplit_steps_total")
    for name, seen in (("tokens", counted.tokens), ("routed_pairs", counted.pairs), ("hit_pairs", counted.hits)):
        for phase in ("decode", "prefill"):
            assert seen[phase] == value_of(exported, f"hotsplit_{name}_total", phase=phase)
    assert 0 < counted.hits["decode"] < counted.pairs["decode"]


def test_touched_bytes_are_the_rows_of_distinct_experts_seen_at_the_routers(exported):
    for bank, seen in exported.counted.touched.items():
        assert seen == value_of(exported, "hotsplit_touched_bytes_total", bank=bank)
    assert 0 == value_of(exported, "hotsplit_kept_bytes_total")


def test_swaps_are_experts_that_became_hot_between_two_steps(exported):
    done = value_of(exported, "hotsplit_swaps_total", result="done")
    assert exported.swaps > 0
    # One that is published after the last step was routed was seen by no router.
    assert exported.swaps <= done <= exported.swaps + 4
    row = value_of(exported, "hotsplit_swap_bytes_total") / done
    assert row == int(row) > 0


def test_hotsplit_top_reads_the_same_numbers_out_of_it(exported):
    values, _ = series_of(exported.text)
    reading = parse(exported.text, url="http://host/metrics")
    assert [0, 1] == list(reading.ranks)
    for rank, shown in reading.ranks.items():
        of_rank = {
            (name, *(value for key, value in labels if key != "rank")): number
            for name, series in values.items()
            for labels, number in series.items()
            if ("rank", str(rank)) in labels and name != "hotsplit_info"
        }
        expected = {
            "/".join([name.removeprefix("hotsplit_").removesuffix("_total"), *labels]): number
            for (name, *labels), number in of_rank.items()
        }
        assert expected == shown.numbers
        assert {"version", "plan_hash", "mode", "backend"} == set(shown.info)


def test_the_ratios_are_ratios_and_the_hit_rate_follows_from_the_counters(exported):
    for name in ("hit_ratio_window", "byte_hit_ratio_window", "oracle_ratio_window", "drift_ratio"):
        assert 0 <= value_of(exported, f"hotsplit_{name}") <= 1
    assert value_of(exported, "hotsplit_hit_ratio_window") <= value_of(exported, "hotsplit_oracle_ratio_window")
    assert value_of(exported, "hotsplit_hot_bytes") <= value_of(exported, "hotsplit_budget_bytes")


@pytest.mark.parametrize("page", ["metrics.md", "top.md"])
def test_a_name_that_a_page_uses_is_one_of_the_designs(page):
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    # Behind a blank, a bracket or a backtick: no part of a file's or a rule's name.
    names = set(re.findall(r"(?<![\w/.])hotsplit_[a-z_]+", text))
    assert {"hotsplit_hit_pairs_total", "hotsplit_info"} & names
    assert set() == names - set(DESIGN)


def test_the_alerts_of_the_page_are_a_rule_file():
    yaml = pytest.importorskip("yaml")
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    (group,) = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["groups"]
    assert 3 == len(group["rules"])
    for rule in group["rules"]:
        assert {"alert", "expr"} <= set(rule) <= {"alert", "expr", "for"}
        assert set(re.findall(r"hotsplit_\w+", rule["expr"])) <= set(DESIGN)
        assert rule["expr"].count("(") == rule["expr"].count(")")
