"""How several answers to a row are drawn, as explain says it before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from partita.cli.main import app

BEST = {"do_sample": True, "best_of": 8, "reward": "runs/rm"}
SETTINGS: dict[str, Any] = {
    "base_model": {"type": "scratch"},
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "reply", "type": "text"}],
    "generation": BEST,
    "trainer": {"type": "none"},
}


def explained(folder: Path, *flags: str, **changes: Any) -> str:
    """Return what explain prints for a configuration with these changes."""
    file = folder / "file.yaml"
    file.write_text(json.dumps(SETTINGS | changes), encoding="utf8")
    result = CliRunner().invoke(app, ["explain", str(file), *flags])
    assert result.exit_code == 0, result.output
    return result.stdout


ONCE = "one prefill of a prompt serves all 8 answers to it, where the model supports continuous batching"
CHOICE = "each row gets 8 answers, and the reward model runs/rm chooses one"
SERVER = {"type": "endpoint", "url": "http://localhost:8000/v1", "model": "m"}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {},
            [CHOICE, ONCE],
        ),
        (
            {"backend": {"type": "ray"}},
            [CHOICE, ONCE],
        ),
        (
            {"generation": BEST | {"slots": False}},
            [CHOICE, "each prompt is computed 8 times, once for each answer: generation.slots is false"],
        ),
        (
            {"base_model": "org/model", "backend": SERVER},
            [CHOICE, "each prompt is computed 8 times, once for each answer: a server gets each answer as a request"],
        ),
        (
            {"trainer": {"type": "finetune"}},
            [
                "predict and evaluate draw 8 answers, and the reward model runs/rm chooses one",
                ONCE,
                "answers that training generates are not chosen",
            ],
        ),
    ],
    ids=["slots", "ray", "no slots", "server", "training"],
)
def test_explain_says_who_chooses_and_how_often_a_prompt_is_computed(
    tmp_path: Path, changes: dict[str, Any], lines: list[str]
) -> None:
    text = explained(tmp_path, **changes)

    assert "# best of n:\n" + "".join(f"#   {line}\n" for line in lines) in text


def test_explain_records_the_plan_as_json(tmp_path: Path) -> None:
    shown = json.loads(explained(tmp_path, "--json"))

    assert shown["best_of"] == {
        "samples": 8,
        "reward": "runs/rm",
        "prefills": 1,
        "reason": "where the model supports continuous batching",
    }


def test_explain_says_nothing_about_a_single_answer(tmp_path: Path) -> None:
    assert "best of n" not in explained(tmp_path, generation={"do_sample": True})
    assert "best_of" not in json.loads(explained(tmp_path, "--json", generation={"do_sample": True}))
