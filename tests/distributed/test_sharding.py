"""Tests of sharded weights (FSDP): training takes the steps of one process with all weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from partita.lm.products.product import Product

pytestmark = pytest.mark.long

SHARED = {"type": "torchrun", "sharding": "full", "timeout_seconds": 60}
PATIENT = SHARED | {"timeout_seconds": 1800}
"""The timeout of collectives is longer than that of a test, so a test fails if a rank waits for another."""
EVERYTHING = {
    "mixed_precision": "bf16",
    "gradient_checkpointing": True,
    "gradient_clipping": {"clipglobalnorm": 0.5, "clipvalue": 0.01},
    "optimizer": {"type": "schedule_free_adamw", "weight_decay": 0.1},
    "eval_batch_size": "auto",
}
"""Other options that use weights, gradients or the state of an optimizer."""


def all_weights(processes: Any, **trainer: Any) -> dict[str, Any]:
    """Return a configuration that trains all weights, with tied embeddings."""
    settings: dict[str, Any] = processes.settings(learning_rate=0.003, **trainer)
    settings["base_model"]["tie_word_embeddings"] = True
    del settings["adapter"]
    return settings


def job(processes: Any, folder: Path, settings: dict[str, Any], ranks: int, *steps: str) -> dict[str, Any]:
    """Run a job on `ranks` processes with sharded weights; return its results."""
    prepared = processes.prepare(folder, settings | {"backend": SHARED})
    result: dict[str, Any] = processes.start(ranks, prepared, *steps)
    return result


def assert_same_steps(one: list[dict[str, Any]], several: list[dict[str, Any]]) -> None:
    assert [line["batch_hash"] for line in several] == [line["batch_hash"] for line in one]
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in several] == pytest.approx([line[key] for line in one], rel=2e-4)


@pytest.fixture(scope="module")
def whole(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train all weights on one process; return folder and results."""
    folder = tmp_path_factory.mktemp("whole") / "job"
    return folder, job(processes, folder, all_weights(processes), 1, "train:12", "predict:more", "evaluate:more")


def test_products_by_onednn_take_the_steps_of_one_process(processes: Any, tmp_path: Path) -> None:
    folders = [tmp_path / str(ranks) for ranks in (1, 2)]
    for ranks, folder in enumerate(folders, start=1):
        result = job(processes, folder, all_weights(processes), ranks, "train_by_onednn:6")
        assert set(result["train_by_onednn:6"]["computed"]) == set(Product)
    one, several = map(processes.log, folders)
    assert len(one) == 6
    assert_same_steps(one, several)


def test_full_fine_tuning_equals_that_of_one_process(
    processes: Any, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    result = job(processes, folder, all_weights(processes), 4, "train:12", "predict:more", "evaluate:more")

    assert_same_steps(processes.log(whole[0]), processes.log(folder))
    assert (folder / "more.out.jsonl").read_text() == (whole[0] / "more.out.jsonl").read_text()
    assert result["evaluate:more"]["model"] == pytest.approx(whole[1]["evaluate:more"]["model"], rel=1e-4)
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    assert manifest["parameters_per_process"] < 0.3 * manifest["parameters"]
    ours, theirs = (load_file(one / "run" / "model" / "model.safetensors") for one in (folder, whole[0]))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).abs().max() < 1e-3 * theirs[name].abs().max() + 1e-5, name
    configs = [json.loads((one / "run" / "model" / "config.json").read_text()) for one in (folder, whole[0])]
    assert configs[0] == configs[1]


def test_training_of_an_adapter_equals_that_of_one_process(
    processes: Any, straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    job(processes, tmp_path / "job", processes.settings(), 2, "train:12", "predict:more")

    assert_same_steps(processes.log(straight[0]), processes.log(tmp_path / "job"))
    assert (tmp_path / "job" / "more.out.jsonl").read_text() == (straight[0] / "more.out.jsonl").read_text()


def test_mixed_precision_checkpointing_clipping_and_averaged_weights(processes: Any, tmp_path: Path) -> None:
    settings = all_weights(processes, **EVERYTHING)
    results = {ranks: job(processes, tmp_path / str(ranks), settings, ranks, "train:12") for ranks in (1, 2)}
    one, two = (processes.log(tmp_path / str(ranks)) for ranks in (1, 2))

    assert [line["batch_hash"] for line in two] == [line["batch_hash"] for line in one]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=0.01)
    assert results[2]["train:12"]["metrics"]["validation"]["loss"] == pytest.approx(
        results[1]["train:12"]["metrics"]["validation"]["loss"], rel=0.01
    )
    sizes = json.loads((tmp_path / "2" / "run" / "manifest.json").read_text())["batch_sizes"]
    assert {size["origin"] for name, size in sizes.items() if name != "training"} <= {"tuned", "cached"}


def test_the_number_of_processes_may_change_and_one_may_be_killed(
    processes: Any, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = processes.prepare(tmp_path / "job", all_weights(processes) | {"backend": PATIENT})
    processes.start(4, folder, "train:4")
    assert all(processes.kill(2, folder, "train:12", rank=1, pattern="run/log.jsonl", lines=5, delay=0.0))
    processes.start(1, folder, "train:9")
    result = processes.start(2, folder, "train:12")

    assert result["train:12"]["resumed_from"] == 9
    assert_same_steps(processes.log(whole[0]), processes.log(folder))


def test_out_of_memory_on_a_rank_ends_the_job_with_advice(
    processes: Any, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = processes.prepare(tmp_path / "job", all_weights(processes, max_steps=12) | {"backend": PATIENT})
    assert all(rank.wait() for rank in processes.launch(2, folder, "train_out_of_memory:10"))

    said = (folder / "error-1.txt").read_text()
    assert said.startswith("OutOfStepError: step 5: out of memory on rank 1 with 4 rows of ")
    assert said.endswith(
        " tokens, and processes that share the weights cannot take a step again in smaller parts: lower "
        "trainer.batch_size, write trainer.gradient_checkpointing: true, or take more processes, and start the same "
        "command again"
    )
    other = (folder / "error-0.txt").read_text()
    assert other == f"OtherRankError: rank 1 failed: {said}"
    assert processes.start(2, folder, "train:12")["train:12"]["resumed_from"] == 3
    assert_same_steps(processes.log(whole[0]), processes.log(folder))
