"""A bag-of-words classifier that implements `partita.lm.base.GenerativeModel`.

Configs, rows, journals, metrics and saved models therefore work as for language models. The tokens of a prompt are a
bag, the only possible answers are the labels, and the probability of a label is that of all its tokens together.

Shapes: N rows, K entries of all bags, C labels, B and T of a padded batch, V tokens.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from partita.lm.base import (
    PADDED,
    AnswerContext,
    AnsweringSlots,
    BatchSupport,
    Generated,
    GenerationOptions,
    GenerationRequest,
    Label,
    SlotAnswer,
    SlotRequest,
)
from partita.lm.devices import seeded
from partita.lm.heads.base import check_numbers
from partita.lm.heads.embedding_bag import EmbeddingBagClassifier, bags_of
from partita.tokenizers.hub import check_intact, short_digest, tensors_digest
from partita.tokenizers.load import tokenizer_digest
from partita_schema.config import Config
from partita_schema.errors import ModelError, ResumeError
from partita_schema.sections.model import EmbeddingBagModel
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Purpose, Timing
from partita_trainers.checkpoints.file_sums import summed
from partita_trainers.hogwild.bags import Bags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"
MOST_ELEMENTS = 2**22
"""Maximum number of products of means and output weights held at a time."""


class BagLanguageModel:
    """A classifier of bags that answers prompts with labels."""

    context_length: int | None = None
    """Unlimited."""
    answer_context: AnswerContext | None = None

    def __init__(
        self, described: EmbeddingBagModel, *, tokenizer: "PreTrainedTokenizerFast", labels: Sequence[Label], seed: int
    ) -> None:
        """Initialize random weights.

        Args:
            described: The model's section.
            tokenizer: Tokenizer of the prompts.
            labels: The answers with their tokens.
            seed: Seed of the weights.

        Raises:
            ModelError: There are fewer than two labels.
        """
        if len(labels) < 2:
            raise ModelError(
                f"a bag of words chooses among labels, and here are {len(labels)}; give rows of two or more"
            )
        self.described, self.tokenizer, self.labels = described, tokenizer, tuple(labels)
        self.device = torch.device("cpu")
        with seeded(seed, device=self.device):
            self.module = EmbeddingBagClassifier(
                embeddings=len(tokenizer) + described.buckets, dim=described.embedding_dim, labels=len(labels)
            )
        self.module.eval()
        end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.label_indices = {(*label.ids, *end): index for index, label in enumerate(self.labels)}

    # Training

    def bags(self, batch: Batch) -> Bags:
        """Split a batch into bags (the tokens before the loss tokens) and labels (the loss tokens)."""
        texts, labels = [], []
        for ids, learned in zip(batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), strict=True):
            tokens = tuple(token for token in learned if token != -100)
            texts.append(ids[: next(index for index, token in enumerate(learned) if token != -100)])
            labels.append(self.label_indices[tokens])
        ids_K, starts_Nplus1 = self.bags_of(texts)
        return Bags(ids_K, starts_Nplus1, torch.tensor(labels))

    def bags_of(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [K] and starts [N + 1] of the bags of prompts."""
        described = self.described
        return bags_of(texts, ngrams=described.ngrams, vocabulary=len(self.tokenizer), buckets=described.buckets)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross-entropy of the labels, each of which counts as all its tokens."""
        return self.cross_entropy(module, batch, reduction="sum")

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each label at its first token, and 0 at its other tokens.

        A label is chosen as a whole: its tokens have no probabilities of their own.
        """
        log_probs_N = -self.cross_entropy(module, batch, reduction="none")
        rows_L = batch.loss_token_rows
        is_first_L = torch.cat([torch.ones(1, dtype=torch.bool), rows_L[1:] != rows_L[:-1]])
        return torch.where(is_first_L, log_probs_N[rows_L], 0.0)

    def cross_entropy(self, module: nn.Module, batch: Batch, *, reduction: Literal["sum", "none"]) -> torch.Tensor:
        """Return the cross-entropy of the labels, summed or one value per row."""
        rows = self.bags(batch)
        logits_NC = module(rows.ids_K, rows.starts_Nplus1[:-1])
        return nn.functional.cross_entropy(logits_NC, rows.labels_N, reduction=reduction)

    def auxiliary_loss(self) -> torch.Tensor | None:
        """Return None: there is no auxiliary loss."""
        return None

    def prepare_training(self, total_steps: int) -> None:
        """Do nothing: the number of steps has no effect."""

    def after_step(self, step: int) -> None:
        """Do nothing after an optimizer step."""

    def training(self) -> AbstractContextManager[None]:
        """Return a context manager that switches to training mode and restores the mode."""
        return mode(self.module, training=True)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager that switches to evaluation mode and restores the mode."""
        return mode(self.module, training=False)

    def check_loss(self) -> None:
        """Do nothing: there is no padding."""

    def check_packing(self) -> None:
        """Raise ModelError: packed rows would become one bag."""
        raise ModelError("a bag of words has no rows packed in one sequence; remove data.batching")

    # Files

    def save_checkpoint(self, folder: Path) -> None:
        """Write the weights."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach() for name, value in self.module.state_dict().items()}, folder / WEIGHTS)

    def load_checkpoint(self, folder: Path) -> None:
        """Load the weights.

        Raises:
            ResumeError: The weights are missing, or their labels, tokens or sizes do not match.
        """
        from safetensors.torch import load_file

        if not (folder / WEIGHTS).exists():
            raise ResumeError(f"{folder / WEIGHTS} is missing; the checkpoint is not complete")
        weights = load_file(folder / WEIGHTS)
        for name, tensor in self.module.state_dict().items():
            saved = weights.get(name)
            if saved is None or saved.shape != tensor.shape:
                seen = "nothing" if saved is None else tuple(saved.shape)
                raise ResumeError(
                    f"{folder / WEIGHTS}: {name} is {seen} and this file has {tuple(tensor.shape)}: other labels, "
                    "tokens or sizes; start a new run"
                )
        self.module.load_state_dict(weights)

    def save(self, folder: Path) -> None:
        """Write the weights, a config and the tokenizer."""
        described = self.described.model_dump(mode="json", exclude={"type"})
        card = {"model_type": "embedding_bag", **described, "labels": [label.text for label in self.labels]}
        with summed(folder):
            self.save_checkpoint(folder)
            (folder / "config.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf8")
            self.tokenizer.save_pretrained(folder)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, the labels and the weights."""
        labels = [label.text for label in self.labels]
        weights = tensors_digest(self.module.state_dict().items())
        return short_digest(self.described.model_dump(mode="json"), labels, tokenizer_digest(self.tokenizer), weights)

    # Answers

    def answers(self, requests: Sequence[GenerationRequest], options: GenerationOptions) -> list[Generated]:
        """Return the most probable label of each prompt, with all log probabilities if labels are scored."""
        answers: list[Generated] = []
        rows = max(1, MOST_ELEMENTS // (self.described.embedding_dim * len(self.labels)))
        for start in range(0, len(requests), rows):
            ids_K, starts_Nplus1 = self.bags_of([request.input_ids for request in requests[start : start + rows]])
            with torch.no_grad():
                logits_NC = self.module.separate(ids_K, starts_Nplus1[:-1])
            answers += [self.answer(scores, options) for scores in logits_NC.double().log_softmax(-1).tolist()]
        return answers

    def answer(self, scores: Sequence[float], options: GenerationOptions) -> Generated:
        """Return the label with the highest score, the first one of a tie. Raise ModelError for NaN."""
        check_numbers(scores)
        texts = [label.text for label in self.labels]
        answer = Generated.most_probable(texts, scores, logprobs=options.logprobs)
        return answer if options.labels else replace(answer, scores=None)

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Return the labels of prompts in order; nothing is sampled."""
        return self.answers(requests, options)

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return that rows of any length can share a batch: each is computed independently."""
        return PADDED

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return None: slots are always supported."""
        return None

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Return slots that are free again after prefill.

        See `GenerativeModel.open_slots` for the arguments.
        """
        return BagSlots(self, options, prefix=len(prefix))

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Empty: there is no checkpoint."""
        return {}

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids that are not special."""
        special = set(self.tokenizer.all_special_ids)
        return [token for token in range(len(self.tokenizer)) if token not in special]

    @property
    def vocabulary_size(self) -> int:
        """Number of labels to choose from."""
        return len(self.labels)

    # Measurements for batch sizes, used only if the config does not set them

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return `new_tokens`: there is no limit."""
        return new_tokens

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Classify prompts of this length, for measuring; there is no decode step.

        See `GenerativeModel.generate_worst_case` for the arguments.
        """
        request = GenerationRequest([self.token_ids[0]] * prompt_tokens, new_tokens)
        started = time.perf_counter()
        self.answers([request] * rows, options)
        return Timing(prefill_seconds=time.perf_counter() - started)

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, loss_tokens: int) -> int:
        """Estimate memory in bytes: eight per id of a bag, four per number of its mean and of the logits.

        See `GenerativeModel.estimated_bytes` for the arguments.
        """
        return rows * (8 * tokens * self.described.ngrams + 4 * (self.described.embedding_dim + len(self.labels)))

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return 0: there is no decode step.

        See `GenerativeModel.time_decode_step` for the arguments.
        """
        return 0.0


