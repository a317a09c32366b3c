"""The labels of outputs: those of the training rows, and the rows of other splits whose labels are unknown."""

import logging
from collections.abc import Mapping, Sequence

from partita.data.dialogue import build_expander, expanded, for_scores
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita_schema.config import Config
from partita_schema.rows import check_rows, row_schema

logger = logging.getLogger(__name__)


def find_labels(config: Config, rows: Rows | None) -> dict[str, tuple[str, ...]]:
    """Return the labels of each output that has any, by name: the configured ones, else those of the good rows, sorted.

    They are as in answers, in lower case if the output says so. Labels are empty if there are neither.
    """
    outputs = [feature for feature in config.output_features if feature.has_labels]
    unknown = [feature for feature in outputs if feature.labels is None]
    seen: dict[str, set[str]] = {feature.name: set() for feature in unknown}
    if unknown and rows is not None:
        schema = row_schema(config, supervised=True)
        expander = build_expander(config, mode="squash")
        for chunk in expanded(rows, None if expander is None else for_scores(expander)).iterate():
            for row in check_rows(schema, chunk).clean.values():
                for feature in unknown:
                    seen[feature.name].update(feature.labels_in(row[feature.name]))
    for feature in unknown:
        if advice := feature.label_advice(sorted(seen[feature.name])):
            logger.warning("%s: %s", feature.name, advice)
    return {
        feature.name: tuple(sorted(seen[feature.name])) if feature.labels is None else feature.answer_labels(())
        for feature in outputs
    }


def rows_with_known_labels(
    rows: Rows, config: Config, labels: Mapping[str, Sequence[str]], *, ledger: Ledger, split: str
) -> Rows:
    """Return `without_unknown_labels`; dialogues unchanged, whose turns are checked one by one in `build_eval_rows`.

    Args:
        rows: Rows to evaluate on.
        config: The configuration.
        labels: Labels by output, from the training rows.
        ledger: Records the rows that are left out.
        split: Name of the split in the ledger.
    """
    if config.dialogue_input is not None:
        return rows
    return without_unknown_labels(rows, config, labels, ledger=ledger, split=split)


def without_unknown_labels(
    rows: Rows, config: Config, labels: Mapping[str, Sequence[str]], *, ledger: Ledger, split: str
) -> Rows:
    """Return the rows without those whose label is none of `labels`, which no answer can equal.

    Outputs with configured labels are not checked; an unknown label is an invalid value there.

    Args:
        rows: Rows to evaluate on.
        config: The configuration.
        labels: Labels by output, from the training rows.
        ledger: Records the rows that are left out; they do not count towards its limit.
        split: Name of the split in the ledger.
    """
    outputs = [feature for feature in config.output_features if feature.has_labels and feature.labels is None]
    if not outputs:
        return rows
    known = {feature.name: frozenset(labels[feature.name]) for feature in outputs}
    schema, unknown = row_schema(config, supervised=True), set[int]()
    start = 0
    for chunk in rows.iterate():
        for place, values in check_rows(schema, chunk).clean.items():
            reasons = [
                f"column {feature.source_column}: {feature.why_unknown(label, labels[feature.name])}"
                for feature in outputs
                for label in feature.labels_in(values[feature.name])
                if label not in known[feature.name]
            ]
            if reasons:
                index, row = start + place, chunk[place]
                unknown.add(index)
                file, number = rows.keys.location(index)
                ledger.leave_out(
                    rows.key(index), reasons, split=split, file=file, number=number, row=row, accepted=True
                )
        start += len(chunk)
    if not unknown:
        return rows
    return rows.select([index for index in range(len(rows)) if index not in unknown]).with_bad(rows.bad)
