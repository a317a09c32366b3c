"""Tests of embeddings: the loss is that of one large batch, and the vectors are those of other libraries."""

import csv
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from partita import Model
from partita.data.formatting.build import build_row_tokenizer
from partita.data.sources.sources import open_rows
from partita.data.tokenizer_texts import tokenizer_texts
from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import ConfigError, DataError, DivergenceError
from partita_schema.load import load_config
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext, prepare
from partita_trainers.objectives.contrastive import Contrastive
from partita_trainers.objectives.of_config import default_objective
from partita_trainers.objectives.text_identity import identity_of
from partita_trainers.process_group import SINGLE_PROCESS

from ..head_models import LoadedHead, tiny_model
from ..json_lines import write_json_lines

WORDS = tuple(f"w{number}" for number in range(40))
TEMPERATURE = 0.1


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return questions, passages with the same words, and passages with other words."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = rng.choice(WORDS, 4, replace=False).tolist()
        extra = int(rng.integers(0, 4))
        rows.append(
            {
                "question": " ".join(rng.permutation(words)[:3]),
                "passage": "about " + " ".join(words),
                "other": " ".join(rng.choice(WORDS, 2 + extra, replace=False)),
            }
        )
    return rows


def settings(architecture: str = "bert", *, negatives: Sequence[str] = ("other",), **changes: Any) -> dict[str, Any]:
    output = {
        "name": "vector",
        "type": "embedding",
        "column": "passage",
        "preprocessing": {"negatives": list(negatives)},
        "decoder": {"temperature": TEMPERATURE},
    }
    base: dict[str, Any] = {
        "base_model": tiny_model(architecture),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [output],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "finetune", "batch_size": 8, "max_steps": 3, "learning_rate": 0.01},
    }
    return base | changes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    return tmp_path


