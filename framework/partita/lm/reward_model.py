"""A reward model: a transformers model with a head of one output, which scores answers to prompts.

The score of an answer is read at its last token that is not the pad token, never at padding. That is where
`AutoModelForSequenceClassification` of transformers reads it in a row with this answer alone, so scores are the same.

Both answers of a pair follow their prompt in one row, which is computed once; see `partita.lm.branches`. Where a model
takes no mask of pairs of tokens, each answer is a separate row.

Shapes: B lines, T tokens of the longest, N loss tokens, R rows, A = 2 answers of a row.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_prompts import right_padded
from partita.lm.branches import BranchWay, branch_inputs, find_branch_way, separate_rows
from partita.lm.head_model import HeadModel
from partita.lm.heads import head_modules
from partita.lm.marks import without_marks
from partita.lm.reward_head import score_answers
from partita_trainers.base import Batch

logger = logging.getLogger(__name__)

ANSWERS = 2
"""Answers of a row; a row with one answer has its score twice."""


class ScorePositions:
    """Reads the scores of a module at several positions of each line, in place of one per line.

    transformers computes the score of every token and then selects one of them. Between these steps, the scores of a
    line are replaced by those at the positions, so that the module returns them whatever it selects, and gradients and
    hooks see an ordinary forward pass.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        """Register the hook on the layer that computes the scores; None if there is no such layer."""
        self.columns_BK: torch.Tensor | None = None
        self.attached = layer is not None
        if layer is not None:
            layer.register_forward_hook(self.select)

    def select(self, layer: nn.Module, inputs: tuple[Any, ...], scores_BT1: torch.Tensor) -> torch.Tensor | None:
        """Replace scores [B, T, 1] by those of each line [B, T, K]."""
        if self.columns_BK is None:
            return None
        scores_BK = scores_BT1[:, :, 0].gather(1, self.columns_BK)
        return scores_BK[:, None].expand(-1, scores_BT1.shape[1], -1)

    @contextmanager
    def only(self, columns_BK: torch.Tensor) -> Iterator[None]:
        """Read the scores of these columns in the context."""
        self.columns_BK = columns_BK
        try:
            yield
        finally:
            self.columns_BK = None


