"""Rows to evaluate on: one per answer to score, and those for the loss, one per output if a turn is a sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partita.data.dialogue import Expander, expanded, for_loss, for_scores
from partita.data.labels import without_unknown_labels
from partita.data.ledger import Ledger
from partita.data.rows import RowKeys, Rows
from partita_schema.config import Config


@dataclass(frozen=True)
class EvalRows:
    """The rows of a split."""

    scored: Rows
    """One row per answer."""
    learned: Rows
    """Rows with a single answer in the loss: the same ones, or one per output of a turn answered in sequence."""
    answer_of_N: np.ndarray
    """For each row in `learned`, the index of its answer in `scored`."""

    def usable(self, indices_N: np.ndarray) -> np.ndarray:
        """Return the indices in `scored` of the answers to score, given those of the usable rows in `learned`."""
        unusable = np.ones(len(self.learned), dtype=np.bool_)
        unusable[indices_N] = False
        bad = np.unique(self.answer_of_N[unusable])
        return np.setdiff1d(np.arange(len(self.scored)), bad)


def build_eval_rows(
    rows: Rows,
    expander: Expander | None,
    config: Config,
    labels: Mapping[str, Sequence[str]],
    *,
    ledger: Ledger,
    split: str,
) -> EvalRows:
    """Expand dialogues into answers, and leave out turns with an unknown label, which no answer can equal.

    Args:
        rows: The rows of the split.
        expander: Expands dialogues; None if no input is a dialogue.
        config: The configuration.
        labels: Labels by output, from the training rows.
        ledger: Counts the rows that are left out.
        split: Name of the split in the ledger.
    """
    if expander is None:
        return EvalRows(rows, rows, np.arange(len(rows)))
    scored = expanded(rows, for_scores(expander))
    if not config.has_turn_outputs:
        return EvalRows(scored, scored, np.arange(len(scored)))
    learned = expanded(rows, for_loss(expander))
    answer_of_N = answer_indices(learned.keys, outputs=len(config.output_features) if expander.by_output else 1)
    known = without_unknown_labels(scored, config, labels, ledger=ledger, split=split)
    if len(known) < len(scored):
        # Keys are unique, so they identify the remaining answers.
        left = set(known.keys)
        kept_N = np.array([key in left for key in scored.keys], dtype=np.bool_)
        learned = learned.select(np.flatnonzero(kept_N[answer_of_N])).with_bad(learned.bad)
        answer_of_N = (np.cumsum(kept_N) - 1)[answer_of_N[kept_N[answer_of_N]]]
    return EvalRows(known, learned, answer_of_N)


def answer_indices(keys: RowKeys, *, outputs: int) -> np.ndarray:
    """Return the index of the answer that each row belongs to; answers have `outputs` rows each, in their order.

    A dialogue that cannot be read is a single row, and a single answer.
    """
    assert keys.examples is not None, "rows of dialogues are numbered"
    own_N3 = np.stack([keys.files, keys.numbers, (keys.examples - 1) // outputs], axis=1)
    changes_N = np.any(own_N3[1:] != own_N3[:-1], axis=1)
    return np.concatenate([[0], np.cumsum(changes_N)]) if len(keys) else np.zeros(0, dtype=np.int64)
