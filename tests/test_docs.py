"""The pages under docs/ keep to the code: links lead somewhere, and tables hold what there is."""

from __future__ import annotations

import inspect
import re

import pytest

from doc_pages import DOCS, PAGES, ROOT, name_of, sections, slug
from hotsplit import errors
from hotsplit.config import settings
from hotsplit.metrics import METRICS, UpdateLine
from hotsplit.plan.dialects import DIALECTS

DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(page):
    """What a heading is called in a link."""
    return {slug(section.title) for section in sections(page.read_text(encoding="utf-8"))}


def broken_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    return broken


def rows_of(text):
    """Cells of every table row, without code marks."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    assert [] == broken_links(page)


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A head\n[a](page.md#a-head) [b](page.md#another) [c](gone.md) [d](#a-head)\n")
    assert ["page.md#another", "gone.md"] == broken_links(page)


def test_the_settings_page_has_every_setting():
    assert [] == [info.variable for info in settings() if f"### {info.variable}\n" not in read("configuration.md")]


def test_settings_that_pages_speak_of_exist():
    known = {info.variable for info in settings()} | {"HOTSPLIT_"}
    spoken = {
        (name_of(page), word)
        for page in PAGES
        for word in re.findall(r"HOTSPLIT_[A-Z_]*", page.read_text(encoding="utf-8"))
        if word not in known
    }
    assert {("docs/errors.md", "HOTSPLIT_DYN_STEP")} == spoken  # the error that it shows


def test_the_metrics_page_is_the_table_of_metrics():
    expected = [
        [metric.name, metric.kind, metric.unit, ", ".join(metric.labels) or "-", metric.meaning]
        for metric in METRICS.values()
    ]
    assert expected == [row for row in rows_of(read("metrics.md")) if row[0].startswith("hotsplit_")]


def test_the_metrics_page_explains_every_part_of_the_update_line():
    text = read("metrics.md")
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("hotsplit update="))
    assert line == str(UpdateLine.parse(line))
    parts = [name for row in rows_of(text.split("## The update line")[1]) for name in row[0].split(", ")]
    assert list(UpdateLine.__slots__) == [part for part in parts if part in UpdateLine.__slots__]


def test_the_errors_page_is_the_tree_of_errors():
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    expected = {
        kind.__name__: (sum(issubclass(kind, other) for other in classes) - 1, kind.exit_code) for kind in classes
    }
    shown = {
        row[0].replace("&nbsp;", "").strip(): (row[0].count("&nbsp;"), int(row[2]))
        for row in rows_of(read("errors.md"))
        if row[0].endswith("Error")
    }
    assert expected == shown


def test_the_errors_page_names_every_notice():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    names = set(re.findall(r'(?:Notice\(\s*name=|_skipped\(\s*)"([a-z-]+)"', sources))
    told = {name for row in rows_of(read("errors.md")) for name in row[0].split(", ")}
    assert len(names) > 20
    assert set() == names - told
    assert set() == {name for name in told if re.fullmatch(r"[a-z]+(-[a-z]+)+", name)} - names


def test_the_histogram_page_names_every_form_that_is_read():
    shown = [row[0] for row in rows_of(read("histogram-file.md"))]
    assert [] == [name for name in DIALECTS if name != "ours" and name not in shown]


def test_the_pages_for_users_call_our_programs_by_the_python_that_was_installed():
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    calls = [call for text in texts for call in re.findall(r"\S*python (?:examples|scripts|benchmarks)/", text)]
    assert len(calls) > 5
    assert {".venv/bin/python"} == {call.split()[0].strip("`") for call in calls}


def test_the_release_page_names_the_file_of_the_version():
    (named,) = re.findall(r"`__version__` in `(\S+)`", (ROOT / "RELEASE.md").read_text(encoding="utf-8"))
    assert "__version__ = " in (ROOT / named).read_text(encoding="utf-8")


def test_the_tour_is_short_and_names_files_that_exist():
    text = read("tour.md")
    assert 50 <= len(text.splitlines()) <= 80
    named = re.findall(r"`((?:bank|plan|host|engines)/[\w/.]+|[\w]+\.py)`", text)
    assert len(named) > 15
    assert [] == [name for name in named if not (ROOT / "src" / "hotsplit" / name).exists()]


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_is_a_choice_what_was_refused_and_the_reason(page):
    text = page.read_text(encoding="utf-8")
    number = int(page.name[:4])
    assert text.startswith(f"# {number}. ")
    assert ["Choice", "Refused", "Reason"] == re.findall(r"^\*\*(\w+)\.\*\*", text, flags=re.MULTILINE)
    assert len(text.splitlines()) <= 40


def test_the_decisions_are_numbered_in_a_row_and_listed():
    assert list(range(1, len(DECISIONS) + 1)) == [int(page.name[:4]) for page in DECISIONS]
    listed = re.findall(r"\]\((\d+.+?\.md)\)", (DOCS / "decisions" / "README.md").read_text(encoding="utf-8"))
    assert [page.name for page in DECISIONS] == listed
