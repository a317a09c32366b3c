"""The output type json: find the JSON value in an answer and validate it."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from partita.outputs.base import Metrics, OutputType, Reader, ReadError
from partita.outputs.find_json import find_json
from partita_schema.json_values import json_validator, schema_mistake
from partita_schema.sections.outputs.json import JsonOutput

MAX_REASON = 200
"""Length limit of a reason, in characters."""

MAX_FIELDS = 64
"""Fields of JSON objects that are reported by name."""
SORTED = json.JSONEncoder(sort_keys=True)
"""Built once, because `json.dumps` with options builds an encoder for each value."""


class JsonType(OutputType[JsonOutput]):
    """A JSON value."""

    column: ClassVar = "json"

    def reader(self, labels: Sequence[str]) -> Reader:
        return JsonReader(self.feature.decoder.json_schema)

    def metrics(self) -> "JsonMetrics":
        return JsonMetrics()

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most = self.feature.decoder.max_new_tokens
        return super().new_tokens(labels, count=count) if most is None else most


class JsonReader(Reader):
    """Finds a JSON value in a text and validates it against a schema."""

    accepts_null: ClassVar = True

    def __init__(self, schema: dict[str, Any] | None) -> None:
        self._validator = json_validator(schema) if schema is not None else None

    def read(self, text: str) -> Any:
        """Return the value. Raise ReadError."""
        return find_json(text, check=self.check)

    def read_member(self, member: Any) -> Any:
        """Return the member as it is. Raise ReadError if it violates the schema."""
        return self.check(member)

    def check(self, value: Any) -> Any:
        """Return the value unchanged.

        Raises:
            ReadError: It holds a number that no float can, or violates the schema; with the path in the value.
        """
        if not all_finite(value):
            raise ReadError("a number is too large")
        if self._validator is None:
            return value
        try:
            mistake = schema_mistake(self._validator, value)
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply for its schema") from None
        if mistake is not None:
            raise ReadError(mistake[:MAX_REASON])
        return value


def all_finite(value: Any) -> bool:
    """Return whether all numbers of a JSON value are finite. A float reads 1e400 as infinity."""
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    if isinstance(value, list):
        return all(map(all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


class JsonMetrics(Metrics):
    """exact_match, valid; for objects field_accuracy over all fields, and field.NAME for each; and those of slots."""

    def __init__(self) -> None:
        self.right = self.valid = 0
        self.fields: Counter[str] = Counter()
        self.right_fields: Counter[str] = Counter()
        self.all_fields = self.all_right_fields = 0
        self.slots = SlotMetrics()

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
        if isinstance(truth, dict):
            self.slots.add(truth, value if valid else None, right=right)
        return right

    def results(self, rows: int) -> dict[str, float]:
        metrics = {"exact_match": self.right / rows, "valid": self.valid / rows}
        if self.all_fields:
            metrics["field_accuracy"] = self.all_right_fields / self.all_fields
        by_name = {f"field.{name}": self.right_fields[name] / count for name, count in self.fields.items()}
        return metrics | by_name | self.slots.results()


class SlotMetrics:
    """Metrics of dialogue state tracking over the rows whose reference is an object.

    A slot is the path of a value that is no object, such as `hotel.area`. An unreadable answer has no slots.

    joint_accuracy: the share of rows in which the whole state is right, or joint goal accuracy (Henderson et al. 2014,
    "The Second Dialog State Tracking Challenge"). slot_accuracy: the mean over rows and slots of whether the slot is
    right, that is equal or absent in both states (Wu et al. 2019, "Transferable Multi-Domain State Generator"); its
    slots are those of all references, because there is no ontology. Most slots are absent in most states, so this is
    close to 1 even for an empty state. slot_f1: the micro-averaged F1 score of slots with their values, where slots
    that only the answer has count as well; slot.PATH: the same for one slot of the references. If there are no slots at
    all, these are the joint accuracy.
    """

    def __init__(self) -> None:
        self.rows = self.right_rows = 0
        self.true_counts: Counter[SlotPath] = Counter()
        self.answer_counts: Counter[SlotPath] = Counter()
        self.right_counts: Counter[SlotPath] = Counter()
        self.wrong_rows: Counter[SlotPath] = Counter()

    def add(self, truth: Any, value: Any, *, right: bool) -> None:
        """Add one row; `value` is None if the answer is unreadable."""
        wanted, answered = slots_of(truth), slots_of(value)
        shared = {path for path, content in wanted.items() if answered.get(path) == content}
        self.rows += 1
        self.right_rows += right
        self.true_counts.update(wanted.keys())
        self.answer_counts.update(answered.keys())
        self.right_counts.update(shared)
        self.wrong_rows.update((wanted.keys() | answered.keys()) - shared)

    def results(self) -> dict[str, float]:
        """Return the metrics of all rows so far; none without rows."""
        if not self.rows:
            return {}
        joint, slots = self.right_rows / self.rows, sorted(self.true_counts)
        wrong, count = sum(self.wrong_rows[path] for path in slots), self.rows * len(slots)
        total = self.true_counts.total() + self.answer_counts.total()
        by_slot = {
            f"slot.{'.'.join(path)}": 2 * self.right_counts[path] / (self.true_counts[path] + self.answer_counts[path])
            for path in slots[:MAX_FIELDS]
        }
        return {
            "joint_accuracy": joint,
            "slot_accuracy": 1 - wrong / count if count else joint,
            "slot_f1": 2 * self.right_counts.total() / total if total else joint,
            **by_slot,
        }


SlotPath = tuple[str, ...]
"""The keys of a slot, from the outermost."""


def slots_of(value: Any, path: SlotPath = ()) -> dict[SlotPath, str]:
    """Return the values of a state by path, in their canonical form. A value that is no object has no slots."""
    if not isinstance(value, dict):
        return {}
    slots: dict[SlotPath, str] = {}
    for name, content in value.items():
        inner = (*path, str(name))
        slots |= slots_of(content, inner) if isinstance(content, dict) and content else {inner: canonical(content)}
    return slots


def canonical(value: Any) -> str:
    """Return the same text for equal JSON values: sorted keys, 1.0 as 1; true and 1 differ."""
    return SORTED.encode(value if isinstance(value, str) else _whole(value))


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _whole(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
