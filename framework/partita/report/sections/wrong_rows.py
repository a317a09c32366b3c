"""The rows that went wrong: the prompt, the answer, and how it differs from the reference."""

import json
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from partita.report.evaluation import Evaluation, SplitResults
from partita.report.section import Paragraph, Part, Passage, Passages, Piece
from partita.report.value_metrics import numbers_of
from partita_schema.common.text import counted

MAX_ROWS = 20
"""Rows that are shown."""
MAX_CHARACTERS = 4_000
"""Characters of a text that are compared."""
MAX_PARTS = 800
"""Words and spaces, or lines, of a text that are compared."""
MAX_VALUE = 300
"""Characters of a value in a title."""
WORD = re.compile(r"\s+|\w+|[^\w\s]")
UNFOLDED = 3
"""Compared texts that are shown at first."""
COMPARED = ("text", "preference", "json")
"""Types whose answers are compared word by word."""
LEGEND = (
    Piece("only in the reference", "removed"),
    Piece(" "),
    Piece("only in the answer", "added"),
)


def wrong_rows(results: SplitResults, output: str) -> list[Part]:
    """Return the rows in which an output is wrong, those with the highest loss first.

    Args:
        results: The results of the split.
        output: Name of the output.
    """
    evaluation, column = results.result, results.result.outputs[output]
    wrong = [index for index, right in enumerate(column.rights) if right is False]
    if not wrong:
        judged = any(right is not None for right in column.rights)
        return [Paragraph("Every answer is right.")] if judged else []
    chosen = worst(evaluation, wrong)
    shown = "" if len(chosen) == len(wrong) else f", the {len(chosen)} worst of {len(wrong):,}"
    caption = f"Wrong answers{shown}"
    if column.type in COMPARED:
        passages = [compared(results, output, index) for index in chosen]
        return [Passages(caption, passages, legend=LEGEND, unfolded=UNFOLDED)]
    return [Passages(caption, [named(results, output, index) for index in chosen])]


def largest_errors(results: SplitResults, output: str) -> list[Part]:
    """Return the rows with the largest errors of a number.

    Args:
        results: The results of the split.
        output: Name of the output.
    """
    truths_N, values_N = numbers_of(results.result.outputs[output])
    with np.errstate(over="ignore"):
        errors_N = np.abs(values_N - truths_N)
    missing = [index for index, value in enumerate(values_N) if not np.isfinite(value)]
    known = [index for index in np.argsort(-errors_N).tolist() if errors_N[index] > 0]
    chosen = [*missing, *known][:MAX_ROWS]
    passages = [named(results, output, index) for index in chosen]
    caption = f"Rows without a number ({len(missing):,}), then the largest errors" if missing else "The largest errors"
    return [Passages(caption, passages)] if passages else [Paragraph("Every answer is right.")]


def continued_texts(results: SplitResults) -> list[Part]:
    """Return the rows with the highest loss of a model without answers; nothing if no row has a loss."""
    evaluation = results.result
    known = np.flatnonzero(np.isfinite(evaluation.losses_N)).tolist()
    if not known:
        return []
    passages = [
        Passage(title_of(evaluation, index), [Piece(evaluation.prompts[index])], facts=base_facts(results, index))
        for index in worst(evaluation, known)
    ]
    return [Passages(f"{counted(len(passages), 'row')} of {len(known):,}", passages, unfolded=UNFOLDED)]


def worst(evaluation: Evaluation, indices: Sequence[int]) -> list[int]:
    """Return at most MAX_ROWS rows, those with the highest loss first; rows without a loss keep their order."""
    losses_N = evaluation.losses_N
    return sorted(indices, key=lambda index: -losses_N[index] if np.isfinite(losses_N[index]) else 0.0)[:MAX_ROWS]


def title_of(evaluation: Evaluation, index: int) -> str:
    """Return the key of a row and its loss."""
    loss = evaluation.losses[index]
    return f"row {evaluation.keys[index]}" + ("" if loss is None else f", loss {loss:.3f}")