class RewardModel(HeadModel):
    """Implements `partita.lm.base.GenerativeModel` for a model that scores answers; created by `load_model`."""

    scores_answers = True
    """A request may hold two answers."""

    def __post_init__(self) -> None:
        """Find the layer that computes scores."""
        super().__post_init__()
        self.positions = ScorePositions(self._score_layer())

    def _score_layer(self) -> nn.Module | None:
        """Return the layer that computes the score of every token; None for an encoder, which pools tokens first."""
        names = head_modules(self.base)
        layer: Any = getattr(self.base, names[0]) if len(names) == 1 else None
        weight = getattr(getattr(layer, "original_module", layer), "weight", None)
        is_linear = weight is not None and weight.ndim == 2 and len(weight) == 1
        return layer if is_linear and self.takes_branches else None

    @property
    def takes_branches(self) -> bool:
        """Whether the model is a decoder, whose tokens attend only to those before them."""
        from partita.lm.kinds import describes_encoder

        return not describes_encoder(self.base.config)

    @cached_property
    def branch_way(self) -> BranchWay:
        """How rows with two answers are computed."""
        if not self.positions.attached:
            return BranchWay(f"{type(self.base).__name__} computes no score for each token")
        return find_branch_way(self)

    # Training

    def answer_scores(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scores of the answers of each row, the chosen one first, float32 [R, 2].

        An answer that a row does not have gets the score of its first one. `module` is `self.module`, or a wrapper of
        it.
        """
        ends_RA = self.answer_ends(batch)
        noise = self.noise.for_rows(batch) if self.noise is not None else nullcontext()
        with noise:
            if batch.position_ids_BT is not None and self.branch_way.reason is None:
                return self._scores_of_branches(module, batch, ends_RA)
            return self._scores_of_rows(module, batch, ends_RA)

    def answer_ends(self, batch: Batch) -> torch.Tensor:
        """Return the number of the loss token at which the score of each answer is read, int64 [R, 2].

        It is the last one of the answer that is not the pad token. Loss tokens have the order of `loss_token_rows`.
        """
        is_loss_BT = batch.labels_BT[:, 1:] != -100
        is_padding_N = batch.input_ids_BT[:, 1:][is_loss_BT] == self.tokenizer.pad_token_id
        answer_N = ANSWERS * batch.loss_token_rows + batch.loss_token_branches
        number_N = torch.arange(len(answer_N))
        ends_RA = torch.full((ANSWERS * batch.rows,), -1)
        for chosen_N in (torch.ones_like(is_padding_N), ~is_padding_N):
            ends_RA = ends_RA.scatter_reduce(0, answer_N[chosen_N], number_N[chosen_N], "amax", include_self=False)
        ends_RA = ends_RA.view(batch.rows, ANSWERS)
        return torch.where(ends_RA < 0, ends_RA[:, :1].clamp(min=0), ends_RA)

    def _scores_of_branches(self, module: nn.Module, batch: Batch, ends_RA: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, 2], with one pass over each line."""
        assert batch.position_ids_BT is not None
        line_N, column_N = (batch.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)
        lines_n, columns_n = line_N[ends_RA.flatten()], column_N[ends_RA.flatten()] + 1
        number_n = places_in_lines(lines_n)
        columns_BK = torch.zeros(batch.lines, int(number_n.max()) + 1, dtype=torch.int64)
        columns_BK[lines_n, number_n] = columns_n
        inputs = branch_inputs(batch.position_ids_BT.to(self.device), model=self.base)
        with self.positions.only(columns_BK.to(self.device)):
            output = module(input_ids=batch.input_ids_BT.to(self.device), **inputs, use_cache=False)
        scores_BK: torch.Tensor = output.logits
        return scores_BK[lines_n.to(self.device), number_n.to(self.device)].view(-1, ANSWERS).float()

    def _scores_of_rows(self, module: nn.Module, batch: Batch, ends_RA: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, 2], with each answer in a separate row."""
        rows = separate_rows(batch) if batch.position_ids_BT is not None else batch
        line_N = (rows.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)[0]
        scores_L1: torch.Tensor = self.forward(module, rows).logits
        return scores_L1[:, 0][line_N[ends_RA.flatten()].to(self.device)].view(-1, ANSWERS).float()

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return a score of each line: ranks without rows run the model with it."""
        scores_B1: torch.Tensor = self.forward(module, batch).logits
        return scores_B1[:, 0].float()

    def check_loss(self) -> None:
        """Test how rows with two answers are computed, before the weights are sharded."""
        logger.debug("branches: %s", self.branch_way)

    def check_packing(self) -> None:
        """Do nothing: rows in a line are masked, or computed as separate rows."""

    # Inference

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Score the answers of each request in one batch; keep the order. An answer is a JSON array of its scores."""
        if not requests:
            return []
        batch, counts = self.prompts(requests), [answers_of(request) for request in requests]
        with self.evaluating(), torch.inference_mode():
            return score_answers(self.answer_scores(self.module, batch), counts)

    def prompts(self, requests: Sequence[GenerationRequest]) -> Batch:
        """Return requests as rows: a prompt with an answer, or with two if tokens are marked.

        The marks are on the last tokens of the prompt and of both answers. Of a request without marks, the score is
        read at its end.
        """
        input_ids_BT, lengths_B = right_padded(requests, pad_token_id=self.tokenizer.pad_token_id)
        input_ids_BT, is_mark_BT = without_marks(input_ids_BT)
        labels_BT, positions_BT = torch.full_like(input_ids_BT, -100), torch.zeros_like(input_ids_BT)
        for row, length in enumerate(lengths_B.tolist()):
            start, end = 1, length
            positions_BT[row, :length] = torch.arange(length)
            if is_mark_BT[row].any():
                start, end = (is_mark_BT[row].nonzero()[:2, 0] + 1).tolist()
                positions_BT[row, end:length] -= end - start
            labels_BT[row, start:length] = input_ids_BT[row, start:length]
        keys = tuple(map(str, range(len(requests))))
        with_pairs = bool(is_mark_BT.any())
        return Batch(input_ids_BT, labels_BT, lengths_B, keys, positions_BT if with_pairs else None)


def answers_of(request: GenerationRequest) -> int:
    """Return the number of answers of a request: two if tokens are marked."""
    return ANSWERS if any(token < 0 for token in request.input_ids) else 1


def places_in_lines(lines_n: torch.Tensor) -> torch.Tensor:
    """Return for each element how many before it have the same line, of lines in ascending order."""
    firsts_n = torch.searchsorted(lines_n, lines_n)
    return torch.arange(len(lines_n)) - firsts_n
