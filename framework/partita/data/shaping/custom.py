"""What writes rows as text, from outside: `data.formatter`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partita.data.parts import load_part, source_digest
from partita.data.shaping.formatter import FormattedText, Row
from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.errors import DataError


class CustomFormatter:
    """`data.formatter`: a class of the user's, made as `Class(config, tokenizer=...)`, in place of Formatter.

    A copy in another process loads the class again, from where this one found it.
    """

    chat = False
    """The model's chat template is the class's own business."""

    def __init__(self, config: Config, *, tokenizer: Any, folder: Path | None) -> None:
        """Raises ConfigError where there is no such class."""
        assert config.data.formatter is not None
        self.config, self.tokenizer, self._folder = config, tokenizer, folder
        self._target = config.data.formatter
        found = load_part(self._target, key="data.formatter", folder=folder)
        self.fingerprint = source_digest(found)
        """A hash of the module's text: another text may write rows otherwise."""
        self._shaper = found(config, tokenizer=tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.config, self.tokenizer, self._folder)

    def format_all(self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool = True) -> list[FormattedText]:
        """Rows as text. Raises DataError where the class does not give a FormattedText for each row."""
        found = list(self._shaper.format_all(rows, keys, supervised=supervised))
        if len(found) != len(rows):
            texts, given = counted(len(found), "text"), counted(len(rows), "row")
            raise DataError(f"data.formatter: {self._target} gave {texts} for {given}; give a FormattedText for each")
        odd = next((type(item).__name__ for item in found if not isinstance(item, FormattedText)), None)
        if odd is not None:
            raise DataError(f"data.formatter: {self._target} gave a {odd} for a row; give a FormattedText for each")
        return found


def rebuilt(config: Config, tokenizer: Any, folder: Path | None) -> CustomFormatter:
    return CustomFormatter(config, tokenizer=tokenizer, folder=folder)
