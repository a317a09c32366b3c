"""The result of an export: a comparison of its answers and its chat template with those of the model."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.export.answers import END, Answers
from partita.export.prompts import CheckPrompts
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted
from partita_schema.errors import ExportError

REPORT = "export.json"
"""Name of the report in the exported folder."""


@dataclass(frozen=True)
class AnswerAgreement:
    """Agreement of answers with those of the model."""

    rows_equal: int | None
    """Rows with the same answer to the end; None if answers were not compared."""
    tokens_equal: int = 0
    """Tokens before the first difference, summed over the rows."""
    tokens: int = 0
    """Tokens of the longer of both answers, summed over the rows; 0 for a head."""
    largest_difference: float | None = None
    """Largest difference of two outputs of a head; None for a model that writes text."""
    first_difference: str | None = None
    """The first row that differs, and how."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Result of `Model.export`, also written to export.json in the folder."""

    folder: str
    """The exported folder."""
    to: str
    """The format."""
    dtype: str
    """Type of the exported weights."""
    prompts: str
    """The prompts that were answered, such as `32 rows of the test split`."""
    rows: int
    """Number of prompts."""
    rows_equal: int | None = None
    """Rows with the same answer to the end; None if answers were not compared."""
    tokens: int = 0
    """Tokens of the longer of both answers, summed over the rows; 0 for a head."""
    tokens_equal: int = 0
    """Tokens before the first difference, summed over the rows."""
    largest_difference: float | None = None
    """Largest difference of two outputs of a head; None for a model that writes text."""
    first_difference: str | None = None
    """The first row that differs, and how; None without one."""
    prompts_equal: int | None = None
    """Prompts whose text has the same tokens in the export; None if prompts are not texts, or were not compared."""
    template_equal: bool | None = None
    """Whether the chat template renders the same bytes; None if there is none, or it was not compared."""
    min_agreement: float
    """Smallest agreement that is accepted."""
    notes: tuple[str, ...] = ()
    """Notes on the export."""
    reasons: tuple[str, ...] = ()
    """Why answers were not compared, or prompts have other tokens."""

    @property
    def compared(self) -> bool:
        """Whether the answers of the export were compared with those of the model."""
        return self.rows_equal is not None

    @property
    def agreement(self) -> float | None:
        """Share of equal tokens, or of equal rows for a head; None if answers were not compared."""
        if self.rows_equal is None:
            return None
        return self.tokens_equal / self.tokens if self.tokens else self.rows_equal / max(1, self.rows)

    @property
    def prompt_agreement(self) -> float:
        """Share of prompts whose text has the same tokens; 1 if they were not compared."""
        return 1.0 if self.prompts_equal is None else self.prompts_equal / max(1, self.rows)

    @property
    def passed(self) -> bool:
        """Whether the export agrees with the model; without a comparison, only if `min_agreement` is 0."""
        if self.agreement is None:
            return not self.min_agreement
        return (
            self.agreement >= self.min_agreement
            and self.prompt_agreement >= self.min_agreement
            and self.template_equal is not False
        )

    def content(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        own = {"compared": self.compared, "agreement": self.agreement, "passed": self.passed}
        return {**dataclasses.asdict(self), **own}

    def write(self, folder: Path) -> None:
        """Write the report into a folder."""
        written = {**self.content(), "folder": "."}
        write_atomically(folder / REPORT, json.dumps(written, indent=2) + "\n")

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"{self.folder}: {self.to}, {self.dtype}"]
        if self.agreement is None:
            lines.append("answers: not compared")
        elif self.largest_difference is not None:
            lines.append(
                f"outputs: {self.rows_equal} of {counted(self.rows, 'row')} equal, largest difference "
                f"{self.largest_difference:.2g} ({self.prompts})"
            )
        else:
            lines.append(
                f"answers: {self.rows_equal} of {counted(self.rows, 'row')} equal, {self.tokens_equal:,} of "
                f"{counted(self.tokens, 'token')} equal up to the first difference ({self.prompts})"
            )
        if self.first_difference is not None:
            lines.append(f"first difference: {self.first_difference}")
        if self.prompts_equal is not None and self.prompts_equal < self.rows:
            lines.append(f"tokens: {self.prompts_equal} of {counted(self.rows, 'prompt')} have the same tokens")
        if self.template_equal is not None:
            lines.append(f"chat template: {'renders the same bytes' if self.template_equal else 'differs'}")
        return [*lines, *self.reasons, *self.notes]

    def raise_if_failed(self) -> None:
        """Raise ExportError if the export does not agree with the model."""
        if self.passed:
            return
        if self.agreement is None:
            raise ExportError(f"{self.folder} is written, but {'; '.join(self.reasons)}. --min-agreement 0 accepts it")
        if self.prompt_agreement < self.min_agreement:
            raise ExportError(
                f"{self.folder}: the text of {counted(self.rows - (self.prompts_equal or 0), 'prompt')} of {self.rows} "
                f"has other tokens in the export than in the model, so it would answer other prompts: "
                f"{'; '.join(self.reasons)}"
            )
        if self.template_equal is False:
            raise ExportError(
                f"{self.folder}: its chat template renders other text than that of the model; do not use the export"
            )
        what = "tokens" if self.tokens else "rows"
        raise ExportError(
            f"{self.folder}: {self.agreement:.1%} of the {what} equal those of the model, and --min-agreement is "
            f"{self.min_agreement:.1%}; the first difference is {self.first_difference}. Choose a more exact type of "
            "the weights, or lower --min-agreement if the answers are good enough"
        )


