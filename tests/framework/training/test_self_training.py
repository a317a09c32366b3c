"""Tests of the rows of a self-training round and its guard; complete rounds are in tests/framework/simulation."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita.runs.directory import RunDirectory
from partita.training.round_config import check_round_configs, round_config, round_data
from partita.training.self_training import SelfTraining
from partita_schema.config import Config
from partita_schema.errors import ConfigError
from partita_trainers.process_group import SINGLE_PROCESS


def make_rounds(folder: Path, *, data: dict[str, Any] | None = None, **self_training: Any) -> SelfTraining:
    """Return the self-training of a configuration before its first round."""
    config = Config.model_validate(
        {
            "base_model": "m",
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {"type": "finetune"},
            "data": data or {},
            "simulation": {
                "world": {"type": "environment", "environment": "worlds:World"},
                "tasks": {"count": 4},
                "self_training": {"rounds": 9, "tasks": {"count": 4}, **self_training},
            },
        }
    )
    assert config.simulation is not None
    assert config.simulation.self_training is not None
    unused: Any = None
    directory = RunDirectory(folder / "run", config=config)
    return SelfTraining(
        config, config.simulation.self_training, folder, directory, SINGLE_PROCESS, 1, unused, unused, unused, unused
    )


@pytest.mark.parametrize(
    ("before", "after", "guard", "worse"),
    [
        (0.5, 0.75, 0.25, False),
        (0.5, 0.5, 0.0, False),
        (0.5, 0.25, 0.25, False),  # exactly the difference that the guard allows
        (0.5, 0.24, 0.25, True),
        (0.5, 0.49, 0.0, True),
        (0.5, 0.0, None, False),
        (0.5, None, 0.25, False),
        (8 / 20, 7 / 20, 0.05, False),
        (None, 0.0, 0.25, False),
    ],
)
def test_a_round_is_worse_if_its_success_rate_falls_more_than_the_guard_allows(
    tmp_path: Path, before: float | None, after: float | None, guard: float | None, worse: bool
) -> None:
    rounds = make_rounds(tmp_path, guard=guard)
    assert rounds.is_worse({"success": after}, [{"dialogues": {"success": before}}]) is worse


def test_a_round_whose_episodes_are_all_truncated_before_their_reward_is_worse(tmp_path: Path) -> None:
    rounds, ended = make_rounds(tmp_path, guard=0.05), [{"dialogues": {"success": 0.9}}]
    assert rounds.is_worse({"dialogues.n": 5, "truncated: turns.n": 5}, ended)
    assert not rounds.is_worse({"dialogues.n": 5, "done.n": 5}, ended), "nothing judges"


def weights(rounds: SelfTraining, number: int) -> dict[str, float]:
    """Return the weights of a round's sources by name; without a mix, the path of the source."""
    result = round_data(rounds.config, rounds.plan, number, source_of=rounds.source)
    return (
        {part["name"]: part["weight"] for part in result["mix"]} if result["mix"] else {result["source"]["path"]: 1.0}
    )


def test_the_configured_sources_keep_their_relative_weights(tmp_path: Path) -> None:
    mix = [{"source": "a.jsonl", "weight": 3.0}, {"source": "b.jsonl", "weight": 1.0, "name": "second"}]
    rounds = make_rounds(tmp_path, data={"mix": mix}, mix=0.2, keep_rounds=2)
    assert weights(rounds, 1) == pytest.approx({"a": 0.6, "second": 0.2, "round-1": 0.2})
    assert weights(rounds, 4) == pytest.approx({"a": 0.6, "second": 0.2, "round-3": 0.1, "round-4": 0.1})


def test_the_newest_rounds_share_the_weight_of_dialogues(tmp_path: Path) -> None:
    rounds = make_rounds(tmp_path, data={"source": "a.jsonl"}, mix=0.6, keep_rounds=3)
    assert weights(rounds, 2) == pytest.approx({"a": 0.4, "round-1": 0.3, "round-2": 0.3})
    assert weights(rounds, 5) == pytest.approx({"a": 0.4, "round-3": 0.2, "round-4": 0.2, "round-5": 0.2})


