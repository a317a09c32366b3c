"""Tests with a pretrained model and human-written problems, from a shared folder next to the repository."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model

from ..json_lines import read_json_lines

SHARED = Path(__file__).parents[2].parent / "shared"
STORIES = SHARED / "models" / "stories260k"
PROBLEMS = SHARED / "data" / "gsm8k" / "train.jsonl"

CONTINUATION = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
)
"""The greedy continuation of "Once upon a time", as measured by the authors of the converted model."""

pytestmark = pytest.mark.skipif(not (STORIES.is_dir() and PROBLEMS.is_file()), reason=f"needs the data in {SHARED}")


def zero_shot() -> dict[str, Any]:
    return {
        "base_model": str(STORIES),
        "input_features": [{"name": "beginning", "type": "text"}],
        "output_features": [{"name": "story", "type": "text"}],
        "generation": {"max_new_tokens": 40},
        "trainer": {"type": "none"},
    }


def test_the_pretrained_model_writes_the_known_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model(zero_shot(), quiet=True)
    alone = model.generate("Once upon a time")
    assert alone[0] == CONTINUATION
    several = model.generate(
        ["Once upon a time", "Tom and", "Once upon a time, there was a big dog"], max_new_tokens=20
    )
    assert CONTINUATION.startswith(several[0])
    assert len(several[0]) > 40


@pytest.mark.long
def test_partita_predict_writes_the_known_continuation(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(zero_shot()), encoding="utf8")
    (tmp_path / "rows.csv").write_text("number,beginning\n1,Lily saw\n2,Once upon a time\n", encoding="utf8")
    command = [
        sys.executable,
        "-m",
        "partita",
        "predict",
        "zero.yaml",
        "--dataset",
        "rows.csv",
        "--output",
        "out.jsonl",
    ]
    done = subprocess.run([*command, "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = read_json_lines(tmp_path / "out.jsonl")
    assert [row["number"] for row in rows] == ["1", "2"]
    assert rows[1]["story"] == rows[1]["story_raw"] == CONTINUATION
    assert (rows[1]["tokens"], rows[1]["finish_reason"]) == (40, "length")


@pytest.mark.long
def test_lora_learns_from_human_written_problems(tmp_path: Path) -> None:
    with PROBLEMS.open(encoding="utf8") as file:
        rows = [json.loads(next(file)) for _ in range(330)]
    settings = {
        "base_model": str(STORIES),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 16},
        "preprocessing": {"global_max_sequence_length": 512},
        "data": {"split": {"type": "random", "probabilities": [1, 0, 0]}},
    }
    lora = {
        "adapter": {"type": "lora", "r": 16},
        "trainer": {"type": "finetune", "epochs": 1, "batch_size": 8, "learning_rate": 5e-3},
    }
    held_out = rows[300:]
    before = Model({**settings, "trainer": {"type": "none"}}, quiet=True).evaluate(held_out)
    model = Model({**settings, **lora}, quiet=True)
    result = model.train(rows[:300], run=tmp_path / "run")
    after = model.evaluate(held_out)
    assert after["model"]["loss"] < 0.6 * before["model"]["loss"]
    assert result.steps == 19
    predictions = model.predict(held_out[:20])
    assert {row["status"] for row in predictions} == {"ok"}
    assert [row["question"] for row in predictions] == [row["question"] for row in held_out[:20]]