def compare_answers(
    prompts: CheckPrompts, model: Answers, export: Answers, *, decode: Callable[[Sequence[int]], str], tolerance: float
) -> AnswerAgreement:
    """Compare the answers of an export with those of the model.

    Args:
        prompts: The prompts.
        model: Answers of the model.
        export: Answers of the export.
        decode: Returns the text of tokens.
        tolerance: Largest difference of equal outputs of a head, relative to the largest output of the row if that is
            above 1.
    """
    if model.outputs:
        return compare_outputs(prompts, model, export, tolerance=tolerance)
    same, longest, first, rows_equal = 0, 0, None, 0
    for name, ours, theirs in zip(prompts.names, model.tokens, export.tokens, strict=True):
        equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        equal = min(len(ours), len(theirs)) if equal is None else equal
        same, longest = same + equal, longest + max(len(ours), len(theirs))
        rows_equal += ours == theirs
        if ours != theirs and first is None:
            a, b = describe(ours, equal, decode), describe(theirs, equal, decode)
            first = f"row {name}, token {equal + 1}: {a} of the model, {b} of the export"
    return AnswerAgreement(rows_equal, same, longest, first_difference=first)


def describe(tokens: Sequence[int], index: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the token at an index for a message."""
    if index >= len(tokens):
        return "no token"
    return "the end" if tokens[index] == END else f"{decode([tokens[index]])!r} ({tokens[index]})"


def compare_outputs(prompts: CheckPrompts, model: Answers, export: Answers, *, tolerance: float) -> AnswerAgreement:
    """Compare the outputs of heads; see `compare_answers`."""
    largest, first, rows_equal = 0.0, None, 0
    for name, ours, theirs in zip(prompts.names, model.outputs, export.outputs, strict=True):
        difference = float(np.abs(ours - theirs).max())
        largest = max(largest, difference)
        equal = difference <= tolerance * max(1.0, float(np.abs(ours).max()))
        rows_equal += equal
        if not equal and first is None:
            place = np.unravel_index(int(np.abs(ours - theirs).argmax()), ours.shape)
            values = f"{ours[place]:.5g} of the model, {theirs[place]:.5g} of the export"
            first = f"row {name}, output {int(place[-1]) + 1}: {values}"
    return AnswerAgreement(rows_equal, largest_difference=largest, first_difference=first)
