"""Tests of heads: losses, gradients and labels are those of transformers."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.lm.heads.base import RegressionHead
from partita_trainers.base import Batch

from ....classifiers import DECODERS, ENCODERS, LABELS, OUTPUTS, make_rows, settings, write_classifier
from ....head_models import CONTEXT, LoadedHead


def plain_inputs(folder: Path, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the inputs of texts as users of transformers make them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def plain_labels(kind: str, rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    if kind == "category":
        return torch.tensor([LABELS.index(row["label"]) for row in rows])
    if kind == "set":
        return torch.tensor([[float(label in row["parts"].split(",")) for label in LABELS] for row in rows])
    return torch.tensor([float(row["length"]) for row in rows])


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_loss_and_gradients_equal_those_of_transformers(tmp_path: Path, architecture: str, kind: str) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = write_classifier(tmp_path, architecture, kind)
    rows = make_rows(8, seed=1, longest=24)
    inputs, labels = plain_inputs(folder, [row["text"] for row in rows]), plain_labels(kind, rows)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours = LoadedHead(
        settings(architecture, kind, base_model=str(folder)),
        rows,
        folder=tmp_path,
        labels={OUTPUTS[kind]["name"]: () if kind == "number" else LABELS},
    )

    assert torch.equal(ours.batch().input_ids_BT, inputs["input_ids"])
    ours.check_loss_and_gradients(plain, plain(**inputs, labels=labels).loss)


def test_a_predicted_number_has_the_digits_of_float32_and_keeps_its_limits() -> None:
    output = SimpleNamespace(logits=torch.tensor([[0.1], [3.0], [-2.0], [7.5]]))
    answers = RegressionHead(minimum=-1.1, maximum=7.3).answers(output, batch=Batch.__new__(Batch))
    assert [answer.text for answer in answers] == ["0.1", "3.0", "-1.1", "7.3"]
