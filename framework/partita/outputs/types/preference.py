"""The output type preference: a text, which is compared with the chosen answer."""

from collections.abc import Callable, Sequence

from partita.outputs.base import OutputType, Reader
from partita.outputs.types.text import TextMetrics, TextReader
from partita_schema.sections.outputs.preference import PreferenceOutput


class PreferenceType(OutputType[PreferenceOutput]):
    """A text; the data has a chosen and a rejected one."""

    def reader(self, labels: Sequence[str]) -> Reader:
        return TextReader()

    def metrics(self) -> TextMetrics:
        return TextMetrics()

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most = self.feature.decoder.max_new_tokens
        return super().new_tokens(labels, count=count) if most is None else most
