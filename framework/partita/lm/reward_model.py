"""A reward model: a transformers model with a head of one output, which scores answers to prompts.

The score of an answer is read at its last token that is not the pad token, never at padding. That is where
`AutoModelForSequenceClassification` of transformers reads it in a row with this answer alone, so scores are the same.

Both answers of a pair, or several answers to compare, follow their prompt in one row, which is computed once; see
`partita.lm.branches.masks`. Where a model takes no mask of pairs of tokens, each answer is a separate row.

Shapes: B sequences, T tokens of the longest, N loss tokens, R rows, A answers of a row: 2 of a pair, n = R A answers, K
most answers of a sequence, L sequences of one answer each.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.lm.branches.masks import (
    BranchSupport,
    branch_inputs,
    ends_of_sight,
    find_branch_support,
    separate_rows,
)
from partita.lm.decoding.batch_prompts import right_padded
from partita.lm.head_model import HeadModel
from partita.lm.heads.base import head_modules
from partita.lm.heads.reward import score_answers
from partita.lm.marks import with_marks, without_marks
from partita.lm.model_config.kinds import describes_encoder
from partita_trainers.base import Batch
from partita_trainers.device_copies import to_device

logger = logging.getLogger(__name__)

ANSWERS = 2
"""Fewest answers in the scores of a row; a row with one answer has its score twice."""
TOKEN_PRODUCTS = 6
"""Multiplications of a token by the 12 H x H weights of a usual layer, over 2 H for its attention to each token, by H.

