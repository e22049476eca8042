"""The frame of a page: one HTML file that holds its shapes and style, and asks no network for anything."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

# A browser that obeys it loads nothing, even if a text found its way around the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, content: str, *, subtitle: str = "", style: str = "", script: str = "") -> str:
    """The text of an HTML page.

    Args:
        title: any text; it is escaped.
        content: what stands under the title, as HTML.
        subtitle: any text, below the title.
        style: CSS, after that of all pages.
        script: the page's script elements, as HTML; without it no script runs in the page.

    Example:
        >>> document("a < b", "<p>both</p>").count("<h1>a &lt; b</h1>")
        1
    """
    policy = _POLICY + ("; script-src 'unsafe-inline'" if script else "")
    heading, below = escape(title), f"<p>{escape(subtitle)}</p>" if subtitle else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="torch_odt">
<title>{heading}</title>
<style>
{asset("torch_odt.pages", "base.css")}{style}</style>
</head>
<body>
<main>
<header><h1>{heading}</h1>{below}</header>
{content}
</main>
{script}
</body>
</html>
"""


def section(title: str, content: str, hint: str = "") -> str:
    """A part of a page; what is given is HTML."""
    text = f'<p class="hint">{hint}</p>' if hint else ""
    return f"<section><h2>{title}</h2>{text}\n{content}\n</section>\n"


def facts(entries: Sequence[tuple[str, str]]) -> str:
    """Names and what there is to say of each, as cells beside each other."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in entries)
    return f'<dl class="facts">{cells}</dl>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def asset(package: str, name: str) -> str:
    """The text of a file that lies in a package."""
    return (resources.files(package) / name).read_text(encoding="utf-8")
