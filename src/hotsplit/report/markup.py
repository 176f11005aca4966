"""Text into HTML: the one place where what comes from files becomes part of a page.

Names of models, files and sets may hold anything. Everything goes through `escape`, or as JSON through `embedded`; what
is put together from their results is `Html`, and nothing else is.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import NewType

Html = NewType("Html", str)
"""Text that is safe in a page, as an element's content."""


def printable(text: str) -> str:
    r"""Show what cannot be seen: controls, line separators, marks that turn the direction, halves of characters.

    Args:
        text: Any.

    >>> printable("safe\u202e\u2028gpj.exe")
    'safe\\u202e\\u2028gpj.exe'
    """
    return "".join(mark if mark.isprintable() else f"\\u{ord(mark):04x}" for mark in text)


def escape(text: object) -> Html:
    """Text for an element's content or a quoted attribute, in ASCII.

    Args:
        text: Any; `str()` is taken of what is no text.

    >>> escape('<b title="a&b">')
    '&lt;b title=&quot;a&amp;b&quot;&gt;'
    """
    shown = html.escape(printable(str(text)), quote=True)
    return Html(shown.encode("ascii", "xmlcharrefreplace").decode("ascii"))


def joined(parts: Iterable[Html]) -> Html:
    """Several pieces as one.

    Args:
        parts: In order.
    """
    return Html("\n".join(parts))


def embedded(value: object) -> Html:
    r"""JSON for a script element that holds data: ASCII, and nothing in it can end the element or begin a comment.

    Args:
        value: What JSON can hold; keys keep their order.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Html(text)


def element(tag: str, content: Html, **attributes: str) -> Html:
    """One element.

    Args:
        tag: Its name.
        content: What is in it.
        **attributes: By name, a closing underscore is taken off and others are dashes; values are escaped.
    """
    named = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(text)}"' for name, text in attributes.items())
    return Html(f"<{tag}{named}>{content}</{tag}>")


def table(caption: str, *, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table: the first column names its row, the others are numbers.

    Args:
        caption: What it shows.
        columns: Headings.
        rows: Cells.
    """
    head = "".join(element("th", escape(column), scope="col") for column in columns)
    body = [
        f"<tr>{element('th', escape(name), scope='row')}{''.join(element('td', escape(cell)) for cell in cells)}</tr>"
        for name, *cells in rows
    ]
    return Html(
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f'<caption class="unseen-text">{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def details(summary: str, content: Html) -> Html:
    """Something that opens when it is asked for.

    Args:
        summary: What it is.
        content: What is in it.
    """
    return Html(f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what they stand for, one a line.

    Args:
        pairs: In order.
    """
    lines = [f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in pairs]
    return Html('<dl class="facts">\n' + "\n".join(lines) + "\n</dl>")
