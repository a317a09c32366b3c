"""Tests of `partita export --to onnx`: onnxruntime computes what the model does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita import Model, ModelError, PartitaError

from ...classifiers import LABELS, make_rows
from ...classifiers import settings as head_settings
from ...encoder_decoders import save_encoder_decoder
from ...json_lines import write_json_lines
from .conftest import text_config, train_encoder, train_reward_model


def head_run(folder: Path, architecture: str, kind: str, **changes: Any) -> Model:
    """Return a model with a head, trained for two steps in `folder`."""
    write_json_lines(folder / "rows.jsonl", make_rows(60, longest=12))
    config = head_settings(architecture, kind, **changes)
    source = {"source": str(folder / "rows.jsonl")}
    model = Model(config | {"data": source, "trainer": config["trainer"] | {"max_steps": 2}}, quiet=True)
    model.train(run=folder / "run")
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("distilbert", "category"), ("bert", "set"), ("modernbert", "number"), ("llama", "category"), ("gpt2", "number")],
)
def test_a_head_has_the_same_outputs_in_onnxruntime(tmp_path: Path, architecture: str, kind: str) -> None:
    import onnxruntime
    from transformers import AutoTokenizer

    model = head_run(tmp_path, architecture, kind, adapter={"type": "lora", "r": 2})
    rows = make_rows(40, longest=12, seed=3)
    report = model.export("onnx", tmp_path / "onnx", dataset=rows)
    assert (report.rows, report.rows_equal, report.tokens) == (32, 32, 0)
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-4

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    for row in rows[:4]:
        inputs = tokenizer(row["text"], truncation=True, max_length=16, return_tensors="np")
        named = {one.name: inputs[one.name] for one in session.get_inputs()}
        [logits] = session.run(["logits"], named)
        [answer] = model.predict([row])
        if kind == "category":
            labels = json.loads((tmp_path / "onnx" / "labels.json").read_text())
            assert labels == list(LABELS)
            assert answer["label"] == labels[int(logits[0].argmax())]
        elif kind == "number":
            assert answer["length"] == pytest.approx(float(logits[0, 0]), abs=1e-3)
        else:
            expected = 1 / (1 + np.exp(-logits[0]))
            assert list(answer["parts_probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.long
def test_a_reward_model_has_the_same_scores_in_onnxruntime(tmp_path: Path) -> None:
    report = train_reward_model(tmp_path).export("onnx", tmp_path / "onnx")
    assert report.rows_equal == report.rows
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tags", "embedding"])
def test_an_encoder_has_the_same_outputs_for_all_tokens_in_onnxruntime(tmp_path: Path, kind: str) -> None:
    import onnxruntime

    report = train_encoder(tmp_path, kind).export("onnx", tmp_path / "onnx")
    assert report.rows_equal == report.rows
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-4
    [output] = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx").get_outputs()
    assert output.name == ("logits" if kind == "tags" else "last_hidden_state")
    pooled = any("pooling of the embedding" in note for note in report.notes)
    assert pooled == (kind == "embedding")


@pytest.mark.long
def test_a_model_that_writes_text_answers_the_same_in_onnxruntime(
    lora_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = Model.load(lora_run, quiet=True).export("onnx", tmp_path / "onnx")
    assert "torchvision" not in capfd.readouterr().err, "a package that the export does not need"
    assert report.rows_equal == 32
    assert report.tokens_equal == report.tokens > 32
    [note] = report.notes
    assert note == (
        "the graph has no KV cache, so generation computes the whole sequence for each token; it is for scoring, and "
        "for short answers"
    )


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    base = save_encoder_decoder(tmp_path / "base", "t5")
    zero = Model(text_config(tmp_path, base_model=str(base), trainer={"type": "none"}), quiet=True)
    with pytest.raises(ModelError, match="an encoder-decoder is not exported to ONNX, because it is two graphs; use"):
        zero.export("onnx", tmp_path / "onnx")


def test_without_the_packages_the_error_names_them(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.export.onnx.find_spec", lambda name: None)
    expected = r"ONNX files are written by onnxscript and checked by onnxruntime; run pip install 'partita\[onnx\]'"
    with pytest.raises(PartitaError, match=expected):
        Model.load(lora_run, quiet=True).export("onnx", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
