"""What the model answered, by output: charts and tables of its type, and the rows that went wrong."""

from collections.abc import Callable, Sequence

from partita.report.evaluation import Evaluation, OutputColumn, SplitResults
from partita.report.preference_rows import labelled_of, pairs_of
from partita.report.section import Part, Section
from partita.report.sections.categories import category_parts
from partita.report.sections.labels import set_parts, tags_parts
from partita.report.sections.numbers import number_parts
from partita.report.sections.wrong_rows import continued_texts, largest_errors, wrong_rows

OutputParts = Callable[[OutputColumn], Sequence[Part]]
PARTS: dict[str, OutputParts] = {
    "category": category_parts,
    "number": number_parts,
    "score": number_parts,
    "set": set_parts,
    "tags": tags_parts,
}
"""What is drawn of an output, by its type; of other types, only the rows that went wrong."""
ROWS = {"number": largest_errors, "score": largest_errors}
"""Which rows are shown, by type of the output; of other types, those that are wrong."""


def answer_sections(results: Sequence[SplitResults]) -> list[Section]:
    """Return a section for each output of the most important split."""
    if not results:
        return []
    main = results[0]
    if not any(column.values for column in main.result.outputs.values()) or not has_answers(main.result):
        if pairs_of(main.result) or labelled_of(main.result):
            return []  # the section on preferences has their rows
        parts = continued_texts(main)
        return [Section(f"Rows with the highest loss ({main.split})", parts)] if parts else []
    return [
        Section(
            f"Answers: {name} ({column.type}, {main.split})",
            [*PARTS.get(column.type, no_parts)(column), *ROWS.get(column.type, wrong_rows)(main, name)],
        )
        for name, column in main.result.outputs.items()
    ]


def has_answers(evaluation: Evaluation) -> bool:
    """Return whether any row has a value or an answer."""
    values = (value for column in evaluation.outputs.values() for value in column.values)
    return any(answer is not None for answer in evaluation.answers) or any(value is not None for value in values)


def no_parts(column: OutputColumn) -> Sequence[Part]:
    """Return nothing: the rows that went wrong show everything."""
    return ()
