"""Choice of labels by their probability: every token of every label is scored, and nothing is generated.

The score of a label is the sum of the log probabilities of its tokens and of any end token after them. It is not
normalized by length: it is the probability of the whole answer, and the probabilities of all possible answers sum to
one. Prompts are prefilled once. The tokens of all labels are then computed in one more pass, as a tree in which labels
share prefixes and a token attends only to its ancestors (Miao et al. 2023, "SpecInfer", section 4.2).

Shapes: N rows, V vocabulary, T tokens of the tree, C = 1 + T contexts: the end of the prompt, then the tokens of the
tree; L tokens of the longest prompt, E end tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from partita.lm.base import Generated, GenerationOptions, Label, SlotAnswer, SlotRequest
from partita.lm.generation import end_token_ids
from partita.lm.loaded_model import LoadedModel
from partita.lm.row import NOT_NUMBERS
from partita.lm.slots import Slots, SlotWay
from partita_schema.errors import ModelError

MOST_ELEMENTS = 2**27
"""Maximum number of logits of trees held at a time."""
NO_END = "decoder.scoring: the model has no token that ends an answer; remove scoring"


class LabelTree:
    """The tokens of labels, as a tree in which labels share prefixes."""

    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        """Build the tree of `labels`, each given by its tokens."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        """Index of each token's parent; -1 for the first token of a label."""
        self.paths = [self.add(ids) for ids in labels]
        """Indices of the tokens of each label."""

    def add(self, ids: Sequence[int]) -> list[int]:
        """Add the tokens of a label; return their indices."""
        path: list[int] = []
        for token in ids:
            parent = path[-1] if path else -1
            known = (p for p, held in enumerate(self.tokens) if held == token and self.parents[p] == parent)
            index = next(known, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
            path.append(index)
        return path

    @property
    def depths(self) -> list[int]:
        """Number of ancestors of each token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def attention_mask(self) -> torch.Tensor:
        """Return which tokens each token attends to, including itself [T, T]."""
        seen_TT = torch.eye(len(self.tokens), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                seen_TT[index] |= seen_TT[parent]
        return seen_TT


class ScoringSlots:
    """Implements `partita.lm.base.AnsweringSlots` by scoring labels: rows finish with prefill."""

    live: Sequence[Any] = ()

    def __init__(
        self,
        lm: LoadedModel,
        options: GenerationOptions,
        *,
        slots: int,
        tokens: int,
        prefix: Sequence[int],
        way: SlotWay,
    ) -> None:
        """Allocate slots and prefill the prefix.

        Args:
            lm: The model.
            options: Generation settings with labels.
            slots: Number of slots.
            tokens: Maximum length of a row, prompt and new tokens.
            prefix: Tokens that all prompts start with.
            way: What the model supports.
        """
        self.lm, self.options = lm, options
        ends = sorted({*end_token_ids(lm.base, tokenizer=lm.tokenizer), *options.stop_token_ids})
        if not ends:
            raise ModelError(NO_END)
        self.tree = LabelTree([before_end(label, ends=ends) for label in options.labels])
        self.longest = max(map(len, self.tree.paths))
        width = len(self.tree.tokens)
        self.slots = Slots(
            lm, options.free, slots=slots, tokens=tokens + width, prefix=prefix, seed=0, way=way, exact=True
        )
        self.tokens_T = torch.tensor(self.tree.tokens, device=lm.device)
        self.contexts_T = torch.tensor(self.tree.parents, device=lm.device) + 1
        self.depths_T = torch.tensor(self.tree.depths, device=lm.device)
        self.seen_TT = self.tree.attention_mask().to(lm.device)
        self.ends_E = torch.tensor(ends, device=lm.device)
        self.rows = max(1, min(self.slots.read_tokens // width, MOST_ELEMENTS // (width * lm.vocabulary_size)))
        """Number of rows whose trees are computed in one pass."""

    def readable(self, tokens: int, most: int) -> int:
        """Return how many prompts to prefill in one pass, from 1 to `most`."""
        return self.slots.readable(tokens, most)

    def read_length(self, tokens: int) -> int:
        """Return the padded prefill length per prompt if the longest has `tokens` after the prefix."""
        return self.slots.read_length(tokens)

    def unread(self, request: SlotRequest) -> int:
        """Return the number of prompt tokens after the prefix: nothing is cached."""
        return self.slots.unread(request)

    def forget(self, row: int) -> None:
        """Do nothing: nothing is cached."""

    def close(self) -> None:
        """Restore the model to its previous state."""
        self.slots.close()

    def step(self) -> list[SlotAnswer]:
        """Return nothing: no row needs another step."""
        return []

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Prefill prompts, score the labels of each, and choose."""
        crowded = [request for request in requests if request.max_new_tokens < self.longest]
        asked = [request for request in requests if request.max_new_tokens >= self.longest]
        answers = [SlotAnswer(request, None, error=self.no_room(request)) for request in crowded]
        return [*answers, *map(self.answer, asked, self.scores(asked))] if asked else answers

    def scores(self, requests: Sequence[SlotRequest]) -> list[list[float]]:
        """Return the scores of all labels for each row."""
        prefix = self.slots.prefix
        prompts = [list(request.input_ids[prefix:]) for request in requests]
        first_NV = self.slots.forward(prompts, first=0, start=prefix)
        lengths = [len(request.input_ids) for request in requests]
        scores_of_rows: list[list[float]] = []
        for start in range(0, len(requests), self.rows):
            part = slice(start, start + self.rows)
            later_NTV = self.read_labels(lengths[part], first=start, start=max(lengths))
            scores_of_rows += self.sums(first_NV[part], later_NTV)
        for index, scores in enumerate(scores_of_rows):
            if any(score != score for score in scores):
                self.slots.pool.clear(index, start=prefix)
        return scores_of_rows

    def read_labels(self, lengths: Sequence[int], *, first: int, start: int) -> torch.Tensor:
        """Return logits [N, T, V] of the tree after prompts in slots from `first` on.

        Args:
            lengths: Length of each prompt in tokens.
            first: First slot.
            start: Position of the tree in the slots, after the longest prompt.
        """
        rows, device = len(lengths), self.lm.device
        lengths_N1 = torch.tensor(lengths, device=device)[:, None]
        positions_NT = lengths_N1 + self.depths_T
        prompts_NTL = (torch.arange(start, device=device) < lengths_N1)[:, None].expand(-1, len(self.tokens_T), -1)
        seen_NTW = torch.cat([prompts_NTL, self.seen_TT.expand(rows, -1, -1)], dim=2)
        mask = torch.zeros(seen_NTW.shape, dtype=self.lm.base.dtype, device=device)
        mask = mask.masked_fill_(~seen_NTW, -torch.inf)[:, None]
        self.slots.pool.layout.read(first, rows, start=start)
        return self.slots.run(self.tokens_T.expand(rows, -1), positions_NT, mask)

    def sums(self, first_NV: torch.Tensor, later_NTV: torch.Tensor) -> list[list[float]]:
        """Return the scores of all labels for each row, from the logits after the prompt and after each token."""
        logits_NCV = torch.cat([first_NV[:, None], later_NTV], dim=1).float()
        totals_NC = logits_NCV.logsumexp(-1)
        tokens_NT = logits_NCV[:, self.contexts_T, self.tokens_T] - totals_NC[:, self.contexts_T]
        ends_NC = logits_NCV[:, :, self.ends_E].logsumexp(-1) - totals_NC
        tokens_NT, ends_NC = tokens_NT.double(), ends_NC.double()
        lasts = [path[-1] + 1 if path else 0 for path in self.tree.paths]
        scores = [
            tokens_NT[:, path].sum(1) + ends_NC[:, last] for path, last in zip(self.tree.paths, lasts, strict=True)
        ]
        # JSON has no infinity, the score of an impossible label.
        values: list[list[float]] = torch.stack(scores, dim=1).clamp(min=-1e30).tolist()
        return values

    def answer(self, request: SlotRequest, scores: Sequence[float]) -> SlotAnswer:
        """Return the most probable label, the first one of a tie."""
        if any(score != score for score in scores):
            return SlotAnswer(request, None, error=NOT_NUMBERS)
        best = max(range(len(scores)), key=lambda index: scores[index])
        texts = [label.text for label in self.options.labels]
        logprob = scores[best] if self.options.logprobs else None
        by_label = dict(zip(texts, scores, strict=True))
        return SlotAnswer(request, Generated((), texts[best], "stop", logprob, scores=by_label))

    def no_room(self, request: SlotRequest) -> str:
        """Return why a row cannot be scored."""
        return (
            f"the prompt has {len(request.input_ids):,} tokens and the context leaves room for "
            f"{request.max_new_tokens:,} more, but the longest label has {self.longest:,}"
        )


def before_end(label: Label, *, ends: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a label before its first end token."""
    end = next((index for index, token in enumerate(label.ids) if token in ends), len(label.ids))
    return label.ids[:end]
