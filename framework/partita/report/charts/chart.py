"""A chart: a picture with its title and its numbers, and the look of all charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from unicodedata import east_asian_width

WIDTH, HEIGHT = 360, 230
NARROW_LETTER, LETTER, CAPITAL, WIDE_LETTER = 4.6, 7.0, 8.7, 11.5
"""Widths of letters at the font size of a chart, in DejaVu Sans, which is wider than most fonts."""
NARROW = "ijlftrI .,:;'|!()[]-/"
WIDE = "mwMW@%&#<>=+~^\u2026"
"""Narrow and wide characters of Western texts."""
MAX_TABLE_ROWS = 50
"""Rows of the table of a chart."""
COLORS = 4
"""Number of colors, after which they repeat."""
DASHES = ("", "5 3", "1.5 2.5", "8 3 2 3")
"""Dashes of curves, by color."""
CHART_STYLE = """\
:root { --c0: #0072b2; --c1: #d55e00; --c2: #00785a; --c3: #a8548a; }
@media (prefers-color-scheme: dark) { :root { --c0: #56b4e9; --c1: #e69f00; --c2: #2fc49a; --c3: #dd92bd; } }
svg.chart { display: block; width: 100%; height: auto; max-width: 460px; }
svg.chart text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg.chart .quiet { opacity: .75; }
svg.chart .axis { stroke: var(--faint); fill: none; }
svg.chart .mark { stroke: var(--ink); stroke-dasharray: 2 3; opacity: .7; }
svg.chart .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
"""


@dataclass(frozen=True)
class Table:
    """Cells of a table as text."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """A chart of a page."""

    title: str
    svg: str
    """The picture as an SVG element, safe to insert into HTML."""
    table: Table
    """The numbers of the picture."""
    note: str = ""
    """A sentence below the chart."""


def svg(title: str, parts: Sequence[str], *, height: float = HEIGHT) -> str:
    """Return an SVG element with a title for screen readers."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def text_width(text: str) -> float:
    """Return about the width of a text in a chart, rather more than less."""
    return sum(map(letter_width, text))


def letter_width(letter: str) -> float:
    """Return about the width of a letter in a chart."""
    if letter in NARROW:
        return NARROW_LETTER
    if letter in WIDE or east_asian_width(letter) in "WF":
        return WIDE_LETTER
    return CAPITAL if letter.isupper() else LETTER


def fitted(text: str, *, width: float) -> str:
    """Return a text that is at most this wide in a chart; of a longer one, the middle is left out."""
    most = min(len(text), int(width / NARROW_LETTER) + 1)
    while most > 1 and text_width(shortened(text, most=most)) > width:
        most -= 1
    return shortened(text, most=most)


def shortened(text: str, *, most: int) -> str:
    """Return a text of at most `most` characters; of a longer one, the middle is left out."""
    half = (most - 1) // 2  # names often differ at their end
    return text if len(text) <= most else f"{text[: most - 1 - half]}\u2026{text[len(text) - half :]}"
