"""`partita preview`: rendered rows with the learned tokens marked, and how long rows are."""

from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.options import File, Overrides

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from partita.data.preview import Preview, PreviewRow

BAR_WIDTH = 40
"""Characters of the longest bar."""


def preview(
    file: File,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="Rows to show.")] = 3,
    dataset: Annotated[str | None, typer.Option(help="Rows to show, over data.source.", show_default=False)] = None,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
) -> None:
    """Show what the model will see, with the learned tokens marked, and how long rows are. Trains nothing."""
    from rich.console import Console

    from partita.data.preview import preview as make_preview
    from partita.logs import show_log
    from partita_schema.load import load_config

    show_log(quiet=True)
    loaded = load_config(file, overrides=overrides)
    found = make_preview(loaded.config, folder=loaded.folder, dataset=dataset, count=rows)
    print_preview(found, Console(highlight=False, soft_wrap=True))


def print_preview(preview: "Preview", console: "Console") -> None:
    """Rows and lengths; learned tokens in green, or between ⟦ and ⟧ where there are no colours."""
    colours = console.is_terminal and console.color_system is not None
    for row in preview.rows:
        console.rule(f"{row.key}: {about(row)}", align="left")
        console.print(marked(row, colours=colours))
    console.rule(align="left")
    told = "through the model's chat template" if preview.chat else "without a chat template"
    learned = "" if not preview.supervised else ", learned tokens " + ("in green" if colours else "between ⟦ and ⟧")
    console.print(f"{preview.num_rows:,} rows, {told}{learned}")
    if preview.left_out:
        console.print(
            f"{preview.left_out:,} of {len(preview.lengths) + preview.left_out:,} measured rows cannot be used"
        )
    print_lengths(preview.lengths, limit=preview.limit, console=console)


def about(row: "PreviewRow") -> str:
    if row.reasons:
        return f"left out: {'; '.join(row.reasons)}"
    cut = f", {row.cut_tokens:,} cut" if row.cut_tokens else ""
    return f"{row.tokens:,} tokens, {row.learned_tokens:,} learned{cut}"


def marked(row: "PreviewRow", *, colours: bool) -> "Text":
    """The row's text with what is learned standing out."""
    from rich.text import Text

    text = Text()
    for piece in row.pieces:
        if colours or not piece.learned:
            text.append(piece.text, style="bold green" if piece.learned else "dim")
        else:
            text.append(f"⟦{piece.text}⟧")
    return text


def print_lengths(lengths: "np.ndarray", *, limit: int | None, console: "Console") -> None:
    """A histogram of lengths."""
    from partita.data.preview import histogram

    bins = histogram(lengths)
    if not bins:
        return
    at_most = f", at most {limit:,} fit" if limit is not None else ""
    console.print(f"tokens of {len(lengths):,} rows{at_most}:")
    most = max(number for _, _, number in bins)
    width = len(f"{bins[-1][1]:,}")
    for low, high, number in bins:
        bar = "█" * -(-number * BAR_WIDTH // most)
        console.print(f"  {low:>{width},} - {high:>{width},} {bar} {number:,}")
