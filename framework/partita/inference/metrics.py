"""Scores of answers against the truth, by the type of the output.

Every row counts: an answer that could not be read (`invalid`) and a row without an answer (`errors`) are wrong, and
their shares are reported; `n` is the number of rows. A row that cannot be scored, such as one without a right answer,
is not among them; `Model.evaluate` reports how many as `skipped`. Scores are summed up row by row, with the same result
in whatever order rows come; no texts are kept.

| output | metrics |
|---|---|
| category | accuracy; macro_f1 and weighted_f1 over the labels that are right or answered somewhere |
| number | exact_match; over the answers that are numbers mae, mse and rmse (infinite where none is) and r2 |
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

from partita.inference.predictions import Answer
from partita_schema.config import Config
from partita_schema.features import CategoryOutput, JsonOutput, NumberOutput, OutputFeature

METRICS = {
    "category": ("accuracy", "macro_f1", "weighted_f1"),
    "number": ("exact_match", "mae", "mse", "rmse", "r2"),
    "json": ("exact_match", "valid", "field_accuracy"),
    "text": ("exact_match", "rouge_1", "rouge_2", "rouge_l", "bleu"),
}
"""Metrics by type of output."""
SHARED_METRICS = ("invalid", "errors", "n")
"""Metrics of every output."""

MAX_FIELDS = 64
"""Fields of JSON objects that are reported by name."""

ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}
"""Metrics of texts by their names in the library."""

WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class OutputScores:
    """Metrics by output; empty where no row was scored."""

    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each output, by name."""
    overall: Mapping[str, float] = field(default_factory=dict)
    """exact_match: the share of rows in which every output is right; n: the number of rows."""

    @property
    def flat(self) -> dict[str, float]:
        """All metrics by one name: `output.metric`, and those of `overall` by their own."""
        named = {f"{name}.{metric}": value for name, scores in self.outputs.items() for metric, value in scores.items()}
        return named | dict(self.overall)


class Scorer:
    """Sums up scores row by row."""

    def __init__(self, config: Config) -> None:
        self._sums = {feature.name: _sums(feature) for feature in config.output_features}
        self._counts = {feature.name: _Counts() for feature in config.output_features}
        self._rows = self._all_right = 0

    def add(self, truth: Mapping[str, Any], answer: Answer) -> None:
        """Score one row; `truth` holds the right value of each output, by name."""
        answered = answer.record.status == "ok"
        right = [self._add_output(name, truth[name], answer, answered=answered) for name in self._sums]
        self._rows += 1
        self._all_right += all(right)

    def scores(self) -> OutputScores:
        """The scores of all rows so far."""
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
    """Rows, unreadable answers, and rows without an answer."""

    def __init__(self) -> None:
        self.rows = self.invalid = self.errors = 0

    def add(self, *, answered: bool, valid: bool) -> None:
        self.rows += 1
        self.errors += not answered
        self.invalid += answered and not valid

    def metrics(self) -> dict[str, float]:
        return {"invalid": self.invalid / self.rows, "errors": self.errors / self.rows, "n": float(self.rows)}


class _Sums(Protocol):
    """What is summed up for one output."""

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        """Count one row; `value` means nothing unless `valid`. Returns whether it is right."""

    def metrics(self, rows: int) -> dict[str, float]:
        """The metrics of all rows so far, of which there is at least one."""


class _CategorySums:
    """How often each label was answered for each."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str | None]] = Counter()

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        self.pairs[str(truth), str(value) if valid else None] += 1
        return valid and str(value) == str(truth)

    def metrics(self, rows: int) -> dict[str, float]:
        """Return the accuracy and the means of the labels' F1 scores.

        An unreadable answer misses its label but is not a label itself, whose F1 would always be 0.
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
    """Errors and right values of the answers that are numbers."""

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
        """The coefficient of determination; where all right values are equal, 1 without errors and else 0."""
        if not math.isfinite(mse):
            return -math.inf
        mean = exact_sum(self.truths) / len(self.truths)
        variance = exact_sum((truth - mean) * (truth - mean) for truth in self.truths) / len(self.truths)
        if not variance:
            return 0.0 if mse else 1.0
        return 1 - mse / variance


class _JsonSums:
    """Right values, and right fields of objects."""

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
    """Right texts, ROUGE (Lin 2004) by row, and the n-gram counts of BLEU (Papineni et al. 2002).

    BLEU takes the orders of n-grams that answers have: answers of fewer than four words alone have no 4-grams, and
    would otherwise come to 0 however right they are. With longer ones it is the usual score.
    """

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu.metrics import BLEU

        self.right = 0
        self.rouge = {name: array("d") for name in ROUGE}
        # As the library's own tokenizer on English, and letters of other scripts are letters too.
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
        """Runs of letters and digits, in lower case."""
        return WORD.findall(text.lower())


def metric_names(config: Config) -> tuple[str, ...]:
    """Names that `OutputScores.flat` may hold, those of single JSON fields aside, with `loss` before them."""
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
    """The sum, rounded once: the same in whatever order."""
    try:
        return math.fsum(values)
    except OverflowError:  # of numbers as large as can be
        return math.inf


def canonical(value: Any) -> str:
    """One text for equal JSON values: keys sorted, 1.0 as 1; true stays apart from 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
