"""Tests of reward models that a file names, with a reward model that was trained on pairs."""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, DataError, Model
from partita.backends.reward_models import load_answer_scorer
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ...json_lines import write_json_lines

WORDS = ["red", "green", "blue", "one", "two", "three", "ball", "box"]
SCRATCH = {
    "type": "scratch",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "context_length": 48,
    "tokenizer": "word",
    "vocab_size": 40,
}
QUESTIONS = [{"question": " ".join(random.Random(n).choices(WORDS, k=1 + n % 4)), "n": n} for n in range(8)]
BEST = {"max_new_tokens": 4, "min_new_tokens": 2, "do_sample": True, "temperature": 1.5, "best_of": 5, "reward": "rm"}


def pairs(count: int) -> list[dict[str, str]]:
    """Return pairs of which the better answer has the word red."""
    rng = random.Random(1)
    answers = [[rng.choice(WORDS[1:]) for _ in range(3)] for _ in range(count)]
    return [
        {
            "question": " ".join(rng.choices(WORDS, k=1 + number % 4)),
            "chosen": " ".join(["red", *answer[1:]]),
            "rejected": " ".join(answer),
        }
        for number, answer in enumerate(answers)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and the run of a reward model."""
    folder = tmp_path_factory.mktemp("rewards")
    write_json_lines(folder / "pairs.jsonl", pairs(40))
    file = {
        "base_model": SCRATCH,
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": str(folder / "pairs.jsonl")},
        "trainer": {"type": "reward", "max_steps": 20, "batch_size": 8, "eval_batch_size": 8, "learning_rate": 0.02},
    }
    Model(file, quiet=True).train(run=folder / "rm")
    text = file | {"output_features": [{"name": "chosen", "type": "text"}], "trainer": {"type": "none"}}
    Model(text, quiet=True).save(folder / "base")
    of_bytes = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 96}
    Model(text | {"base_model": of_bytes}, quiet=True).save(folder / "bytes")
    return folder


def file_of(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "base_model": str(folder / "base"),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": BEST,
        "trainer": {"type": "none", "batch_size": 8},
    } | sections


def model_of(folder: Path, **sections: Any) -> Model:
    (folder / "run.yaml").write_text(json.dumps(file_of(folder, **sections)), encoding="utf8")
    return Model(folder / "run.yaml", quiet=True)


def test_predictions_hold_the_answer_that_the_reward_model_prefers(folder: Path, tmp_path: Path) -> None:
    model = model_of(folder, generation=BEST | {"keep_samples": True})
    rows = list(model.predict(QUESTIONS, tmp_path / "answers.jsonl"))
    scorer = load_answer_scorer(folder / "rm", key="generation.reward", quiet=True)
    for question, row in zip(QUESTIONS, rows, strict=True):
        texts = [sample["text"] for sample in row["samples"]]
        scores = [score.value for score in scorer.scores(question, texts)]
        assert [sample["reward"] for sample in row["samples"]] == pytest.approx(scores, abs=1e-5)
        assert row["reward"] == max(sample["reward"] for sample in row["samples"])
        best = next(one["text"] for one in row["samples"] if one["reward"] == row["reward"])
        assert row["answer"] == best.strip()
    single = {key: value for key, value in BEST.items() if key not in ("best_of", "reward")}
    once = list(model_of(folder, generation=single).predict(QUESTIONS, tmp_path / "once.jsonl"))
    assert [row["samples"][0]["text"].strip() for row in rows] == [row["answer"] for row in once]
    assert "reward" not in once[0]


def test_a_saved_reward_model_is_used_like_its_run(folder: Path, tmp_path: Path) -> None:
    of_run = list(model_of(folder).predict(QUESTIONS, tmp_path / "run.jsonl"))
    Model.load(folder / "rm", quiet=True).save(tmp_path / "saved")
    saved = model_of(folder, generation=BEST | {"reward": str(tmp_path / "saved")})
    assert list(saved.predict(QUESTIONS, tmp_path / "saved.jsonl")) == of_run


def test_an_evaluation_scores_the_chosen_answers(folder: Path, tmp_path: Path) -> None:
    chosen = list(model_of(folder).predict(QUESTIONS, tmp_path / "answers.jsonl"))
    labelled = [row | {"answer": best["answer"]} for row, best in zip(QUESTIONS, chosen, strict=True)]
    assert model_of(folder).evaluate(labelled)["answer"]["exact_match"] == 1.0
    single = {key: value for key, value in BEST.items() if key not in ("best_of", "reward")}
    assert model_of(folder, generation=single).evaluate(labelled)["answer"]["exact_match"] < 1.0


def test_measured_batch_sizes_count_the_reward_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    usual = list(model_of(folder).predict(QUESTIONS, tmp_path / "usual.jsonl"))
    measured = model_of(folder, trainer={"type": "none", "batch_size": "auto"})
    predictions = measured.predict(QUESTIONS, tmp_path / "measured.jsonl")
    assert list(predictions) == usual
    (file,) = (tmp_path / "cache" / "batch_sizes").glob("*.json")
    cached = json.loads(file.read_text("utf8"))
    assert cached["key"]["next_to"] == ["rm"]
    # Which of the sizes that fit is the fastest differs by the machine.
    assert cached["found"]["max_fitting"] == len(QUESTIONS) * BEST["best_of"]
    assert predictions.stats.batch_size == cached["found"]["rows"]


@pytest.fixture
def same_tokenizer(folder: Path, tmp_path: Path) -> Path:
    """Return a model with the tokenizer of the reward model."""
    same = shutil.copytree(folder / "base", tmp_path / "same")
    for path in (folder / "rm" / "model").glob("tokenizer*"):
        shutil.copy(path, same)
    (same / SUMS).unlink()
    return same


def test_a_tokenizer_that_differs_from_that_of_the_reward_model_is_reported(
    folder: Path, same_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = (
        "the tokenizer or chat template of rm differs from that of the model: answers are scored as texts, which the "
        "reward model formats and tokenizes as its own file says"
    )
    for name, differs in (("base", True), (str(same_tokenizer), False)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            rows = model_of(folder, base_model=str(folder / name)).predict(QUESTIONS[:2], tmp_path / f"{differs}.jsonl")
        assert (message in caplog.messages) == differs
        assert all(isinstance(row["reward"], float) for row in rows)


def test_constrained_answers_of_a_model_with_another_tokenizer_are_chosen_too(folder: Path, tmp_path: Path) -> None:
    output = {"name": "answer", "type": "set", "decoder": {"labels": ["red", "box", "two"], "constrain": True}}
    sections: dict[str, Any] = {"base_model": str(folder / "bytes"), "output_features": [output]}
    sections["generation"] = BEST | {"max_new_tokens": 40, "keep_samples": True}
    rows = list(model_of(folder, **sections).predict(QUESTIONS, tmp_path / "answers.jsonl"))
    for row in rows:
        assert row["reward"] == max(sample["reward"] for sample in row["samples"])
        assert set(row["answer"]) <= {"red", "box", "two"}
    assert len({tuple(row["answer"]) for row in rows}) > 1


def test_without_slots_the_answers_are_the_same_and_prompts_are_computed_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slots = list(model_of(folder).predict(QUESTIONS, tmp_path / "slots.jsonl"))
    with caplog.at_level(logging.INFO):
        static = list(
            model_of(folder, generation=BEST | {"slots": False}).predict(QUESTIONS, tmp_path / "static.jsonl")
        )
    assert static == slots
    assert "a prompt is computed 5 times, once for each answer of best_of" in caplog.text


def refused(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        model_of(folder, **sections).predict(QUESTIONS, folder / "refused.jsonl", fresh=True)
    return str(caught.value)


def test_a_folder_without_a_reward_model_is_refused(folder: Path) -> None:
    assert "generation.reward: " in refused(folder, generation=BEST | {"reward": "missing"})
    assert "missing is neither a run directory nor a saved model" in refused(
        folder, generation=BEST | {"reward": "missing"}
    )
    message = refused(folder, generation=BEST | {"reward": "base"})
    assert "base is a run of trainer: {type: none}, which scores no answers; name a run with trainer" in message


def test_greedy_answers_of_a_checkpoint_are_refused(folder: Path) -> None:
    greedy = {key: value for key, value in BEST.items() if key not in ("do_sample", "temperature")}
    assert refused(folder, generation=greedy).endswith(
        "generation.best_of: answers are not sampled, so all answers to a row are the same; write generation: "
        "{do_sample: true, num_beams: 1}"
    )


def test_rows_without_the_columns_of_the_reward_model_are_refused_before_anything_is_generated(folder: Path) -> None:
    model = model_of(folder, input_features=[{"name": "asked", "type": "text"}])
    message = (
        "generation.reward: dataset has no column 'question', which input question needs; its columns are asked; "
        "the reward model reads the same rows"
    )
    with pytest.raises(DataError) as caught:
        model.predict([{"asked": "red"}], folder / "refused.jsonl")
    assert str(caught.value) == message
    with pytest.raises(DataError, match=r"generation\.reward: .* has no column 'question'"):
        model.evaluate([{"asked": "red", "answer": "box"}])


def test_a_row_that_the_reward_model_cannot_read_is_an_error_with_the_reason(folder: Path, tmp_path: Path) -> None:
    model = model_of(folder, input_features=[{"name": "asked", "type": "text"}])
    rows = list(
        model.predict([{"asked": "red", "question": ""}, {"asked": "box", "question": "box"}], tmp_path / "a.csv")
    )
    assert rows[0]["error"] == "no answer has a reward: column question is missing or empty"
    assert rows[1]["status"] == "ok"


def test_verbs_that_draw_one_answer_refuse_best_of(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation\.best_of: generate draws one answer and chooses none; remove"):
        model_of(folder).generate("red")
