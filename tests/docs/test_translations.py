"""The README and the guide say the same in English, Russian and Chinese: headings, code, names, numbers and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from doc_pages import ROOT, SHELLS, inline_code, links, sections, slug

LANGUAGES = ("en", "ru", "zh")
PAGES = {
    "README": {"en": "README.md", "ru": "docs/ru/README.md", "zh": "docs/zh/README.md"},
    "guide": {language: f"docs/{language}/how-expert-balance-works.md" for language in LANGUAGES},
}
PAIRS = [(page, language) for page in PAGES for language in LANGUAGES[1:]]
CJK = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"


def read(page, language):
    return (ROOT / PAGES[page][language]).read_text(encoding="utf-8")


def group_of(path):
    """(group, language) of a page that exists in three languages."""
    return next(((page, known) for page in PAGES for known in LANGUAGES if PAGES[page][known] == path), None)


def target_of(link, *, page):
    """What a link means, the same in every language: the page's group or path, and the number of the heading."""
    if "://" in link:
        return link
    path, _, anchor = link.partition("#")
    whole = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
    inside = str(whole.relative_to(ROOT))
    titles = [slug(section.title) for section in sections(whole.read_text(encoding="utf-8"))] if anchor else []
    group = group_of(inside)
    return f"{group[0] if group else inside}#{titles.index(anchor) if anchor else ''}"


def code_of(block):
    """A block's lines; in a shell block comments are prose, and may be said in any language."""
    is_shell = not block.language or block.language in SHELLS
    return [re.sub(r"\s+# .*$", "", line) if is_shell else line for line in block.lines]


def numbers(text):
    """As they are written, without code and links."""
    bare = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", text)
    return re.findall(r"\d+(?:\.\d+)*", re.sub(r"(\d),(\d{3})\b", r"\1\2", bare))


def facts(text, *, page):
    """(level, what stands there) of every section."""
    found = []
    for section in sections(text):
        prose = f"{section.title}\n{section.prose}"
        found.append(
            (
                section.level,
                {
                    "code": Counter(tuple(code_of(block)) for block in section.blocks),
                    "names": Counter(inline_code(section.prose)),
                    "numbers": Counter(numbers(prose)),
                    "links": Counter(target_of(link, page=page) for link in links(prose)),
                    "table rows": Counter({"": sum(line.startswith("|") for line in section.prose.splitlines())}),
                    "list items": Counter({"": len(re.findall(r"^(?:-|\d+\.) ", section.prose, flags=re.MULTILINE))}),
                },
            )
        )
    return found


def differences(english, other, *, page, language):
    """One line for everything that one text has and the other has not; empty where they keep in step."""
    left = facts(english, page=PAGES[page]["en"])
    right = facts(other, page=PAGES[page][language])
    if [level for level, _ in left] != [level for level, _ in right]:
        return [f"headings: {[level for level, _ in left]} and {[level for level, _ in right]}"]
    found = []
    for i, ((_, ours), (_, theirs)) in enumerate(zip(left, right, strict=True)):
        for kind in ours:
            missing, more = ours[kind] - theirs[kind], theirs[kind] - ours[kind]
            if missing or more:
                found.append(f"section {i}, {kind}: without {dict(missing)}, with {dict(more)}")
    return found


@pytest.mark.parametrize(("page", "language"), PAIRS)
def test_a_translation_keeps_in_step(page, language):
    assert [] == differences(read(page, "en"), read(page, language), page=page, language=language)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("numbers", lambda text: text.replace("25 GB/s", "24 GB/s", 1)),
        ("headings", lambda text: re.sub(r"^### .*\n", "", text, count=1, flags=re.MULTILINE)),
        ("headings", lambda text: re.sub(r"^### ", "## ", text, count=1, flags=re.MULTILINE)),
        ("code", lambda text: text.replace("    hotsplit rerank hist.json --learned -o merged.json\n", "", 1)),
        ("code", lambda text: text.replace("--dyn-steps 50", "--dyn-steps 500", 1)),
        ("names", lambda text: text.replace("`HOTSPLIT_DYN_MARGIN`", "`HOTSPLIT_DYN_STEPS`", 1)),
        ("links", lambda text: text.replace("](../forecast.md)", "](../fit.md)", 1)),
        ("table rows", lambda text: re.sub(r"^\| 1 \| 3 .*\n", "", text, count=1, flags=re.MULTILINE)),
        ("list items", lambda text: re.sub(r"^- ", "", text, count=1, flags=re.MULTILINE)),
    ],
)
@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_what_is_out_of_step_is_found(what, change, language):
    other = read("guide", language)
    changed = change(other)
    assert changed != other
    found = differences(read("guide", "en"), changed, page="guide", language=language)
    assert any(what in line for line in found)


@pytest.mark.parametrize(("page", "language"), [(page, language) for page in PAGES for language in LANGUAGES])
def test_a_page_names_the_other_languages_at_its_top(page, language):
    top = "\n".join(read(page, language).splitlines()[:4])
    here = (ROOT / PAGES[page][language]).parent
    named = [str(here.joinpath(link).resolve().relative_to(ROOT)) for link in links(top)]
    assert [PAGES[page][other] for other in LANGUAGES if other != language] == named


@pytest.mark.parametrize(("page", "language"), PAIRS)
def test_below_its_top_a_translation_links_pages_of_its_own_language(page, language):
    body = read(page, language).split("\n", maxsplit=4)[4]
    here = (ROOT / PAGES[page][language]).parent
    local = [str(here.joinpath(link.partition("#")[0]).resolve()) for link in links(body) if "://" not in link]
    groups = [group_of(str(Path(path).relative_to(ROOT))) for path in local]
    assert {language} >= {group[1] for group in groups if group}


@pytest.mark.parametrize("page", PAGES)
def test_a_translation_is_written_in_its_language(page):
    russian = "".join(section.prose for section in sections(read(page, "ru")))
    chinese = "".join(section.prose for section in sections(read(page, "zh")))
    assert len(re.findall(r"[\u0400-\u04ff]", russian)) > len(re.findall(r"[A-Za-z]", russian))
    assert len(re.findall(CJK, chinese)) > 1000


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_chinese_breaks_where_a_blank_would_be_seen(page):
    for section in sections(read(page, "zh")):
        assert [] == re.findall(rf".{CJK}\n(?![|\-#]){CJK}.", section.prose)
