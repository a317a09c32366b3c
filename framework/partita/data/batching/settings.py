"""The settings that cut rows into batches and steps, resolved from the configuration."""

from dataclasses import dataclass

from partita.data.batching.policies import Policy, build_policy
from partita_schema.sections.batching import Batching


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What decides the batches of given rows."""

    batching: Batching
    """The batching policy and its settings."""
    batch_size: int
    """Rows per batch; sequences per batch for pack."""
    max_tokens: int | None = None
    """Value in tokens of an automatic `max_tokens`: token_budget's `auto`, and pack's default."""
    batches_per_step: int
    """M, the number of batches in one optimizer step, summed over all ranks."""
    seed: int
    """Decides the order of the rows."""

    def policy(self) -> Policy:
        """Return the policy that cuts windows of rows into batches."""
        return build_policy(self.batching, batch_size=self.batch_size, max_tokens=self.max_tokens)

    def fingerprint_inputs(self) -> dict[str, str]:
        """Return what decides the batches, by the names of the configuration."""
        settings = self.batching.model_dump(mode="json")
        # "auto" is a different number on another machine, and the batches follow from the number.
        if settings.get("max_tokens", 0) in (None, "auto"):
            settings["max_tokens"] = self.max_tokens
        inputs = {"batching": settings.pop("type")}
        inputs |= {f"batching.{name}": str(value) for name, value in settings.items()}
        # A token budget fills batches by tokens: there the batch size decides nothing, and may change on resuming.
        if self.batching.type != "token_budget":
            inputs["batch size"] = str(self.batch_size)
        return inputs | {"batches a step": str(self.batches_per_step), "seed": str(self.seed)}
