"""Tests of the trainer registry and of custom trainers."""

from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from partita_schema.errors import ConfigError
from partita_schema.sections.trainer import CustomTrainer, FinetuneTrainer, NoTrainer, Trainer
from partita_trainers.finetune import Finetune
from partita_trainers.registry import TRAINERS, build_trainer, check_probe, check_signature
from partita_trainers.user_modules import load_class
from partita_trainers.zero_shot import ZeroShot


def custom(target: str) -> CustomTrainer:
    return CustomTrainer(type="custom", target=target)


def test_the_registry_has_every_type_of_the_schema() -> None:
    classes = get_args(get_args(Trainer)[0])
    tags = {get_args(result.model_fields["type"].annotation)[0] for result in classes}
    assert tags == {*TRAINERS, "custom"}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_entry_is_a_class_with_train(name: str) -> None:
    assert callable(load_class(TRAINERS[name]).train)


def test_trainers_are_built_from_sections() -> None:
    assert isinstance(build_trainer(NoTrainer(type="none")), ZeroShot)
    assert isinstance(build_trainer(FinetuneTrainer(type="finetune")), Finetune)
    assert TypeAdapter(Trainer).validate_python({"type": "none"}) == NoTrainer(type="none")


def test_a_custom_class_is_built_from_its_section() -> None:
    section = custom("partita_trainers.zero_shot:ZeroShot")
    trainer: Any = build_trainer(section)
    assert trainer.config is section


class WithoutInit:
    def train(self, context: Any) -> None: ...


class WithoutTrain:
    def __init__(self, section: CustomTrainer) -> None: ...


class TrainsWithoutContext(WithoutTrain):
    def train(self) -> None: ...


class Async(WithoutTrain):
    async def train(self, context: Any) -> None: ...


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "no_such_package.there:Class",
            "trainer.target: there is no module no_such_package; install it or put its folder on PYTHONPATH",
        ),
        ("partita_trainers.zero_shoot:ZeroShot", "trainer.target: there is no module partita_trainers.zero_shoot"),
        (
            "partita_trainers.zero_shot:ZeroShott",
            "trainer.target: module partita_trainers.zero_shot has no class ZeroShott; did you mean ZeroShot?",
        ),
        (
            "argparse:Action",
            "trainer.target: Action cannot be created with the trainer section as its only argument: missing a",
        ),
        (
            f"{__name__}:WithoutInit",
            (
                "trainer.target: WithoutInit cannot be created with the trainer section as its only argument: it has "
                "no __init__; write def __init__(self, section)"
            ),
        ),
        (
            f"{__name__}:WithoutTrain",
            "trainer.target: WithoutTrain has no method train; write def train(self, context)",
        ),
        (
            f"{__name__}:TrainsWithoutContext",
            (
                "trainer.target: TrainsWithoutContext.train cannot be called with the context as its only argument: "
                "too many positional arguments; write def train(self, context)"
            ),
        ),
        (
            f"{__name__}:Async",
            "trainer.target: Async.train is async and would never run; write def train(self, context)",
        ),
    ],
)
def test_an_invalid_target_is_reported(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_trainer(custom(target))
    assert str(error.value).startswith(message)


def test_a_class_of_c_may_take_its_section() -> None:
    check_signature(dict, custom("builtins:dict"))


class WithoutProbe:
    def __init__(self, section: CustomTrainer) -> None:
        self.section = section


def test_a_class_without_a_probe_needs_a_batch_size() -> None:
    section = custom("partita_trainers.zero_shot:ZeroShot")
    message = (
        "trainer.batch_size: auto needs a trainer that says what to probe: give WithoutProbe a method probe, "
        "or write a number"
    )
    with pytest.raises(ConfigError) as error:
        check_probe(WithoutProbe(section), section)
    assert str(error.value) == message
    numbered = section.model_copy(update={"batch_size": 8})
    check_probe(WithoutProbe(numbered), numbered)
