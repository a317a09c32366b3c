"""Tests of semantic retrieval with sentence-transformers, on a tiny encoder made here."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import Model
from partita.data.formatting.retrieval import build_retriever
from partita.data.sources.sources import open_rows
from partita_schema.config import Config
from partita_schema.errors import ModelError

POOL = [
    {"text": "three red balls", "colour": "red"},
    {"text": "two blue boxes", "colour": "blue"},
    {"text": "a green tree", "colour": "green"},
    {"text": "seven white clouds", "colour": "white"},
]
WORDS = sorted({word for row in POOL for word in row["text"].split()})

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers.*")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a sentence-transformers model: a random BERT over the words of the pool, mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("embedder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape))
    with torch.no_grad():  # random embeddings are small next to position embeddings; words must distinguish the texts
        bert.embeddings.word_embeddings.weight.mul_(50)
    bert.save_pretrained(folder / "bert")
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu").save(str(folder / "model"))
    return str(folder / "model")


def config_of(model_name: str, *, k: int = 1, **changes: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": {"type": "scratch", "size": "nano", "tokenizer": "word", "context_length": 128},
            "input_features": [{"name": "text", "type": "text"}],
            "output_features": [{"name": "colour", "type": "text"}],
            "prompt": {"retrieval": {"type": "semantic", "k": k, "model_name": model_name}},
            "trainer": {"type": "none", "batch_size": 2},
            **changes,
        }
    )


def test_the_most_similar_example_is_last_and_never_the_row_itself(embedder: str, tmp_path: Path) -> None:
    config = config_of(embedder, k=2)
    rows = open_rows(POOL, folder=tmp_path, name="pool")
    retriever = build_retriever(config, training=rows, folder=tmp_path)
    assert retriever is not None
    asked = [{"text": "two blue balls"}, {"text": "white clouds"}, {"text": "nine white clouds"}]
    found = retriever.choose(asked, ["a:1", "a:2", "a:3"])
    assert [examples[-1]["colour"] for examples in found] == ["blue", "white", "white"]
    assert [len(examples) for examples in found] == [2, 2, 2]
    assert found[0][0]["colour"] == "red", "the other row with balls comes second"
    own = retriever.choose([POOL[3]], [rows.key(3)])
    assert all(example["text"] != POOL[3]["text"] for example in own[0])
    assert len(own[0]) == 2


def test_a_zero_shot_prompt_contains_the_most_similar_example(
    embedder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.csv").write_text("text,colour\n" + "".join(f"{r['text']},{r['colour']}\n" for r in POOL))
    config = config_of(embedder, data={"source": "pool.csv"}, generation={"max_new_tokens": 2})
    model = Model(config, quiet=True)
    predictions = model.predict([{"text": "a tree"}, {"text": "red balls"}])
    assert {row["status"] for row in predictions} == {"ok"}
    row_tokenizer = model._backend.pipeline().row_tokenizer
    prompts = row_tokenizer.encode_prompts([{"text": "a tree"}, {"text": "red balls"}], ["q:1", "q:2"])
    tokenizer = model._backend.pipeline().lm.tokenizer
    first, second = (tokenizer.decode(prompt.input_ids) for prompt in prompts)
    assert "a green tree" in first
    assert "three red balls" in second
    assert "three red balls" not in first


def test_a_missing_package_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    rows = open_rows(POOL, folder=tmp_path, name="pool")
    with pytest.raises(ModelError) as caught:
        build_retriever(config_of("any"), training=rows, folder=tmp_path)
    assert str(caught.value) == (
        "prompt.retrieval of type semantic needs sentence-transformers; run: pip install 'partita[retrieval]'"
    )


def test_a_missing_model_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = open_rows(POOL, folder=tmp_path, name="pool")
    with pytest.raises(ModelError, match=r"^prompt\.retrieval\.model_name: no-such/model cannot be loaded: "):
        build_retriever(config_of("no-such/model"), training=rows, folder=tmp_path)
