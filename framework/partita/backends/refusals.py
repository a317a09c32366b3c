"""Verbs that a backend or a kind of model does not support, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from partita_schema.errors import PartitaError

if TYPE_CHECKING:
    from partita_schema.config import Config

EVALUATE_ONLY = "train with trainer: {type: none}"
USE_THIS_PROCESS = "remove backend, or add --set 'backend={type: local}'"
"""What to do in a file, and for a run directory."""


@dataclass(frozen=True)
class Refusals:
    """Verbs that are not supported, and why."""

    message: str = "{verb}: {reason}"
    """The message, with `{verb}` and `{reason}`."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why, and what to do instead, by verb."""

    def check(self, verb: str) -> None:
        """Raise PartitaError if the verb is not supported."""
        if verb in self.reasons:
            self.refuse(verb)

    def refuse(self, verb: str) -> NoReturn:
        """Raise PartitaError: the verb is not supported."""
        raise PartitaError(self.message.format(verb=verb, reason=self.reasons[verb]))


ENDPOINT = Refusals(
    "there is nothing to {verb} with backend: {{type: endpoint}}: {reason}",
    {
        "train": "the model is the server's; use evaluate or predict, or remove backend",
        "tune": "the server chooses how many rows go through its model at once; backend.concurrency says how many it "
        "is asked at the same time",
        "preview": "tokens are the server's; with a model or its folder as base_model and without backend they are "
        "shown",
        "save": "the model is the server's",
        "export": "the model is the server's",
        "simulate": "episodes need a model in this process; remove backend",
    },
)
RAY = Refusals(
    "backend: {{type: ray}} does not {verb}: {reason}",
    {
        EVALUATE_ONLY: "evaluate scores rows with the workers",
        "tune": f"the workers find their sizes themselves; for those of this process, {USE_THIS_PROCESS}",
        "generate": f"for a few texts, {USE_THIS_PROCESS}, or predict a dataset",
        "save": f"this process does not hold the model; {USE_THIS_PROCESS}",
        "export": f"this process does not hold the model; {USE_THIS_PROCESS}",
    },
)
BY_TYPE = {"endpoint": ENDPOINT, "ray": RAY}
"""What backends do not support, by backend.type; other backends support all verbs."""
EMBEDDING_BAG = Refusals(
    "there is nothing to {verb} with base_model: {{type: embedding_bag}}: {reason}",
    {
        "generate": "it writes no text; predict answers rows with labels",
        "simulate": "it has no dialogues; write a language model as base_model",
        "tune": "its batch sizes are numbers in the file",
        "export": "only partita reads its files",
    },
)
"""Verbs that the embedding-bag classifier does not support."""
HEAD = Refusals(
    "there is nothing to {verb} with a head: {reason}",
    {
        "generate": "it writes no text; predict answers rows",
        "simulate": "it writes no text; write a file with a model that answers",
    },
)
"""Verbs that a model with a head does not support."""


def check_supported(config: "Config", verb: str) -> None:
    """Raise PartitaError if the backend of the configuration does not support a verb."""
    if config.backend.type in BY_TYPE:
        BY_TYPE[config.backend.type].check(verb)
