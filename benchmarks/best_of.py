"""Best of n: the samples of a row start from one prefill of its prompt, and are scored with one computation of it."""

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from fixtures import write_rows, zero_shot
from harness import Limit, Result, Row, call, main

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
NEW_MODEL = {"type": "scratch", "tokenizer": "word", "vocab_size": 256, "context_length": 512, "size": "mini"}


def samples(folder: Path, quick: bool) -> Result:
    """Eight samples of each row that share one prefill of its prompt, compared with a prefill for each sample.

    A model of 5 M parameters draws 8 answers of 16 or 48 tokens to each of 16 prompts of 300 to 400 tokens, in 64
    slots, and in 60, which is no multiple of 8, so that the samples of some rows start at different times. One thread.
    CPU seconds are medians of three rounds, in which the contenders alternate. Prompt tokens are those that the model
    computed.
    """
    table = call(sampled, folder, 1 if quick else 3)
    limits = [
        Limit("CPU seconds with 16 tokens per answer, prompts computed once", table[0]["ratio"], 3, "min"),
        Limit("share of rows with the same answers", min(row["same answers"] for row in table), 1, "min"),
        Limit(
            "prompt tokens over those of the rows, at most", max(row["over the rows'"] for row in table), 1.25, "max"
        ),
    ]
    return table, limits


def sampled(folder: str, rounds: int) -> list[Row]:
    """Return a row of the table for each length of answers and number of slots."""
    import torch

    from partita.model import Model

    torch.set_num_threads(1)
    os.chdir(folder)
    rng = random.Random(1)
    write_rows(Path(folder, "texts.jsonl"), ({"question": text(rng, 3, 20), "answer": "ba"} for _ in range(200)))
    config = zero_shot(NEW_MODEL, "question answer", tokens=48, data={"source": "texts.jsonl"})
    lm = Model(config, quiet=True)._backend.pipeline().lm
    table = []
    for tokens, slots in ((16, 64), (48, 64), (48, 60)):
        seconds: dict[int, list[float]] = {1: [], 8: []}
        for _ in range(rounds):
            for together in (8, 1):
                spent, answers, read = draw(lm, tokens=tokens, slots=slots, together=together)
                seconds[together].append(spent)
                if together == 8:
                    shared, read_shared = answers, read
        apart, once = (statistics.median(seconds[together]) for together in (1, 8))
        same = sum(answers[row] == shared[row] for row in answers) / len(answers)
        table.append(
            {
                "tokens per answer": tokens,
                "slots": slots,
                "CPU s, a prefill per sample": round(apart, 2),
                "CPU s, a prefill per row": round(once, 2),
                "ratio": round(apart / once, 2),
                "prompt tokens": read,
                "computed": read_shared,
                "over the rows'": round(read_shared * 8 / read, 3),
                "same answers": same,
            }
        )
        print(table[-1], flush=True)
    return table


def draw(lm: Any, *, tokens: int, slots: int, together: int) -> tuple[float, dict[int, tuple[int, ...]], int]:
    """Return CPU seconds, answers by sample, and prompt tokens computed, with 8 samples per row.

    Args:
        lm: The model.
        tokens: Tokens of an answer.
        slots: Rows at a time.
        together: How many samples of a row share a prefill: 1 or 8.
    """
    import numpy as np

    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings, RowRequests
    from partita.generation.scheduler import Scheduler
    from partita.lm.base import GenerationOptions

    rng = random.Random(2)
    prompts = [[rng.randrange(8, 60) for _ in range(rng.randint(300, 400))] for _ in range(16)]
    work = RowRequests(
        lengths=np.repeat([len(prompt) for prompt in prompts], 8).astype(np.int32),
        new_tokens=np.full(128, tokens),
        fetch=lambda rows: [prompts[row // 8] for row in rows],
        key=lambda row: row.to_bytes(4, "little"),
        num_samples=together,
    )
    options = GenerationOptions({"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": tokens // 2})
    run = Scheduler(
        lm, work, GenerationSettings(options, BatchBudget(slots), 0), rows=np.ones(128, dtype=np.bool_), tolerant=False
    )
    started = time.process_time()
    batches = list(run.completions())
    spent = time.process_time() - started
    results = [result for batch in batches for result in batch.results]
    answers = {result.row: result.generated.ids for result in results if result.generated is not None}
    return spent, answers, sum(batch.spent.prompt_tokens for batch in batches)


# Rewards


def rewards(folder: Path, quick: bool) -> Result:
    """A reward model that scores eight answers to a row, with the prompt computed once or once for each answer.

    A reward model of 5 M parameters scores 8 answers of 8 to 16 words to each of 16 prompts of 300 to 400 words, and
    to 16 prompts as long as an answer. One thread. CPU seconds are medians of three rounds, in which the contenders
    alternate. Rows are scored one at a time, as with `generation.best_of`.
    """
    table = call(rewarded, folder, 1 if quick else 3)
    limits = [
        Limit("CPU seconds of long prompts, computed for each answer over computed once", table[0]["ratio"], 3, "min"),
        Limit("the same with short prompts", table[1]["ratio"], 1, "min"),
        Limit("largest difference of a score", max(row["largest difference"] for row in table), 1e-5, "max"),
    ]
    return table, limits


def rewarded(folder: str, rounds: int) -> list[Row]:
    """Return a row of the table for long and for short prompts."""
    import torch

    from partita.backends.reward_models import load_answer_scorer
    from partita.lm.branches.masks import BranchSupport
    from partita.lm.reward_model import RewardModel
    from partita.model import Model

    torch.set_num_threads(1)
    os.chdir(folder)
    rng = random.Random(3)
    pairs = [{"prompt": text(rng, 8, 16), "chosen": text(rng, 2, 8), "rejected": "no"} for _ in range(40)]
    write_rows(Path(folder, "pairs.jsonl"), pairs)
    config = {
        "base_model": NEW_MODEL,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": "pairs.jsonl"},
        "trainer": {"type": "reward", "max_steps": 1, "batch_size": 8},
    }
    Model(config, quiet=True).train(run="rm")
    scorer = load_answer_scorer(Path("rm"), key="generation.reward", quiet=True)
    lm = scorer.pipeline.lm
    assert isinstance(lm, RewardModel)
    ways = {"each": BranchSupport("measured"), "once": lm.branch_support}
    table = []
    for fewest, most in ((300, 400), (8, 16)):
        asked = [({"prompt": text(rng, fewest, most)}, [text(rng, 8, 16) for _ in range(8)]) for _ in range(16)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        scores: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, way in ways.items():
                lm.branch_support = way
                started = time.process_time()
                results = [score for row, answers in asked for score in scorer.scores(row, answers)]
                seconds[name].append(time.process_time() - started)
                scores[name] = [score.value for score in results if score.value is not None]
        assert len(scores["each"]) == len(scores["once"]) == 128
        each, once = (statistics.median(seconds[name]) for name in ways)
        table.append(
            {
                "words of a prompt": f"{fewest} to {most}",
                "CPU s, prompts for each answer": round(each, 2),
                "CPU s, prompts once": round(once, 2),
                "ratio": round(each / once, 2),
                "largest difference": max(abs(a - b) for a, b in zip(scores["each"], scores["once"], strict=True)),
            }
        )
        print(table[-1], flush=True)
    return table


def text(rng: random.Random, fewest: int, most: int) -> str:
    """Return random words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


if __name__ == "__main__":
    main(samples, rewards)
