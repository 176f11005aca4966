"""What pages show a command to print is what it prints: the guide's counts and update line, and the README's updates."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest

from doc_pages import DOCS, blocks_of
from doc_world import furnish, scaled
from hotsplit.cli.main import group
from hotsplit.metrics import UpdateLine

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

GUIDE = (DOCS / "en" / "how-expert-balance-works.md").read_text(encoding="utf-8")
LINES = [line for block in blocks_of(GUIDE) for line in block.lines]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(what profile printed, what run said) of the guide's commands, one after the other."""

    import torch

    folder = tmp_path_factory.mktemp("guide")
    profile = next(line for line in LINES if "profile MODEL --data english.txt" in line)
    run = next(line for line in LINES if "run MODEL --counts english.json" in line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOTSPLIT_STATE_DIR", str(folder / "state"))
        for line in (profile, run):
            words = scaled(shlex.split(line)[1:], url="")
            furnish(folder, words=words)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                group.main(words, standalone_mode=False)
            said.append((out.getvalue(), err.getvalue()))
    torch.set_num_threads(threads)
    return said[0][0], said[1][1]


def shares(text):
    """Per cent of the "top" columns, decode and prefill."""
    rows = re.findall(r"^ *(?:decode|prefill) +([\d,]+) +(.*)$", text, flags=re.MULTILINE)
    return [(tokens, [float(number) for number in re.findall(r"[\d.]+(?= %)", rest)]) for tokens, rest in rows]


def test_the_skew_is_what_profile_prints(ran):
    told, found = shares("\n".join(LINES)), shares(ran[0])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in told]
    for (_, expected), (_, measured) in zip(told, found, strict=True):
        assert expected == pytest.approx(measured, abs=1.0)  # another CPU rounds some token's choice otherwise


def test_the_update_line_is_one_that_this_run_writes(ran):
    told = UpdateLine.parse(next(line for line in LINES if line.startswith("hotsplit update=")))
    lines = [UpdateLine.parse(line) for line in ran[1].splitlines() if "hotsplit update=" in line]
    (found,) = [line for line in lines if line.update == told.update]
    assert (told.step, told.tokens, told.failed, told.rank) == (found.step, found.tokens, found.failed, found.rank)
    for name in ("hit", "byte_hit", "oracle", "drift"):
        assert getattr(told, name) == pytest.approx(getattr(found, name), abs=0.1)
    assert told.hit > lines[0].hit + 0.1  # it is on its way, as the page says


def test_the_first_rate_and_the_expected_one_are_those_of_the_run(ran):
    first = UpdateLine.parse(next(line for line in ran[1].splitlines() if "hotsplit update=1 " in line))
    (expected,) = re.findall(r"expected hit rate ([\d.]+)", ran[1])
    (told_first, told_expected) = re.findall(
        r"it was ([\d.]+) at the first, and the plan had expected ([\d.]+)", GUIDE
    )[0]
    assert float(told_first) == pytest.approx(first.hit, abs=0.1)
    assert float(told_expected) == pytest.approx(float(expected), abs=0.01)
