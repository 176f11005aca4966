"""Troubleshooting keeps to the code: what an entry says is printed is in the sources, and its commands are real ones."""

from __future__ import annotations

import ast
import re

import pytest

from doc_pages import DOCS, ROOT, inline_code, sections

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = [section for section in sections(PAGE) if section.level == 3]
LEADS = ["Prints", "Cause", "Look", "Do"]
ERRORS = (DOCS / "errors.md").read_text(encoding="utf-8")


def texts_of_the_sources():
    """Every string literal of the package, parts of an f-string too, as one text each."""
    found = []
    for path in (ROOT / "src" / "hotsplit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                found.append("".join(parts))
    return "\n".join(found)


SOURCES = texts_of_the_sources()


def item(entry, lead):
    """What stands behind a lead."""
    (found,) = re.findall(rf"^- \*\*{lead}:\*\* (.*?)(?=^- \*\*|\Z)", entry.prose, flags=re.MULTILINE | re.DOTALL)
    return found


def unknown_texts(entry):
    """Texts in backticks that neither the sources nor docs/errors.md have."""
    told = [code for code in inline_code(item(entry, "Prints")) if not code.startswith("hotsplit ")]
    return [code for code in told if code not in SOURCES and f"`{code}`" not in ERRORS]


def test_there_are_many_entries_and_each_is_found_by_another_symptom():
    titles = [entry.title for entry in ENTRIES]
    assert len(titles) > 20
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_an_entry_says_what_is_printed_why_where_to_look_and_what_to_do(entry):
    assert LEADS == re.findall(r"^- \*\*(\w+):\*\*", entry.prose, flags=re.MULTILINE)
    assert inline_code(item(entry, "Prints"))
    assert inline_code(item(entry, "Look"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_what_an_entry_says_is_printed_exists(entry):
    assert [] == unknown_texts(entry)


def test_a_text_that_nothing_prints_is_found():
    text = "### A\n\n- **Prints:** `the run exceeds host memory` or `the moon is full`\n- **Cause:** none\n"
    assert ["the moon is full"] == unknown_texts(sections(text)[1])
