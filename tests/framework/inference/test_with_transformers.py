import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.inference.predictions import Predictions
from partita.inference.prompts import EncodedPrompts
from partita.inference.static import generate_rows
from partita.lm.base import GenerationOptions
from partita.lm.huggingface import load_model
from partita.lm.tokenizers import load_tokenizer
from partita_schema.config import Config
from partita_schema.rows import row_schema

QUESTIONS = [{"question": "abc " * (n * 5 % 9 + 1) + str(n)} for n in range(14)]
SAMPLED = GenerationOptions({"do_sample": True, "top_k": 0})
GREEDY = GenerationOptions({"do_sample": False})


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def lm(request: Any, make_config: Any) -> Any:
    base = {"type": "scratch", "architecture": request.param, "size": "nano", "tokenizer": "byte", "context_length": 64}
    config: Config = make_config(base_model=base)
    tokenizer = load_tokenizer(config, folder=Path(), texts=list)
    return load_model(config, folder=Path(), tokenizer=tokenizer, trainable=False)


def answers(predictions: Predictions) -> list[Any]:
    return [(row["answer_raw"], row["finish_reason"], row["tokens"], row["status"]) for row in predictions]


def test_batches_give_what_each_row_gives_alone(lm: Any, make_rows: Any, predict: Any, caplog: Any) -> None:
    # The longest prompts leave less room than max_new_tokens: limits differ within a batch.
    options: dict[str, Any] = {"generation": GREEDY, "max_new_tokens": 40}
    with caplog.at_level(logging.INFO):
        batched = answers(predict(lm, make_rows(QUESTIONS), batch_size=5, **options))
    assert not [message for message in caplog.messages if "row by row" in message]
    alone = answers(predict(lm, make_rows(QUESTIONS), batch_size=1, fresh=True, **options))
    assert batched == alone
    assert {row[3] for row in batched} == {"ok"}
    assert len({row[2] for row in batched}) > 1


def test_a_sampled_job_with_holes_is_filled_with_what_a_straight_one_samples(
    lm: Any, make_config: Any, make_rows: Any
) -> None:
    from partita.data.shaping.encoder import Encoder
    from partita.data.shaping.prompt import Shaper

    config = make_config()
    encoder = Encoder(Shaper(config, tokenizer=lm.tokenizer, labels={}, retriever=None))
    prompts = EncodedPrompts(make_rows(QUESTIONS), encoder, row_schema(config, supervised=False))

    def sample(done: Any, seed: int = 1) -> dict[int, str]:
        options: dict[str, Any] = {"options": SAMPLED, "max_new_tokens": 12, "batch_size": 4}
        batches = generate_rows(lm, prompts, seed=seed, done=done, **options)
        return {result.row: result.generated.text for batch in batches for result in batch.results if result.generated}

    straight = sample(np.zeros(14, dtype=np.bool_))
    assert sample(np.zeros(14, dtype=np.bool_), seed=2) != straight
    for holes in ([0], [3, 8, 13], list(range(5))):
        done = np.ones(14, dtype=np.bool_)
        done[holes] = False
        assert sample(done) == {row: straight[row] for row in holes}
