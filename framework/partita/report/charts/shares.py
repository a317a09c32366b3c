"""Horizontal bars: a share of each of a few named things."""

from collections.abc import Mapping
from html import escape

from partita.report.charts.chart import WIDTH, Chart, Table, fitted, svg

ROW, BAR, LEFT = 26, 14, 8


def shares_chart(title: str, shares: Mapping[str, float], *, label: str, note: str = "") -> Chart:
    """Return a bar for each share, with its name above it.

    Args:
        title: What it shows.
        shares: Shares by name, from 0 to 1.
        label: Name of the quantity.
        note: A sentence below the chart.
    """
    parts: list[str] = []
    room = WIDTH - LEFT - 48
    for number, (name, share) in enumerate(shares.items()):
        y = number * (ROW + 10) + 14
        parts.append(f'<text x="{LEFT}" y="{y}">{escape(fitted(name, width=WIDTH - LEFT - 4))}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y + 4}" width="{max(1.0, share * room):.1f}" height="{BAR}" fill="var(--c0)"/>'
        )
        parts.append(f'<text x="{LEFT + max(1.0, share * room) + 5:.1f}" y="{y + 15}">{share:.0%}</text>')
    table = Table(["parameter", label], [[name, f"{share:.3f}"] for name, share in shares.items()])
    return Chart(title, svg(title, parts, height=len(shares) * (ROW + 10) + 6), table, note)
