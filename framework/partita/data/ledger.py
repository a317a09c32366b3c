"""What became of every row: used, cut, or left out and why.

Rows that are left out go to quarantine.jsonl as they are met, and the counts to ledger.json; both appear under their
names when they are whole (written beside, fsynced, renamed). What is left out after a first save, or of a stream, is
appended; a kill can tear the last line then, and readers pass over it.

A run that is started again reads its rows again and writes both files anew. A stream goes on in the middle instead: its
counts are seven numbers that travel with its position (`state`), and `load` takes them up again, with as many rows of
the quarantine as they count. So nothing is counted twice, however often a run is resumed.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from partita.data.rows import BadRow
from partita_schema.counted import counted
from partita_schema.errors import DataError
from partita_schema.sealed import parse_json

logger = logging.getLogger(__name__)

LEDGER = "ledger.json"
QUARANTINE = "quarantine.jsonl"
MAX_RAW = 2000
"""Characters of a row's JSON that are kept in the quarantine."""
MAX_REASONS = 100
"""Different reasons that are counted apart; further ones are counted together."""
ROWS_FOR_A_SHARE = 1000
"""Rows to be met before a share of bad ones among them says something."""
NUMBERS = ("rows", "used", "cut", "cut_tokens", "loss_tokens", "unknown_tokens", "left_out")
"""What a position carries."""
UNKNOWN_WARNED = 0.001
"""Share of unknown tokens among the loss tokens above which a warning is logged."""
UNKNOWN_REFUSED = 0.05
"""Share of unknown tokens among the loss tokens above which nothing is trained."""
LOSS_TOKENS_FOR_A_SHARE = 1000
"""Loss tokens of a stream to be met before the share of unknown ones is judged."""
NOTHING_COUNTED = dict.fromkeys(NUMBERS, 0)


