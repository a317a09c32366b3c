"""Parse an answer's text into the values of the output features.

With one output, the answer is its value. With several, the answer is one JSON object with the outputs' names as
keys, and each member is parsed by the type of its output. No text raises: an unreadable output is None with a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.outputs.json_values import JsonReader, compact, find_json
from partita.outputs.labels import LabelReader
from partita.outputs.numerals import NumberReader
from partita.outputs.reading import ReadError, clipped
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.features import CategoryOutput, JsonOutput, NumberOutput, OutputFeature


@dataclass(frozen=True)
class Decoded:
    """The values of an answer, by output name."""

    values: dict[str, Any]
    """Value of each output; None if it is unreadable."""
    errors: dict[str, str]
    """Why there is no value, for outputs without one."""
    raw: dict[str, str]
    """The part of the answer that each value was read from; the whole answer if it could not be parsed."""


class TextReader:
    """Reads the whole text."""

    def read(self, text: str) -> str:
        """Return the text without surrounding white space."""
        return text.strip()


Reader = TextReader | LabelReader | NumberReader | JsonReader


class Decoder:
    """Parses answers into the output features of a configuration."""

    def __init__(self, config: Config, *, labels: Mapping[str, tuple[str, ...]]) -> None:
        """Create the readers of all outputs.

        `labels` holds the labels found in the data, by output name, for categories without configured labels. Raises
        ConfigError if a category has no labels.
        """
        self._readers = {
            feature.name: _reader(feature, seen=labels.get(feature.name), path=f"output_features[{place}]")
            for place, feature in enumerate(config.output_features)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the file."""
        return tuple(self._readers)

    def decode(self, text: str) -> Decoded:
        """Parse an answer; never raises."""
        if len(self._readers) == 1:
            return _decoded({name: _read_text(reader, text) for name, reader in self._readers.items()})
        try:
            members: dict[str, Any] = find_json(text, check=self._is_answer)
        except ReadError as reason:
            return _decoded({name: _missing(reader, text, str(reason)) for name, reader in self._readers.items()})
        return _decoded({name: _read_member(reader, members, name, text) for name, reader in self._readers.items()})

    def without_answer(self, reason: str) -> Decoded:
        """Return the result for a row without an answer: no values, and this reason."""
        return _decoded({name: _Part(None, "", reason) for name in self._readers})

    def _is_answer(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ReadError(f"the answer is not a JSON object: {clipped(compact(value))}")
        if not any(name in value for name in self._readers):
            raise ReadError(f"the answer's object has none of the keys {', '.join(self._readers)}")
        return value


@dataclass(frozen=True)
class _Part:
    value: Any
    raw: str
    error: str | None = None


def _decoded(parts: Mapping[str, _Part]) -> Decoded:
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
    """Read one member of the answer's object; JSON values and numbers are used as they are."""
    member = members.get(name)
    if name not in members or (member is None and not isinstance(reader, JsonReader)):
        return _missing(reader, text, f"the answer has no {name!r}")
    raw = member if isinstance(member, str) else compact(member)
    try:
        if isinstance(reader, JsonReader):
            return _Part(reader.check(member), raw)
        if isinstance(reader, NumberReader) and isinstance(member, int | float) and not isinstance(member, bool):
            return _Part(reader.check(member), raw)
    except ReadError as reason:
        return _Part(None, raw, str(reason))
    return _read_text(reader, raw)


def _missing(reader: Reader, text: str, reason: str) -> _Part:
    """Return a category's fallback label for a missing output, else the reason."""
    fallback = reader.fallback if isinstance(reader, LabelReader) else None
    return _Part(fallback, text, reason if fallback is None else None)


def _reader(feature: OutputFeature, *, seen: tuple[str, ...] | None, path: str) -> Reader:
    if isinstance(feature, CategoryOutput):
        labels = feature.labels or seen
        if not labels:
            message = f"no labels of {feature.name} are known; write them as decoder: {{labels: [...]}}"
            raise ConfigError([Problem(path=f"{path}.decoder.labels", message=message)])
        return _label_reader(feature, labels)
    if isinstance(feature, NumberOutput):
        return NumberReader(feature.decoder)
    if isinstance(feature, JsonOutput):
        return JsonReader(feature.decoder.json_schema)
    return TextReader()


def _label_reader(feature: CategoryOutput, labels: tuple[str, ...]) -> LabelReader:
    rules, fallback = feature.decoder.match or {}, feature.fallback_label
    if not feature.preprocessing.lowercase:
        return LabelReader(labels, rules=rules, fallback=fallback)
    return LabelReader(
        [label.lower() for label in labels],
        rules={label.lower(): rule for label, rule in rules.items()},
        fallback=fallback.lower() if fallback else None,
    )
