"""Tests of the optimizers of all tools, and of the options of Adam, which the tools do not pass to each of them."""

from pathlib import Path
from typing import Any

import pytest

from partita_schema.compat.tools.conversion import Report
from partita_schema.convert import ToolName
from partita_schema.sections.trainer import FinetuneTrainer

from .conversions import converted, missing

FILES: dict[ToolName, str] = {
    "axolotl": "base_model: org/model\ndatasets: [{path: org/data, type: chat_template}]\n",
    "llama_factory": "model_name_or_path: org/model\ndataset: mine\n",
    "trl": "model_name_or_path: org/model\ndataset_name: org/data\n",
}
EVERY_TOOL = pytest.mark.parametrize("tool", FILES)


def optimizer(keys: str, tool: ToolName, folder: Path) -> tuple[dict[str, Any], Report]:
    """Return what is set of the optimizer, and the report; `optimizer` in `keys` becomes the key of the tool."""
    keys = keys.replace("optimizer:", "optimizer:" if tool == "axolotl" else "optim:")
    config, report = converted(f"{FILES[tool]}{keys}", tool, folder)
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer.optimizer.model_dump(exclude_unset=True), report


def unneeded(report: Report) -> dict[str, str]:
    return {problem.path: problem.message for problem in report.unneeded if problem.path.startswith("adam_")}


@EVERY_TOOL
@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_options_of_adam_that_an_optimizer_does_not_use_are_not_needed(
    name: str, tool: ToolName, tmp_path: Path
) -> None:
    keys = "adam_beta1: 0.9\nadam_beta2: 0.95\nadam_epsilon: 1.0e-5\n"
    found, report = optimizer(f"optimizer: {name}\n{keys}", tool, tmp_path)
    reason = f"{name} does not use it"
    assert found == {"type": name}
    assert unneeded(report) == dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), reason)


@EVERY_TOOL
@pytest.mark.parametrize(
    ("keys", "betas"),
    [("", (0.9, 0.999)), ("adam_beta2: 0.95\n", (0.9, 0.95)), ("adam_beta1: 0.8\n", (0.8, 0.999))],
)
def test_lion_has_the_betas_of_adam(keys: str, betas: tuple[float, float], tool: ToolName, tmp_path: Path) -> None:
    found, report = optimizer(f"optimizer: lion_32bit\n{keys}", tool, tmp_path)
    default = ("adam_beta1 and adam_beta2", "trainer.optimizer.betas", [0.9, 0.999])
    assert found == {"type": "lion", "betas": betas}
    assert (default in report.defaults) == (not keys)


@pytest.mark.parametrize("name", ["lion_8bit", "paged_lion_8bit"])
def test_lion_has_no_eps(name: str, tmp_path: Path) -> None:
    found, report = optimizer(f"optimizer: {name}\nadam_epsilon: 1.0e-5\n", "axolotl", tmp_path)
    assert (found["type"], found.get("eps")) == ("lion_8bit", None)
    assert unneeded(report) == {"adam_epsilon": "lion_8bit does not use it"}


@pytest.mark.parametrize(
    ("tool", "keys"), [("axolotl", "optimizer: muon\n"), ("llama_factory", "use_muon: true\noptim: adamw_torch\n")]
)
def test_options_of_adam_next_to_muon_have_no_counterpart(tool: ToolName, keys: str, tmp_path: Path) -> None:
    found, report = optimizer(f"{keys}adam_beta2: 0.95\nadam_epsilon: 1.0e-5\n", tool, tmp_path)
    reason = "muon trains embeddings, biases and norms with adamw, whose betas and eps are the defaults"
    assert found == {"type": "muon"}
    assert {key: missing(report)[key] for key in ("adam_beta2", "adam_epsilon")} == {
        "adam_beta2": reason,
        "adam_epsilon": reason,
    }


def test_an_optimizer_that_axolotl_has_under_another_name_is_not_read(tmp_path: Path) -> None:
    _, report = converted(f"{FILES['axolotl']}optim: sgd\n", "axolotl", tmp_path)
    assert missing(report) == {"optim": "the conversion does not know this key; look up what it does"}
