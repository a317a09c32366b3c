"""`partita doctor`: what is installed, which devices there are, and what is missing."""

import json

import typer

from partita.cli.options import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Report versions, devices, memory, disk, the Hub and missing extras; for bug reports, too."""
    from partita.report.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.record(), indent=2))
    else:
        print(*diagnosis.lines(), sep="\n")
    if diagnosis.problems:
        raise typer.Exit(1)