def prompt_of(evaluation: Evaluation, index: int) -> str:
    """Return the prompt of a row, in a dialogue with the turns before it."""
    context = evaluation.contexts[index]
    return f"{context}\nuser: {evaluation.prompts[index]}" if context else evaluation.prompts[index]


def named(results: SplitResults, output: str, index: int) -> Passage:
    """Return a row with a short value: the reference and the answer in its title.

    Args:
        results: The results of the split.
        output: Name of the output.
        index: Index of the row.
    """
    evaluation, column = results.result, results.result.outputs[output]
    reference, value = text_of(column.references[index]), text_of(column.values[index])
    title = f"{title_of(evaluation, index)}: {value} instead of {reference}"
    answer = evaluation.answers[index]
    facts = [("Answer", answer[:MAX_VALUE])] if answer is not None and answer.strip() != value else []
    return Passage(title, (), before=prompt_of(evaluation, index), facts=[*facts, *base_facts(results, index, output)])


def compared(results: SplitResults, output: str, index: int) -> Passage:
    """Return a row with a long value, whose differences from the reference are marked.

    Args:
        results: The results of the split.
        output: Name of the output.
        index: Index of the row.
    """
    evaluation, column = results.result, results.result.outputs[output]
    value = column.values[index]
    unreadable = value is None and not column.nulls[index]
    answer = evaluation.answers[index] if value is None else text_of(value, cut=False)
    pieces = word_diff(text_of(column.references[index], cut=False), answer or "", by_line=column.type == "json")
    facts = [("Note", "the answer cannot be read as a value")] if unreadable else []
    return Passage(title_of(evaluation, index), pieces, before=prompt_of(evaluation, index), facts=facts)


def base_facts(results: SplitResults, index: int, output: str | None = None) -> list[tuple[str, str]]:
    """Return what the base model answered, or its loss without an output.

    Args:
        results: The results of the split.
        index: Index of the row.
        output: Name of the output.
    """
    if results.base is None:
        return []
    if output is not None and output in results.base.outputs:
        return [("Base model", text_of(results.base.outputs[output].values[index]))]
    loss = results.base.losses[index]
    return [] if loss is None else [("Loss of the base model", f"{loss:.3f}")]


def text_of(value: Any, *, cut: bool = True) -> str:
    """Return a value as text; (none) if there is none. With `cut`, in one line of at most MAX_VALUE characters."""
    if value is None:
        return "(none)"
    if isinstance(value, float):
        return f"{value:.12g}"
    if not cut and isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, indent=2)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:MAX_VALUE]} ..." if cut and len(text) > MAX_VALUE else text


def word_diff(reference: str, answer: str, *, by_line: bool = False) -> list[Piece]:
    """Return the answer and what it lacks as pieces: common words, words only in the reference or only in the answer.

    Texts are compared up to MAX_CHARACTERS and MAX_PARTS. Frequent words of a long text match only beside others,
    because an answer that repeats a word would take minutes otherwise.

    Args:
        reference: The correct text.
        answer: The text that is compared with it.
        by_line: Whether to compare lines instead of words.
    """
    split = (lambda text: text.splitlines(keepends=True)) if by_line else WORD.findall
    wanted, given = split(reference[:MAX_CHARACTERS]), split(answer[:MAX_CHARACTERS])
    pieces = list[Piece]()
    matcher = SequenceMatcher(None, wanted[:MAX_PARTS], given[:MAX_PARTS])
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        removed, added = "".join(wanted[start:end]), "".join(given[other_start:other_end])
        if kind == "equal":
            pieces.append(Piece(added))
            continue
        pieces += [Piece(removed, "removed")] if removed else []
        pieces += [Piece(added, "added")] if added else []
    if max(len(wanted), len(given)) > MAX_PARTS or max(len(reference), len(answer)) > MAX_CHARACTERS:
        pieces.append(Piece(" ... (shortened)"))
    return pieces
