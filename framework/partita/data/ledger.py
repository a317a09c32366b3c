"""What became of every row: used, cut, or left out and why.

Rows that are left out go to quarantine.jsonl as they are met, and the counts to ledger.json; both appear under their
names when they are whole (written beside, fsynced, renamed), and a resumed run writes them anew.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from partita.data.rows import BadRow
from partita_schema.errors import DataError

MAX_RAW = 2000
"""Characters of a row's JSON that are kept in the quarantine."""
MAX_REASONS = 100
"""Different reasons that are counted apart; further ones are counted together."""


@dataclass
class Counts:
    """Numbers of one split."""

    rows: int = 0
    """Rows met, bad ones included."""
    used: int = 0
    cut: int = 0
    """Used rows that lost tokens to a length limit."""
    cut_tokens: int = 0
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows left out by reason; a row with two reasons counts in both."""


class Ledger:
    """Counts rows by split and keeps the bad ones. Without a folder it only counts."""

    def __init__(self, folder: Path | None, *, max_bad_rows: int | float) -> None:
        """`max_bad_rows` is a number of rows, or as a float a share of all."""
        self._folder = folder
        self._max_bad_rows = max_bad_rows
        self._quarantine: TextIO | None = None
        self._saved = False
        self._first: dict[str, str] = {}
        self.splits: dict[str, Counts] = {}

    def split(self, name: str) -> Counts:
        """The counts of a split."""
        return self.splits.setdefault(name, Counts())

    def use(self, *, split: str, rows: int, cut: int = 0, cut_tokens: int = 0) -> None:
        """Count rows that are used, and how many of them lost how many tokens."""
        counts = self.split(split)
        counts.rows += rows
        counts.used += rows
        counts.cut += cut
        counts.cut_tokens += cut_tokens

    def leave_out(
        self,
        key: str,
        reasons: Sequence[str],
        *,
        split: str,
        file: str,
        number: int,
        row: Mapping[str, Any] | str | None = None,
    ) -> None:
        """Count a row that is left out, and keep it in the quarantine."""
        counts = self.split(split)
        counts.rows += 1
        counts.left_out += 1
        for reason in reasons:
            known = reason in counts.reasons or len(counts.reasons) < MAX_REASONS
            name = reason if known else "other reasons"
            counts.reasons[name] += 1
            self._first.setdefault(name, key)
        self._write({"key": key, "split": split, "file": file, "number": number, "reasons": list(reasons)}, row)

    def leave_out_unreadable(self, rows: Sequence[BadRow], *, split: str) -> None:
        """The same for rows that could not even be read."""
        for row in rows:
            self.leave_out(row.key, [row.reason], split=split, file=row.file, number=row.number, row=row.raw)

    def check(self, total: int | None = None) -> None:
        """Raise DataError when more rows are left out than the run accepts; `total` defaults to all rows met."""
        left_out = sum(counts.left_out for counts in self.splits.values())
        total = total or sum(counts.rows for counts in self.splits.values())
        limit = self._max_bad_rows
        accepted = limit * total if isinstance(limit, float) else limit
        if left_out <= accepted:
            return
        shown = f"{limit:g} of all rows" if isinstance(limit, float) else f"{limit:,} rows"
        reasons = sum((counts.reasons for counts in self.splits.values()), Counter[str]())
        told = [f"  {count:,} x {reason} (such as {self._first[reason]})" for reason, count in reasons.most_common(5)]
        place = f"; see {self._folder / 'quarantine.jsonl'}" if self._folder is not None else ""
        self.save()
        raise DataError(
            f"{left_out:,} of {total:,} rows cannot be used, and data.max_bad_rows accepts {shown}{place}:\n"
            + "\n".join(told)
        )

    def save(self) -> None:
        """Bring quarantine.jsonl and ledger.json to their names, whole."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._quarantine is None:
            self._open()
        assert self._quarantine is not None
        settle(self._quarantine, self._folder / "quarantine.jsonl")
        self._quarantine, self._saved = None, True
        counts = {name: vars(counts) for name, counts in self.splits.items()}
        with beside(self._folder / "ledger.json").open("w", encoding="utf-8") as file:
            json.dump({"format_version": 1, "splits": counts}, file, indent=2, ensure_ascii=False)
            settle(file, self._folder / "ledger.json")

    def _open(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / "quarantine.jsonl"
        if self._saved:  # a second split comes after a first save: what stands there stays
            shutil.copyfile(place, beside(place))
        self._quarantine = beside(place).open("a" if self._saved else "w", encoding="utf-8")

    def _write(self, record: dict[str, Any], row: Mapping[str, Any] | str | None) -> None:
        if self._folder is None:
            return
        if self._quarantine is None:
            self._open()
        assert self._quarantine is not None
        text = json.dumps(row, default=str)
        kept = row if len(text) <= MAX_RAW else text[:MAX_RAW]
        self._quarantine.write(json.dumps(record | {"row": kept}, default=str) + "\n")


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def settle(file: TextIO, path: Path) -> None:
    """Close a file that was written beside and give it its name, once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    beside(path).replace(path)
