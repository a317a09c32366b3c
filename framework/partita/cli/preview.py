"""`partita preview`: rendered rows with loss tokens marked, row lengths, and rows left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.loading import loading_libraries
from partita.cli.options import MERGED, Overrides
from partita.cli.standard_streams import StdinFormat, dataset_path
from partita_schema.common.text import counted

if TYPE_CHECKING:
    from collections import Counter

    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from partita.data.preview import LedgerReport, Preview, PreviewRow

BAR_WIDTH = 40
"""Width of the longest bar in characters."""
MAX_LINE = 80
"""Characters of a line, as on a narrow terminal."""
SHOWN_REASONS = 3
"""Number of reasons why rows cannot be used that are shown."""
REFUSED = "bold red"
"""Style of the reasons why a row cannot be used."""


def preview(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help=f"The YAML file; {MERGED}. With --ledger also a run directory, and by default the newest run.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="Number of rows to print.")] = 3,
    dataset: Annotated[
        str | None,
        typer.Option(help="Rows to preview instead of data.source, or - for standard input.", show_default=False),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Count the rows used, truncated and left out, with reasons.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
) -> None:
    """Print rows as the model sees them, and their lengths. Loss tokens are marked; nothing is trained."""
    from partita.runs.log import show_log
    from partita.runs.waiting import show_waits, waiting

    show_log(quiet=True)
    show_waits()
    with loading_libraries():
        from rich.console import Console

        import partita.data.preview
    console = Console(highlight=False, soft_wrap=True, markup=False)
    dataset = dataset_path(dataset, stdin_format)
    if ledger:
        print_ledger(find_report(files or [], dataset=dataset, overrides=overrides), console)
        return
    if not files:
        raise typer.BadParameter("write the YAML file of the run", param_hint="FILE")
    from partita.backends.refusals import check_supported
    from partita_schema.load import load_config

    loaded = load_config(files, overrides=overrides)
    check_supported(loaded.config, "preview")
    with waiting("reading the rows"):
        result = partita.data.preview.preview(loaded.config, folder=loaded.folder, dataset=dataset, count=rows)
    print_preview(result, console)


def find_report(files: Sequence[Path], *, dataset: str | None, overrides: list[str]) -> "LedgerReport":
    """Return the ledger of a run directory, of the newest run, or of the current rows of the files."""
    from partita.data.preview import make_report, newest_run, read_report
    from partita_schema.load import load_config

    if not files:
        return read_report(newest_run(Path("runs")))
    if len(files) == 1 and files[0].is_dir():
        return read_report(files[0])
    loaded = load_config(files, overrides=overrides)
    return make_report(loaded.config, folder=loaded.folder, dataset=dataset)


def print_ledger(report: "LedgerReport", console: "Console") -> None:
    """Print a table of counts with one row per split, and a table of reasons, the most frequent first."""
    from rich.table import Table

    from partita.data.ledger import widened_in_words

    counts = Table("split")
    for column in ("rows", "used", "cut", "tokens lost", "unknown tokens", "left out"):
        counts.add_column(column, justify="right")
    for split, entry in report.splits.items():
        numbers = (entry.rows, entry.used, entry.cut, entry.cut_tokens, entry.unknown_tokens, entry.left_out)
        counts.add_row(split, *(f"{number:,}" for number in numbers))
    console.print(counts)
    for split, entry in report.splits.items():
        if entry.widened_spans:
            console.print(f"{split}: {widened_in_words(entry)}", markup=False)
    if not any(entry.reasons for entry in report.splits.values()):
        console.print("no row is left out")
        return
    reasons = Table("split")
    reasons.add_column("left out", justify="right")
    reasons.add_column("because", overflow="fold")
    reasons.add_column("such as", overflow="fold")
    for split, entry in report.splits.items():
        for reason, number in sorted(entry.reasons.items(), key=lambda item: -item[1]):
            reasons.add_row(split, f"{number:,}", reason, report.examples.get((split, reason), ""))
    console.print(reasons)


def print_preview(preview: "Preview", console: "Console") -> None:
    """Print rows and lengths; loss tokens in green, or without colours between ⟦ and ⟧."""
    colours = console.is_terminal and console.color_system is not None
    for row in preview.rows:
        console.rule(
            f"{row.key}: {about(row, head=preview.head)}", align="left", style="red" if row.reasons else "rule.line"
        )
        console.print(highlight_row(row, colours=colours))
    console.rule(align="left")
    console.print(summary(preview, colours=colours))
    for file in preview.files:
        console.print(f"found in {file}", markup=False)
    if preview.chunk_length is not None:
        length = counted(preview.chunk_length, "token")
        console.print(f"documents are joined and cut into chunks of {length}")
    if preview.left_out:
        total = preview.left_out.total()
        measured = counted(len(preview.lengths) + total, "measured row")
        print_reasons(f"{total:,} of {measured} cannot be used:", preview.left_out, console)
    if preview.unreadable:
        unreadable = counted(preview.unreadable.total(), "row")
        print_reasons(f"{unreadable} cannot be read:", preview.unreadable, console)
    if preview.accepted is not None:
        console.print(
            f"data.max_bad_rows accepts {preview.accepted}, and train stops at more", style=REFUSED, markup=False
        )
    print_lengths(preview.lengths, limit=preview.limit, console=console)


def print_reasons(heading: str, reasons: "Counter[str]", console: "Console") -> None:
    """Print the most frequent reasons why rows are left out, each with its number."""
    console.print(heading, style=REFUSED)
    for reason, number in reasons.most_common(SHOWN_REASONS):
        console.print(f"  {number:,}: {reason}", style=REFUSED, markup=False)
    if len(reasons) > SHOWN_REASONS:
        others = counted(len(reasons) - SHOWN_REASONS, "more reason")
        console.print(f"  and {others}; partita preview --ledger shows all", style=REFUSED)


def summary(preview: "Preview", *, colours: bool) -> str:
    """Return what the rows are and what the marks mean, on two lines if one is too long."""
    what = f"dialogues ({', '.join((*preview.formats, preview.mode))})" if preview.mode else "rows"
    rows = f"{'the first ' if preview.streamed else ''}{preview.num_rows:,} {what}"
    if preview.head is None:
        rows += ", through the model's chat template" if preview.chat else ", without a chat template"
    if not preview.supervised:
        return rows
    legend = f"{preview.head or 'loss tokens'} {'in green' if colours else 'between ⟦ and ⟧'}"
    line = f"{rows}, {legend}"
    return line if len(line) <= MAX_LINE else f"{rows},\n{legend}"


def about(row: "PreviewRow", *, head: str | None) -> str:
    """Return the number of tokens of a row, or that it is left out.

    Args:
        row: The row.
        head: What a head learns, which has no loss tokens; None without one.
    """
    if row.reasons:
        return "left out"
    cut = f", {row.cut_tokens:,} cut" if row.cut_tokens else ""
    loss = "" if head is not None else f", {row.loss_tokens:,} in the loss"
    return f"{counted(row.tokens, 'token')}{loss}{cut}"


def highlight_row(row: "PreviewRow", *, colours: bool) -> "Text":
    """Return the row's text with loss tokens highlighted, or the reasons why it is left out."""
    from rich.text import Text

    text = Text()
    if row.reasons:
        text.append("; ".join(row.reasons), style=REFUSED)
        text.append("\n" if row.pieces else "")
    for piece in row.pieces:
        if piece.name:
            text.append(f"\n{piece.name}: ", style="bold")
        if colours or not piece.in_loss:
            text.append(piece.text, style="bold green" if piece.in_loss else "dim")
        else:
            text.append(f"⟦{piece.text}⟧")
    return text


def print_lengths(lengths: "np.ndarray", *, limit: int | None, console: "Console") -> None:
    """Print a histogram of row lengths."""
    from partita.data.preview import histogram

    bins = histogram(lengths)
    if not bins:
        return
    at_most = f", at most {limit:,} fit" if limit is not None else ""
    console.print(f"tokens of {counted(len(lengths), 'row')}{at_most}:")
    most = max(number for _, _, number in bins)
    width = len(f"{bins[-1][1]:,}")
    single = all(low == high for low, high, _ in bins)
    for low, high, number in bins:
        bar = "█" * -(-number * BAR_WIDTH // most)
        bounds = f"{low:>{width},}" if single else f"{low:>{width},} - {high:>{width},}"
        console.print(f"  {bounds} {bar} {number:,}" if bar else f"  {bounds} 0")
