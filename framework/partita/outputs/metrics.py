"""Metrics of answers by the type of the output.

All rows count: unreadable answers (`invalid`) and rows without an answer (`errors`) are wrong, and their shares are
reported; `n` is the number of rows. Rows that cannot be scored, such as those without a reference, are excluded;
`Model.evaluate` reports their number as `skipped`. Metrics are accumulated row by row, independent of the row order,
without storing texts.

| output | metrics |
|---|---|
| category | accuracy; macro_f1 and weighted_f1 over all labels that occur as reference or answer |
| number | exact_match; over the numeric answers mae, mse and rmse (infinite without any) and r2 |
| json | exact_match, valid; for objects field_accuracy over all fields, and field.NAME for each |
| text | exact_match; rouge_1, rouge_2 and rouge_l (F-measures, 0 to 1) and bleu (corpus, 0 to 100) |
"""

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.generation.predictions import Answer
from partita_schema.config import Config
from partita_schema.features import CategoryOutput, JsonOutput, NumberOutput, OutputFeature

METRICS = {
    "category": ("accuracy", "macro_f1", "weighted_f1"),
    "number": ("exact_match", "mae", "mse", "rmse", "r2"),
    "json": ("exact_match", "valid", "field_accuracy"),
    "text": ("exact_match", "rouge_1", "rouge_2", "rouge_l", "bleu"),
}
"""Metrics by output type."""
SHARED_METRICS = ("invalid", "errors", "n")
"""Metrics of every output."""

MAX_FIELDS = 64
"""Fields of JSON objects that are reported by name."""

ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
"""ROUGE metrics and their names in the library."""

WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class OutputScores:
    """Metrics by output; empty if no row was scored."""

    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each output, by name."""
    overall: Mapping[str, float] = field(default_factory=dict)
    """exact_match: the share of rows with every output right; n: the number of rows."""

    @property
    def flat(self) -> dict[str, float]:
        """All metrics in one dictionary: `output.metric`, and those of `overall` by their own names."""
        named = {f"{name}.{metric}": value for name, scores in self.outputs.items() for metric, value in scores.items()}
        return named | dict(self.overall)


class Scorer:
    """Accumulates metrics row by row."""

    def __init__(self, config: Config) -> None:
        self._sums = {feature.name: _sums(feature) for feature in config.output_features}
        self._counts = {feature.name: _Counts() for feature in config.output_features}
        self._rows = self._all_right = 0

    def add(self, truth: Mapping[str, Any], answer: Answer) -> None:
        """Score one row; `truth` holds the reference of each output, by name."""
        answered = answer.record.status == "ok"
        right = [self._add_output(name, truth[name], answer, answered=answered) for name in self._sums]
        self._rows += 1
        self._all_right += all(right)

    def scores(self) -> OutputScores:
        """Return the metrics of all rows so far."""
        if not self._rows:
            return OutputScores()
        outputs = {name: sums.metrics(self._rows) | self._counts[name].metrics() for name, sums in self._sums.items()}
        return OutputScores(outputs, {"exact_match": self._all_right / self._rows, "n": float(self._rows)})

    def _add_output(self, name: str, truth: Any, answer: Answer, *, answered: bool) -> bool:
        decoded = answer.decoded
        valid = name not in decoded.errors
        self._counts[name].add(answered=answered, valid=valid)
        return self._sums[name].add(truth, decoded.values[name], valid=valid)


class _Counts:
    """Counts of rows, unreadable answers, and rows without an answer."""

    def __init__(self) -> None:
        self.rows = self.invalid = self.errors = 0

    def add(self, *, answered: bool, valid: bool) -> None:
        self.rows += 1
        self.errors += not answered
        self.invalid += answered and not valid

    def metrics(self) -> dict[str, float]:
        return {"invalid": self.invalid / self.rows, "errors": self.errors / self.rows, "n": float(self.rows)}


class _Sums(Protocol):
    """Accumulated values of one output."""

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        """Add one row and return whether it is right; `value` is only meaningful if `valid`."""

    def metrics(self, rows: int) -> dict[str, float]:
        """Return the metrics of all rows so far, at least one."""


class _CategorySums:
    """Counts of pairs of reference and answered label."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str | None]] = Counter()

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        self.pairs[str(truth), str(value) if valid else None] += 1
        return valid and str(value) == str(truth)

    def metrics(self, rows: int) -> dict[str, float]:
        """Return the accuracy and the means of the labels' F1 scores.

        An unreadable answer counts as a miss but is not a label itself, because its F1 would always be 0.
        """
        true_counts: Counter[str] = Counter()
        answer_counts: Counter[str | None] = Counter()
        for (truth, answer), count in self.pairs.items():
            true_counts[truth] += count
            answer_counts[answer] += count
        labels = true_counts.keys() | {answer for answer in answer_counts if answer is not None}
        f1 = {
            label: 2 * self.pairs[label, label] / (true_counts[label] + answer_counts[label])
            for label in sorted(labels)
        }
        return {
            "accuracy": sum(self.pairs[label, label] for label in f1) / rows,
            "macro_f1": math.fsum(f1.values()) / len(f1),
            "weighted_f1": math.fsum(true_counts[label] * score for label, score in f1.items()) / rows,
        }