def test_without_other_data_a_round_is_trained_only_on_dialogues(tmp_path: Path) -> None:
    path = "run/rounds/{}/transcripts/predicted.jsonl"
    assert weights(make_rounds(tmp_path, keep_rounds=1), 3) == {path.format(3): 1.0}
    alone = make_rounds(tmp_path, data={"source": "a.jsonl"}, mix=1, keep_rounds=2)
    assert weights(alone, 1) == {path.format(1): 1.0}
    assert weights(alone, 2) == pytest.approx({"round-1": 0.5, "round-2": 0.5})


def test_a_source_that_is_named_like_a_round_keeps_its_name(tmp_path: Path) -> None:
    rounds = make_rounds(tmp_path, data={"source": "round-1.jsonl"})
    assert weights(rounds, 2) == pytest.approx({"round-1": 0.6, "round-1-2": 0.2, "round-2": 0.2})
    mix = [{"source": "a.jsonl", "name": "round-2"}, {"source": "b.jsonl", "name": "round-2-2"}]
    rounds = make_rounds(tmp_path, data={"mix": mix}, mix=0.2, keep_rounds=1)
    assert weights(rounds, 2) == pytest.approx({"round-2": 0.4, "round-2-2": 0.4, "round-2-3": 0.2})
    for number in (1, 2):
        round_config(rounds.config, rounds.plan, number, source_of=rounds.source)


def test_when_a_mix_stops_is_left_out_of_a_round_without_one(tmp_path: Path) -> None:
    data = {"mix": [{"source": "a.jsonl"}, {"source": "b.jsonl"}], "stop": "first"}
    rounds = make_rounds(tmp_path, data=data, mix=1)
    configs = [round_config(rounds.config, rounds.plan, number, source_of=rounds.source) for number in (1, 2)]
    assert [(len(config.data.mix or ()), config.data.stop) for config in configs] == [(0, "all"), (2, "first")]
    rounds = make_rounds(tmp_path, data=data)
    assert round_config(rounds.config, rounds.plan, 1, source_of=rounds.source).data.stop == "first"


def test_a_round_that_cannot_be_trained_is_an_error_before_training(tmp_path: Path) -> None:
    data = {"mix": [{"source": f"{number}.jsonl"} for number in range(999)]}
    check_round_configs((rounds := make_rounds(tmp_path, data=data, keep_rounds=1)).config, rounds.plan)
    rounds = make_rounds(tmp_path, data=data)
    with pytest.raises(ConfigError) as caught:
        check_round_configs(rounds.config, rounds.plan)
    assert str(caught.value) == (
        "simulation.self_training: round 4 cannot be trained, because of its data.mix: got 1,003 sources, at most "
        "1,000 can be mixed; write a glob (data/*.jsonl) to read many files as one source"
    )


def test_checkpoints_that_a_kill_has_left_in_a_finished_round_are_removed(tmp_path: Path) -> None:
    rounds = make_rounds(tmp_path)
    finished = RunDirectory(rounds.folder(1), config=rounds.config)
    finished.manifest = {"status": "done", "steps": 6}
    (finished.checkpoints / "step-6").mkdir(parents=True)
    rounds = replace(rounds, open_run=lambda folder, config: nullcontext(finished))

    assert rounds.train_round(1).steps == 6
    assert not finished.checkpoints.exists()


def test_the_results_of_the_run_become_those_of_the_round_that_is_taken(tmp_path: Path) -> None:
    rounds = make_rounds(tmp_path)
    run, taken = rounds.directory.folder / "evaluations", rounds.folder(2) / "evaluations"
    for folder, names in ((run, ("test", "test-base", "other")), (taken, ("test", "test-base", "validation"))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.jsonl").write_text(f"{name} in {folder.parent.name}")

    rounds.take_results(2)

    assert {path.name: path.read_text() for path in run.iterdir()} == {
        "test.jsonl": "test in 2",
        "test-base.jsonl": "test-base in run",
        "validation.jsonl": "validation in 2",
    }
    assert len(list(taken.iterdir())) == 3
