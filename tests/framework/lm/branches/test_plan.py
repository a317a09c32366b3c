"""How the answers of pairs are computed, as explain says it before a model is loaded, and as a run notes it."""

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from partita import Model
from partita.cli.main import app
from partita.lm.branches.plan import APART, TOGETHER, plan_branches
from partita_schema.config import Config

from ....json_lines import write_json_lines
from ....properties import ends

PAIRS = [{"text": "one red ball", "chosen": "blue", "rejected": "green"}] * 8
SETTINGS: dict[str, Any] = {
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "reply", "type": "preference"}],
    "trainer": {"type": "preference", "batch_size": 2, "max_steps": 1, "skip_all_evaluation": True},
}


def explained(folder: Path, *flags: str, **changes: Any) -> list[str]:
    """Return the lines that explain prints for a configuration with these changes."""
    file = folder / "file.yaml"
    file.write_text(json.dumps(SETTINGS | changes), encoding="utf8")
    result = CliRunner().invoke(app, ["explain", str(file), *flags])
    assert result.exit_code == 0, result.output
    return [line.removeprefix("#").strip() for line in result.stdout.splitlines()]


def test_a_new_model_computes_a_prompt_once(tmp_path: Path) -> None:
    lines = explained(tmp_path, base_model={"type": "scratch", "architecture": "qwen3"})

    assert lines[lines.index("pairs:") + 1] == "qwen3 computes a prompt once for both of its answers"
    texts = [{"name": "reply", "type": "text"}]
    assert "pairs:" not in explained(tmp_path, base_model="org/model", output_features=texts, trainer={"type": "none"})


def test_an_encoder_scores_each_answer_in_a_row_of_its_own(tmp_path: Path) -> None:
    base = {"type": "scratch", "architecture": "bert"}
    lines = explained(tmp_path, base_model=base, trainer={"type": "reward"})

    assert lines[lines.index("pairs:") + 1] == (
        "bert is an encoder, which computes no score for each token: each answer is computed as a separate row, and "
        "each prompt twice"
    )


def test_explain_counts_the_tokens_that_are_saved(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", PAIRS)
    new = {"type": "scratch", "size": "nano", "tokenizer": "byte"}

    lines = explained(tmp_path, "--data", base_model=new, data={"source": "rows.jsonl"})

    plan = next(line for line in lines if line.startswith("llama"))
    assert plan == "llama computes a prompt once for both of its answers, 34% fewer tokens than separate rows"


SEPARATE = ": each answer is computed as a separate row, and each prompt twice"
OPEN = ", so it is open whether a prompt is computed once; the run tests it when it begins"
FLASH = "attention is flash_attention_2, and masks of branches are for sdpa and eager"


@pytest.mark.parametrize(
    ("base_model", "changes", "line"),
    [
        ("mamba", {}, f"mamba takes no mask that separates the answers to a prompt{SEPARATE}"),
        ("llama", {"model_parameters": {"attention": "flash_attention_2"}}, FLASH + SEPARATE),
        (
            "llama",
            {"adapter": {"type": "prefix_tuning"}},
            f"prefix_tuning puts virtual tokens before each row{SEPARATE}",
        ),
        ("newest", {}, f"newest is not among the architectures measured{OPEN}"),
        (None, {}, f"the model is not downloaded{OPEN}"),
    ],
)
def test_explain_says_why_answers_are_separate_rows(
    base_model: str | None, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    if base_model is not None:
        (tmp_path / "model").mkdir()
        described = {"text_config": {"model_type": base_model}} if base_model == "mamba" else {"model_type": base_model}
        (tmp_path / "model/config.json").write_text(json.dumps(described), encoding="utf8")
    config = Config.model_validate(
        SETTINGS | changes | {"base_model": "org/not-here" if base_model is None else str(tmp_path / "model")}
    )

    plan = plan_branches(config, folder=tmp_path)

    assert plan is not None
    assert plan.lines() == [line]


def test_a_run_says_what_separate_rows_cost(architectures: ModuleType, tmp_path: Path, caplog: Any) -> None:
    architectures.saved_and_loaded("mamba", tmp_path / "model")
    write_json_lines(tmp_path / "rows.jsonl", PAIRS)
    settings = SETTINGS | {"base_model": str(tmp_path / "model"), "data": {"source": str(tmp_path / "rows.jsonl")}}

    with caplog.at_level(logging.INFO):
        Model(settings, quiet=True).train(run=tmp_path / "run")
    lines = explained(tmp_path, "--data", **settings)
    shown = json.loads("\n".join(explained(tmp_path, "--data", "--json", **settings)))

    assert next(line for line in lines if line.startswith("mamba")) == (
        "mamba takes no mask that separates the answers to a prompt: each answer is computed as a separate row, and "
        "each prompt twice, 52% more tokens"
    )
    noted = json.loads((tmp_path / "run/manifest.json").read_text(encoding="utf8"))["branches"]
    assert noted["separate_rows"]
    assert noted["reason"] == "MambaForCausalLM takes no mask of pairs of tokens"
    assert noted["repeated_tokens"] == shown["pairs"]["repeated_tokens"]
    assert (
        "MambaForCausalLM takes no mask of pairs of tokens: each answer is computed as a separate row, and each "
        "prompt twice, 52% more tokens"
    ) in caplog.messages


@pytest.mark.parametrize("kind", ends(["llama", *sorted(APART | TOGETHER)[::9], "bloom"]))
def test_the_tables_say_what_the_models_do(architectures: ModuleType, kind: str, tmp_path: Path) -> None:
    lm = architectures.saved_and_loaded(kind, tmp_path)

    assert (lm.branch_support.reason is None) == (kind in TOGETHER)
    assert not APART & TOGETHER
