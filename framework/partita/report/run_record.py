"""What a run directory has recorded, read for its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.episode import Episode
from partita.report.evaluation import SplitResults, blocks_of_lines, read_evaluations
from partita.report.folds_page import FOLDS
from partita.report.preference_rows import has_preferences
from partita.report.simulated import read_outcomes, read_simulations, transcript_files
from partita.runs.listing import RunSummary, read_summary
from partita.runs.manifest import MANIFESTS, sibling_runs
from partita.runs.row_results import FOLDER as EVALUATIONS
from partita_schema.common.json_text import parse_json
from partita_schema.errors import DataError, PartitaError

BLOCK = 1 << 22
"""Bytes of log.jsonl that are read at a time."""
PREFERENCE_VALUES = ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "kl")
"""The same of trainers on preferences."""
STEP_VALUES = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "rows", "seconds")
"""Values of a line of log.jsonl that the report draws."""


@dataclass(frozen=True)
class RunRecord(RunSummary):
    """A run with everything that its report needs. N logged steps."""

    steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values of the logged steps by name, each [N], float64; NaN where a step has no such value."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    """Counts of rows by split; {} without a ledger."""
    config_text: str = ""
    """The configuration as written; "" without one."""
    results: Sequence[SplitResults] = ()
    """Results of rows by split, the most important split first."""
    simulations: Mapping[str, Sequence[Episode]] = field(default_factory=dict)
    """Simulated dialogues by history."""
    outcomes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Numbers of the simulations by history and name."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Training rows with the texts of their tokens, and which of them are in the loss."""

    @property
    def validation_metric(self) -> str | None:
        """The metric that selects checkpoints."""
        metric = (self.config.get("trainer") or {}).get("validation_metric")
        return str(metric) if metric else None

    @property
    def is_untrained(self) -> bool:
        """Whether the model is the base model itself."""
        return (self.config.get("trainer") or {}).get("type") == "none"

    @property
    def is_new_model(self) -> bool:
        """Whether the model began with random weights."""
        base_model = self.config.get("base_model")
        return isinstance(base_model, Mapping) and base_model.get("type") in ("scratch", "embedding_bag")

    @property
    def is_plain_text(self) -> bool:
        """Whether the model continues texts."""
        outputs = self.config.get("output_features") or [{}]
        is_document = outputs[0].get("type") != "preference"
        return bool(self.config) and not self.config.get("input_features") and is_document

    def evaluations(self, split: str, metric: str) -> tuple[list[float], list[float]]:
        """Return the steps at which a metric of a split was measured, and its values."""
        found = [
            (float(record["step"]), float(record[metric]))
            for record in self.manifest.get("evaluations", ())
            if record.get("split") == split and isinstance(record.get(metric), int | float)
        ]
        first = dict(reversed(found))  # the final evaluation, of the best weights, has the number of the last step too
        return sorted(first), [first[step] for step in sorted(first)]


def read_run(folder: Path) -> RunRecord:
    """Read a run directory, or the folder of a simulation or evaluation without training.

    Raises:
        DataError: The folder holds no run, or results of rows are damaged.
        PartitaError: The manifest is damaged.
    """
    if not holds_results(folder):
        where = "is not the directory of a run" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {where}; name the directory of a run, such as runs/NAME{sibling_runs(folder)}")
    summary = read_summary(folder, name="/".join(folder.resolve().parts[-2:]))
    if summary.status == "unreadable":
        raise PartitaError(str(summary.problem))
    config, simulations = folder / "config.yaml", read_simulations(folder)
    step_values = (*STEP_VALUES, *PREFERENCE_VALUES) if has_preferences(summary.config) else STEP_VALUES
    return RunRecord(
        **vars(summary),
        steps=read_steps(folder / "log.jsonl", step_values),
        ledger=read_ledger(folder / "ledger.json"),
        config_text=config.read_text(encoding="utf8", errors="replace") if config.is_file() else "",
        results=read_evaluations(folder),
        simulations=simulations,
        outcomes=read_outcomes(folder, simulations),
        samples=read_samples(folder / "samples.json"),
    )


def holds_results(folder: Path) -> bool:
    """Return whether a folder is a run, or has results of an evaluation, a simulation or a cross-validation."""
    is_evaluated = any((folder / EVALUATIONS).glob("*.jsonl"))
    is_run = any((folder / name).is_file() for name in (MANIFESTS[0], FOLDS))
    return is_run or is_evaluated or any(transcript_files(folder))


def read_steps(path: Path, names: Sequence[str] = STEP_VALUES) -> dict[str, np.ndarray]:
    """Return the values of the logged steps by name; damaged lines are left out."""
    parts: dict[str, list[np.ndarray]] = {name: [np.zeros(0)] for name in names}
    if path.is_file():
        with path.open("rb") as file:
            for block in blocks_of_lines(file, size=BLOCK):
                for name, values in values_of(block, names).items():
                    parts[name].append(values)
    return {name: np.concatenate(values) for name, values in parts.items()}


def values_of(block: bytes, names: Sequence[str] = STEP_VALUES) -> dict[str, np.ndarray]:
    """Return the values of the steps in lines of log.jsonl by name; damaged lines are left out."""
    from pyarrow import ArrowInvalid, BufferReader, float64, schema
    from pyarrow.json import ParseOptions, ReadOptions, read_json

    options = ParseOptions(
        explicit_schema=schema([(name, float64()) for name in names]), unexpected_field_behavior="ignore"
    )
    try:  # four times as fast as the module json, which is needed to tell the damaged lines from the others
        read = ReadOptions(use_threads=False, block_size=BLOCK)
        table = read_json(BufferReader(block), read_options=read, parse_options=options)
    except ArrowInvalid:
        table = None
    if table is None or table.num_rows != block.count(b"\n") or table["step"].null_count:
        records = [record for line in block.splitlines() if (record := parsed(line)) is not None]
        return {name: column_of(records, name) for name in names}
    return {name: np.concatenate([floats_of(chunk) for chunk in table[name].chunks]) for name in names}


def floats_of(array: Any) -> np.ndarray:
    """Return an Arrow array of floats, with NaN for null. Its own `to_numpy` imports pandas, which takes longer."""
    present, values = array.buffers()
    inside = slice(array.offset, array.offset + len(array))
    values_N = np.frombuffer(values, dtype=np.float64)[inside]
    if not array.null_count:
        return values_N
    is_present_N = np.unpackbits(np.frombuffer(present, dtype=np.uint8), bitorder="little")[inside]
    return np.where(is_present_N, values_N, np.nan)


def column_of(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return a value of all records, [N]; NaN where it is missing, null or no number."""
    values = [record.get(name) for record in records]
    try:
        return np.array(values, dtype=np.float64)  # null becomes NaN
    except (ValueError, TypeError):
        return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line of log.jsonl; None if it is damaged."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read_ledger(path: Path) -> dict[str, Any]:
    """Return the counts of rows by split; {} if there is no ledger that can be read."""
    try:
        splits: dict[str, Any] = json.loads(path.read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return splits


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the sample rows; none if there is no file that can be read."""
    try:
        samples: list[dict[str, Any]] = json.loads(path.read_bytes())["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return samples
