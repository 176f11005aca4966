"""A folder in which the commands of a page can be run: stand-ins for the files, the model and the servers they name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hotsplit.recipes
from hotsplit.data import text_path, tiny_moe_path
from hotsplit.plan.histogram import Histogram, PhaseCounts, save_histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.trace import Trace, save_trace
from model_configs import DEEPSEEK_V3
from patience import LIMIT_S

TINY = ModelIdentity(model_type="qwen3_moe", layers=(0, 1, 2, 3), num_experts=32, top_k=4)
"""Of the bundled model."""
TINY_HOT_GIB = "0.003"
"""About half of the bundled model's experts, where a page speaks of a large one."""
_RECIPES = Path(hotsplit.recipes.__file__).parent / "data"
RECIPE = "mimo-v2.6-pro"
"""Where a page says NAME, and the one that most pages use."""
OUTPUTS = ("-o", "--output", "--trace", "--state-dir", "--report")
"""Options whose value is written, not read."""
URL = re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost|[\w.-]*HOST[\w.-]*):\d+")
"""Of a server on a page."""


def scaled(words: list[str], *, url: str) -> list[str]:
    """Words of a page for the bundled model and the server that stands in; with a recipe the model is the recipe's.

    Args:
        words: Behind `hotsplit`.
        url: Of the server that stands in.
    """
    if words[0] == "serve" and "--recipe" in words:
        words = [word for word in words if word != "MODEL"]
    words = [RECIPE if i and words[i - 1] == "--recipe" and word == "NAME" else word for i, word in enumerate(words)]
    found = [re.sub(r"^MODEL$|^src/hotsplit/data/tiny-moe$", str(tiny_moe_path()), word) for word in words]
    if str(tiny_moe_path()) in found:
        for i in range(1, len(found)):
            if found[i - 1] == "--hot-gib" and float(found[i]) >= 1:
                found[i] = TINY_HOT_GIB
    return [URL.sub(url, word) for word in found]


def shortened(words: list[str]) -> list[str]:
    """The same with less traffic, and more patience, where a page leaves it open: what is shown here is that it runs."""
    given = {word.partition("=")[0] for word in words}
    short = {
        "profile": {"--max-prompts": "4", "--prompt-tokens": "24", "--decode-tokens": "12"},
        "run": {"--max-new-tokens": "8"},
        "top": {"--timeout": str(LIMIT_S)},
    }
    more = [
        part for option, value in short.get(words[0], {}).items() if option not in given for part in (option, value)
    ]
    return [words[0], *more, *words[1:]]


def furnish(folder: Path, *, words: list[str]) -> list[str]:
    """Make each file that a command reads and that is not there yet.

    Args:
        folder: Where the command runs.
        words: Behind `hotsplit`.

    Returns:
        The names that were made.
    """
    made = []
    for i, word in enumerate(words):
        name = word.partition("#")[0]
        maker = next((make for pattern, make in _MAKERS.items() if re.fullmatch(pattern, name)), None)
        if maker and not (folder / name).exists() and words[max(i, 1) - 1] not in OUTPUTS:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            maker(folder / name)
            made.append(name)
    return made


def _requests(path: Path) -> None:
    pieces = text_path("python" if "other" in path.name else "english").read_text(encoding="utf-8").split("\n\n")[:24]
    lines = [json.dumps({"text": piece}) for piece in pieces if piece.strip()]
    path.write_text("\n".join(lines), encoding="utf-8")


def _text(path: Path) -> None:
    path.write_text(text_path("english").read_text(encoding="utf-8"), encoding="utf-8")


def _code(path: Path) -> None:
    path.write_text(text_path("python").read_text(encoding="utf-8"), encoding="utf-8")


def _counts(path: Path) -> None:
    """Skewed, every name a little other traffic of the same kind; 60,000 decode tokens."""
    draws = np.random.default_rng(list(path.name.encode()))
    shares_E = 1.0 / np.arange(1, TINY.num_experts + 1)
    counts_LE = [draws.multinomial(60_000 * TINY.top_k, shares_E / shares_E.sum()) for _ in TINY.layers]
    phase = PhaseCounts(counts=np.array(counts_LE, dtype=np.float64), tokens=60_000)
    save_histogram(Histogram(identity=TINY, phases={"decode": phase}, name="made up"), path)


def _recipes_counts(path: Path) -> None:
    """Of the model whose recipe the pages use."""
    path.write_bytes((_RECIPES / "histograms" / f"{RECIPE}.8prompt.json").read_bytes())


def _plan(path: Path) -> None:
    from hotsplit.cli.main import group

    counts = path.with_name("counts-of-the-plan.json")
    _counts(counts)
    arguments = ["plan", str(tiny_moe_path()), "--counts", str(counts), "--hot-gib", TINY_HOT_GIB, "-o", str(path)]
    group.main(arguments, standalone_mode=False)


def _rates(path: Path) -> None:
    gpu = {
        "index": 0,
        "name": "stand-in",
        "memory_bytes": 96 * 2**30,
        "hbm_bytes_per_s": 1.5e12,
        "dma_h2d_bytes_per_s": 5e10,
        "in_place_bytes_per_s": 4e10,
        "numa_node": 0,
    }
    host = {"memory_bytes_per_s": 2e11, "all_gpus_h2d_bytes_per_s": 1e11, "disk_bytes_per_s": 3e9}
    file = {"format": "hotsplit-rates", "version": 1, "gpus": [gpu], "host": host, "measured": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps(file), encoding="utf-8")


def _trace(path: Path) -> None:
    """Two domains, each with habits of its own."""
    draws = np.random.default_rng(7)
    tokens = 400
    experts = np.empty((tokens, 4, 4), dtype=np.uint8)
    for token in range(tokens):
        favourites = 16 * (token >= tokens // 2)
        for layer in range(4):
            experts[token, layer] = favourites + draws.permutation(16)[:4]
    ordinals = np.arange(tokens, dtype=np.uint32)
    save_trace(
        Trace(
            experts=experts,
            phase=np.ones(tokens, dtype=np.uint8),
            step=ordinals,
            domain=(ordinals >= tokens // 2).astype(np.uint8),
            domains=("python", "english"),
            identity=TINY,
        ),
        path,
    )


def _recording(path: Path) -> None:
    import torch

    torch.save(torch.from_numpy(np.random.default_rng(1).integers(1, 900, size=(58, 256))), path)


def _rank(path: Path) -> None:
    """Every rank counted other experts."""
    rank = int(path.stem.removeprefix("rank"))
    rows = [f"{layer},{expert},{10 + expert}" for layer in range(4) for expert in range(rank * 8, rank * 8 + 8)]
    path.write_text("layer,expert,count\n" + "\n".join(rows) + "\n", encoding="utf-8")


def _config(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(DEEPSEEK_V3), encoding="utf-8")


_MAKERS: dict[str, Callable[[Path], None]] = {
    r".*\.jsonl": _requests,
    r"code\.txt|a\.txt": _code,
    r".*\.txt": _text,
    r"rates\.json": _rates,
    r"(?:.*/)?plan\.json": _plan,
    r"balanced/histogram\.json|merged\.json": _recipes_counts,
    r"(?:.*/)?(?:hist|test|other|chat|agent|monday|tuesday|english)\.json": _counts,
    r"trace\.npz": _trace,
    r"recorded\.pt": _recording,
    r"rank\d\.csv": _rank,
    r"deepseek-v3": _config,
}
"""How a file of a name is made; the first pattern that fits."""
