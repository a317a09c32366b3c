"""Parse an answer's text into the values of the output features.

With one output, the answer is its value. With several, the answer is one JSON object with the outputs' names as
keys, and each member is parsed by the type of its output. If the outputs of a dialogue turn are answered in sequence,
the members are the texts of their answers. No text raises: an unreadable output is None with a reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.outputs.base import Reader, ReadError, clip
from partita.outputs.find_json import find_json
from partita.outputs.registry import output_type
from partita_schema.cells import compact_json
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.outputs import OutputFeature


@dataclass(frozen=True)
class Decoded:
    """The values of an answer, by output name."""

    values: dict[str, Any]
    """Value of each output; None if it is unreadable."""
    errors: dict[str, str]
    """Why there is no value, for outputs without one."""
    raw: dict[str, str]
    """The part of the answer that each value was read from; the whole answer if it could not be parsed."""


class Decoder:
    """Parses answers into the output features of a configuration."""

    def __init__(self, config: Config, *, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Create the readers of all outputs.

        `labels` holds the labels found in the data, by output name, for outputs without configured labels. Raises
        ConfigError if an output has no labels.
        """
        self._in_sequence = config.answers_in_sequence
        self._readers = {
            feature.name: _reader(feature, seen=labels.get(feature.name, ()), path=f"output_features[{index}]")
            for index, feature in enumerate(config.output_features)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the file."""
        return tuple(self._readers)

    def decode(self, text: str) -> Decoded:
        """Parse an answer; never raises."""
        if len(self._readers) == 1:
            return _combine({name: _read_text(reader, text) for name, reader in self._readers.items()})
        if self._in_sequence:
            texts: dict[str, str] = json.loads(text)
            return _combine({name: _read_text(reader, texts[name]) for name, reader in self._readers.items()})
        try:
            members: dict[str, Any] = find_json(text, check=self._is_answer)
        except ReadError as reason:
            return _combine({name: _missing(reader, text, str(reason)) for name, reader in self._readers.items()})
        return _combine({name: _read_member(reader, members, name, text) for name, reader in self._readers.items()})

    def without_answer(self, reason: str) -> Decoded:
        """Return the result for a row without an answer: no values, and this reason."""
        return _combine({name: _Part(None, "", reason) for name in self._readers})

    def _is_answer(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ReadError(f"the answer is not a JSON object: {clip(compact_json(value))}")
        if not any(name in value for name in self._readers):
            raise ReadError(f"the answer's object has none of the keys {', '.join(self._readers)}")
        return value


@dataclass(frozen=True)
class _Part:
    value: Any
    raw: str
    error: str | None = None


def _combine(parts: Mapping[str, _Part]) -> Decoded:
    return Decoded(
        values={name: part.value for name, part in parts.items()},
        errors={name: part.error for name, part in parts.items() if part.error is not None},
        raw={name: part.raw for name, part in parts.items()},
    )


def _read_text(reader: Reader, text: str) -> _Part:
    try:
        return _Part(reader.read(text), text)
    except ReadError as reason:
        return _Part(None, text, str(reason))


def _read_member(reader: Reader, members: Mapping[str, Any], name: str, text: str) -> _Part:
    """Read one member of the answer's object."""
    member = members.get(name)
    if name not in members or (member is None and not reader.accepts_null):
        return _missing(reader, text, f"the answer has no {name!r}")
    raw = member if isinstance(member, str) else compact_json(member)
    try:
        return _Part(reader.read_member(member), raw)
    except ReadError as reason:
        return _Part(None, raw, str(reason))


def _missing(reader: Reader, text: str, reason: str) -> _Part:
    try:
        return _Part(reader.missing(reason), text)
    except ReadError as error:
        return _Part(None, text, str(error))


def _reader(feature: OutputFeature, *, seen: Sequence[str], path: str) -> Reader:
    labels = feature.answer_labels(seen)
    if feature.has_labels and not labels:
        message = f"no labels of {feature.name} are known; write them as decoder: {{labels: [...]}}"
        raise ConfigError([Problem(path=f"{path}.decoder.labels", message=message)])
    return output_type(feature).reader(labels)