H is the hidden size.
"""


class ScorePositions:
    """Reads the scores of a module at several positions of each sequence, in place of one per sequence.

    transformers computes the score of every token and then selects one of them. Between these steps, the scores of a
    sequence are replaced by those at the positions, so that the module returns them whatever it selects, and gradients
    and hooks see an ordinary forward pass.
    """

    def __init__(self, layer: nn.Module | None) -> None:
        """Register the hook on the layer that computes the scores; None if there is no such layer."""
        self.columns_BK: torch.Tensor | None = None
        self.attached = layer is not None
        if layer is not None:
            layer.register_forward_hook(self.select)

    def select(self, layer: nn.Module, inputs: tuple[Any, ...], scores_BT1: torch.Tensor) -> torch.Tensor | None:
        """Replace scores [B, T, 1] by those of each sequence [B, T, K]."""
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
    """A request may hold several answers."""

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
        return not describes_encoder(self.base.config)

    @cached_property
    def branch_support(self) -> BranchSupport:
        """How rows with several answers are computed."""
        if not self.positions.attached:
            return BranchSupport(f"{type(self.base).__name__} computes no score for each token")
        return find_branch_support(self)

    # Training

    def answer_scores(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scores of the answers of each row, the chosen one of a pair first, float32 [R, A].

        An answer that a row does not have gets the score of its first one. `module` is `self.module`, or a wrapper of
        it.
        """
        ends_RA = self.answer_ends(batch)
        noise = self.noise.for_rows(batch) if self.noise is not None else nullcontext()
        with noise:
            if batch.position_ids_BT is not None and self.branch_support.reason is None:
                return self._scores_of_branches(module, batch, ends_RA)
            return self._scores_of_rows(module, batch, ends_RA)

    def answer_ends(self, batch: Batch) -> torch.Tensor:
        """Return the number of the loss token at which the score of each answer is read, int64 [R, A].

        It is the last one of the answer that is not the pad token. Loss tokens have the order of `loss_token_rows`.
        """
        is_loss_BT = batch.labels_BT[:, 1:] != -100
        is_padding_N = batch.input_ids_BT[:, 1:][is_loss_BT] == self.tokenizer.pad_token_id
        branch_N = batch.loss_token_branches
        answers = max(ANSWERS, int(branch_N.max()) + 1) if len(branch_N) else ANSWERS
        answer_N = answers * batch.loss_token_rows + branch_N
        number_N = torch.arange(len(answer_N))
        ends_RA = torch.full((answers * batch.rows,), -1)
        for chosen_N in (torch.ones_like(is_padding_N), ~is_padding_N):
            ends_RA = ends_RA.scatter_reduce(0, answer_N[chosen_N], number_N[chosen_N], "amax", include_self=False)
        ends_RA = ends_RA.view(batch.rows, answers)
        return torch.where(ends_RA < 0, ends_RA[:, :1].clamp(min=0), ends_RA)

    def _scores_of_branches(self, module: nn.Module, batch: Batch, ends_RA: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, A], with one pass over each sequence."""
        assert batch.position_ids_BT is not None
        sequence_N, column_N = (batch.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)
        sequences_n, columns_n = sequence_N[ends_RA.flatten()], column_N[ends_RA.flatten()] + 1
        number_n = places_in_sequences(sequences_n)
        columns_BK = torch.zeros(batch.sequences, int(number_n.max()) + 1, dtype=torch.int64)
        columns_BK[sequences_n, number_n] = columns_n
        ends_BT = to_device(ends_of_sight(batch.position_ids_BT), self.device)
        inputs = branch_inputs(to_device(batch.position_ids_BT, self.device), ends_BT, model=self.base)
        with self.positions.only(to_device(columns_BK, self.device)):
            output = module(input_ids=to_device(batch.input_ids_BT, self.device), **inputs, use_cache=False)
        scores_BK: torch.Tensor = output.logits
        index_n = to_device(torch.stack([sequences_n, number_n]), self.device)
        return scores_BK[index_n[0], index_n[1]].view_as(ends_RA).float()

    def _scores_of_rows(self, module: nn.Module, batch: Batch, ends_RA: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, A], with each answer in a separate row."""
        rows = separate_rows(batch) if batch.position_ids_BT is not None else batch
        sequence_N = (rows.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)[0]
        scores_L1: torch.Tensor = self.forward(module, rows).logits
        sequence_n = to_device(sequence_N[ends_RA.flatten()], self.device)
        return scores_L1[:, 0][sequence_n].view_as(ends_RA).float()

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return a score of each sequence: ranks without rows run the model with it."""
        scores_B1: torch.Tensor = self.forward(module, batch).logits
        return scores_B1[:, 0].float()

    def check_loss(self) -> None:
        """Test how rows with several answers are computed, before the weights are sharded."""
        logger.debug("branches: %s", self.branch_support)

    def check_packing(self) -> None:
        """Do nothing: rows in a sequence are masked, or computed as separate rows."""

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
        """Return requests as rows: a prompt with an answer, or with several if tokens are marked.

        The marks are on the last tokens of the prompt and of each answer. Of a request without marks, the score is read
        at its end.
        """
        input_ids_BT, lengths_B = right_padded(requests, pad_token_id=self.tokenizer.pad_token_id)
        input_ids_BT, is_mark_BT = without_marks(input_ids_BT)
        labels_BT, positions_BT = torch.full_like(input_ids_BT, -100), torch.zeros_like(input_ids_BT)
        for row, length in enumerate(lengths_B.tolist()):
            prompt, *ends = (is_mark_BT[row].nonzero()[:, 0] + 1).tolist() or (1, length)
            positions_BT[row, : ends[0]] = torch.arange(ends[0])
            for start, end in pairwise(ends):
                positions_BT[row, start:end] = torch.arange(prompt, prompt + end - start)
            labels_BT[row, prompt:length] = input_ids_BT[row, prompt:length]
        keys = tuple(map(str, range(len(requests))))
        has_branches = bool(is_mark_BT.any())
        return Batch(input_ids_BT, labels_BT, lengths_B, keys, positions_BT if has_branches else None)

    def requests_of(self, texts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
        """Return the requests that score texts, whose answers have the scores of the texts in their order.

        It is one request with the texts as branches of their common beginning, or one for each text where that is less
        work, or where the model computes each answer as a separate row anyway.

        Args:
            texts: Token ids of a prompt with an answer each; usually of the same prompt.
        """
        # The token at which a score is read is in its branch: the last one that is not the pad token.
        pad = self.tokenizer.pad_token_id
        most = min(max((index for index, token in enumerate(text) if token != pad), default=0) for text in texts)
        columns = enumerate(zip(*(text[:most] for text in texts), strict=True))
        prompt = next((index for index, tokens in columns if len(set(tokens)) > 1), most)
        if len(texts) == 1 or prompt < 1 or not self.saves_work(list(map(len, texts)), prompt):
            return [GenerationRequest(text, 0) for text in texts]
        ids, ends = list(texts[0][:prompt]), {prompt - 1}
        for text in texts:
            ids += text[prompt:]
            ends.add(len(ids) - 1)
        return [GenerationRequest(with_marks(ids, ends), 0)]

    def saves_work(self, lengths: Sequence[int], prompt: int) -> bool:
        """Return whether texts of these lengths are less work as branches of their first `prompt` tokens.

        Branches save the matrix products of the prompt. Their attention is computed for all pairs of tokens in the
        sequence, also for those of two branches, which are masked.
        """
        if self.branch_support.reason is not None:
            return False
        products: int = TOKEN_PRODUCTS * self.base.config.get_text_config().hidden_size
        sequence = prompt + sum(length - prompt for length in lengths)
        return sequence * (products + sequence) <= sum(length * (products + length) for length in lengths)


def answers_of(request: GenerationRequest) -> int:
    """Return the number of answers of a request: with marks, one for each mark after that of the prompt."""
    return max(1, sum(token < 0 for token in request.input_ids) - 1)


def places_in_sequences(sequences_n: torch.Tensor) -> torch.Tensor:
    """Return for each element how many before it have the same sequence, of sequences in ascending order."""
    firsts_n = torch.searchsorted(sequences_n, sequences_n)
    return torch.arange(len(sequences_n)) - firsts_n
