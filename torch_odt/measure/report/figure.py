"""A figure of the page: charts with a legend, the numbers as a table, and what is missing with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torch_odt.pages.document import section, table


@dataclass(frozen=True)
class Panel:
    """One chart of a figure.

    Attributes:
        title: what is different in this one, such as the model; any text.
        chart: HTML, as `bars`, `lines` and `areas` make it.
        begins_row: whether it stands on the left, for what follows it belongs beside it.
    """

    title: str
    chart: str
    begins_row: bool = False


@dataclass(frozen=True)
class Figure:
    """What a part of the page shows.

    Attributes:
        key: its id in the page.
        title: what is compared.
        hint: how to read it; any text.
        panels: the charts; without any the figure says only what is missing.
        legend: names and styles of what is drawn.
        header: of the table with the numbers.
        rows: of that table.
        missing: what could not be drawn, and why.
        is_dense: whether three charts have room beside each other.
    """

    key: str
    title: str
    hint: str = ""
    panels: Sequence[Panel] = ()
    legend: Sequence[tuple[str, str]] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    missing: Sequence[str] = ()
    is_dense: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it but the reason for that."""
        return not self.panels and not self.rows


def figure_section(figure: Figure) -> str:
    """A figure as HTML."""
    missing = _missing(figure.missing)
    if not figure.panels:
        return section(escape(figure.title), f'<div id="{figure.key}">{missing}{_numbers(figure)}</div>')
    panels = "".join(map(_panel, figure.panels))
    legend = "".join(f'<li><i class="swatch {style}"></i>{escape(name)}</li>' for name, style in figure.legend)
    content = f"""<figure id="{figure.key}" class="chart"><figcaption><ul class="legend">{legend}</ul></figcaption>
<div class="panels{" dense" if figure.is_dense else ""}">{panels}</div></figure>
{missing}{_numbers(figure)}"""
    return section(escape(figure.title), content, escape(figure.hint))


def lacking_section(figures: Sequence[Figure]) -> str:
    """Figures without anything in them as one part of a page: what each would show, and why it does not."""
    entries = "".join(
        f'<li id="{figure.key}">{escape(figure.title)}: {escape(" ".join(figure.missing))}</li>' for figure in figures
    )
    return section("What this record does not show", f'<ul class="absent">{entries}</ul>') if entries else ""


def _panel(panel: Panel) -> str:
    title = f"<h3>{escape(panel.title)}</h3>" if panel.title else ""
    return f'<div class="panel{" first" if panel.begins_row else ""}">{title}{panel.chart}</div>'


def _missing(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    entries = "".join(f"<li>{escape(reason)}</li>" for reason in dict.fromkeys(reasons))
    return f'<ul class="absent">{entries}</ul>'


def _numbers(figure: Figure) -> str:
    if not figure.rows:
        return ""
    numbers = f'<div class="scroll">{table(figure.header, figure.rows)}</div>'
    return f"<details><summary>The numbers</summary>{numbers}</details>"