class Setup(LoadedHead):
    """A model from scratch, and rows as one batch."""

    def __init__(
        self, architecture: str, rows: Sequence[dict[str, Any]], folder: Path, *, dropout: float = 0.0
    ) -> None:
        texts = [text for row in rows for text in row.values()]
        super().__init__(settings(architecture), rows, folder=folder, texts=texts)
        for module in self.lm.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        self.objective: Any = default_objective(self.config)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients and reset them."""
        found = [parameter.grad for parameter in self.lm.module.parameters() if parameter.grad is not None]
        self.lm.module.zero_grad()
        return found


def plain_vectors(model: Any, tokenizer: Any, texts: Sequence[str], *, pooling: str) -> torch.Tensor:
    """Return embeddings as the model cards of sentence encoders compute them."""
    inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=16, return_tensors="pt")
    mask = inputs["attention_mask"]
    hidden = model(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
    if pooling == "last":
        vectors = hidden[torch.arange(len(mask)), mask.sum(1) - 1]
    else:
        vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return functional.normalize(vectors, dim=1)


def plain_loss(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, pooling: str = "mean") -> torch.Tensor:
    """Return MultipleNegativesRankingLoss of sentence-transformers over all rows, with one hard negative each."""
    anchors, positives, negatives = (
        plain_vectors(model, tokenizer, [row[column] for row in rows], pooling=pooling)
        for column in ("question", "passage", "other")
    )
    scores = anchors @ torch.cat([positives, negatives]).T / TEMPERATURE
    return functional.cross_entropy(scores, torch.arange(len(rows)))


def step(setup: Setup, batches: Sequence[Batch], count: int, *, group: Any = SINGLE_PROCESS) -> float:
    """Take the backward passes of a step; return the loss."""
    context = ObjectiveContext(setup.lm, setup.lm.module, group)
    prepare(setup.objective, context, batches)
    total = 0.0
    for batch in batches:
        loss, _ = setup.objective.loss(context, batch)
        (loss / count).backward()
        total += loss.item() / count
    return total


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "deberta-v2", "modernbert", "llama", "gpt2"])
def test_loss_and_gradients_are_those_of_one_batch_for_any_micro_batches(tmp_path: Path, architecture: str) -> None:
    rows = make_rows(8)
    setup = Setup(architecture, rows, tmp_path)
    pooling = "last" if architecture in ("llama", "gpt2") else "mean"
    expected = plain_loss(setup.lm.module, setup.tokenizer, rows, pooling=pooling)
    expected.backward()
    gradients = setup.gradients()
    for parts in ([range(8)], [range(3), range(3, 8)], [[row] for row in (5, 1, 7, 0, 2, 6, 4, 3)]):
        batches = [setup.batch(list(part)) for part in parts]
        assert sum(map(setup.objective.denominator, batches)) == 8
        assert step(setup, batches, 8) == pytest.approx(expected.item(), rel=1e-5)
        for ours, plain in zip(setup.gradients(), gradients, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_two_ranks_have_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    rows = make_rows(8)
    one = Setup("bert", rows, tmp_path)
    expected = step(one, [one.batch(range(8))], 8)
    gradients = one.gradients()
    setups = [Setup("bert", rows, tmp_path) for _ in range(2)]

    def of_rank(group: Any) -> float:
        setup = setups[group.rank]
        return step(setup, [setup.batch([row]) for row in range(group.rank, 8, 2)], 8, group=group)

    with ThreadPoolExecutor(2) as threads:
        losses = list(threads.map(of_rank, ThreadGroup.of(2, timeout_seconds=30)))
    assert sum(losses) == pytest.approx(expected, rel=1e-5)
    for first, second, whole in zip(setups[0].gradients(), setups[1].gradients(), gradients, strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-5, atol=1e-5)


def test_the_cached_gradient_is_exact_with_dropout(tmp_path: Path) -> None:
    rows = make_rows(6)
    setup = Setup("bert", rows, tmp_path, dropout=0.3)
    batches = [setup.batch([0, 1, 2]), setup.batch([3, 4, 5])]

    def seed(batch: Batch) -> int:
        return len(batch.keys[0]) + batch.input_ids_BT.sum().item()

    def embedded(batch: Batch) -> torch.Tensor:
        torch.manual_seed(seed(batch))
        return setup.lm.embeddings(setup.lm.module, batch).view(3, 3, -1)

    context = ObjectiveContext(setup.lm, setup.lm.module, noise_seed=seed)
    with setup.lm.training():
        whole = torch.cat([embedded(batch) for batch in batches])
        candidates = whole[:, 1:].reshape(12, -1)
        expected = functional.cross_entropy(whole[:, 0] @ candidates.T / TEMPERATURE, torch.arange(6) * 2)
        expected.backward()
        gradients = setup.gradients()
    prepare(setup.objective, context, batches)
    assert not setup.lm.module.training
    total = 0.0
    with setup.lm.training():
        for batch in batches:
            torch.manual_seed(seed(batch))
            loss, _ = setup.objective.loss(context, batch)
            (loss / 6).backward()
            total += loss.item() / 6
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for ours, plain in zip(setup.gradients(), gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_the_metrics_are_those_of_a_search_in_all_texts(tmp_path: Path) -> None:
    rows = make_rows(12)
    setup = Setup("bert", rows, tmp_path)
    batches = [setup.batch(range(6)), setup.batch(range(6, 12))]
    context = ObjectiveContext(setup.lm, setup.lm.module)
    with torch.no_grad():
        prepare(setup.objective, context, batches)
        metrics = [setup.objective.loss(context, batch)[1] for batch in batches]
        anchors, positives, negatives = (
            plain_vectors(setup.lm.module, setup.tokenizer, [row[column] for row in rows], pooling="mean")
            for column in ("question", "passage", "other")
        )
    similar = anchors @ torch.cat([positives, negatives]).T
    ranks = [int((similar[row] >= similar[row, row]).sum()) for row in range(12)]
    expected = {"mrr": sum(1 / rank for rank in ranks)}
    expected |= {f"recall_at_{depth}": sum(rank <= depth for rank in ranks) for depth in (1, 5, 10)}
    for name, total in expected.items():
        assert sum(part[f"vector.{name}"].total for part in metrics) == pytest.approx(total)
        assert sum(part[f"vector.{name}"].weight for part in metrics) == 12


def test_texts_that_are_equal_within_the_context_are_not_equal(place: Path) -> None:
    begin = " ".join(WORDS[:20])
    rows = [{"question": f"w{n}", "passage": f"{begin} w{n}", "other": f"{begin} w{n + 20}"} for n in range(10)]
    metrics = Model(settings(trainer={"type": "none"}), quiet=True).evaluate(rows)
    # All texts but the question have the same vector, and candidates as similar as the positive come before it.
    assert metrics["vector"]["recall_at_10"] == 0
    assert metrics["vector"]["mrr"] == pytest.approx(1 / 20)
    assert metrics["model"]["loss"] == pytest.approx(math.log(20), rel=1e-5)


def test_the_same_positive_of_another_row_is_no_negative(place: Path) -> None:
    rows = [{"question": f"w{n}", "passage": "w30 w31", "other": "w30 w31"} for n in range(10)]
    metrics = Model(settings(trainer={"type": "none"}), quiet=True).evaluate(rows)
    assert metrics["vector"]["mrr"] == 1
    assert metrics["model"]["loss"] == 0


def test_a_tokenizer_for_embeddings_is_trained_on_all_texts_with_their_prefix(place: Path) -> None:
    preprocessing = {"prefix": "passage: ", "negatives": ["other"]}
    output = {"name": "vector", "type": "embedding", "column": "passage", "preprocessing": preprocessing}
    config = load_config(settings(output_features=[output], prompt={"template": "query: {question}"})).config
    rows = open_rows([{"question": "q", "passage": "p", "other": "n"}], folder=Path())
    assert list(tokenizer_texts(rows, config, supervised=True)) == ["query: q", "passage: p", "passage: n"]
    assert list(tokenizer_texts(rows, config, supervised=False)) == ["query: q"]


def test_the_objective_belongs_to_embeddings_only() -> None:
    objective = default_objective(load_config(settings()).config)
    assert isinstance(objective, Contrastive)
    assert (objective.temperature, objective.name) == (TEMPERATURE, "vector")


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_metrics(place: Path, train_killed: Any) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "max_steps": 4, "learning_rate": 0.01, "steps_per_checkpoint": 2}
    config = settings(trainer={**trainer, "effective_batch_size": 16, "validation_metric": "mrr"})
    whole = Model(config, quiet=True).train(run=place / "whole")
    train_killed(Model(config, quiet=True), place / "killed", after=3)
    resumed = Model(config, quiet=True).train(run=place / "killed")
    assert resumed.resumed_from == 2
    assert resumed.metrics == whole.metrics
    assert {"loss", "vector.mrr", "vector.recall_at_10"} <= whole.metrics["validation"].keys()


def test_embeddings_are_learned_evaluated_and_predicted(place: Path) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "effective_batch_size": 16, "epochs": 8, "learning_rate": 0.01}
    rows = make_rows(40, seed=1)
    before = Model(settings(trainer={"type": "none"}), quiet=True).evaluate(rows)["vector"]["mrr"]
    Model(settings(trainer=trainer), quiet=True).train(run=place / "run")
    model = Model.load(place / "run", quiet=True)
    metrics = model.evaluate(rows)
    assert metrics["vector"]["mrr"] > before + 0.2
    assert metrics["vector"]["n"] == 40
    assert set(metrics["model"]) == {"loss"}
    other_size = model.evaluate(rows, batch_size=3)
    # Each micro-batch adds up its reciprocal ranks, in float64.
    assert other_size["vector"] == pytest.approx(metrics["vector"], rel=1e-14)
    assert other_size["model"] == pytest.approx(metrics["model"], rel=1e-6)
    predictions = model.predict(rows, output=place / "out.parquet")
    vectors = np.array(predictions["vector"], dtype=np.float32)
    assert vectors.shape == (40, 32)
    np.testing.assert_allclose((vectors**2).sum(1), 1, rtol=1e-5)
    table = pq.read_table(place / "out.parquet")
    assert str(table.schema.field("vector").type) == "list<element: float>"
    assert np.array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
    predictions.write(place / "out.csv")
    with (place / "out.csv").open(encoding="utf8", newline="") as file:
        assert np.array_equal(np.array([json.loads(row["vector"]) for row in csv.DictReader(file)], "float32"), vectors)


def test_a_model_that_diverges_ends_training_with_the_reason(place: Path) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "max_steps": 8, "learning_rate": 1e30}
    reason = r"^step 2: the loss is nan on rows .*: lower trainer\.learning_rate, now 1e\+30"
    with pytest.raises(DivergenceError, match=reason):
        Model(settings(trainer=trainer), quiet=True).train(run=place / "run")


def test_a_diverged_model_can_be_evaluated(place: Path) -> None:
    Model(settings(), quiet=True).train(run=place / "run")
    file = place / "run" / "model" / "model.safetensors"
    save_file({name: torch.full_like(weights, torch.nan) for name, weights in load_file(file).items()}, file)
    (file.parent / "partita-checksums.json").unlink()
    metrics = Model.load(place / "run", quiet=True).evaluate(make_rows(10))
    assert math.isnan(metrics["model"]["loss"])
    assert metrics["vector"]["recall_at_10"] == 0


def test_the_batch_size_of_an_evaluation_is_that_of_its_loss(place: Path) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "eval_batch_size": "auto", "max_steps": 1}
    Model(settings(trainer=trainer), quiet=True).train(run=place / "run")
    trained, new = Model.load(place / "run", quiet=True), Model(settings(trainer={"type": "none"}), quiet=True)
    for model in (trained, new):
        sizes = model.tune(place / "rows.jsonl", fresh=True).by_purpose()
        assert sizes.keys() == {"generation", "evaluation"}
        assert model.evaluate(place / "rows.jsonl")["vector"]["n"] == 60


@pytest.mark.parametrize("pooling", ["auto", "cls", "last"])
def test_saved_embeddings_are_those_of_transformers_and_sentence_transformers(place: Path, pooling: str) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    config = settings()
    config["output_features"][0]["decoder"]["pooling"] = pooling
    Model(config, quiet=True).train(run=place / "run")
    rows = make_rows(5, seed=2)
    texts = [row["question"] for row in rows]
    vectors = torch.tensor(Model.load(place / "run", quiet=True).predict(rows)["vector"])
    folder = str(place / "run" / "model")
    with torch.no_grad():
        plain, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        if pooling != "cls":
            found = plain_vectors(plain, tokenizer, texts, pooling="last" if pooling == "last" else "mean")
            torch.testing.assert_close(found, vectors, rtol=1e-5, atol=1e-6)
    encoded = SentenceTransformer(folder, device="cpu").encode(texts)
    torch.testing.assert_close(torch.from_numpy(encoded), vectors, rtol=1e-5, atol=1e-6)


def test_embeddings_with_an_adapter_are_saved_and_loaded(place: Path) -> None:
    Model(settings("llama", adapter={"type": "lora"}), quiet=True).train(run=place / "run")
    model = Model.load(place / "run", quiet=True)
    rows = make_rows(4, seed=2)
    again = Model.load(place / "run", quiet=True)
    assert model.predict(rows)["vector"] == again.predict(rows)["vector"]


def test_each_text_is_cut_to_the_context_and_the_lost_tokens_are_counted(tmp_path: Path) -> None:
    long = " ".join(WORDS[:20])
    setup = Setup("bert", make_rows(40), tmp_path)
    config = load_config(settings()).config
    row_tokenizer = build_row_tokenizer(config, tokenizer=setup.tokenizer, context_length=16)
    example = row_tokenizer.encode({"question": "w1 w2", "vector": long, "vector.other": "w3"}, key="a")
    begin, *words, end = setup.tokenizer(long)["input_ids"]
    texts = [setup.tokenizer(text)["input_ids"] for text in ("w1 w2", "w3")]
    assert example.input_ids == [*texts[0], begin, *words[:14], end, *texts[1]]
    assert example.cut_tokens == 6
    assert [stop for _, stop in example.spans] == [4, 20, 23]
    assert example.targets == [identity_of(text) for text in ("w1 w2", long, "w3")]


def test_batch_sizes_of_embeddings_are_measured(place: Path) -> None:
    config = settings(trainer={"type": "finetune", "batch_size": "auto", "max_batch_size": 4, "max_steps": 1})
    result = Model(config, quiet=True).train(run=place / "run")
    assert result.batch_sizes["training"]["rows"] <= 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"backend": {"type": "torchrun", "processes": 2, "sharding": "full"}},
            "backend.sharding: the embeddings of a step need the whole model on each rank; remove sharding",
        ),
        (
            {"backend": {"type": "ray"}},
            "backend.type: the embeddings of a step are compared in one place; remove backend",
        ),
    ],
    ids=["sharding", "ray"],
)
def test_backends_that_cannot_compare_embeddings_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings(**changes))
    assert problem in [str(one) for one in caught.value.problems]


def test_a_missing_column_of_negatives_is_reported(place: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'unlike', which output vector needs"):
        Model(settings(negatives=["unlike"]), quiet=True).train(run=place / "run")
