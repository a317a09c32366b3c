"""`partita report`: write the report page of runs."""

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.loading import loading_libraries


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="The directory of a run, or of transcripts; several.", show_default=False),
    ],
) -> None:
    """Write report.html into the directories of runs."""
    from partita.runs.waiting import show_waits, waiting

    show_waits()
    with loading_libraries(line=False):
        from partita.report.run_page import write_report

    for run in runs:
        with waiting(f"writing the report of {run}", line=False):
            page = write_report(run)
        print(page)
