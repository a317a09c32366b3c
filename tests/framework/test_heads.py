"""Tests of runs whose output a head predicts: answers and files are those of transformers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from partita import Model
from partita.data import DataLoader
from partita.data.preview import preview
from partita.lm.heads.base import ClassificationHead, fit_labels, has_other_labels
from partita.training.plan import plan_of_file
from partita_schema.errors import ConfigError, ModelError, PartitaError
from partita_schema.load import load_config

from ..classifiers import DECODERS, ENCODERS, LABELS, OUTPUTS, make_rows, settings, write_classifier
from ..head_models import CONTEXT
from ..json_lines import log_of, write_json_lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with rows.jsonl, some of which are longer than the context."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60, longest=24))
    return tmp_path


def train(config: dict[str, Any], run: Path, **trainer: Any) -> Model:
    model = Model(config | {"trainer": config["trainer"] | trainer}, quiet=True)
    model.train(run=run)
    return model


def logits_of(model: Any, folder: Path, texts: list[str]) -> torch.Tensor:
    """Return the logits of a model of transformers for texts, one by one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(text, truncation=True, max_length=CONTEXT, return_tensors="pt") for text in texts]
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits for one in inputs]
        )


@pytest.mark.parametrize("architecture", [*ENCODERS, *DECODERS])
def test_predictions_equal_those_of_the_pipeline_of_transformers_row_by_row(tmp_path: Path, architecture: str) -> None:
    from transformers import pipeline

    folder = write_classifier(tmp_path / "model", architecture)
    rows = make_rows(12, seed=2, longest=24)
    classify = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    expected = [classify([row["text"]], truncation=True, max_length=CONTEXT)[0] for row in rows]
    names = dict(zip(("LABEL_0", "LABEL_1", "LABEL_2"), LABELS, strict=True))

    model = Model(settings(architecture, base_model=str(folder), trainer={"type": "none"}), quiet=True)
    for batch_size in (1, 5):
        predictions = list(model.predict(rows, tmp_path / "answers.jsonl", batch_size=batch_size, fresh=True))
        assert [row["label"] for row in predictions] == [names[scores[0]["label"]] for scores in expected]
        for row, scores in zip(predictions, expected, strict=True):
            probabilities = {names[score["label"]]: pytest.approx(score["score"], abs=1e-5) for score in scores}
            assert row["label_probabilities"] == probabilities


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_trained_model_loads_with_plain_transformers(place: Path, kind: str) -> None:
    from transformers import AutoModelForSequenceClassification

    train(settings("distilbert", kind), place / "run")
    rows = make_rows(6, seed=3, longest=24)
    folder = place / "run" / "model"
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    logits = logits_of(plain, folder, [row["text"] for row in rows])
    answers = list(Model.load(place / "run").predict(rows, batch_size=4))

    written = json.loads((folder / "config.json").read_text(encoding="utf8"))
    assert written["architectures"] == ["DistilBertForSequenceClassification"]
    if kind == "category":
        assert (written["problem_type"], plain.config.id2label) == (
            "single_label_classification",
            dict(enumerate(LABELS)),
        )
        assert [row["label"] for row in answers] == [LABELS[index] for index in logits.argmax(-1)]
        assert answers[0]["label_probability"] == pytest.approx(logits[0].softmax(-1).max().item(), abs=1e-5)
    elif kind == "set":
        shares = logits.sigmoid().tolist()
        chosen = [[label for label, share in zip(LABELS, row, strict=True) if share >= 0.5] for row in shares]
        assert written["problem_type"] == "multi_label_classification"
        assert [row["parts"] for row in answers] == chosen
        assert list(answers[0]["parts_probabilities"].values()) == pytest.approx(shares[0], abs=1e-5)
    else:
        assert written["problem_type"] == "regression"
        assert [row["length"] for row in answers] == pytest.approx(logits[:, 0].tolist(), abs=1e-4)


def test_a_head_learns_the_label(place: Path) -> None:
    write_json_lines(place / "rows.jsonl", make_rows(300))
    model = train(settings("llama"), place / "run", max_steps=60, learning_rate=0.005)

    metrics = model.evaluate(make_rows(50, seed=4))["label"]

    assert metrics["accuracy"] > 0.85
    assert metrics["auroc"] > 0.9


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_lora_trains_the_head_and_saves_it(place: Path, architecture: str, merged: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = write_classifier(place / "base", architecture)
    adapter = {"type": "lora", "r": 2, "postprocessor": {"merge_adapter_into_base_model": merged}}
    train(settings(architecture, base_model=str(base), adapter=adapter), place / "run")
    folder = place / "run" / "model"
    if merged:
        plain = AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        plain = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), str(folder))
        weights = load_file(folder / "adapter_model.safetensors")
        untrained = AutoModelForSequenceClassification.from_pretrained(base).state_dict()
        heads = {name: name.removeprefix("base_model.model.") for name in weights if ".lora_" not in name}
        assert sorted(heads.values()) == sorted(name for name in untrained if name.startswith(("classifier", "score")))
        assert not any(torch.equal(weights[name], untrained[own]) for name, own in heads.items())
    rows = make_rows(6, seed=3, longest=24)
    expected = logits_of(plain.eval(), folder, [row["text"] for row in rows]).softmax(-1)

    answers = Model.load(place / "run").predict(rows)

    for row, shares in zip(answers, expected.tolist(), strict=True):
        assert list(row["label_probabilities"].values()) == pytest.approx(shares, abs=1e-5)


