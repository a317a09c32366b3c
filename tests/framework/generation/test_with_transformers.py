import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from partita.generation.encoded_prompts import EncodedPrompts
from partita.generation.engine import Engine
from partita.generation.predictions import Predictions
from partita.lm.base import GenerationOptions
from partita_schema.rows import row_schema

from .conftest import encoder_of, nano_model
from .generating import generate_rows

QUESTIONS = [{"question": "abc " * (n * 5 % 9 + 1) + str(n)} for n in range(14)]
SAMPLED = GenerationOptions({"do_sample": True, "top_k": 0})
GREEDY = GenerationOptions({"do_sample": False})
LIBRARY = replace(GREEDY, slots=False)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def lm(request: Any) -> Any:
    return nano_model(request.param)


def answers(predictions: Predictions) -> list[Any]:
    return [(row["answer_raw"], row["finish_reason"], row["tokens"], row["status"]) for row in predictions]


@pytest.mark.parametrize("engine", ["slots", "static"])
def test_batched_rows_give_the_answers_of_single_rows(
    lm: Any, make_rows: Any, predict: Any, engine: Engine, caplog: Any
) -> None:
    # The longest prompts leave less room than max_new_tokens, so limits differ between rows.
    options: dict[str, Any] = {"generation": replace(GREEDY, slots=engine == "slots"), "max_new_tokens": 40}
    with caplog.at_level(logging.INFO):
        together = answers(predict(lm, make_rows(QUESTIONS[:8]), batch_size=5, **options))
    assert not [message for message in caplog.messages if "row by row" in message or "one by one" in message]
    in_batches = "answers are generated in sorted batches, not in slots: generation.slots is false"
    assert (in_batches in caplog.messages) == (engine == "static")
    alone = predict(lm, make_rows(QUESTIONS[:8]), batch_size=1, fresh=True, **options)
    assert together == answers(alone)
    by_library = predict(lm, make_rows(QUESTIONS[:8]), batch_size=1, fresh=True, **options | {"generation": LIBRARY})
    assert together == answers(by_library)
    assert {row[3] for row in together} == {"ok"}
    assert len({row[2] for row in together}) > 1


@pytest.mark.parametrize("engine", ["slots", "static"])
def test_missing_rows_of_a_sampled_job_get_the_samples_of_an_uninterrupted_one(
    lm: Any, make_config: Any, make_rows: Any, engine: Engine
) -> None:
    config = make_config()
    prompts = EncodedPrompts(make_rows(QUESTIONS), encoder_of(config, lm), row_schema(config, supervised=False))

    def sample(done: Any, seed: int = 1) -> dict[int, str]:
        options: dict[str, Any] = {"options": SAMPLED, "max_new_tokens": 12, "batch_size": 4, "engine": engine}
        batches = generate_rows(lm, prompts, seed=seed, done=done, **options)
        return {result.row: result.generated.text for batch in batches for result in batch.results if result.generated}

    straight = sample(np.zeros(14, dtype=np.bool_))
    assert len(set(straight.values())) == 14
    assert sample(np.zeros(14, dtype=np.bool_), seed=2) != straight
    for holes in ([0], [3, 8, 13], list(range(5))):
        done = np.ones(14, dtype=np.bool_)
        done[holes] = False
        assert sample(done) == {row: straight[row] for row in holes}