@dataclass(frozen=True)
class UsedRows:
    """Numbers of rows that are used."""

    rows: int = 0
    cut: int = 0
    """Rows that lost tokens to a length limit."""
    cut_tokens: int = 0
    loss_tokens: int = 0
    unknown_tokens: int = 0
    """Loss tokens that are the tokenizer's unknown token."""

    def __add__(self, other: "UsedRows") -> "UsedRows":
        return UsedRows(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class RowCounts:
    """Numbers of one split."""

    rows: int = 0
    """Rows met, bad ones included."""
    used: int = 0
    cut: int = 0
    """Used rows that lost tokens to a length limit."""
    cut_tokens: int = 0
    loss_tokens: int = 0
    unknown_tokens: int = 0
    """Loss tokens that are the tokenizer's unknown token."""
    left_out: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows left out by reason; a row with two reasons counts in both."""

    def add(self, other: "RowCounts") -> None:
        """Count what another has counted."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, number in other.reasons.items():
            self.add_reason(reason, number)

    def add_reason(self, reason: str, number: int = 1) -> str:
        """Count a reason; what comes back is the name under which it is counted."""
        known = reason in self.reasons or len(self.reasons) < MAX_REASONS
        name = reason if known else "other reasons"
        self.reasons[name] += number
        return name


class Ledger:
    """Counts rows by split and keeps the bad ones. Without a folder it only counts."""

    def __init__(self, folder: Path | None, *, max_bad_rows: int | float, resumable: bool = False) -> None:
        """`max_bad_rows` is a number of rows, or as a float a share of all.

        A `resumable` ledger keeps the rows of an earlier one in its folder until `load` says which of them count.
        """
        self._folder = folder
        self._resumable = resumable
        self._max_bad_rows = max_bad_rows
        self._begun = False
        self._beside: TextIO | None = None
        self._first: dict[str, str] = {}
        self.splits: dict[str, RowCounts] = {}

    def split(self, name: str) -> RowCounts:
        """The counts of a split."""
        return self.splits.setdefault(name, RowCounts())

    def use(self, used: UsedRows, *, split: str) -> None:
        """Count rows that are used."""
        counts = self.split(split)
        counts.rows += used.rows
        counts.used += used.rows
        counts.cut += used.cut
        counts.cut_tokens += used.cut_tokens
        counts.loss_tokens += used.loss_tokens
        counts.unknown_tokens += used.unknown_tokens

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
            self._first.setdefault(counts.add_reason(reason), key)
        self._write({"key": key, "split": split, "file": file, "number": number, "reasons": list(reasons)}, row)

    def leave_out_unreadable(self, rows: Sequence[BadRow], *, split: str) -> None:
        """The same for rows that could not even be read."""
        for row in rows:
            self.leave_out(row.key, [row.reason], split=split, file=row.file, number=row.number, row=row.raw)

    def adopt(self, folder: Path, *, split: str) -> None:
        """Count what another ledger has counted of a split and saved in `folder`, and quarantine its rows here too."""
        counts = read_counts(folder).get(split, RowCounts())
        self.split(split).add(counts)
        for record in read_quarantine(folder / QUARANTINE):
            self._remember(record)
            self._append(json.dumps(record))

    def state(self, *, split: str = "training") -> dict[str, int]:
        """The counts of a split without reasons: JSON of some sixty characters, to be kept with a position."""
        return {name: getattr(self.split(split), name) for name in NUMBERS}

    def load(self, state: Mapping[str, int], *, split: str = "training") -> None:
        """Go on counting a split where `state` stood, before anything of it was counted.

        Reasons and rows come from the quarantine that lies there, where the ledger is resumable.
        """
        counts = self.splits[split] = numbers(state)
        missing = counts.left_out
        for record in self._earlier(split, counts.left_out):
            missing -= 1
            for reason in record["reasons"]:
                counts.add_reason(reason)
            self._remember(record)
            self._append(json.dumps(record))
        if missing and counts.left_out:
            counts.reasons["before the run was continued"] = missing
        self.save()
        if self._folder is not None:
            earlier(self._folder).unlink(missing_ok=True)

    def check_so_far(self) -> None:
        """The same as `check` while rows are still to come: a share is judged once 1,000 rows were met."""
        met = sum(counts.rows for counts in self.splits.values())
        if met >= ROWS_FOR_A_SHARE or not isinstance(self._max_bad_rows, float) or not self._max_bad_rows:
            self.check()

    def check(self, total: int | None = None) -> None:
        """Raise DataError when more rows are left out than the run accepts; `total` defaults to all rows met."""
        left_out = sum(counts.left_out for counts in self.splits.values())
        total = total or sum(counts.rows for counts in self.splits.values())
        limit = self._max_bad_rows
        accepted = limit * total if isinstance(limit, float) else limit
        if left_out <= accepted:
            return
        shown = f"{limit:g} of all rows" if isinstance(limit, float) else counted(limit, "row")
        place = f"; see {self._folder / QUARANTINE}" if self._folder is not None else ""
        self.save()
        raise DataError(
            f"{left_out:,} of {counted(total, 'row')} cannot be used, and data.max_bad_rows accepts {shown}{place}:\n"
            + self.main_reasons()
        )

    def warn_of_unknown_tokens(self) -> None:
        """Log a warning for each split in whose loss the tokenizer's unknown token stands too often."""
        for split, counts in self.splits.items():
            if counts.unknown_tokens > UNKNOWN_WARNED * counts.loss_tokens:
                logger.warning("%s: %s", split, unknown_share(counts))

    def refuse_unknown_tokens(self, split: str, *, least: int = 0) -> None:
        """Raise DataError when more than 5 % of the loss tokens of a split are the unknown token.

        Fewer than `least` loss tokens are not judged.
        """
        counts = self.split(split)
        if counts.loss_tokens >= least and counts.unknown_tokens > UNKNOWN_REFUSED * counts.loss_tokens:
            raise DataError(
                f"{split}: {unknown_share(counts)}, which the model would learn to write; write a larger "
                "base_model.vocab_size or base_model.tokenizer: bpe for a new model, else choose a base model whose "
                "tokenizer knows this text (partita preview shows the rows as their tokens hold them)"
            )

    def main_reasons(self) -> str:
        """The most frequent reasons with their counts and an example each, one a line."""
        reasons = sum((counts.reasons for counts in self.splits.values()), Counter[str]())
        return "\n".join(f"  {count:,} x {reason}{self._such_as(reason)}" for reason, count in reasons.most_common(5))

    def save(self) -> None:
        """Bring quarantine.jsonl and ledger.json to their names, whole."""
        if self._folder is None:
            return
        self._begin()
        if self._beside is not None:
            settle(self._beside, self._folder / QUARANTINE)
            self._beside = None
        counts = {name: vars(counts) for name, counts in self.splits.items()}
        with beside(self._folder / LEDGER).open("w", encoding="utf-8") as file:
            json.dump({"format_version": 1, "splits": counts}, file, indent=2, ensure_ascii=False)
            settle(file, self._folder / LEDGER)

    def close(self) -> None:
        """Give up what was not saved."""
        if self._beside is not None:
            self._beside.close()

    def _such_as(self, reason: str) -> str:
        return f" (such as {self._first[reason]})" if reason in self._first else ""

    def _remember(self, record: Mapping[str, Any]) -> None:
        for reason in record["reasons"]:
            self._first.setdefault(reason, record["key"])

    def _earlier(self, split: str, number: int) -> Iterator[dict[str, Any]]:
        """The first rows of a split in the quarantine that an earlier ledger has left."""
        if self._folder is None:
            return
        self._begin()
        found = (record for record in read_quarantine(earlier(self._folder)) if record["split"] == split)
        yield from islice(found, number)

    def _begin(self) -> None:
        """Put away what an earlier ledger has left."""
        if self._begun or self._folder is None:
            return
        self._begun = True
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / QUARANTINE
        if not self._resumable:
            self._beside = beside(place).open("w", encoding="utf-8")
            return
        if place.exists() and not earlier(self._folder).exists():
            place.replace(earlier(self._folder))  # else one was not loaded yet, and what stands here is nobody's
        place.write_text("")

    def _write(self, record: dict[str, Any], row: Mapping[str, Any] | str | None) -> None:
        text = json.dumps(row, default=str)
        kept = row if len(text) <= MAX_RAW else text[:MAX_RAW]
        self._append(json.dumps(record | {"row": kept}, default=str))

    def _append(self, line: str) -> None:
        if self._folder is None:
            return
        self._begin()
        if self._beside is not None:
            self._beside.write(line + "\n")
            return
        # Closed each time, so that a position never counts rows that a kill keeps from the file.
        with (self._folder / QUARANTINE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def numbers(saved: Mapping[str, int]) -> RowCounts:
    """Counts without reasons."""
    counts = RowCounts()
    for name in NUMBERS:
        setattr(counts, name, int(saved[name]))
    return counts


def unknown_share(counts: RowCounts) -> str:
    """The share of unknown tokens among the loss tokens, in words."""
    share = counts.unknown_tokens / counts.loss_tokens
    return (
        f"{share:.2%} of the loss tokens ({counts.unknown_tokens:,} of {counts.loss_tokens:,}) are the tokenizer's "
        "unknown token"
    )


def read_counts(folder: Path) -> dict[str, RowCounts]:
    """The counts that a ledger has saved in a folder, by split. Raises DataError where they cannot be read."""
    path = folder / LEDGER
    try:
        splits = parse_json(path.read_bytes())["splits"]
        return {name: replace(numbers(saved), reasons=Counter(saved["reasons"])) for name, saved in splits.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); it is written anew by the run") from None


def read_quarantine(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a quarantine; a line that a kill has torn is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and {"key", "split", "reasons"} <= record.keys():
                yield record


def earlier(folder: Path) -> Path:
    return folder / ".quarantine.jsonl.earlier"


def beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def settle(file: TextIO, path: Path) -> None:
    """Close a file that was written beside and give it its name, once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    beside(path).replace(path)