class _NumberSums:
    """Errors and references of the numeric answers."""

    def __init__(self) -> None:
        self.right = 0
        self.errors = array("d")
        self.truths = array("d")

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        if not valid:
            return False
        error = float(value) - float(truth)
        self.errors.append(abs(error))
        self.truths.append(float(truth))
        right = math.isclose(value, truth, rel_tol=1e-9, abs_tol=1e-12)
        self.right += right
        return right

    def metrics(self, rows: int) -> dict[str, float]:
        count = len(self.errors)
        mae = exact_sum(self.errors) / count if count else math.inf
        mse = exact_sum(error * error for error in self.errors) / count if count else math.inf
        return {
            "exact_match": self.right / rows,
            "mae": mae,
            "mse": mse,
            "rmse": math.sqrt(mse),
            "r2": self._r2(mse) if count else -math.inf,
        }

    def _r2(self, mse: float) -> float:
        """Return the coefficient of determination; if all references are equal, 1 without errors and 0 with."""
        if not math.isfinite(mse):
            return -math.inf
        mean = exact_sum(self.truths) / len(self.truths)
        variance = exact_sum((truth - mean) * (truth - mean) for truth in self.truths) / len(self.truths)
        if not variance:
            return 0.0 if mse else 1.0
        return 1 - mse / variance


class _JsonSums:
    """Counts of right values, and of right fields of objects."""

    def __init__(self) -> None:
        self.right = self.valid = 0
        self.fields: Counter[str] = Counter()
        self.right_fields: Counter[str] = Counter()
        self.all_fields = self.all_right_fields = 0

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        right = valid and canonical(value) == canonical(truth)
        self.right += right
        self.valid += valid
        for name, wanted in truth.items() if isinstance(truth, dict) else ():
            holds = valid and isinstance(value, dict) and name in value and canonical(value[name]) == canonical(wanted)
            self.all_fields += 1
            self.all_right_fields += holds
            if name in self.fields or len(self.fields) < MAX_FIELDS:
                self.fields[name] += 1
                self.right_fields[name] += holds
        return right

    def metrics(self, rows: int) -> dict[str, float]:
        metrics = {"exact_match": self.right / rows, "valid": self.valid / rows}
        if self.all_fields:
            metrics["field_accuracy"] = self.all_right_fields / self.all_fields
        by_name = {f"field.{name}": self.right_fields[name] / count for name, count in self.fields.items()}
        return metrics | by_name


class _TextSums:
    """Exact matches, ROUGE (Lin 2004) per row, and the n-gram counts of BLEU (Papineni et al. 2002).

    BLEU uses only the n-gram orders that the answers have: answers shorter than four words have no 4-grams and would
    score 0 even if they are right. With longer answers it is the usual score.
    """

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu.metrics import BLEU

        self.right = 0
        self.rouge = {name: array("d") for name in ROUGE}
        # Same as the library's tokenizer on English; letters of other scripts count as letters, too.
        self.rouge_scorer = RougeScorer(list(ROUGE.values()), tokenizer=_Words())
        self.bleu = BLEU(effective_order=True)
        self.matches, self.totals = [0] * 4, [0] * 4
        self.answer_length = self.truth_length = 0

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        text, truth = str(value) if valid else "", str(truth).strip()
        rouge = self.rouge_scorer.score(truth, text)
        for name, kind in ROUGE.items():
            self.rouge[name].append(rouge[kind].fmeasure)
        counts = self.bleu.sentence_score(text, [truth])
        self.matches = [a + b for a, b in zip(self.matches, counts.counts, strict=True)]
        self.totals = [a + b for a, b in zip(self.totals, counts.totals, strict=True)]
        self.answer_length += counts.sys_len
        self.truth_length += counts.ref_len
        right = valid and text.strip() == truth
        self.right += right
        return right

    def metrics(self, rows: int) -> dict[str, float]:
        bleu = self.bleu.compute_bleu(
            self.matches,
            self.totals,
            self.answer_length,
            self.truth_length,
            smooth_method="exp",
            effective_order=True,
        )
        rouge = {name: exact_sum(scores) / rows for name, scores in self.rouge.items()}
        return {"exact_match": self.right / rows, **rouge, "bleu": float(bleu.score)}


class _Words:
    def tokenize(self, text: str) -> list[str]:
        """Return the lowercased runs of letters and digits."""
        return WORD.findall(text.lower())


def metric_names(config: Config) -> tuple[str, ...]:
    """Return `loss` and the names that `OutputScores.flat` may hold, except those of single JSON fields."""
    outputs = config.output_features
    named = [f"{output.name}.{metric}" for output in outputs for metric in (*METRICS[output.type], *SHARED_METRICS)]
    return ("loss", *named, "exact_match", "n")


def _sums(feature: OutputFeature) -> _Sums:
    if isinstance(feature, CategoryOutput):
        return _CategorySums()
    if isinstance(feature, NumberOutput):
        return _NumberSums()
    return _JsonSums() if isinstance(feature, JsonOutput) else _TextSums()


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once, independent of the order."""
    try:
        return math.fsum(values)
    except OverflowError:  # finite values near the maximum of a float
        return math.inf


def canonical(value: Any) -> str:
    """Return the same text for equal JSON values: sorted keys, 1.0 as 1; true and 1 differ."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
