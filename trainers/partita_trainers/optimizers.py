"""Optimizers by name: torch's, bitsandbytes' 8-bit and paged ones, and schedule-free AdamW.

Muon trains matrices only and is combined with AdamW for other parameters. The result is therefore a list of optimizers.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import torch

from partita_schema.sections.optimization import Optimizer as OptimizerConfig
from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

logger = logging.getLogger(__name__)

Parameters = Mapping[str, torch.nn.Parameter]

NO_DECAY = ("bias", "norm", "ln_")
"""Parameters whose names contain one of these get no weight decay, nor do one-dimensional parameters."""


def build_optimizers(
    config: OptimizerConfig,
    parameters: Parameters,
    *,
    learning_rate: float,
    device: torch.device,
    embeddings: Collection[str] = (),
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of all trained `parameters`, given by name.

    Args:
        config: Optimizer section of the configuration.
        parameters: Trained parameters by name.
        learning_rate: Initial learning rate.
        device: Device of the parameters; fused and paged variants depend on it.
        embeddings: Names of the weights of embeddings and of the output layer, which Muon is not for.
    """
    if config.type != "muon":
        return [build_one(config, groups(parameters, config.weight_decay), learning_rate=learning_rate, device=device)]
    matrices = {name: p for name, p in parameters.items() if p.ndim == 2 and not is_embedding(name, embeddings)}
    others = {name: p for name, p in parameters.items() if name not in matrices}
    built: list[torch.optim.Optimizer] = []
    if matrices:
        built.append(
            torch.optim.Muon(
                list(matrices.values()),
                lr=learning_rate,
                weight_decay=config.weight_decay,
                momentum=0.95 if config.momentum is None else config.momentum,
                nesterov=config.nesterov is not False,
                eps=1e-7 if config.eps is None else config.eps,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others:
        adamw = OptimizerConfig(type="adamw", weight_decay=config.weight_decay)
        built.append(build_one(adamw, groups(others, config.weight_decay), learning_rate=learning_rate, device=device))
    return built


def embedding_names(module: torch.nn.Module) -> set[str]:
    """Return the names of the weights of all embeddings and of the output layer of a model."""
    find_output: Any = getattr(module, "get_output_embeddings", lambda: None)
    output = find_output()
    layers = [part for part in module.modules() if part is output or isinstance(part, torch.nn.Embedding)]
    weights = {id(weight) for layer in layers for weight in layer.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in weights}


def is_embedding(name: str, embeddings: Collection[str]) -> bool:
    """Return whether a parameter is that of an embedding or output layer, or of an adapter of one."""
    return name in embeddings or any(part in name for part in ("embed", "wte", "wpe", "lm_head"))


def groups(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay; one group if there is no decay."""
    if weight_decay == 0:
        return [{"params": list(parameters.values()), "weight_decay": 0.0}]
    spared = {name for name, p in parameters.items() if p.ndim < 2 or any(part in name.lower() for part in NO_DECAY)}
    decayed = [p for name, p in parameters.items() if name not in spared]
    rest = [parameters[name] for name in parameters if name in spared]
    param_groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in param_groups if group["params"]]


def build_one(
    config: OptimizerConfig, param_groups: list[dict[str, Any]], *, learning_rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Build one optimizer of any type except muon.

    Args:
        config: Optimizer section of the configuration.
        param_groups: Parameter groups with their weight decay.
        learning_rate: Initial learning rate.
        device: Device of the parameters.
    """
    options: dict[str, Any] = {"lr": learning_rate}
    if config.betas is not None:
        options["betas"] = config.betas
    if config.eps is not None:
        options["eps"] = config.eps
    match config.type:
        case "adamw":
            return torch.optim.AdamW(param_groups, fused=config.fused, **options)
        case "adam":
            # Decoupled decay, as weight_decay promises: torch's Adam would add it to the gradient.
            return torch.optim.Adam(param_groups, fused=config.fused, decoupled_weight_decay=True, **options)
        case "sgd":
            momentum = config.momentum or 0.0
            return DecoupledSGD(
                param_groups, lr=learning_rate, momentum=momentum, nesterov=bool(config.nesterov), fused=config.fused
            )
        case "adafactor":
            from transformers import Adafactor

            # torch's multiplies the learning rate by the size of a weight, which is 0 for half of a new LoRA.
            adafactor: torch.optim.Optimizer = Adafactor(
                param_groups, lr=learning_rate, scale_parameter=False, relative_step=False
            )
            return adafactor
        case "schedule_free_adamw":
            import schedulefree

            optimizer: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(param_groups, foreach=False, **options)
            optimizer.train()  # type: ignore[attr-defined]
            return optimizer
        case "adamw_8bit" | "paged_adamw" | "paged_adamw_8bit" | "lion" | "lion_8bit":
            return build_bitsandbytes(config.type, param_groups, options, device=device)
        case "muon":
            raise AssertionError("muon is combined with another optimizer, and built with it")
        case _:
            assert_never(config.type)


class DecoupledSGD(torch.optim.SGD):
    """SGD with decoupled weight decay (Loshchilov and Hutter 2019), as `weight_decay` promises.

    torch's adds it to the gradient, and thus to the momentum, in which it accumulates.
    """

    def __init__(self, param_groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(
            [{**group, "weight_decay": 0.0, "decay": group["weight_decay"]} for group in param_groups], **options
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Shrink the parameters that have a gradient, then take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["decay"]:
                    parameter.mul_(1 - group["lr"] * group["decay"])
        return super().step(closure)


def build_bitsandbytes(
    name: str, param_groups: list[dict[str, Any]], options: dict[str, Any], *, device: torch.device
) -> torch.optim.Optimizer:
    """Build an optimizer of bitsandbytes. Paged ones become plain ones on a CPU.

    Args:
        name: Type of the optimizer, such as adamw_8bit.
        param_groups: Parameter groups with their weight decay.
        options: Other arguments of the optimizer.
        device: Device of the parameters.
    """
    import_bitsandbytes()
    import bitsandbytes as bnb

    if device.type == "cpu" and name.startswith("paged_"):
        name = name.removeprefix("paged_")
        logger.info("optimizer %s instead of paged_%s: only a GPU's memory can be paged out", name, name)
    classes = {
        "adamw": bnb.optim.AdamW,
        "adamw_8bit": bnb.optim.AdamW8bit,
        "paged_adamw": bnb.optim.PagedAdamW,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "lion": bnb.optim.Lion,
        "lion_8bit": bnb.optim.Lion8bit,
    }
    optimizer: torch.optim.Optimizer = classes[name](param_groups, **options)
    return optimizer


def set_learning_rate(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    """Set the learning rate of the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def keep_evaluation_weights(optimizers: list[torch.optim.Optimizer]) -> None:
    """Switch the parameters to the weights for evaluation and export, permanently."""
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()


@contextmanager
def evaluation_weights(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Switch the parameters to the weights for evaluation and export inside the context.

    Schedule-free methods train one sequence of weights and evaluate another (Defazio et al. 2024, section 2).
    """
    switching = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval") and hasattr(optimizer, "train")]
    for optimizer in switching:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in switching:
            optimizer.train()
