"""Tests of building optimizers from the optimizer section."""

from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from partita_schema.sections.optimization import Optimizer
from partita_trainers.optimizers import build_optimizers, embedding_names

SHAPES = {"embed.weight": (5, 3), "layer.weight": (3, 3), "layer.bias": (3,), "norm.weight": (3,), "gate": (1,)}


def build(**options: Any) -> tuple[dict[str, torch.nn.Parameter], list[torch.optim.Optimizer]]:
    """Return parameters filled with ones, and their optimizers."""
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    config = Optimizer.model_validate(options)
    return parameters, build_optimizers(config, parameters, learning_rate=0.1, device=torch.device("cpu"))


TYPES = get_args(Optimizer.model_fields["type"].annotation)


@pytest.mark.parametrize("kind", TYPES)
def test_every_optimizer_of_the_schema_takes_steps_against_the_gradient(kind: str) -> None:
    parameters, optimizers = build(type=kind)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    assert all(bool((parameter < 1).all()) for parameter in parameters.values())


@pytest.mark.parametrize("kind", TYPES)
def test_weight_decay_applies_only_to_matrices(kind: str) -> None:
    parameters, optimizers = build(type=kind, weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in parameters.items():
        expected = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full(SHAPES[name], expected))


def test_weight_decay_does_not_gather_in_the_momentum_of_sgd() -> None:
    parameters, [optimizer] = build(type="sgd", momentum=0.9, weight_decay=0.1)
    for _ in range(20):
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    torch.testing.assert_close(parameters["layer.weight"].detach(), torch.full((3, 3), (1 - 0.1 * 0.1) ** 20))


@pytest.mark.parametrize(("kind", "lookups"), [("t5", ["relative_attention_bias", "shared"]), ("bart", ["shared"])])
def test_muon_is_not_for_embeddings_whatever_their_names(kind: str, lookups: list[str]) -> None:
    sizes = {"num_layers": 1} if kind == "t5" else {"encoder_layers": 1, "decoder_layers": 1}
    config = AutoConfig.for_model(kind, vocab_size=8, d_model=16, **sizes)
    module = AutoModelForSeq2SeqLM.from_config(config)
    names = {name.split(".")[-2] for name in embedding_names(module)}
    assert names >= set(lookups)
    assert names.isdisjoint({"q", "wi", "wo", "q_proj", "fc1"})
    weights = dict(module.named_parameters())
    options: dict[str, Any] = {"learning_rate": 0.1, "device": torch.device("cpu")}
    muon, _ = build_optimizers(Optimizer(type="muon"), weights, embeddings=embedding_names(module), **options)
    trained = {id(weight) for weight in muon.param_groups[0]["params"]}
    assert id(module.get_input_embeddings().weight) not in trained
    assert any(id(weight) in trained for weight in weights.values())


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion", "schedule_free_adamw"])
def test_averages_decay_as_configured(kind: str) -> None:
    _, [optimizer] = build(type=kind, betas=[0.5, 0.75])
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.5, 0.75)}


@pytest.mark.parametrize(
    ("options", "momentum", "nesterov"),
    [({}, 0.95, True), ({"nesterov": False}, 0.95, False), ({"momentum": 0.5, "nesterov": True}, 0.5, True)],
)
def test_muon_updates_matrices_with_the_configured_momentum_and_adamw_the_rest(
    options: dict[str, Any], momentum: float, nesterov: bool
) -> None:
    parameters, [muon, adamw] = build(type="muon", **options)
    [group] = muon.param_groups
    assert (group["momentum"], group["nesterov"]) == (momentum, nesterov)
    assert [id(parameter) for parameter in group["params"]] == [id(parameters["layer.weight"])]
    assert sum(len(group["params"]) for group in adamw.param_groups) == 4
    assert isinstance(adamw, torch.optim.AdamW)


@pytest.mark.parametrize("size", [0.0, 0.01, 10.0])
def test_steps_of_adafactor_have_the_size_of_the_learning_rate_whatever_the_size_of_the_weight(size: float) -> None:
    weight = torch.nn.Parameter(torch.full((4, 3), size))
    [optimizer] = build_optimizers(
        Optimizer(type="adafactor"), {"lora_B.weight": weight}, learning_rate=0.01, device=torch.device("cpu")
    )
    weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 3), size - 0.01))


def test_sgd_has_no_momentum_by_default() -> None:
    for options, momentum in (({}, 0.0), ({"momentum": 0.9, "nesterov": True}, 0.9)):
        _, [optimizer] = build(type="sgd", **options)
        [group] = optimizer.param_groups
        assert (group["momentum"], group["nesterov"]) == (momentum, bool(options))
