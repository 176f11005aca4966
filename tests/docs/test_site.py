"""The site builds, strictly, and a link that leads nowhere stops it, inside docs/ as outside of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from doc_pages import DOCS, ROOT

pytest.importorskip("mkdocs")

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* rel="(?:stylesheet|preconnect)"[^>]*https?:"""
)


def build(folder, *, site):
    """Build the site of a folder's mkdocs.yml."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, site=folder)
    assert 0 == done.returncode, done.stderr
    return folder


@pytest.fixture
def small(tmp_path):
    """small(text) -> how the build of a repository with that page ends."""

    def go(text):
        (tmp_path / "docs").mkdir()
        (tmp_path / "scripts").mkdir()
        (tmp_path / "scripts" / "docs_site.py").write_bytes((ROOT / "scripts" / "docs_site.py").read_bytes())
        (tmp_path / "mkdocs.yml").write_text(CONFIG.partition("\nnav:")[0])
        (tmp_path / "docs" / "site.css").touch()
        (tmp_path / "README.md").write_text("# Home\n\n[a page](docs/page.md)\n")
        (tmp_path / "NOTICE").write_text("Thanks.\n")
        (tmp_path / "examples").mkdir()
        (tmp_path / "examples" / "one.py").touch()
        (tmp_path / "docs" / "page.md").write_text(f"# A page\n\n{text}\n")
        return build(tmp_path, site=tmp_path / "site")

    return go


def test_every_page_is_there(site):
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    made = {page.relative_to(site) for page in site.rglob("*.html")}
    named = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}
    assert set() == named - made
    assert (site / "index.html").is_file()


def test_no_page_asks_anybody_for_anything(site):
    fetching = [str(page.relative_to(site)) for page in site.rglob("*.html") if FETCHED.search(page.read_text("utf-8"))]
    assert [] == fetching


@pytest.mark.parametrize(("page", "language"), [("index", "en"), ("ru/index", "ru"), ("zh/index", "zh")])
def test_a_page_says_its_language(site, page, language):
    assert f'<html lang="{language}"' in (site / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["ru", "zh"])
def test_headings_of_every_language_can_be_linked(site, language):
    text = (site / language / "how-expert-balance-works.html").read_text(encoding="utf-8")
    named = re.findall(r'<h2 id="([^"]+)"', text)
    assert len(named) > 8
    assert all(re.search(r"[^\W\d_]", name) for name in named)


def test_what_lies_outside_of_docs_is_brought_along(small, tmp_path):
    done = small("[home](../README.md), [thanks](../NOTICE), [examples](../examples), [head](#a-page)")
    assert 0 == done.returncode, done.stderr
    page = (tmp_path / "site" / "page.html").read_text(encoding="utf-8")
    for link in ("index.html", "repository/NOTICE", "repository/examples/index.html"):
        assert f'href="{link}"' in page
        assert (tmp_path / "site" / link).is_file()


@pytest.mark.parametrize(
    "link",
    ["gone.md", "../GONE.md", "../NOTICES", "page.md#no-such-head", "#no-such-head", "../examples/two.py", "/page.md"],
)
def test_a_link_that_leads_nowhere_stops_the_build(small, link):
    done = small(f"[a link]({link})")
    assert 0 != done.returncode
    assert link.removeprefix("../") in done.stderr


def test_a_link_in_code_is_none(small):
    assert 0 == small("`[a](gone.md)`\n\n```\n[b](gone.md)\n```\n\n    [c](gone.md)\n").returncode


@pytest.mark.parametrize("page", ["README.md", "docs/ru/README.md", "docs/zh/README.md"])
def test_every_readme_leads_to_the_guide_the_quick_start_and_troubleshooting(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in ("how-expert-balance-works.md)", "quick-start.md)", "troubleshooting.md)"):
        assert name in text


def test_make_says_where_the_first_page_is(site):
    rule = re.search(r"^docs-site:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    said = re.search(r"\$\(CURDIR\)/build/site/(\S+?)\"", rule[1])
    assert (site / said[1]).is_file()
    assert "site_dir: build/site" in CONFIG
