"""Simulated dialogues in the transcripts of a folder."""

from pathlib import Path

from partita.data.episode import Episode, from_line
from partita.simulation.transcripts import read_undamaged_lines

TRANSCRIPTS = "transcripts"
HISTORIES = ("gold", "predicted")


def transcript_folder(folder: Path) -> Path:
    """Return the folder of the transcripts of a run; the folder itself if it holds the transcripts."""
    return folder / TRANSCRIPTS if (folder / TRANSCRIPTS).is_dir() else folder


def transcript_files(folder: Path) -> dict[str, Path]:
    """Return the transcripts of finished simulations in a run directory or a folder of transcripts, by history."""
    paths = {history: transcript_folder(folder) / f"{history}.jsonl" for history in HISTORIES}
    return {history: path for history, path in paths.items() if path.is_file()}


def read_simulations(folder: Path) -> dict[str, list[Episode]]:
    """Return the dialogues of finished simulations, by history."""
    episodes = {}
    for history, path in transcript_files(folder).items():
        lines, _ = read_undamaged_lines(path)
        episodes[history] = [from_line(line) for line in lines if "dialogue" in line]
    return {history: dialogues for history, dialogues in episodes.items() if dialogues}


def page_folder(transcripts: Path) -> Path:
    """Return the folder of the page about these transcripts: their run's, or their own if they are elsewhere."""
    return transcripts.parent if transcripts.name == TRANSCRIPTS else transcripts
