"""`Runs`: the runs of a folder in Python."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.report.comparison import EXAMPLES, Comparison, compare_runs
from partita.runs.listing import Order, RunSummary, in_order, read_runs
from partita.runs.manifest import sibling_runs
from partita_schema.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


class Runs:
    """The runs below a folder, as `partita runs` lists them.

    ```python
    from partita import Runs

    runs = Runs("runs")
    runs.frame().sort_values("test.team.accuracy")
    runs.compare("tickets", "tickets-lora").frame()
    ```

    The folder is read once, when the object is created.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        """Read the runs below a folder.

        Raises:
            DataError: There is no such folder, or it is a run itself.
        """
        self.folder = Path(folder)
        self._runs = {run.name: run for run in read_runs(self.folder)}

    def __iter__(self) -> Iterator[RunSummary]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, name: str) -> RunSummary:
        if name not in self._runs:
            raise DataError(f"there is no run {name} in {self.folder}{sibling_runs(self.folder / name)}")
        return self._runs[name]

    def __repr__(self) -> str:
        return f"Runs({str(self.folder)!r}, {len(self)} runs)"

    def sorted(self, order: Order, *, metric: str | None = None) -> list[RunSummary]:
        """Return the runs in an order: the newest first, by name, the best first, or the largest first.

        Args:
            order: date, name, metric or size.
            metric: Name of the metric, such as `team.accuracy` or `loss`. Default: the main one of each run.
        """
        return in_order(self, order, metric=metric)

    def frame(self) -> "pd.DataFrame":
        """Return a table with one row per run, its name as the index, and a column `SPLIT.METRIC` for each metric."""
        import pandas as pd

        rows = [row_of(run) for run in self]
        return pd.DataFrame(rows, index=pd.Index(list(self._runs), name="run", dtype=object))

    def compare(self, *names: str, split: str | None = None, max_examples: int = EXAMPLES) -> Comparison:
        """Compare runs row by row; the first one is the reference.

        Args:
            names: Names of two or more runs.
            split: The evaluation, such as `test`, or the history of a simulation, such as `predicted`. Default: the
                first one that all runs have.
            max_examples: Maximum number of rows that are listed for each pair.

        Raises:
            DataError: There is no such run or evaluation, or the runs have no rows in common.
        """
        return compare_runs([self[name].folder for name in names], split=split, max_examples=max_examples)


def row_of(run: RunSummary) -> dict[str, Any]:
    """Return the cells of a run in a table."""
    record = run.record()
    columns = {name: record[name] for name in ("status", "model", "data", "steps", "created", "updated", "bytes")}
    metrics = {f"{split}.{name}": value for split, values in run.metrics.items() for name, value in values.items()}
    return columns | {"problem": run.problem} | metrics
