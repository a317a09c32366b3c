"""Simulated dialogues in the transcripts of a folder, and their numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from partita.data.episode import Episode, from_line
from partita.runs.files import strict_json
from partita.runs.rounds import ROUNDS, round_folder
from partita.simulation.report import SimulationReport, column, outcomes_of
from partita.simulation.transcripts import read_undamaged_lines
from partita_schema.common.checksums import DamagedError, sealed, unsealed
from partita_schema.common.files import write_atomically

TRANSCRIPTS = "transcripts"
OUTCOMES = "simulation.json"
"""File of the numbers of a simulation, next to its transcripts."""
HISTORIES = ("gold", "predicted")
ROUND = "round-"
"""Start of the name of the dialogues of a round of self-training."""


def transcript_folder(folder: Path) -> Path:
    """Return the folder of the transcripts of a run; the folder itself if it holds the transcripts."""
    return folder / TRANSCRIPTS if (folder / TRANSCRIPTS).is_dir() else folder


def transcript_files(folder: Path) -> dict[str, Path]:
    """Return the transcripts of finished simulations in a run directory or a folder of transcripts, by history."""
    paths = {history: transcript_folder(folder) / f"{history}.jsonl" for history in HISTORIES}
    return {history: path for history, path in paths.items() if path.is_file()}


def round_files(folder: Path) -> dict[str, Path]:
    """Return the transcripts of the finished rounds of self-training in a run directory, as `round-1` and so on."""
    numbers = sorted(int(path.name) for path in (folder / ROUNDS).glob("[0-9]*") if path.name.isdecimal())
    files = {number: transcript_files(round_folder(folder, number)).get(HISTORIES[-1]) for number in numbers}
    return {f"{ROUND}{number}": path for number, path in files.items() if path is not None}


def read_simulations(folder: Path) -> dict[str, list[Episode]]:
    """Return the dialogues of finished simulations, by history."""
    episodes = {}
    for history, path in transcript_files(folder).items():
        lines, _ = read_undamaged_lines(path, damaged="the report leaves them out", edited=True)
        episodes[history] = [from_line(line) for line in lines if "dialogue" in line]
    return {history: dialogues for history, dialogues in episodes.items() if dialogues}


def write_outcomes(report: SimulationReport) -> None:
    """Write the numbers of a simulation, which the transcripts alone do not determine: metrics of outputs, repeats."""
    write_atomically(Path(report.folder) / OUTCOMES, strict_json(sealed(report.flat()), indent=2) + "\n")


def read_outcomes(folder: Path, simulations: Mapping[str, Sequence[Episode]]) -> dict[str, dict[str, float]]:
    """Return the numbers of simulations by history; of transcripts without the file of numbers, those that follow.

    Args:
        folder: A run directory or a folder of transcripts.
        simulations: Its dialogues, by history.
    """
    try:
        recorded = unsealed((transcript_folder(folder) / OUTCOMES).read_bytes(), required=True)
    except (OSError, DamagedError):
        recorded = {}
    return {
        history: dict(recorded.get(history) or column(outcomes_of(episodes, repeats=1)))
        for history, episodes in simulations.items()
    }


def page_folder(transcripts: Path) -> Path:
    """Return the folder of the page about these transcripts: their run's, or their own if they are elsewhere."""
    return transcripts.parent if transcripts.name == TRANSCRIPTS else transcripts
