"""Record the outcome of every row: used, truncated, or left out with its reasons.

Rows that are left out go to quarantine.jsonl as they occur, the counts to ledger.json. Both files are written under a
temporary name, fsynced and renamed, so they appear complete or not at all. Rows left out after the first save, or of a
stream, are appended; a kill can then truncate the last line, which readers skip.

A restarted run reads its rows again and rewrites both files. A stream resumes in the middle instead: its counts are
saved with its position (`state`). `load` restores them, with as many quarantined rows as they count, so nothing is
counted twice, however often a run resumes.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from partita.data.rows import BadRow
from partita_schema.cells import shown
from partita_schema.common.files import temporary_path, write_atomically
from partita_schema.common.json_text import parse_json
from partita_schema.common.text import counted, describe_error
from partita_schema.errors import DataError

logger = logging.getLogger(__name__)

LEDGER = "ledger.json"
QUARANTINE = "quarantine.jsonl"
MAX_RAW = 2000
"""Maximum number of characters of a row's JSON in the quarantine."""
MAX_REASONS = 100
"""Maximum number of distinct reasons; further ones are counted together."""
OTHER = "other reasons"
ROWS_FOR_A_SHARE = 1000
"""Minimum number of rows before the share of bad ones is judged."""
NUMBERS = ("rows", "used", "cut", "cut_tokens", "loss_tokens", "unknown_tokens", "widened_spans", "left_out")
"""Counts that are saved with a data position."""
UNKNOWN_WARNED = 0.001
"""Share of unknown tokens among the loss tokens above which a warning is logged."""
UNKNOWN_REFUSED = 0.05
"""Share of unknown tokens among the loss tokens above which training is refused."""
LOSS_TOKENS_FOR_A_SHARE = 1000
"""Minimum number of a stream's loss tokens before the share of unknown ones is judged."""
NOTHING_COUNTED = dict.fromkeys(NUMBERS, 0)


@dataclass(frozen=True)
class UsedRows:
    """Counts of used rows."""

    rows: int = 0
    cut: int = 0
    """Rows truncated to a length limit."""
    cut_tokens: int = 0
    loss_tokens: int = 0
    unknown_tokens: int = 0
    """Loss tokens that are the tokenizer's unknown token."""
    widened_spans: int = 0
    """Spans of characters that begin or end inside a word, which has their tag as a whole."""
    widened_such_as: str = ""
    """The first of them, with the key of its row."""

    def __add__(self, other: "UsedRows") -> "UsedRows":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items() if isinstance(value, int)}
        return replace(self, **sums, widened_such_as=self.widened_such_as or other.widened_such_as)


@dataclass
class RowCounts:
    """Counts of one split."""

    rows: int = 0
    """Rows read, including bad ones."""
    used: int = 0
    """Rows that are in batches."""
    cut: int = 0
    """Used rows truncated to a length limit."""
    cut_tokens: int = 0
    """Tokens that were cut off."""
    loss_tokens: int = 0
    """Loss tokens of all used rows."""
    unknown_tokens: int = 0
    """Loss tokens that are the tokenizer's unknown token."""
    widened_spans: int = 0
    """Spans of characters that begin or end inside a word, which has their tag as a whole."""
    widened_such_as: str = ""
    """The first of them, with the key of its row."""
    left_out: int = 0
    """Rows that cannot be used."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason; a row with two reasons counts in both."""

    def add(self, other: "RowCounts") -> None:
        """Add the counts of `other`."""
        for name in NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.widened_such_as = self.widened_such_as or other.widened_such_as
        for reason, number in other.reasons.items():
            self.add_reason(reason, number)

    def add_reason(self, reason: str, number: int = 1) -> str:
        """Count a reason and return the name under which it is counted."""
        known = reason in self.reasons or len(self.reasons) < MAX_REASONS
        name = reason if known else OTHER
        self.reasons[name] += number
        return name