class BagSlots:
    """Implements `partita.lm.base.AnsweringSlots`: rows finish with prefill."""

    live: Sequence[Any] = ()

    def __init__(self, lm: BagLanguageModel, options: GenerationOptions, *, prefix: int) -> None:
        """`prefix` is the number of tokens that all prompts start with."""
        self.lm, self.options, self.prefix = lm, options, prefix

    def prompts_per_pass(self, tokens: int, most: int) -> int:
        """Return `most`: any number of prompts fits."""
        return most

    def padded_length(self, tokens: int) -> int:
        """Return `tokens`: nothing is padded."""
        return tokens

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Read prompts and choose their labels."""
        answers = self.lm.answers(requests, self.options)
        return [SlotAnswer(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def step(self) -> list[SlotAnswer]:
        """Return nothing: no row needs another step."""
        return []

    def uncached_tokens(self, request: SlotRequest) -> int:
        """Return the number of prompt tokens after the prefix: nothing is cached."""
        return len(request.input_ids) - self.prefix

    def cancel(self, rows: Collection[int]) -> None:
        """Do nothing: no row is active between calls."""

    def forget(self, row: int) -> None:
        """Do nothing: nothing is cached."""

    def close(self) -> None:
        """Do nothing: there is no state."""


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch to training or evaluation mode, and restore the mode on exit."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def load_bag(
    config: Config, *, tokenizer: "PreTrainedTokenizerFast", labels: Sequence[Label], saved: Path | None = None
) -> BagLanguageModel:
    """Create the bag-of-words model of the config, with the weights in the folder `saved` if given.

    Args:
        config: The config.
        tokenizer: Tokenizer of the prompts.
        labels: The answers with their tokens.
        saved: Folder of a saved model.
    """
    if not isinstance(config.base_model, EmbeddingBagModel):
        raise AssertionError("the file describes no bag of words")
    lm = BagLanguageModel(config.base_model, tokenizer=tokenizer, labels=labels, seed=config.seed)
    if saved is not None:
        check_intact(str(saved))
        lm.load_checkpoint(saved)
        lm.module.requires_grad_(False)
    return lm
