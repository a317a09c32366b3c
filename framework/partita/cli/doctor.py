"""`partita doctor`: installed versions, devices, and missing packages."""

import json

import typer

from partita.cli.options import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Report versions, devices, memory and missing extras. It also shows disk space and Hub access, for bug reports."""
    from partita.report.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.record(), indent=2))
    else:
        print(*diagnosis.lines(), sep="\n")
    if diagnosis.problems:
        raise typer.Exit(1)
