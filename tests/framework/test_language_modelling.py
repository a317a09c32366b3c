"""Tests of language modelling: training on chunks of documents, and the loss of whole documents."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from partita import Model
from partita_schema.errors import ConfigError

from ..json_lines import read_json_lines, write_json_lines
from .conftest import Command

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "hills", "under", "grey", "skies")


def write_documents(folder: Path, *, count: int = 60) -> Path:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(2, 60)))) for _ in range(count)]
    path = folder / "docs.jsonl"
    write_json_lines(path, [{"text": text} for text in texts])
    return path


def settings(**changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 32}
    base: dict[str, Any] = {
        "base_model": {"type": "scratch", "vocab_size": 300, **shape},
        "output_features": [{"name": "text", "type": "text"}],
        "data": {"source": "docs.jsonl", "batching": {"type": "chunk"}},
        "trainer": {"type": "finetune", "batch_size": 2, "eval_batch_size": 4, "max_steps": 4, "learning_rate": 0.01},
    }
    return base | changes


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "lm.yaml"
    path.write_text(yaml.safe_dump(settings(**changes)), encoding="utf-8")
    return path


def nats_of(model: Any, tokenizer: Any, text: str, *, length: int) -> tuple[float, int]:
    """Return the sum of the losses of a document's tokens and their number, by plain transformers calls.

    The document is preceded by the end token, and each window begins with the last token of the one before.
    """
    ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    total = 0.0
    for start in range(0, len(ids) - 1, length - 1):
        window = torch.tensor([ids[start : start + length]])
        with torch.no_grad():
            logits = model(window).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    return total, len(ids) - 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained `run` and its `docs.jsonl`."""
    folder = tmp_path_factory.mktemp("lm")
    write_documents(folder)
    Model(write_config(folder)).train(run=folder / "run")
    return folder


def test_evaluation_is_the_loss_of_whole_documents_under_plain_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = read_json_lines(trained / "docs.jsonl")[:9]
    metrics = Model.load(trained / "run").evaluate(rows)["model"]

    folder = trained / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums = [nats_of(model, tokenizer, row["text"], length=32) for row in rows]
    nats, tokens = sum(total for total, _ in sums), sum(count for _, count in sums)
    text_bytes = sum(len(row["text"].encode()) for row in rows)
    assert metrics["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    assert set(metrics) == {"loss", "perplexity", "bits_per_byte"}


def test_a_run_reports_the_metrics_of_language_modelling(trained: Path) -> None:
    manifest = json.loads((trained / "run" / "manifest.json").read_text(encoding="utf-8"))

    assert set(manifest["metrics"]["test"]) >= {"loss", "perplexity", "bits_per_byte"}
    assert "generation" not in manifest["batch_sizes"]


def test_predict_needs_a_prompt(trained: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Model.load(trained / "run").predict([{"text": "the cat"}])
    assert str(error.value).endswith(
        "input_features: predict answers a prompt, and without inputs there is none; add input_features, or continue a "
        "text with Model.generate"
    )


def test_generate_continues_a_text(trained: Path) -> None:
    [continued] = Model.load(trained / "run").generate("the cat", max_new_tokens=3)

    assert isinstance(continued, str)


@pytest.mark.parametrize("batching", ["chunk", "bucket"])
def test_an_evaluation_does_not_depend_on_the_batching(tmp_path: Path, trained: Path, batching: str) -> None:
    write_documents(tmp_path)
    preprocessing = {} if batching == "chunk" else {"preprocessing": {"global_max_sequence_length": 32}}
    changes: dict[str, Any] = {
        "base_model": str(trained / "run" / "model"),
        "data": {"batching": {"type": batching}},
        "trainer": {"type": "none", "batch_size": 2},
        **preprocessing,
    }
    rows = read_json_lines(trained / "docs.jsonl")[:9]

    found = Model(write_config(tmp_path, **changes)).evaluate(rows)["model"]

    assert found["loss"] == pytest.approx(Model.load(trained / "run").evaluate(rows)["model"]["loss"], rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"isolate_documents": True}], ids=["joined", "isolated"])
def test_the_loss_of_a_step_is_the_mean_over_its_chunks(tmp_path: Path, changes: dict[str, Any]) -> None:
    """At a learning rate of almost 0, the loss of an epoch equals that of all chunks under plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_documents(tmp_path, count=20)
    split = {"type": "random", "probabilities": [1, 0, 0]}
    data = {"batching": {"type": "chunk", **changes}, "source": "docs.jsonl", "split": split}
    trainer = settings()["trainer"] | {"learning_rate": 1e-30, "max_steps": 1, "effective_batch_size": 1000}
    trainer |= {"batch_size": 1000, "evaluate_test": False, "skip_all_evaluation": True}
    model = Model(write_config(tmp_path, data=data, trainer=trainer))

    model.train(run=tmp_path / "run")

    [record] = read_json_lines(tmp_path / "run" / "log.jsonl")
    folder = tmp_path / "run" / "model"
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    ids = [
        token
        for row in read_json_lines(tmp_path / "docs.jsonl")
        for token in [*tokenizer(row["text"])["input_ids"], end]
    ]
    nats, tokens = 0.0, 0
    for start in range(0, len(ids), 32):
        chunk = ids[start : start + 32]
        ends = [place + 1 for place, token in enumerate(chunk[:-1]) if token == end] if changes else []
        for first, last in zip([0, *ends], [*ends, len(chunk)], strict=True):
            piece = torch.tensor([chunk[first:last]])
            with torch.no_grad():
                logits = plain(piece).logits[0, :-1]
            nats += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            tokens += last - first - 1
    assert record["loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_explain_and_preview_say_how_documents_are_cut(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    write_documents(tmp_path)
    path = write_config(tmp_path)

    assert command("explain", path, "--data") == 0
    explained = capsys.readouterr().out
    assert command("preview", path) == 0
    shown = capsys.readouterr().out

    assert "training chunks" in explained
    assert "chunk: 2 chunks of 32 tokens a batch, shuffled" in explained
    assert "documents are joined and cut into chunks of 32 tokens" in shown


@pytest.mark.long
def test_a_state_space_model_trains_on_chunks(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    from partita.tokenizers.load import byte_tokenizer

    write_documents(tmp_path)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 300}
    MambaForCausalLM(MambaConfig(**shape)).save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    data = {"source": "docs.jsonl", "batching": {"type": "chunk", "context_length": 32}}

    result = Model(write_config(tmp_path, base_model="mamba", data=data)).train(run=tmp_path / "run")

    assert result.steps == 4
    assert result.metrics["test"]["bits_per_byte"] > 0
