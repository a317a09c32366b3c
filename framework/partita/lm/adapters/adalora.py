"""AdaLoRA's rank budget: schedule, orthogonality penalty and checkpoint state (Zhang et al. 2023)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from partita_schema.sections.adapter import AdaloraAdapter

if TYPE_CHECKING:
    from peft import PeftModel

MEANS = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""The allocator's running means, each a mapping from parameter name to tensor."""


class AdaloraBudget:
    """Updates the rank budget of a model with an AdaLoRA adapter after each step."""

    def __init__(self, adapted: "PeftModel", adapter: AdaloraAdapter) -> None:
        self.adapted = adapted
        self.adapter = adapter
        self.settings: Any = adapted.active_peft_config
        self.planned = False

    def plan(self, total_steps: int) -> None:
        """Set the three phases for the number of steps; the last one is shortened to leave a step for pruning.

        peft prunes at step `total_step - tfinal` by the importance measured before it, so never at the first step.
        """
        first = as_steps(self.adapter.tinit, total_steps=total_steps)
        last = as_steps(self.adapter.tfinal, total_steps=total_steps)
        self.settings.total_step = max(total_steps, 2)
        self.settings.tinit = min(first, max(total_steps - 1, 0))
        self.settings.tfinal = min(last, max(total_steps - max(self.settings.tinit, 1) - 1, 0))
        self.planned = True

    def after_step(self, step: int) -> None:
        """Prune ranks of low importance. Call it before gradients are cleared."""
        if not self.planned:
            raise AssertionError("prepare_training(total_steps) comes before the first step")
        # peft multiplies each factor by its gradient. A layer that is frozen, or does not affect the loss, has none.
        factors = [factor for name, factor in self.adapted.named_parameters() if ".lora_" in name]
        unused = [factor for factor in factors if factor.grad is None]
        for factor in unused:
            factor.grad = torch.zeros_like(factor)
        self.adapted.base_model.update_and_allocate(step)
        for factor in unused:
            factor.grad = None

    def penalty(self) -> torch.Tensor:
        """Return the weighted orthogonality penalty: mean Frobenius norm of P P' - I (equation 4)."""
        terms = []
        for name, factor in self.adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                gram = factor @ factor.T if "lora_A" in name else factor.T @ factor
                terms.append(torch.linalg.norm(gram - torch.eye(len(gram), device=gram.device)))
        return float(self.adapter.orth_reg_weight) * torch.stack(terms).mean()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the running means, named `rank_budget.<mean>.<parameter>`."""
        allocator = self.adapted.base_model.rankallocator
        return {
            f"rank_budget.{mean}.{name}": tensor.detach().clone()
            for mean in MEANS
            for name, tensor in getattr(allocator, mean).items()
        }

    def ranks(self) -> dict[str, list[bool]] | None:
        """Return which ranks are active by parameter; None before the first allocation."""
        pattern: dict[str, list[bool]] | None = self.settings.rank_pattern
        return pattern or None

    def restore(self, tensors: Mapping[str, torch.Tensor], *, ranks: dict[str, list[bool]] | None) -> None:
        """Restore running means and active ranks from a checkpoint."""
        allocator = self.adapted.base_model.rankallocator
        device = next(self.adapted.parameters()).device
        for mean in MEANS:
            start = f"rank_budget.{mean}."
            values = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            setattr(allocator, mean, {name: tensor.to(device) for name, tensor in values.items()})
        self.settings.rank_pattern = ranks


def as_steps(value: float, *, total_steps: int) -> int:
    """Convert a fraction of the steps (below 1) or a number of steps to a number."""
    return round(value * total_steps) if value < 1 else int(value)