def test_quantized_weights_train_a_head(place: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = write_classifier(place / "base", "roberta")
    adapter, quantization = {"type": "lora", "r": 2}, {"bits": 4}
    model = train(settings("roberta", base_model=str(base), adapter=adapter, quantization=quantization), place / "run")

    assert {row["status"] for row in model.predict(make_rows(5))} == {"ok"}


@pytest.mark.parametrize("streaming", [False, True], ids=["rows", "stream"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(place: Path, streaming: bool) -> None:
    source = {"type": "jsonl", "path": "rows.jsonl", "streaming": True} if streaming else "rows.jsonl"
    config = settings("bert", "set", data={"source": source, "batching": {"type": "bucket", "window": 32}})
    train(config, place / "whole", max_steps=3)
    train(config, place / "run", max_steps=1)
    train(config, place / "run", max_steps=3)

    whole, resumed = (load_file(place / name / "model" / "model.safetensors") for name in ("whole", "run"))
    assert log_of(place / "run")[-1]["step"] == 3
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_rows_are_counted_and_cut_as_the_tokenizer_truncates(place: Path) -> None:
    train(settings("bert"), place / "run")

    steps = log_of(place / "run")
    ledger = json.loads((place / "run" / "ledger.json").read_text(encoding="utf8"))
    assert all(step["loss_tokens"] == step["rows"] for step in steps)
    assert ledger["splits"]["training"]["cut"] > 0


def test_predict_and_evaluate_warn_of_rows_that_are_longer_than_the_context(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = train(settings("bert"), place / "run")
    ledger = json.loads((place / "run" / "ledger.json").read_text(encoding="utf8"))["splits"]
    cut, lost = (sum(split[key] for split in ledger.values()) for key in ("cut", "cut_tokens"))
    caplog.clear()
    model.predict("rows.jsonl")
    model.evaluate("rows.jsonl")
    assert 2 * [f"{cut} rows cut to the length limit, {lost} tokens not read"] == [
        record.message for record in caplog.records if record.levelname == "WARNING"
    ]


def test_the_loss_does_not_depend_on_micro_batches(place: Path) -> None:
    losses = []
    for batch_size in (8, 2):
        config = settings("bert", "set", data={"source": "rows.jsonl", "batching": {"type": "fixed"}})
        train(config, place / f"run-{batch_size}", batch_size=batch_size)
        losses.append([step["loss"] for step in log_of(place / f"run-{batch_size}")])

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_cached_tokens_have_their_targets(place: Path) -> None:
    data = {"source": "rows.jsonl"}
    train(settings("bert", "set", data=data), place / "online", max_steps=2)
    for run in ("writes", "reads"):
        train(settings("bert", "set", data=data | {"encode": "cache"}), place / run, max_steps=2)

    losses = [[step["loss"] for step in log_of(place / run)] for run in ("online", "writes", "reads")]
    assert losses[0] == losses[1] == losses[2]


def test_the_public_loader_yields_targets(place: Path) -> None:
    batch = next(iter(DataLoader(settings("bert", "set"), batch_size=4)))

    assert batch.targets_NK is not None
    assert batch.targets_NK.shape == (4, len(LABELS))
    assert batch.loss_tokens == 4


def test_preview_and_plan_show_what_a_head_reads(place: Path) -> None:
    config = load_config(settings("bert")).config
    result = preview(config, folder=place, count=1)
    plan = plan_of_file(config, folder=place)

    text, target = result.rows[0].pieces
    row = make_rows(60, longest=24)[int(result.rows[0].key.rpartition(":")[2]) - 1]
    assert text.text.startswith("<s>")
    assert text.text.endswith("</s>")
    assert (target.text, target.in_loss, result.rows[0].loss_tokens) == (row["label"], True, 1)
    assert plan.plan is not None


# Labels


def labelled(folder: Path, labels: list[str]) -> None:
    """Name the outputs of a written classifier."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    config |= {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    path.write_text(json.dumps(config), encoding="utf8")


def zero_shot(folder: Path, *, listed: list[str] | None = None) -> Model:
    output = {"name": "label", "type": "category"} | ({"decoder": {"labels": listed}} if listed else {})
    config = settings(base_model=str(folder), output_features=[output], trainer={"type": "none", "batch_size": 4})
    return Model({name: value for name, value in config.items() if name != "data"}, quiet=True)


def test_a_published_classifier_brings_its_labels(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "bert")
    labelled(folder, ["red", "blue", "green"])
    rows = make_rows(8)

    answers = list(zero_shot(folder).predict(rows, tmp_path / "a.jsonl"))
    listed = list(zero_shot(folder, listed=list(LABELS)).predict(rows, tmp_path / "b.jsonl"))

    assert list(answers[0]["label_probabilities"]) == ["red", "blue", "green"]
    assert [row["label"] for row in answers] == [row["label"] for row in listed]
    assert zero_shot(folder).evaluate(rows)["label"]["n"] == 8


def test_labels_of_the_file_must_be_those_of_the_model(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "bert")
    labelled(folder, ["good", "bad", "other"])

    with pytest.raises(ModelError) as error:
        zero_shot(folder, listed=list(LABELS)).predict(make_rows(2))
    assert str(error.value) == (
        f"base_model: {folder} has a head for good, bad, other, and the labels are blue, green, red; write those of "
        "the model, or train a new head"
    )


def test_a_model_without_a_head_needs_training(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = write_classifier(tmp_path / "model", "bert")
    AutoModel.from_pretrained(folder).save_pretrained(folder)

    with pytest.raises(ModelError) as error:
        zero_shot(folder, listed=list(LABELS)).predict(make_rows(2))
    assert str(error.value) == (
        f"base_model: {folder} has no head, and a new one has random weights; write trainer: {{type: finetune}}, or "
        "name a model that was trained as a classifier"
    )


@pytest.mark.parametrize("labels", [range(12), [*range(5), 11]])
def test_numbers_of_classes_name_the_outputs_of_a_model_with_default_names(labels: Sequence[int]) -> None:
    described = BertConfig(num_labels=12, architectures=["BertForSequenceClassification"])
    head = ClassificationHead(tuple(sorted(map(str, labels))))
    fitted = fit_labels(head, described, source="a/b", listed=False, may_be_new=False)
    assert fitted.labels == tuple(map(str, range(12)))
    assert not has_other_labels(fitted, described, listed=False)


def test_rows_may_have_the_default_names_as_labels() -> None:
    described = BertConfig(num_labels=3, architectures=["BertForSequenceClassification"])
    head = ClassificationHead(("LABEL_0", "LABEL_2", "LABEL_1"))
    fitted = fit_labels(head, described, source="a/b", listed=False, may_be_new=False)
    assert fitted.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_labels_of_the_data_do_not_name_the_outputs_of_a_model_with_default_names() -> None:
    described = BertConfig(num_labels=3, architectures=["BertForSequenceClassification"])
    head = ClassificationHead(LABELS)
    with pytest.raises(ModelError) as error:
        fit_labels(head, described, source="a/b", listed=False, may_be_new=False)
    assert str(error.value) == (
        "base_model: a/b has a head for LABEL_0, LABEL_1, LABEL_2, and the labels are blue, green, red; list them in "
        "decoder.labels, in the order of the model, or train a new head"
    )
    assert fit_labels(head, described, source="a/b", listed=False, may_be_new=True).labels == LABELS
    assert has_other_labels(head, described, listed=False)
    assert fit_labels(head, described, source="a/b", listed=True, may_be_new=False).labels == LABELS
    assert not has_other_labels(head, described, listed=True)


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama"])
def test_training_replaces_a_head_for_as_many_other_labels(
    place: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_classifier(place / "model", architecture)
    labelled(folder, ["a", "b", "c"])
    trainer = {"type": "finetune", "max_steps": 1, "learning_rate": 1e-9, "batch_size": 4}
    Model(settings(architecture, base_model=str(folder), trainer=trainer), quiet=True).train(run=place / "run")
    before, after = (load_file(path / "model.safetensors") for path in (folder, place / "run" / "model"))
    [name] = [name for name, weight in before.items() if weight.shape == (3, 32)]
    assert not torch.allclose(before[name], after[name], atol=1e-3)
    warning = (
        f"base_model: {folder} has a head for a, b, c, and the labels are blue, green, red: training starts with a new "
        "head; list the labels of the model, in its order, in decoder.labels to keep its head"
    )
    assert caplog.messages.count(warning) == 1


def test_training_replaces_a_head_for_other_labels(place: Path) -> None:
    folder = write_classifier(place / "model", "bert")
    labelled(folder, ["a", "b", "c"])
    output = OUTPUTS["category"] | {"decoder": {"labels": [*LABELS, "none"]}}
    train(settings(base_model=str(folder), output_features=[output]), place / "run")

    [row] = Model.load(place / "run").predict(make_rows(1))
    assert list(row["label_probabilities"]) == [*LABELS, "none"]


# Errors


def test_a_continued_adapter_keeps_the_labels_of_its_head(place: Path) -> None:
    write_classifier(place / "classifier", "bert")
    base = BertModel.from_pretrained(place / "classifier")
    base.save_pretrained(place / "base")
    for path in (place / "classifier").glob("tokenizer*"):
        shutil.copy(path, place / "base")

    def config(labels: Sequence[str] | None, **adapter: Any) -> dict[str, Any]:
        decoder = {"decoder": {"labels": list(labels)}} if labels else {}
        own = settings() | {"base_model": str(place / "base"), "adapter": {"type": "lora", **adapter}}
        return own | {"output_features": [own["output_features"][0] | {"decoder": {}} | decoder]}

    order = LABELS[::-1]
    trained = train(config(order), place / "run", max_steps=2)
    expected = [row["label_probabilities"] for row in trained.predict(make_rows(5))]
    weights = str(place / "run" / "model")
    for labels, keys in ((None, {}), (order, {"target_modules": "all-linear", "r": 16}), (LABELS, {})):
        of_adapter = config(labels, pretrained_adapter_weights=weights, **keys)
        same = Model(of_adapter | {"trainer": {"type": "none"}}, quiet=True)
        assert [row["label_probabilities"] for row in same.predict(make_rows(5))] == expected
    other = config(["x", "y", "z"], pretrained_adapter_weights=weights) | {"trainer": {"type": "none"}}
    with pytest.raises(ModelError) as caught:
        Model(other, quiet=True).predict(make_rows(5))
    assert str(caught.value) == (
        f"adapter.pretrained_adapter_weights: {weights} has a head for {', '.join(order)}, and the labels are x, y, z; "
        "write those of the adapter in decoder.labels, or train a new one"
    )


def test_an_encoder_writes_no_text(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "bert")
    output = {"name": "label", "type": "text"}

    with pytest.raises(ConfigError) as error:
        Model(settings(base_model=str(folder), output_features=[output]), quiet=True).train()
    assert str(error.value) == (
        f"output_features[0].type: {folder} is an encoder, which writes no text, and a text is written; write type: "
        "category, set, number, tags, score or embedding, or choose a decoder as base_model"
    )


def test_keys_of_generated_text_are_refused_for_an_encoder_without_the_key_head(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "bert")

    with pytest.raises(ConfigError) as error:
        Model(settings(base_model=str(folder), generation={"do_sample": True}), quiet=True).train()
    assert str(error.value) == (
        "generation.do_sample: a head predicts the value and nothing is generated, so do_sample has no effect; "
        "remove it"
    )


def test_a_threshold_needs_a_head(tmp_path: Path) -> None:
    output = OUTPUTS["set"] | {"decoder": {"labels": list(LABELS), "threshold": 0.3}}
    base = settings("llama")["base_model"]

    with pytest.raises(ConfigError) as error:
        Model(settings(base_model=base, output_features=[output]), quiet=True).train()
    assert str(error.value) == (
        "output_features[0].decoder.threshold: threshold is for probabilities of a head; write head: linear next to "
        "it, or remove it"
    )


def test_a_head_generates_no_text(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "bert")

    with pytest.raises(PartitaError) as error:
        zero_shot(folder, listed=list(LABELS)).generate("the cat")
    assert str(error.value) == "there is nothing to generate with a head: it writes no text; predict answers rows"


def test_a_row_without_a_token_is_an_error(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "model", "llama")
    config = settings("llama", base_model=str(folder), trainer={"type": "none", "batch_size": 2})
    config["prompt"] = {"template": "{text}"}
    config["input_features"][0]["preprocessing"] = {"missing_value_strategy": "fill_with_const"}

    answers = list(Model(config, quiet=True).predict([{"text": ""}, {"text": "the cat"}], tmp_path / "a.jsonl"))

    assert [row["status"] for row in answers] == ["error", "ok"]
    assert answers[0]["error"] == "the text is empty"


def test_weights_that_diverged_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_classifier(tmp_path / "model", "bert")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    [answer] = zero_shot(folder, listed=list(LABELS)).predict([{"text": "the cat"}], tmp_path / "a.jsonl")

    assert answer["error"] == (
        "ModelError: the scores are NaN because training diverged; train again with a lower trainer.learning_rate"
    )
