"""Plots and page of batch size tuning, by file suffix.

matplotlib is imported when needed.
"""

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.report.batch_sizes import (
    budget_in_sight,
    drawable_sizes,
    max_rows,
    memory_points,
    refused_rows,
    speed_points,
)
from partita.report.number_text import bytes_text
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted
from partita_schema.errors import DataError, PartitaError, WriteError
from partita_trainers.batch_size.probe import BatchSize, ProbeResult
from partita_trainers.batch_size.search import between

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

INK = "#30343a"
FAINT = "#8a9099"
BLUE = "#2f7fc1"
RED = "#d2552b"
STYLE: "dict[RcKeyType, Any]" = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    # Text stays text, which can be searched and read aloud; ids are the same in every run.
    "svg.fonttype": "none",
    "svg.hashsalt": "partita",
    "font.family": "sans-serif",
}
DOTS_PER_INCH = 150


def check_plot(path: Path) -> None:
    """Raise DataError for an unsupported file suffix, and PartitaError if matplotlib is missing."""
    if path.suffix.lower() not in WRITERS:
        ending = f"the ending {path.suffix!r}" if path.suffix else "no ending"
        raise DataError(f"{path} has {ending}; plots are written as .png, .svg or .html")
    if find_spec("matplotlib") is None:
        raise PartitaError("plots are drawn with matplotlib, which is missing here; pip install 'partita[plot]'")


def write_plot(path: Path, sizes: Mapping[str, BatchSize], *, title: str) -> None:
    """Write a plot or a page to `path` atomically.

    Raises:
        DataError: The suffix is not supported, or there is nothing to draw.
        PartitaError: matplotlib is missing.
        WriteError: The file cannot be written.
    """
    check_plot(path)
    if not drawable_sizes(sizes) and path.suffix.lower() != ".html":
        sources = ", ".join(f"{name} is {counted(size.rows, 'row')}" for name, size in sizes.items()) or "nothing to do"
        raise DataError(
            f"{path}: no size was measured, so there is nothing to draw ({sources}); write batch_size: auto"
        )
    content = WRITERS[path.suffix.lower()](sizes, title)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"{path} cannot be written: {reason}; name another file with --plot") from error


def png(sizes: Mapping[str, BatchSize], title: str) -> bytes:
    """Return the figure as PNG."""
    return render_figure(sizes, title, format="png", transparent=False)


def svg(sizes: Mapping[str, BatchSize], title: str) -> bytes:
    """Return the figure as SVG."""
    return render_figure(sizes, title, format="svg", transparent=False)


def html(sizes: Mapping[str, BatchSize], title: str) -> str:
    """Return a page with figures and tables."""
    from partita.report.tuning_page import page

    return page(sizes, title=title, pictures={name: inline(name, size) for name, size in drawable_sizes(sizes).items()})


def inline(name: str, size: BatchSize) -> str:
    """Return an SVG to embed in a page: transparent, in the text color, with unique ids."""
    text = render_figure({name: size}, "", format="svg", transparent=True).decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="memory and speed over rows, {name}"', 1)


WRITERS: Mapping[str, Callable[[Mapping[str, BatchSize], str], str | bytes]] = {".png": png, ".svg": svg, ".html": html}


def render_figure(sizes: Mapping[str, BatchSize], title: str, *, format: str, transparent: bool) -> bytes:
    """Render the figure as a file.

    Args:
        sizes: Sizes by purpose.
        title: Title of the figure; empty for none.
        format: png or svg.
        transparent: Whether the background is transparent.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        target = BytesIO()
        drawn = figure(drawable_sizes(sizes), title)
        # Without a date and a version, the same sizes produce the same file.
        unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type")) if format == "svg" else {"Software": None}
        drawn.savefig(target, format=format, dpi=DOTS_PER_INCH, transparent=transparent, metadata=unsigned)
    return target.getvalue()


def figure(sizes: Mapping[str, BatchSize], title: str) -> "Figure":
    """Create a figure with a row of two panels for each size: memory and speed over rows."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 3.5 * len(sizes) + (0.4 if title else 0)), layout="constrained")
    if title:
        drawn.suptitle(title, x=0.01, ha="left", fontsize=13)
    panels = drawn.subplots(len(sizes), 2, squeeze=False)
    for (name, size), (left, right) in zip(sizes.items(), panels, strict=True):
        draw_memory(left, size, purpose=name)
        draw_speed(right, size, purpose=name)
    return drawn


