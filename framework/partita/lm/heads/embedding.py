"""Embeddings: the hidden states of a text as one vector of length 1. There is no layer on top of the model.

Shapes: N texts, T tokens of the longest, D hidden size.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch.nn import functional

from partita.lm.base import Generated
from partita.lm.heads.base import Head, check_numbers
from partita.lm.model_config.kinds import describes_encoder
from partita_trainers.base import Batch
from partita_trainers.device_copies import to_device
from partita_trainers.objectives.contrastive import text_ends

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Pooling = Literal["auto", "mean", "cls", "last"]
POOLING_MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
"""How sentence-transformers names them."""
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
"""Modules of sentence-transformers, by folder."""


@dataclass(frozen=True)
class EmbeddingHead(Head):
    """Pools the last hidden states; trained with `partita_trainers.objectives.contrastive`."""

    pooling: Pooling = "auto"
    """How the hidden states become a vector; `auto` is known when the model is loaded."""

    auto_class: ClassVar = "AutoModel"
    task_type: ClassVar = "FEATURE_EXTRACTION"
    problem_type: ClassVar = None
    is_bare: ClassVar = True

    @property
    def size(self) -> int:
        return 1

    @property
    def target_size(self) -> int:
        """Number of targets of a text: its identity (`partita_trainers.objectives.text_identity`)."""
        return 2

    def loaded_with(self, described: "PretrainedConfig") -> Self:
        """Return the head with the pooling of the model: mean for encoders, and the last token for decoders."""
        if self.pooling != "auto":
            return self
        return replace(self, pooling="mean" if describes_encoder(described) else "last")

    def describe(self, described: "PretrainedConfig") -> None:
        """Write nothing: there is no head in the files."""

    def write_files(self, folder: Path, *, model: "PreTrainedModel", max_length: int | None) -> None:
        """Write the modules of sentence-transformers: the model, its pooling, and vectors of length 1.

        See `Head.write_files` for the arguments.
        """
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (path, name) in enumerate(MODULES.items())
        ]
        modes = {f"pooling_mode_{name}": self.pooling == pooling for pooling, name in POOLING_MODES.items()}
        width = model.config.get_text_config().hidden_size
        for file, content in {
            "modules.json": modules,
            "1_Pooling/config.json": {"word_embedding_dimension": width, **modes},
            "2_Normalize/config.json": {},
            "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
        }.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        """Raise AssertionError: the loss of a text depends on the other texts of the step."""
        raise AssertionError("embeddings are trained with the contrastive objective")

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the vector of each row as a JSON array, with the digits of single precision."""
        vectors_ND = self.vectors(output, batch).cpu()
        check_numbers(vectors_ND.amax(-1).tolist())
        return [Generated((), f"[{','.join(map(str, row))}]", "stop") for row in vectors_ND.numpy()]

    def vectors(self, output: Any, texts: Batch) -> torch.Tensor:
        """Return the vectors of texts, of length 1, float32 [N, D].

        Args:
            output: Output of the module for the texts.
            texts: One text per row, padded on the right.
        """
        hidden_NTD: torch.Tensor = output.last_hidden_state.float()
        if self.pooling == "cls":
            return functional.normalize(hidden_NTD[:, 0], dim=-1)
        if self.pooling == "last":
            last_N = to_device(texts.lengths_B - 1, hidden_NTD.device)
            rows_N = torch.arange(len(last_N), device=hidden_NTD.device)
            return functional.normalize(hidden_NTD[rows_N, last_N], dim=-1)
        mask_NT1 = to_device(texts.attention_mask(), hidden_NTD.device)[..., None].float()
        means_ND = (hidden_NTD * mask_NT1).sum(1) / mask_NT1.sum(1)
        return functional.normalize(means_ND, dim=-1)


def split_texts(batch: Batch) -> Batch:
    """Return the texts of a batch as separate rows, in order."""
    ends = text_ends(batch)
    parts = [
        batch.input_ids_BT[row, start:end]
        for row, of_row in enumerate(ends)
        for start, end in zip([0, *of_row], of_row, strict=False)
    ]
    input_ids_NT = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    return Batch(
        input_ids_NT,
        torch.full_like(input_ids_NT, -100),
        torch.tensor([len(part) for part in parts]),
        tuple(f"{key}/{text}" for key, of_row in zip(batch.keys, ends, strict=True) for text in range(len(of_row))),
    )
