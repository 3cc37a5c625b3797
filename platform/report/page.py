"""One HTML file out of drawings and words: no script, nothing fetched, every text escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from depthlaw.platform.report.css import CSS
from depthlaw.platform.report.style import Drawing, plain

# The browser is told so too: whatever a name holds, no script runs and nothing is fetched.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

WIDE = 9  # more columns than this are set smaller in print
LONG = 40  # characters above which a cell may wrap


def escape(text: object) -> str:
    return html.escape(plain(str(text)), quote=True)


def page(title: str, opening: str, sections: Sequence[tuple[str, str]]) -> str:
    """sections: (heading, HTML that is escaped already)."""
    ids = [f"part-{k}" for k in range(1, len(sections) + 1)]
    links = "".join(
        f'<li><a href="#{id_}">{escape(heading)}</a></li>' for id_, (heading, _) in zip(ids, sections, strict=True)
    )
    body = "".join(
        f'<section aria-labelledby="{id_}"><h2 id="{id_}">{escape(heading)}</h2>{inner}</section>\n'
        for id_, (heading, inner) in zip(ids, sections, strict=True)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{CSS}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(title)}</h1>{opening}</header>\n"
        f'<nav aria-label="Contents"><ol>{links}</ol></nav>\n<main>\n{body}</main>\n</body>\n</html>\n'
    )


def drawing(d: Drawing, pictures: Mapping[int, bytes]) -> str:
    """The HTML of a figure; pictures: the SVG of each of its panels, by position."""
    caption = f"<figcaption>{escape(d.caption)}</figcaption>"
    if d.lacks:
        return f'<p class="lacks">Not here: {escape(d.lacks)}.</p>'
    images = "".join(image(pictures[k], p.alt) for k, p in enumerate(d.panels))
    grid = f'<div class="panels">{images}</div>' if images else ""
    below = table(d.title, *d.table) if d.table and d.table[1] else ""
    return f"<figure>{grid}{caption}{below}</figure>"


def image(svg: bytes, alt: str) -> str:
    data = base64.b64encode(svg).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Its first column heads the rows. It scrolls in a box of its own, which the keyboard reaches."""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join(
        f'<tr><th scope="row"{_long(row[0])}>{escape(row[0])}</th>'
        + "".join(f"<td{_long(v)}>{escape(v)}</td>" for v in row[1:])
        + "</tr>"
        for row in rows
    )
    wide = ' class="wide"' if len(columns) > WIDE else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {escape(name)}"><table{wide}>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _long(text: str) -> str:
    return ' class="long"' if len(text) > LONG else ""


def items(words: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(w)}</li>" for w in words) + "</ul>"
