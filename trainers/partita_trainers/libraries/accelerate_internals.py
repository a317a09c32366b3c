"""What partita uses of accelerate that is not public.

Checked with accelerate 1.15. If an attribute disappears, tests/trainers/libraries/test_accelerate_internals.py says
what to change.
"""

from torch import nn

PREPARED = ("forward", "_original_forward", "_is_accelerate_prepared")
"""Attributes that `Accelerator.prepare_model` writes into a module.

While the last one is set, no other Accelerator prepares the module. `Accelerator.unwrap_model` leaves it set.
"""


def reset_precision() -> None:
    """Let the next Accelerator have another precision: `AcceleratorState._reset_state`.

    accelerate keeps the precision of the first model that a process trains.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=False)


def layer_class_names(module: nn.Module) -> set[str]:
    """Return the class names of the layers that are not split over devices: `_no_split_modules`.

    Models of transformers have this attribute, and accelerate finds the layers to shard by it. Other models have none.
    """
    return {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
