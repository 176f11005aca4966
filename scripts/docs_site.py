"""What mkdocs.yml hooks in: a site of docs/ and of everything else in the repository that its pages link.

Pages link by paths inside the repository, so that they can be read there. A link that leaves docs/ brings its target
along: a page under its own path below repository/, README.md as the site's first page, any other file as it is, a folder
as its README.md or a list of its files. A link that leads nowhere is left as it stands, and mkdocs, strict, fails on it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)


def slug(heading: str, separator: str) -> str:
    """What a heading is called in a link, by the rule of those who show Markdown in a repository.

    Args:
        heading: Its text.
        separator: Between words.
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site's sources.

    Args:
        path: Inside the repository; a folder ends in a slash.
    """
    if path == "README.md":
        return path
    inside = path.removeprefix("docs/")
    return inside if inside != path else f"repository/{f'{path}index.md' if path.endswith('/') else path}"


def repository_path(src_uri: str) -> str:
    """Where a file of the site's sources lies in the repository; the other way round.

    Args:
        src_uri: Inside the site's sources.
    """
    if src_uri == "README.md":
        return src_uri
    inside = src_uri.removeprefix("repository/")
    return inside if inside != src_uri else f"docs/{src_uri}"


def targets(text: str, *, path: str) -> Iterator[tuple[str, str]]:
    """Every link of a page to something that there is: as it is written, and as a path inside the repository.

    Args:
        text: Markdown.
        path: The page's, inside the repository.
    """
    for _, link, _ in _LINK.findall(_CODE.sub("", text)):
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if "://" in link or found.startswith("..") or not (ROOT / found).exists():
            continue
        yield link, _page_of(found) if (ROOT / found).is_dir() else found


def _page_of(folder: str) -> str:
    """What is shown for a folder: its README.md, or the folder itself, as a list."""
    return f"{folder}/README.md" if (ROOT / folder / "README.md").is_file() else f"{folder}/"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings by our rule."""
    config.mdx_configs["toc"] = {"slugify": slug, "permalink": True}
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is linked, and what that links."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    _add(files, path="README.md", config=config)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else ""
        for _, target in targets(text, path=path):
            if target in seen:
                continue
            seen.add(target)
            if not target.startswith("docs/"):
                _add(files, path=target, config=config)
                waiting.append(target)
    return files


def _add(files: Files, *, path: str, config: MkDocsConfig) -> None:
    """Add a file of the repository, or the list of a folder's files."""
    content: str | bytes
    if path.endswith("/"):
        content = _listing(path)
    else:
        content = (ROOT / path).read_bytes() if not path.endswith(".md") else (ROOT / path).read_text(encoding="utf-8")
    files.append(File.generated(config, site_path(path), content=content))


def _listing(path: str) -> str:
    names = sorted(str(file.relative_to(ROOT / path)) for file in (ROOT / path).rglob("*") if file.is_file())
    shown = [name for name in names if "__pycache__" not in name]
    return f"# {path}\n\nFiles of this folder of the repository:\n\n" + "".join(f"- `{name}`\n" for name in shown)


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn links that leave docs/ into those to what was brought along."""
    path = repository_path(page.file.src_uri)
    places = {link: site_path(target) for link, target in targets(markdown, path=path)}
    here = posixpath.dirname(page.file.src_uri) or "."

    def placed(match: re.Match[str]) -> str:
        start, link, end = match.groups()
        return f"{start}{posixpath.relpath(places[link], here) if link in places else link}{end}"

    return _LINK.sub(placed, markdown)


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Say what language a page is in: browsers choose fonts and hyphens by it."""
    language = posixpath.dirname(page.file.src_uri)
    return output.replace('<html lang="en"', f'<html lang="{language}"', 1) if language in ("ru", "zh") else output
