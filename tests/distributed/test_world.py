"""Tests of the rank and world size from the variables of torchrun, accelerate and slurm."""

import pytest
import torch

from partita.backends import launch
from partita.distributed import init
from partita.distributed.init import own_threads
from partita.distributed.world import DistributedEnv, read_world
from partita_schema.config import Config
from partita_schema.errors import ConfigError, PartitaError


def test_a_process_without_a_world_size_is_single() -> None:
    assert read_world({}) == DistributedEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert read_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == DistributedEnv(), "sbatch starts a single process"


def test_torchrun_sets_the_world() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

    assert read_world(environment) == DistributedEnv(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_a_rank_without_local_variables_is_alone_on_its_machine() -> None:
    assert read_world({"RANK": "1", "WORLD_SIZE": "2"}) == DistributedEnv(
        rank=1, world_size=2, local_rank=0, local_world_size=1
    )


@pytest.mark.parametrize("tasks", ["4(x2)", "4,4", "4", "2,4"])
def test_slurm_sets_the_world(tasks: str) -> None:
    environment = {
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "2",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }

    assert read_world(environment) == DistributedEnv(rank=6, world_size=8, local_rank=2, local_world_size=4)


def test_impossible_ranks_are_refused() -> None:
    with pytest.raises(PartitaError) as error:
        read_world({"RANK": "3", "WORLD_SIZE": "2"})

    assert str(error.value) == (
        "these variables contradict each other: RANK=3, WORLD_SIZE=2; start the job by torchrun, or unset them"
    )


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 2),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1"}, 1),
        # The default of torchrun.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 2),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "PARTITA_THREADS": "1"}, 1),
    ],
)
def test_processes_share_the_cores_unless_configured(environment: dict[str, str], threads: int) -> None:
    assert own_threads(DistributedEnv(1, 8, 1, 4), cores=9, environment=environment) == threads
    assert own_threads(DistributedEnv(1, 8, 1, 4), cores=2, environment={}) == 1


def test_one_device_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "text", "type": "text"}],
            "output_features": [{"name": "label", "type": "text"}],
            "model_parameters": {"device": "cuda:1"},
            "trainer": {"type": "none"},
        }
    )
    monkeypatch.setattr(launch, "get_world", lambda: DistributedEnv(1, 4, 1, 4))

    with pytest.raises(ConfigError) as error:
        launch.get_process_group(config)

    assert str(error.value) == (
        "model_parameters.device: cuda:1 is one device, and each of 4 processes needs its own; write cuda"
    )


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(init, "get_world", lambda: DistributedEnv(1, 4, 1, 2))
    assert init.local_device_index("cuda") == 1
    monkeypatch.setattr(init, "get_world", lambda: DistributedEnv(3, 4, 3, 4))

    with pytest.raises(PartitaError, match=r"^4 processes on .*, and 2 devices of cuda: start as many processes as"):
        init.local_device_index("cuda")
