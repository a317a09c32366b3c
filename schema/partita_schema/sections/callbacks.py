"""Callbacks: classes outside partita that are called during training."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from partita_schema.base import ConfigModel, check_target


class CallbackConfig(ConfigModel):
    """A class with methods that are called during training."""

    type: Literal["custom"]
    """Your own class."""
    target: Annotated[str, AfterValidator(check_target)]
    """The class, as `module:Class`, with one or more of the methods on_start, on_step, on_evaluate, on_checkpoint and
    on_end."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
