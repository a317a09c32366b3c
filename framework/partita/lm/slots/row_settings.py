"""How the tokens of rows in slots are chosen, and when the rows end: the same for all rows, or by request.

Shapes: N rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch

from partita.lm.base import Generated, GenerationOptions, SlotRequest
from partita.lm.batch_generation.generation import answer_ends, finish, first_stop
from partita.lm.decoding.continuation import decode_continuation
from partita.lm.decoding.row import Row
from partita.lm.decoding.sampler import Sampler
from partita.lm.loaded_model import TextModel

MOST_KEPT = 64
"""Settings of requests that are kept for later requests with the same options."""
LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8."""


class RowSettings:
    """How the tokens of some rows are chosen, and when the rows end."""

    def __init__(self, lm: TextModel, options: GenerationOptions, *, seed: int) -> None:
        """Prepare the sampler.

        Args:
            lm: The model.
            options: Generation settings.
            seed: Seed of sampling.

        Raises:
            ModelError: A grammar is not valid.
        """
        self.options, self.tokenizer = options, lm.tokenizer
        self.ends = answer_ends(lm, options)
        texts = [one.grammar for one in options.constraints] if options.constraints else [options.grammar]
        grammars = [None if text is None else lm.grammar(text, ends=self.ends) for text in texts]
        self.sampler = Sampler(options, ends=self.ends, seed=seed, device=lm.device, grammars=grammars)
        self.tail = max((len(text.encode()) for text in options.stop), default=0) + LONGEST_CHARACTER
        """Number of last tokens that hold a stop string, if the text ends with one."""
        self.exact = options.logprobs or options.do_sample
        """Whether tokens are chosen from logits of torch's products.

        Reported log probabilities, and sampling among thousands of tokens, expose the last digits of every sum.
        """

    def has_ended(self, row: Row) -> bool:
        """Return whether a row ended with its last token."""
        if row.new[-1] in self.ends or len(row.new) >= row.request.max_new_tokens:
            return True
        if not self.options.stop:
            return False
        return first_stop(decode_continuation(self.tokenizer, row.new[-self.tail :]), self.options.stop) is not None

    def answer(self, row: Row) -> Generated:
        """Return the answer of a row that has ended."""
        return finish(
            row.new,
            limit=row.request.max_new_tokens,
            ends=self.ends,
            stop=self.options.stop,
            decode=partial(decode_continuation, self.tokenizer),
            scored=row if self.options.logprobs else None,
        )


class SettingsOfRows:
    """The settings of the rows in slots."""

    def __init__(self, lm: TextModel, options: GenerationOptions, *, seed: int) -> None:
        """Prepare the settings of requests without their own options."""
        self.lm, self.seed = lm, seed
        self.default = RowSettings(lm, options, seed=seed)
        self.kept: dict[str, RowSettings] = {}
        """Settings by the text of their options, so that requests with equal options share them."""

    def of(self, request: SlotRequest) -> RowSettings:
        """Return the settings of a request. Raise ModelError if its grammar is not valid."""
        if request.options is None:
            return self.default
        name = repr(request.options)
        if name not in self.kept:
            settings = RowSettings(self.lm, request.options, seed=self.seed)
            if len(self.kept) >= MOST_KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[name] = settings
        return self.kept[name]


def choose_tokens(
    logits_NV: torch.Tensor, rows: Sequence[Row], *, find_near_ties: bool
) -> tuple[torch.Tensor, list[int]]:
    """Return the next token of each row [N], chosen together for rows with the same settings, and near ties.

    Args:
        logits_NV: Logits of the rows.
        rows: The rows.
        find_near_ties: Whether to find near ties, of rows whose logits are not exact.
    """
    by_settings: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_settings.setdefault(id(row.settings), []).append(index)
    if len(by_settings) == 1:
        settings = rows[0].settings
        chosen: tuple[torch.Tensor, list[int]] = settings.sampler.choose(
            logits_NV, rows, find_near_ties=find_near_ties and not settings.exact
        )
        return chosen
    tokens_N, near_ties = torch.empty(len(rows), dtype=torch.long, device=logits_NV.device), list[int]()
    for indices in by_settings.values():
        settings, group_M = rows[indices[0]].settings, torch.tensor(indices, device=logits_NV.device)
        tokens_N[group_M], close = settings.sampler.choose(
            logits_NV[group_M], [rows[index] for index in indices], find_near_ties=find_near_ties and not settings.exact
        )
        near_ties += [indices[index] for index in close]
    return tokens_N, near_ties
