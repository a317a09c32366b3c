"""A user's formatter class: `data.formatter`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partita.data.formatting.base import FormattedText, Row
from partita.data.parts import load_part, source_digest
from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.errors import DataError


class CustomFormatter:
    """`data.formatter`: a user's class, created as `Class(config, tokenizer=...)`, in place of Formatter.

    Unpickling loads the class again from the same module.
    """

    chat = False
    """Whether to use a chat template is up to the class."""

    def __init__(self, config: Config, *, tokenizer: Any, folder: Path | None) -> None:
        """Load the class. Raise ConfigError if there is none."""
        assert config.data.formatter is not None
        self.config, self.tokenizer, self._folder = config, tokenizer, folder
        self._target = config.data.formatter
        formatter_class = load_part(self._target, key="data.formatter", folder=folder)
        self.fingerprint = source_digest(formatter_class)
        """A hash of the module's source, since a changed module may format rows differently."""
        self._shaper = formatter_class(config, tokenizer=tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.config, self.tokenizer, self._folder)

    def format_all(self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool = True) -> list[FormattedText]:
        """Return rows as text. Raise DataError if the class does not return a FormattedText for each row."""
        results = list(self._shaper.format_all(rows, keys, supervised=supervised))
        if len(results) != len(rows):
            texts, requested = counted(len(results), "text"), counted(len(rows), "row")
            raise DataError(
                f"data.formatter: {self._target} gave {texts} for {requested}; give a FormattedText for each"
            )
        odd = next((type(item).__name__ for item in results if not isinstance(item, FormattedText)), None)
        if odd is not None:
            raise DataError(f"data.formatter: {self._target} gave a {odd} for a row; give a FormattedText for each")
        return results


def rebuilt(config: Config, tokenizer: Any, folder: Path | None) -> CustomFormatter:
    return CustomFormatter(config, tokenizer=tokenizer, folder=folder)
