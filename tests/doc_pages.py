"""What the tests of the documents read out of Markdown: sections, code blocks, inline code, links, numbers, commands."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
SHELLS = ("sh", "bash", "shell", "console")
_FENCE = re.compile(r"^(`{3,})([\w-]*)\s*$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OPERATORS = ("|", "||", "&&", ";", "&", ">", ">>", "<")
_HEADING = re.compile(r"(#+) (.+)")


def name_of(page: Path) -> str:
    """A page's path inside the repository."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A code block."""

    language: str
    """Of a fence; empty for an indented block."""
    lines: tuple[str, ...]
    """Without fence and indent; none is blank."""
    first_line: int
    """Of its text in the page, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what stands below it up to the next one."""

    level: int
    """Number signs of the heading; 0 for what stands before the first."""
    title: str
    """Text of the heading."""
    prose: str
    """Text without code blocks and comments."""
    blocks: tuple[Block, ...]
    """Code blocks, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command line of a page."""

    page: str
    """Path inside the repository."""
    line: int
    """Of its start in the page, from 1."""
    text: str
    """As it is typed, continued lines joined."""

    @property
    def words(self) -> list[str]:
        """As a shell splits it; comments are cut off, FILE#SET is none. Where quotes are not in order, at every blank."""
        text = re.sub(r"(?:^|\s)#(?: .*)?$", "", self.text)
        try:
            return shlex.split(text)
        except ValueError:
            return text.split()

    @property
    def is_synopsis(self) -> bool:
        """Whether it shows what may stand where, in brackets, and is nothing to paste."""
        return any(re.fullmatch(r"\[.+|.+\]", word) for word in self.words)

    @property
    def variables(self) -> dict[str, str]:
        """Those set before the program, on its line."""
        leading = self.words[: self._start]
        return {name: value for name, _, value in (word.partition("=") for word in leading)}

    @property
    def program(self) -> str:
        """Name of the program, without its folder."""
        return Path(self.words[self._start]).name if self._start < len(self.words) else ""

    @property
    def arguments(self) -> list[str]:
        """What stands behind the program, up to a pipe, a redirection or the next command."""
        return list(itertools.takewhile(lambda word: word not in _OPERATORS, self.words[self._start + 1 :]))

    @property
    def _start(self) -> int:
        return next((i for i, word in enumerate(self.words) if not _ASSIGNMENT.match(word)), len(self.words))


def sections(text: str) -> list[Section]:
    """Cut a page at its headings; what looks like one inside a code block is none."""
    found = [_Draft(level=0, title="")]
    for kind, number, line, language in _marked(text):
        if kind == "heading":
            match = _HEADING.fullmatch(line)
            assert match
            found.append(_Draft(level=len(match[1]), title=match[2]))
        elif kind == "code":
            found[-1].code.append((number, line, language))
        else:
            found[-1].prose.append(line)
    return [draft.done() for draft in found]


class _Draft:
    """A section that grows."""

    def __init__(self, *, level: int, title: str) -> None:
        self.level, self.title = level, title
        self.prose: list[str] = []
        self.code: list[tuple[int, str, str]] = []

    def done(self) -> Section:
        """As it is."""
        groups: list[list[tuple[int, str, str]]] = []
        for number, line, language in self.code:
            if groups and number == groups[-1][-1][0] + 1:
                groups[-1].append((number, line, language))
            else:
                groups.append([(number, line, language)])
        blocks = [
            Block(language=group[0][2], lines=tuple(line for _, line, _ in group), first_line=group[0][0])
            for group in groups
        ]
        prose = re.sub(r"<!--.*?-->", "", "\n".join(self.prose), flags=re.DOTALL)
        return Section(level=self.level, title=self.title, prose=prose, blocks=tuple(blocks))


def _marked(text: str) -> Iterator[tuple[str, int, str, str]]:
    """(kind, number, line, language) of every line: heading, code or prose. Blank lines of code are left out."""
    fence: tuple[str, str] | None = None
    indented, after_blank = False, True
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if fence:
            fence = None if mark and mark[1] == fence[0] and not mark[2] else fence
            if fence and line.strip():
                yield "code", number, line, fence[1]
        elif mark:
            fence = (mark[1], mark[2])
        elif line.startswith("    ") and line.strip() and (indented or after_blank):
            indented = True
            yield "code", number, line[4:], ""
        else:
            indented = indented and not line.strip()
            kind = "heading" if _HEADING.fullmatch(line) else "prose"
            yield kind, number, line, ""
        after_blank = not line.strip()


def blocks_of(text: str) -> list[Block]:
    """Every code block of a page."""
    return [block for section in sections(text) for block in section.blocks]


def commands(page: str, text: str, *, programs: frozenset[str]) -> list[Command]:
    """The command lines in the code blocks of a page.

    A line is one if its first word behind variables is a program; everything in a block that is fenced as shell is one.

    Args:
        page: Its path inside the repository.
        text: Its Markdown.
        programs: Names of programs, without folders.
    """
    found = []
    for block in blocks_of(text):
        is_shell = block.language in SHELLS
        for line, joined in _joined(block):
            command = Command(page=page, line=line, text=joined)
            if not joined.lstrip().startswith("#") and (is_shell or _first_word(joined) in programs):
                found.append(command)
    return found


def _first_word(line: str) -> str:
    """The program of a line, whether or not its quotes are in order: one that cannot be split is an error later on."""
    return next((Path(word).name for word in line.split() if not _ASSIGNMENT.match(word)), "")


def _joined(block: Block) -> Iterator[tuple[int, str]]:
    """Lines of a block with those that a backslash continues; the prompt of a console is cut off."""
    first, parts = 0, []
    for i, raw in enumerate(block.lines):
        line = raw.removeprefix("$ ")
        if not parts:
            first = block.first_line + i
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield first, " ".join(part.strip() for part in parts)
            parts = []


def inline_code(prose: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", prose.replace("\n", " "))


def links(prose: str) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def slug(heading: str) -> str:
    """What a heading is called in a link: the rule of the page's readers, on the site too."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