def most_frequent(reasons: Counter[str], *, number: int) -> list[tuple[str, int]]:
    """Return up to `number` reasons with their counts, and the sum of the others as `OTHER`."""
    shown = [pair for pair in reasons.most_common() if pair[0] != OTHER][:number]
    others = reasons.total() - sum(count for _, count in shown)
    return [*shown, (OTHER, others)] if others else shown


def reasons_in_words(counts: RowCounts) -> str:
    """Return the two most frequent reasons why rows are left out, with their numbers; of a single one only its text."""
    main = most_frequent(counts.reasons, number=2)
    return main[0][0] if len(main) == 1 else "; ".join(f"{number:,} x {reason}" for reason, number in main)


def accepted_if_exceeded(left_out: float, *, rows: int, max_bad_rows: int | float) -> str | None:
    """Return in words how many of `rows` may be left out; None if `left_out` are no more than that."""
    is_share = isinstance(max_bad_rows, float)
    if left_out <= (max_bad_rows * rows if is_share else max_bad_rows):
        return None
    return f"{max_bad_rows:g} of all rows" if is_share else counted(int(max_bad_rows), "row")


class Ledger:
    """Count rows by split and quarantine the bad ones. Without a folder, only count."""

    def __init__(
        self,
        folder: Path | None,
        *,
        max_bad_rows: int | float,
        num_rows: Mapping[str, int] = MappingProxyType({}),
        resumable: bool = False,
    ) -> None:
        """Create a ledger in `folder`.

        Args:
            folder: Where the files are written; None to only count.
            max_bad_rows: Accepted number of bad rows, or as a float their share of all rows.
            num_rows: Rows of each split, so that the share is one of all rows before all were read.
            resumable: Keep the quarantined rows of an earlier ledger in `folder` until `load` selects those that count.
        """
        self._folder = folder
        self._resumable = resumable
        self._max_bad_rows = max_bad_rows
        self._num_rows = num_rows
        self._opened = False
        self._temporary_file: TextIO | None = None
        self._first: dict[str, str] = {}
        self._accepted = 0
        self.splits: dict[str, RowCounts] = {}

    def split(self, name: str) -> RowCounts:
        """Return the counts of a split."""
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
        counts.widened_spans += used.widened_spans
        counts.widened_such_as = counts.widened_such_as or used.widened_such_as

    def leave_out(
        self,
        key: str,
        reasons: Sequence[str],
        *,
        split: str,
        file: str,
        number: int,
        row: Mapping[str, Any] | str | None = None,
        accepted: bool = False,
    ) -> None:
        """Count a row that is left out, and write it to the quarantine.

        Args:
            key: Key of the row.
            reasons: Why the row cannot be used.
            split: Name of the split.
            file: Name of the row's file.
            number: Line or row number in the file, from 1.
            row: The row as it was read.
            accepted: Whether the row does not count towards `max_bad_rows`.
        """
        self._accepted += accepted
        counts = self.split(split)
        counts.rows += 1
        counts.left_out += 1
        for reason in reasons:
            self._first.setdefault(counts.add_reason(reason), key)
        self._write({"key": key, "split": split, "file": file, "number": number, "reasons": list(reasons)}, row)

    def leave_out_unreadable(self, rows: Sequence[BadRow], *, split: str) -> None:
        """Count and quarantine rows that could not be read."""
        for row in rows:
            self.leave_out(row.key, [row.reason], split=split, file=row.file, number=row.number, row=row.raw)

    def adopt(self, folder: Path, *, split: str) -> None:
        """Add the counts of a split that another ledger saved in `folder`, and quarantine its rows here too."""
        counts = read_counts(folder).get(split, RowCounts())
        self.split(split).add(counts)
        for record in read_quarantine(folder / QUARANTINE):
            self._note_first(record)
            self._append(json.dumps(record))

    def state(self, *, split: str = "training") -> dict[str, int]:
        """Return the counts of a split without reasons, about sixty characters of JSON, for a data position."""
        return {name: getattr(self.split(split), name) for name in NUMBERS}

    def load(self, state: Mapping[str, int], *, split: str = "training") -> None:
        """Restore the counts of a split from `state`, before any of its rows is counted, or counted again.

        If the ledger is resumable, reasons and rows are read from the existing quarantine.
        """
        counts = self.splits[split] = numbers(state)
        missing = counts.left_out
        for record in self._earlier(split, counts.left_out):
            missing -= 1
            for reason in record["reasons"]:
                counts.add_reason(reason)
            self._note_first(record)
            self._append(json.dumps(record))
        if missing and counts.left_out:
            counts.reasons["before the run was continued"] = missing
        self.save()
        if self._folder is not None:
            earlier(self._folder).unlink(missing_ok=True)

    def check_so_far(self) -> None:
        """Run `check` while more rows are to come; a share is judged once 1,000 rows were read."""
        num_rows = sum(counts.rows for counts in self.splits.values())
        if num_rows >= ROWS_FOR_A_SHARE or not isinstance(self._max_bad_rows, float) or not self._max_bad_rows:
            self.check()

    def check(self) -> None:
        """Raise DataError if more rows are left out than `max_bad_rows`."""
        left_out = sum(counts.left_out for counts in self.splits.values())
        read = {split: counts.rows for split, counts in self.splits.items()}
        total = sum(max(read.get(split, 0), self._num_rows.get(split, 0)) for split in {*read, *self._num_rows})
        judged = left_out - self._accepted
        accepted = accepted_if_exceeded(judged, rows=total, max_bad_rows=self._max_bad_rows)
        if accepted is None:
            return
        hint = f"; see {self._folder / QUARANTINE}" if self._folder is not None else ""
        self.save()
        raise DataError(
            f"{left_out:,} of {counted(total, 'row')} cannot be used, and data.max_bad_rows accepts {accepted}{hint}:\n"
            + self.main_reasons()
        )

    def log_warnings(self) -> None:
        """Warn of each split with too many unknown tokens in the loss, or with spans that are no whole words."""
        for split, counts in self.splits.items():
            if counts.unknown_tokens > UNKNOWN_WARNED * counts.loss_tokens:
                logger.warning("%s: %s", split, unknown_share(counts))
            if counts.widened_spans:
                logger.warning("%s: %s", split, widened_in_words(counts))

    def refuse_unknown_tokens(self, split: str, *, least: int = 0) -> None:
        """Raise DataError if more than 5 % of the loss tokens of a split are the unknown token.

        A split with fewer than `least` loss tokens is not judged.
        """
        counts = self.split(split)
        if counts.loss_tokens >= least and counts.unknown_tokens > UNKNOWN_REFUSED * counts.loss_tokens:
            raise DataError(
                f"{split}: {unknown_share(counts)}, which the model would learn to generate; write a larger "
                "base_model.vocab_size or base_model.tokenizer: bpe for a new model, else choose a base model whose "
                "tokenizer knows this text (partita preview shows the rows as their tokens hold them)"
            )

    def main_reasons(self) -> str:
        """Return the most frequent reasons, one per line, each with its count and an example, and the rest as one."""
        reasons = sum((counts.reasons for counts in self.splits.values()), Counter[str]())
        lines = [f"  {count:,} x {reason}{self._such_as(reason)}" for reason, count in most_frequent(reasons, number=5)]
        return "\n".join(lines)

    def save(self) -> None:
        """Write quarantine.jsonl and ledger.json atomically."""
        if self._folder is None:
            return
        self._begin()
        if self._temporary_file is not None:
            settle(self._temporary_file, self._folder / QUARANTINE)
            self._temporary_file = None
        counts = {name: vars(counts) for name, counts in self.splits.items()}
        text = json.dumps({"format_version": 1, "splits": counts}, indent=2, ensure_ascii=False)
        write_atomically(self._folder / LEDGER, text)

    def close(self) -> None:
        """Close the open file and discard what was not saved."""
        if self._temporary_file is not None:
            self._temporary_file.close()

    def _such_as(self, reason: str) -> str:
        return f" (such as {self._first[reason]})" if reason in self._first else ""

    def _note_first(self, record: Mapping[str, Any]) -> None:
        for reason in record["reasons"]:
            self._first.setdefault(reason, record["key"])

    def _earlier(self, split: str, number: int) -> Iterator[dict[str, Any]]:
        """Yield the first `number` rows of a split from the quarantine of an earlier ledger, or of this one so far."""
        if self._folder is None:
            return
        self._begin()
        aside = earlier(self._folder)
        if self._resumable and not aside.exists():  # there was none, or it has been loaded
            (self._folder / QUARANTINE).replace(aside)
            for record in read_quarantine(aside):
                if record["split"] != split:
                    self._append(json.dumps(record))
        records = (record for record in read_quarantine(aside) if record["split"] == split)
        yield from islice(records, number)

    def _begin(self) -> None:
        """Move an earlier ledger's quarantine aside."""
        if self._opened or self._folder is None:
            return
        self._opened = True
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / QUARANTINE
        if not self._resumable:
            self._temporary_file = temporary_path(path).open("w", encoding="utf-8")
            return
        # If there is an earlier file, it was not loaded yet, and the current one belongs to no run.
        if path.exists() and not earlier(self._folder).exists():
            path.replace(earlier(self._folder))
        path.write_text("")

    def _write(self, record: dict[str, Any], row: Mapping[str, Any] | str | None) -> None:
        content: object = row
        try:
            text = json.dumps(row, default=str)
        except (TypeError, ValueError, RecursionError):  # a key that is a tuple, a list that contains itself
            content = text = shown(row)
        shortened = content if len(text) <= MAX_RAW else text[:MAX_RAW]
        self._append(json.dumps(record | {"row": shortened}, default=str))

    def _append(self, line: str) -> None:
        if self._folder is None:
            return
        self._begin()
        if self._temporary_file is not None:
            self._temporary_file.write(line + "\n")
            return
        # Closed after each line, so that a position never counts rows that a kill keeps from the file.
        with (self._folder / QUARANTINE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def numbers(saved: Mapping[str, int]) -> RowCounts:
    """Return saved counts as RowCounts, without reasons."""
    counts = RowCounts()
    for name in NUMBERS:
        setattr(counts, name, int(saved[name]))
    return counts


def unknown_share(counts: RowCounts) -> str:
    """Return a phrase with the share of unknown tokens among the loss tokens."""
    share = counts.unknown_tokens / counts.loss_tokens
    return (
        f"{share:.2%} of the loss tokens ({counts.unknown_tokens:,} of {counts.loss_tokens:,}) are the tokenizer's "
        "unknown token"
    )


def widened_in_words(counts: RowCounts) -> str:
    """Return a phrase with the number of spans that begin or end inside a word."""
    verbs = "begins or ends" if counts.widened_spans == 1 else "begin or end"
    return (
        f"{counted(counts.widened_spans, 'span')} {verbs} inside a word, which is tagged as a whole (such as "
        f"{counts.widened_such_as}); correct them if that is wrong"
    )


def read_counts(folder: Path) -> dict[str, RowCounts]:
    """Read the counts that a ledger saved in a folder, by split. Raise DataError if they cannot be read."""
    path = folder / LEDGER
    try:
        splits = parse_json(path.read_bytes())["splits"]
        return {
            name: replace(
                numbers(saved), reasons=Counter(saved["reasons"]), widened_such_as=str(saved["widened_such_as"])
            )
            for name, saved in splits.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({describe_error(error)}); the run writes it again") from None


def read_quarantine(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a quarantine; skip a line that a kill has truncated."""
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


def settle(file: TextIO, path: Path) -> None:
    """Close a file that was written under a temporary name, and rename it once it is on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    temporary_path(path).replace(path)
