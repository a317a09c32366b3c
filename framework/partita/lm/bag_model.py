"""A bag of words in the place of a language model: it keeps the whole contract of `partita.lm.base.GenerativeModel`.

So files, rows, journals, metrics and saved models are what they are for language models. A prompt is the tokens of a
bag; the only answers that there are are the labels, and the probability of one is that of all its tokens together.

Shapes: N rows, K entries of all bags, C labels, B and T of a padded batch, V tokens.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.lm.base import (
    PADDED,
    AnsweringSlots,
    BatchWay,
    Generated,
    GenerationOptions,
    GenerationRequest,
    Label,
    SlotAnswer,
    SlotRequest,
)
from partita.lm.embedding_bag import EmbeddingBagClassifier, bags_of
from partita.lm.fingerprint import digest, tensors_digest
from partita.lm.hub import check_intact
from partita.lm.randomness import seeded
from partita.lm.tokenizers import tokenizer_digest
from partita_schema.config import Config
from partita_schema.errors import ModelError, ResumeError
from partita_schema.model import EmbeddingBagModel
from partita_trainers.bags import Bags
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Purpose, Timing
from partita_trainers.file_sums import summed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"
MOST_ELEMENTS = 2**22
"""Products of means and output weights that are held at a time."""


class BagLanguageModel:
    """A classifier of bags that answers prompts with labels."""

    context_length: int | None = None
    """A bag has room for any text."""

    def __init__(
        self, described: EmbeddingBagModel, *, tokenizer: "PreTrainedTokenizerFast", labels: Sequence[Label], seed: int
    ) -> None:
        """Random weights; `labels` are the answers, with their tokens. Raises ModelError for fewer than two."""
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
        self.places = {(*label.ids, *end): place for place, label in enumerate(self.labels)}

    # Training

    def bags(self, batch: Batch) -> Bags:
        """The rows of a batch: what stands before the learned tokens, and the label that these are."""
        texts, labels = [], []
        for ids, learned in zip(batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), strict=True):
            tokens = tuple(token for token in learned if token != -100)
            texts.append(ids[: next(place for place, token in enumerate(learned) if token != -100)])
            labels.append(self.places[tokens])
        ids_K, starts_N1 = self.bags_of(texts)
        return Bags(ids_K, starts_N1, torch.tensor(labels))

    def bags_of(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [K] and starts [N + 1] of the bags of prompts."""
        described = self.described
        return bags_of(texts, ngrams=described.ngrams, vocabulary=len(self.tokenizer), buckets=described.buckets)

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy of the labels, which is that of all their tokens: no other answers are possible."""
        rows = self.bags(batch)
        logits_NC = module(rows.ids_K, rows.starts_N1[:-1])
        return nn.functional.cross_entropy(logits_NC, rows.labels_N, reduction="sum")

    def auxiliary_loss(self) -> torch.Tensor | None:
        """None."""
        return None

    def prepare_training(self, total_steps: int) -> None:
        """Nothing depends on the number of steps."""

    def after_step(self, step: int) -> None:
        """Nothing happens between steps."""

    def training(self) -> AbstractContextManager[None]:
        """Training mode inside, the mode before it afterwards."""
        return mode(self.module, training=True)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode inside, the mode before it afterwards."""
        return mode(self.module, training=False)

    def check_loss(self) -> None:
        """Nothing is padded."""

    def check_packing(self) -> None:
        """Raises ModelError: the rows of a line would be one bag."""
        raise ModelError("a bag of words has no rows packed in one line; remove data.batching")

    # Files

    def save_checkpoint(self, folder: Path) -> None:
        """Write the weights."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach() for name, value in self.module.state_dict().items()}, folder / WEIGHTS)

    def load_checkpoint(self, folder: Path) -> None:
        """Read them back. Raises ResumeError where they are absent, or of other labels, tokens or sizes."""
        from safetensors.torch import load_file

        if not (folder / WEIGHTS).exists():
            raise ResumeError(f"{folder / WEIGHTS} is missing; the checkpoint is not complete")
        weights = load_file(folder / WEIGHTS)
        for name, tensor in self.module.state_dict().items():
            found = weights.get(name)
            if found is None or found.shape != tensor.shape:
                told = "nothing" if found is None else tuple(found.shape)
                raise ResumeError(
                    f"{folder / WEIGHTS}: {name} is {told} and this file has {tuple(tensor.shape)}: other labels, "
                    "tokens or sizes; start a new run"
                )
        self.module.load_state_dict(weights)

    def save(self, folder: Path) -> None:
        """Write the weights, what they are and the tokenizer."""
        described = self.described.model_dump(mode="json", exclude={"type"})
        card = {"model_type": "embedding_bag", **described, "labels": [label.text for label in self.labels]}
        with summed(folder):
            self.save_checkpoint(folder)
            (folder / "config.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf8")
            self.tokenizer.save_pretrained(folder)

    @property
    def fingerprint(self) -> str:
        """Changes with the tokenizer, the labels and the weights."""
        labels = [label.text for label in self.labels]
        weights = tensors_digest(self.module.state_dict().items())
        return digest(self.described.model_dump(mode="json"), labels, tokenizer_digest(self.tokenizer), weights)

    # Answers

    def answers(self, requests: Sequence[GenerationRequest], options: GenerationOptions) -> list[Generated]:
        """The most probable label of each prompt, with the log probabilities of all where labels are scored."""
        found: list[Generated] = []
        rows = max(1, MOST_ELEMENTS // (self.described.embedding_dim * len(self.labels)))
        for start in range(0, len(requests), rows):
            ids_K, starts_N1 = self.bags_of([request.input_ids for request in requests[start : start + rows]])
            with torch.no_grad():
                logits_NC = self.module.separate(ids_K, starts_N1[:-1])
            found += [self.answer(scores, options) for scores in logits_NC.double().log_softmax(-1).tolist()]
        return found

    def answer(self, scores: Sequence[float], options: GenerationOptions) -> Generated:
        """The label with the highest score, the first of those that are equal. Raises ModelError for nan."""
        if any(score != score for score in scores):
            raise ModelError("the weights are not numbers any more; train again with a lower trainer.learning_rate")
        best = max(range(len(scores)), key=lambda place: scores[place])
        told = {label.text: score for label, score in zip(self.labels, scores, strict=True)}
        return Generated(
            (),
            self.labels[best].text,
            "stop",
            scores[best] if options.logprobs else None,
            scores=told if options.labels else None,
        )

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """The labels of prompts in order; nothing is drawn."""
        return self.answers(requests, options)

    def batch_way(self, options: GenerationOptions, *, tokens: int) -> BatchWay:
        """Rows of any lengths: each is read alone."""
        return PADDED

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """None: any prompt is answered as soon as it is read."""
        return None

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Slots that are free again as soon as a prompt is read."""
        return BagSlots(self, options, prefix=len(prefix))

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Nothing: there is no checkpoint."""
        return {}

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens that mean text."""
        special = set(self.tokenizer.all_special_ids)
        return [token for token in range(len(self.tokenizer)) if token not in special]

    @property
    def vocabulary_size(self) -> int:
        """The labels: what is chosen from."""
        return len(self.labels)

    # What sizes would be measured with, where the file did not have them as numbers

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """All: there is no limit."""
        return new_tokens

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Answers to prompts of that length; they take no second step."""
        request = GenerationRequest([self.token_ids[0]] * prompt_tokens, new_tokens)
        started = time.perf_counter()
        self.answers([request] * rows, options)
        return Timing(prefill_seconds=time.perf_counter() - started)

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, learned: int) -> int:
        """Eight bytes for an id of a bag, and four for each number of its mean and of the logits."""
        return rows * (8 * tokens * self.described.ngrams + 4 * (self.described.embedding_dim + len(self.labels)))

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """0: an answer has no second step."""
        return 0.0


class BagSlots:
    """Keeps the contract of `partita.lm.base.AnsweringSlots`: rows are answered as soon as they are read."""

    live: Sequence[Any] = ()

    def __init__(self, lm: BagLanguageModel, options: GenerationOptions, *, prefix: int) -> None:
        """All prompts begin with so many tokens alike."""
        self.lm, self.options, self.prefix = lm, options, prefix

    def readable(self, tokens: int, most: int) -> int:
        """All that there is room for."""
        return most

    def read_length(self, tokens: int) -> int:
        """As many: nothing is padded."""
        return tokens

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Read prompts and choose their labels."""
        answers = self.lm.answers(requests, self.options)
        return [SlotAnswer(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def step(self) -> list[SlotAnswer]:
        """Nothing is left to do for any row."""
        return []

    def unread(self, request: SlotRequest) -> int:
        """Tokens of a prompt behind the prefix, for no row keeps any."""
        return len(request.input_ids) - self.prefix

    def forget(self, row: int) -> None:
        """No row keeps anything."""

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode inside, the mode before it afterwards."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def load_bag(
    config: Config, *, tokenizer: "PreTrainedTokenizerFast", labels: Sequence[Label], saved: Path | None = None
) -> BagLanguageModel:
    """A new bag of words as the file describes it, or with the weights in the folder `saved`."""
    if not isinstance(config.base_model, EmbeddingBagModel):
        raise AssertionError("the file describes no bag of words")
    lm = BagLanguageModel(config.base_model, tokenizer=tokenizer, labels=labels, seed=config.seed)
    if saved is not None:
        check_intact(str(saved))
        lm.load_checkpoint(saved)
        lm.module.requires_grad_(False)
    return lm
