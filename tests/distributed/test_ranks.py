"""Tests that steps, model, answers and scores do not depend on the number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from partita import Model
from partita.lm.products.product import Product

from ..json_lines import read_json_lines, write_json_lines

pytestmark = pytest.mark.long

Jobs = dict[int, tuple[Path, dict[str, Any]]]
"""Folder and results by number of processes."""
SUMS = ("rows", "tokens", "loss_tokens")
"""Sums over the steps in a manifest."""


@pytest.fixture(scope="module")
def jobs(processes: Any, straight: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Run the same job on 1, 2 and 4 processes."""
    results = {1: straight}
    for ranks in (2, 4):
        folder = processes.prepare(tmp_path_factory.mktemp("job") / "job", processes.settings())
        results[ranks] = folder, processes.start(ranks, folder, *straight[1])
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_equal_those_of_one_process(processes: Any, jobs: Jobs, ranks: int) -> None:
    check_steps(processes, jobs[1][0], jobs[ranks][0])
    one, several = (json.loads((jobs[n][0] / "run" / "manifest.json").read_text())["batches"] for n in (1, ranks))
    assert [several[name] for name in SUMS] == [one[name] for name in SUMS]


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_steps_by_onednn_equal_those_of_one_process(processes: Any, adapter: bool, tmp_path: Path) -> None:
    config = processes.settings(learning_rate=0.02 if adapter else 0.002)
    if not adapter:
        del config["adapter"]
    folders = [processes.prepare(tmp_path / str(ranks), config) for ranks in (1, 2)]
    for ranks, folder in enumerate(folders, start=1):
        found = processes.start(ranks, folder, "train_by_onednn:12")["train_by_onednn:12"]["computed"]
        assert set(found) == set(Product)
    check_steps(processes, *folders)


def check_steps(processes: Any, one_process: Path, ranks: Path) -> None:
    """Check that two jobs took the same steps, up to the order of float32 sums."""
    one, several = processes.log(one_process), processes.log(ranks)

    for key in ("step", "batch_hash", "rows", "tokens", "loss_tokens", "padding", "learning_rate"):
        assert [line[key] for line in several] == [line[key] for line in one]
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in several] == pytest.approx([line[key] for line in one], rel=2e-4)
    assert len({line["batch_hash"] for line in one}) == len(one) == 12
    [name] = [path.name for path in (one_process / "run" / "model").glob("*model.safetensors")]
    weights = [load_file(folder / "run" / "model" / name) for folder in (one_process, ranks)]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 2e-3 * tensor.abs().max() + 1e-5, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_answers_and_scores_equal_those_of_one_process(processes: Any, jobs: Jobs, ranks: int) -> None:
    (one, alone), (several, together) = jobs[1], jobs[ranks]

    for name in ("more", "few"):
        assert (several / f"{name}.out.jsonl").read_text() == (one / f"{name}.out.jsonl").read_text()
    lines = read_json_lines(several / "few.out.jsonl")
    assert [line["status"] for line in lines] == ["error", "ok", "ok", "error"]
    assert together["predict:more"] == alone["predict:more"]
    metrics = [results["evaluate:more"] for results in (alone, together)]
    assert metrics[0]["colour"] == metrics[1]["colour"]
    assert metrics[0]["model"] == pytest.approx(metrics[1]["model"], rel=1e-3)
    assert alone["train:12"]["metrics"].keys() == together["train:12"]["metrics"].keys()
    assert not list(several.glob("run/journal/*.rank-*")), "the records of all ranks are in the journal of the job"
    assert not list(several.glob("run/.tokens-*"))


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "batches"])
def test_ranks_score_the_same_sampled_answers_as_one_process(processes: Any, tmp_path: Path, slots: bool) -> None:
    config = processes.settings() | {
        "trainer": {"type": "none"},
        "output_features": [{"name": "colour", "type": "text"}],
    }
    config["generation"] = {"do_sample": True, "max_new_tokens": 5, "min_new_tokens": 3, "slots": slots}
    del config["adapter"], config["model_parameters"]
    folder = processes.prepare(tmp_path / "job", config)
    answers = processes.start(1, folder, "predict_zero_shot:more")["predict_zero_shot:more"]
    assert len(set(answers)) > 20
    rows = read_json_lines(folder / "more.jsonl")
    answered = [{**row, "colour": answer} for row, answer in zip(rows, answers, strict=True)]
    write_json_lines(folder / "more.jsonl", answered)
    result = processes.start(2, folder, "predict_zero_shot:more", "evaluate_zero_shot:more")
    assert result["predict_zero_shot:more"] == answers
    assert result["evaluate_zero_shot:more"]["colour"]["exact_match"] == 1


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "batches"])
def test_ranks_choose_the_same_of_several_answers_as_one_process(processes: Any, tmp_path: Path, slots: bool) -> None:
    config = processes.settings() | {
        "trainer": {"type": "none"},
        "output_features": [{"name": "colour", "type": "text"}],
    }
    config["generation"] = {"do_sample": True, "max_new_tokens": 5, "min_new_tokens": 3, "slots": slots}
    del config["adapter"], config["model_parameters"]
    config["generation"] |= {"best_of": 3, "reward": "rm"}
    folder = processes.prepare(tmp_path / "job", config)
    rows = read_json_lines(folder / "rows.jsonl")
    write_json_lines(
        folder / "pairs.jsonl", [row | {"chosen": row["colour"], "rejected": f"{row['text']}!"} for row in rows]
    )
    reward = {
        "base_model": config["base_model"],
        "input_features": config["input_features"],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": str(folder / "pairs.jsonl")},
        "trainer": {"type": "reward", "max_steps": 3, "batch_size": 8, "eval_batch_size": 8},
    }
    Model(reward, quiet=True).train(run=folder / "rm")
    answers = processes.start(1, folder, "predict_zero_shot:more")["predict_zero_shot:more"]
    answered = [
        {**row, "colour": answer} for row, answer in zip(read_json_lines(folder / "more.jsonl"), answers, strict=True)
    ]
    write_json_lines(folder / "more.jsonl", answered)
    result = processes.start(2, folder, "predict_zero_shot:more", "evaluate_zero_shot:more")
    assert result["predict_zero_shot:more"] == answers
    assert result["evaluate_zero_shot:more"]["colour"]["exact_match"] == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_find_the_same_sizes(processes: Any, jobs: Jobs, ranks: int) -> None:
    folder = jobs[ranks][0]
    sizes = [json.loads((folder / f"sizes-{rank}.json").read_text()) for rank in range(ranks)]

    assert sizes[0]["generation"]["origin"] == "tuned"
    assert all(other == sizes[0] for other in sizes[1:])


def test_the_number_of_processes_may_change_in_the_middle_of_an_epoch(
    processes: Any, jobs: Jobs, tmp_path: Path
) -> None:
    folder = processes.prepare(tmp_path / "job", processes.settings())
    for ranks, steps in ((4, 4), (1, 6), (2, 12)):
        result = processes.start(ranks, folder, f"train:{steps}")[f"train:{steps}"]
        assert result["steps"] == steps

    assert [line["batch_hash"] for line in processes.log(folder)] == [
        line["batch_hash"] for line in processes.log(jobs[1][0])
    ]
    assert [line["loss"] for line in processes.log(folder)] == pytest.approx(
        [line["loss"] for line in processes.log(jobs[1][0])], rel=2e-4
    )
