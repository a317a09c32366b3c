"""Tiny models with a head, written with transformers and loaded as partita does, with rows as one batch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.data.batching.collate import collate
from partita.data.batching.plan import alone
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.data.tokenized import TokenizedDataset
from partita.lm.load_model import load_model
from partita.lm.model_config.architectures import scratch_config
from partita.lm.model_config.encoders import heads_of_encoder
from partita.pipeline.build import head_of
from partita.tokenizers.load import load_tokenizer, train_tokenizer
from partita_schema.load import load_config
from partita_schema.sections.model import WITH_OWN_TOKENIZER, ScratchModel
from partita_trainers.base import Batch

CONTEXT = 16


def tiny_model(architecture: str, *, tokenizer: str = "word", vocab_size: int = 64, **changes: Any) -> dict[str, Any]:
    """Return the section base_model of a tiny new model with a context of `CONTEXT` tokens."""
    if architecture in WITH_OWN_TOKENIZER:
        tokenizer, vocab_size = "bpe", 300
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "context_length": CONTEXT}
    named = {"type": "scratch", "architecture": architecture, "tokenizer": tokenizer, "vocab_size": vocab_size}
    return {**named, **shape, **changes}


def write_plain(
    folder: Path, base: Mapping[str, Any], auto_class: Any, *, texts: Iterable[str], describe: Callable[[Any], None]
) -> Path:
    """Write a random model of transformers whose logits vary, with its tokenizer.

    Args:
        folder: Folder to write.
        base: Section base_model of its shape.
        auto_class: Class of transformers.
        texts: The tokenizer is trained on them.
        describe: Writes the head into the transformers config.
    """
    section = ScratchModel.model_validate(base)
    tokenizer = train_tokenizer(section, iter(texts))
    described = scratch_config(section, tokenizer=tokenizer)
    describe(described)
    torch.manual_seed(0)
    model = auto_class.from_config(described)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class LoadedHead:
    """A model with its head, loaded from a configuration, and tokenized rows."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        *,
        folder: Path,
        labels: Mapping[str, Sequence[str]] | None = None,
        texts: Iterable[str] = (),
    ) -> None:
        """Load the model and tokenize the rows.

        Args:
            settings: The configuration.
            rows: The rows.
            folder: Base of relative paths.
            labels: Labels by output.
            texts: The tokenizer of a new model is trained on them.
        """
        self.config = heads_of_encoder(load_config(dict(settings)).config, folder=folder)
        self.tokenizer = load_tokenizer(self.config, folder=folder, texts=lambda: texts)
        head = head_of(self.config, labels or {})
        self.lm: Any = load_model(self.config, folder=folder, tokenizer=self.tokenizer, trainable=True, head=head)
        encoder = build_row_tokenizer(
            self.config, tokenizer=self.tokenizer, context_length=self.lm.context_length, labels=labels or {}
        )
        ledger = Ledger(None, max_bad_rows=0)
        self.encoded = TokenizedDataset.build(open_rows(list(rows), folder=folder), encoder, ledger=ledger)

    def batch(self, indices: Sequence[int] | None = None) -> Batch:
        """Return rows as a batch. Default: all of them."""
        chosen = range(len(self.encoded)) if indices is None else indices
        return collate(self.encoded, alone(np.array(chosen)), pad_token_id=self.tokenizer.pad_token_id)

    def check_loss_and_gradients(self, plain: torch.nn.Module, loss: torch.Tensor) -> None:
        """Assert that the mean loss of all rows and its gradients equal those of the same model of transformers."""
        loss.backward()  # type: ignore[no-untyped-call]
        batch = self.batch()
        ours = self.lm.loss(self.lm.module, batch) / batch.loss_tokens
        ours.backward()
        assert math.isclose(ours.item(), loss.item(), rel_tol=1e-5)
        own = dict(self.lm.module.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-5, atol=1e-5)