def draw_memory(axes: "Axes", size: BatchSize, *, purpose: str) -> None:
    """Draw probes as points, out of memory as crosses at the budget, and the predicted memory between them."""
    from matplotlib.ticker import EngFormatter

    points, budget = memory_points(size), budget_in_sight(size)
    hidden = f" of {bytes_text(size.budget_bytes)}" if size.budget_bytes is not None and budget is None else ""
    axes.set_title(f"{purpose}: memory taken{hidden}")
    highest = max([used for _, used in points] + [budget or 0]) or 1
    if len(points) > 1:
        rows, predicted = predicted_line(points, max_rows=max_rows(size), limit=1.05 * highest)
        axes.plot(rows, predicted, color=BLUE, linewidth=1.2, alpha=0.6, label="predicted", zorder=1)
    fitting = [point for point in points if point[0].verdict == "fits"]
    scatter(axes, fitting, marker="o", color=BLUE, label="fits")
    scatter(axes, [point for point in points if point not in fitting], marker="^", color=RED, label="too large")
    if refused := refused_rows(size):
        axes.plot(refused, [highest] * len(refused), "x", color=RED, ms=8, mew=2, label="out of memory", zorder=4)
    if budget is not None:
        axes.axhline(budget, color=RED, linestyle="--", linewidth=1.2, label=f"budget {bytes_text(budget)}", zorder=0)
    axes.set_ylim(0, 1.12 * highest)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    finish(axes, size)


def scatter(axes: "Axes", points: list[tuple[ProbeResult, int]], *, marker: str, color: str, label: str) -> None:
    """Draw points of rows and bytes with one marker, if there are any.

    Args:
        axes: The panel.
        points: Probes with the bytes they took.
        marker: Marker of matplotlib.
        color: Color of the marker.
        label: Label in the legend.
    """
    if points:
        rows, used = [probe.rows for probe, _ in points], [used for _, used in points]
        axes.plot(rows, used, marker, color=color, markersize=6, label=label, zorder=3)


def predicted_line(
    points: list[tuple[ProbeResult, int]], *, max_rows: int, limit: float
) -> tuple[list[float], list[float]]:
    """Return rows and bytes on straight lines through the points, extrapolated to `max_rows` or to `limit`."""
    known = [(probe.rows, float(used)) for probe, used in points]
    first, last = known[0][0], known[-1][0]
    ends = max(last, max_rows)
    # Dense enough that a straight line looks smooth on a logarithmic axis.
    rows = sorted({first, *(round(first * (ends / first) ** (step / 200)) for step in range(201)), last})
    line = [(float(number), between(known, number)) for number in rows]
    shown = [(number, used) for number, used in line if number <= last or used <= limit]
    return [number for number, _ in shown], [used for _, used in shown]


def draw_speed(axes: "Axes", size: BatchSize, *, purpose: str) -> None:
    """Draw rows per second."""
    points = speed_points(size)
    axes.set_title(f"{purpose}: rows a second")
    if points:
        rows, speeds = [rows for rows, _ in points], [speed for _, speed in points]
        axes.plot(rows, speeds, "o-", color=BLUE, markersize=4, linewidth=1.2, label="predicted for the data")
        axes.set_ylim(0, 1.12 * max(speeds) or 1)
    finish(axes, size)


def finish(axes: "Axes", size: BatchSize) -> None:
    """Set up what both panels share: logarithmic rows, the best size and the largest that fits, the legend."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(0.9, max(2, max_rows(size)) * 1.25)
    axes.set_xlabel("rows")
    axes.grid(color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    pointed = {"best": (size.best, "-"), "fits": (size.max_fitting, ":")}
    if size.best == size.max_fitting:
        pointed = {"best and fits": (size.best, "-")}
    for name, (rows, style) in pointed.items():
        if rows is not None:
            axes.axvline(rows, color=INK, alpha=0.7, linewidth=1, linestyle=style, label=f"{name} {rows:,}", zorder=0)
    axes.legend()
