"""Choice of labels by their probability: every token of every label is scored, and nothing is generated.

The score of a label is the sum of the log probabilities of its tokens and of any end token after them. It is not
normalized by length: it is the probability of the whole answer, and the probabilities of all possible answers sum to
one. Prompts are prefilled once. The tokens of all labels are then computed in one more pass, as a tree in which labels
share prefixes and a token attends only to its ancestors (Miao et al. 2023, "SpecInfer", section 4.2).

Shapes: N rows, V vocabulary, T tokens of the tree, C = 1 + T contexts: the end of the prompt, then the tokens of the
tree; L tokens of the longest prompt, E end tokens.
"""

from collections.abc import Sequence

import torch

from partita.lm.base import Generated, GenerationOptions, Label, SlotAnswer, SlotRequest
from partita.lm.batch_generation.generation import answer_ends
from partita.lm.decoding.row import NOT_NUMBERS, Row
from partita.lm.loaded_model import TextModel
from partita.lm.slots.slots import Slots, SlotSupport
from partita_schema.errors import ModelError

MOST_ELEMENTS = 2**27
"""Maximum number of logits of trees held at a time."""
LEAST_SCORE = -1e30
"""Score of impossible labels; JSON has no infinity."""
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


class LabelScorer:
    """Scores the labels of an answer after prompts in slots."""

    def __init__(self, lm: TextModel, options: GenerationOptions, labels: Sequence[Label]) -> None:
        """Build the tree of the labels. Raise ModelError if the model has no end token."""
        self.lm, self.logprobs = lm, options.logprobs
        ends = answer_ends(lm, options)
        if not ends:
            raise ModelError(NO_END)
        self.texts = [label.text for label in labels]
        self.tree = LabelTree([before_end(label, ends=ends) for label in labels])
        self.longest = max(map(len, self.tree.paths))
        self.width = len(self.tree.tokens)
        self.max_rows = max(1, MOST_ELEMENTS // (self.width * lm.vocabulary_size))
        """Maximum number of rows whose trees are computed in one pass."""
        self.tokens_T = torch.tensor(self.tree.tokens, device=lm.device)
        self.contexts_T = torch.tensor(self.tree.parents, device=lm.device) + 1
        self.depths_T = torch.tensor(self.tree.depths, device=lm.device)
        self.seen_TT = self.tree.attention_mask().to(lm.device)
        self.ends_E = torch.tensor(ends, device=lm.device)

    def scores(self, slots: Slots, first_NV: torch.Tensor, lengths: Sequence[int], *, first: int) -> list[list[float]]:
        """Return the scores of all labels for each row.

        Args:
            slots: The slots, with the prompts in those from `first` on.
            first_NV: Logits after the prompts.
            lengths: Length of each prompt in tokens.
            first: First slot.
        """
        rows = max(1, min(slots.prefill_tokens // self.width, self.max_rows))
        scores_of_rows: list[list[float]] = []
        for start in range(0, len(lengths), rows):
            part = slice(start, start + rows)
            later_NTV = self.read_labels(slots, lengths[part], first=first + start, start=max(lengths))
            scores_of_rows += self.sums(first_NV[part], later_NTV)
        for index, scores in enumerate(scores_of_rows):
            if any(score != score for score in scores):
                slots.pool.clear(first + index, start=slots.prefix)
        return scores_of_rows

    def read_labels(self, slots: Slots, lengths: Sequence[int], *, first: int, start: int) -> torch.Tensor:
        """Return logits [N, T, V] of the tree after prompts in slots from `first` on.

        Args:
            slots: The slots.
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
        slots.pool.layout.read(first, rows, start=start)
        return slots.run(self.tokens_T.expand(rows, -1), positions_NT, mask)

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
        values: list[list[float]] = torch.stack(scores, dim=1).clamp(min=LEAST_SCORE).tolist()
        return values

    def answer(self, request: SlotRequest, scores: Sequence[float]) -> SlotAnswer:
        """Return the most probable label, the first one of a tie."""
        if any(score != score for score in scores):
            return SlotAnswer(request, None, error=NOT_NUMBERS)
        return SlotAnswer(request, Generated.most_probable(self.texts, scores, logprobs=self.logprobs))

    def no_room(self, request: SlotRequest) -> str | None:
        """Return why a row cannot be scored; None if it can."""
        if request.max_new_tokens >= self.longest:
            return None
        return (
            f"the prompt has {len(request.input_ids):,} tokens and the context leaves room for "
            f"{request.max_new_tokens:,} more, but the longest label has {self.longest:,}"
        )


class ScoringSlots(Slots):
    """Slots in which a request is generated or scored, by its constraint; a scored row finishes with its prefill."""

    def __init__(
        self,
        lm: TextModel,
        options: GenerationOptions,
        *,
        slots: int,
        tokens: int,
        prefix: Sequence[int],
        seed: int,
        support: SlotSupport,
    ) -> None:
        """Allocate slots and prefill the prefix.

        Args:
            lm: The model.
            options: Generation settings with labels.
            slots: Number of slots.
            tokens: Maximum length of a row, prompt and new tokens.
            prefix: Tokens that all prompts start with.
            seed: Seed of sampling.
            support: What the model supports.
        """
        labels = [one.labels for one in options.constraints] if options.constraints else [options.labels]
        self.scorers = [LabelScorer(lm, options, known) if known else None for known in labels]
        width = max(scorer.width for scorer in self.scorers if scorer is not None)
        super().__init__(
            lm, options, slots=slots, tokens=tokens + width, prefix=prefix, seed=seed, support=support, exact=True
        )

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Prefill prompts, score the labels of those that have labels, and choose the first token of the others."""
        by_constraint: dict[int, list[SlotRequest]] = {}
        for request in requests:
            by_constraint.setdefault(request.constraint_index, []).append(request)
        answers, others = [], list[SlotRequest]()
        for constraint, group in by_constraint.items():
            scorer = self.scorers[constraint]
            if scorer is None:
                others += group
            else:
                answers += self.score(scorer, group)
        # Last, because from here on the rows are active: nothing can fail after it.
        return [*answers, *super().admit(others)] if others else answers

    def step(self) -> list[SlotAnswer]:
        """Decode one token for every active row, if there are any; return rows that ended with it."""
        return super().step() if self.rows else []

    def score(self, scorer: LabelScorer, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Return the labels that are chosen for prompts."""
        reasons = [scorer.no_room(request) for request in requests]
        crowded = [
            SlotAnswer(request, None, error=reason)
            for request, reason in zip(requests, reasons, strict=True)
            if reason is not None
        ]
        asked = [request for request, reason in zip(requests, reasons, strict=True) if reason is None]
        if not asked:
            return crowded
        by_slot, first_NV = self.prefill(asked)
        lengths = [len(request.input_ids) for request in by_slot]
        scores = scorer.scores(self, first_NV, lengths, first=len(self.rows))
        answers = [
            scorer.answer(request, scores_of_row) for request, scores_of_row in zip(by_slot, scores, strict=True)
        ]
        for index, answer in enumerate(answers):
            if answer.request.keep and answer.generated is not None:
                self.kept.keep(Row(answer.request), slot=len(self.rows) + index)
        return [*crowded, *answers]


def before_end(label: Label, *, ends: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a label before its first end token."""
    end = next((index for index, token in enumerate(label.ids) if token in ends), len(label.ids))
    return label.ids[:end]
