"""A loaded model that can be trained and saved: what models that write text and models with a head share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from partita.lm.adapters.adalora import AdaloraBudget
from partita.lm.loaded_model import LoadedModel
from partita.lm.training.exporting import changed_tensors, export, identity
from partita.lm.training.freezing import trained_parameters
from partita.lm.training.mode import ModeSwitch
from partita.lm.training.neftune import EmbeddingNoise
from partita.lm.training.saving import INITIAL, check_initial, read_checkpoint, restore_parameters, write_checkpoint
from partita.tokenizers.hub import short_digest, tensors_digest
from partita_schema.sections.adapter import AdaloraAdapter, LoraAdapter
from partita_schema.sections.trainer import CustomTrainer
from partita_trainers.sharding import exchange_weights


class TrainedModel(LoadedModel):
    """The parts of `partita.lm.base.GenerativeModel` that concern training and files."""

    def __post_init__(self) -> None:
        """Set up what training changes about the module."""
        super().__post_init__()
        noise_alpha = self.config.model_parameters.neftune_noise_alpha
        self.noise = EmbeddingNoise(self.base.get_input_embeddings(), alpha=noise_alpha) if noise_alpha else None
        adapter = self.config.adapter
        trains_ranks = isinstance(adapter, AdaloraAdapter) and bool(trained_parameters(self.module))
        self.budget = AdaloraBudget(self.adapted, adapter) if trains_ranks else None  # type: ignore[arg-type]
        self._switch_mode: Callable[[bool], object] = self.module.train
        self._starting: dict[str, torch.Tensor] | None = None
        self._identity: str | None = None
        self._fingerprint: str | None = None

    # Training

    def prepare_training(self, total_steps: int) -> None:
        """Set up what the steps need, some of which depends on their number."""
        trainer = self.config.trainer
        # torch.compile may not notice a mode that was not set by `train`.
        if not (isinstance(trainer, CustomTrainer) or getattr(trainer, "compile", False)):
            self._switch_mode = ModeSwitch(self.module)
        if self.budget is not None:
            self.budget.plan(total_steps)

    def auxiliary_loss(self) -> torch.Tensor | None:
        """Return AdaLoRA's weighted regularization loss; None for other adapters."""
        return self.budget.penalty() if self.budget is not None else None

    def after_step(self, step: int) -> None:
        """Update AdaLoRA's rank budget. Call it before gradients are cleared."""
        if self.budget is not None:
            self.budget.after_step(step)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Switch to training mode, with NEFTune noise if configured; restore the mode on exit."""
        before = self.module.training
        self._switch_mode(True)
        try:
            with self.noise.switched_on() if self.noise is not None else nullcontext():
                yield
        finally:
            self._switch_mode(before)

    def keep_reference(self) -> None:
        """Copy the weights that training changes, for `reference`. Call it before the first step and before a resume.

        An adapter is small; without one, this is a second copy of the weights that are trained. If the ranks share the
        weights, each rank copies its shards.
        """
        parameters = trained_parameters(self.module)
        self._starting = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @property
    def has_reference(self) -> bool:
        """Whether `keep_reference` has copied weights, and `drop_reference` has not freed them."""
        return self._starting is not None

    def drop_reference(self) -> None:
        """Free the copy that `keep_reference` has made."""
        self._starting = None

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute with the weights of `keep_reference` in this context, in evaluation mode and without gradients.

        The starting policy is the reference, also if it is an adapter that is trained further. If the ranks share the
        weights, this model has all of them, and all ranks enter the context together.
        """
        assert self._starting is not None, "keep_reference was not called"
        parameters = trained_parameters(self.module)
        current = exchange_weights(parameters, self._starting)
        try:
            with torch.no_grad(), self.evaluating():
                yield
        finally:
            exchange_weights(parameters, current)

    @property
    def is_base_without_adapter(self) -> bool:
        """Whether an adapter was trained that changed nothing exactly before training, and can be switched off."""
        adapter = self.config.adapter
        return (
            self.adapted is not None
            and isinstance(adapter, LoraAdapter)
            and adapter.pretrained_adapter_weights is None
            and adapter.init in ("default", "gaussian", "eva")
            and adapter.bias == "none"
            and not adapter.use_dora
        )

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Compute with the base model alone in this context, in evaluation mode and without gradients."""
        with self.adapted.disable_adapter(), torch.no_grad(), self.evaluating():
            yield

    # Files

    def save_checkpoint(self, folder: Path) -> None:
        """Write the trained state, bit for bit."""
        extra = self.budget.tensors() if self.budget is not None else {}
        ranks = self.budget.ranks() if self.budget is not None else None
        write_checkpoint(folder, module=self.module, initial=self.initial_adapter_tensors, extra=extra, ranks=ranks)

    def load_checkpoint(self, folder: Path) -> None:
        """Load the trained state in place.

        Raises:
            ResumeError: The checkpoint does not match the model.
        """
        tensors, notes = read_checkpoint(folder)
        first = {name.removeprefix(INITIAL): value for name, value in tensors.items() if name.startswith(INITIAL)}
        check_initial(first, self.initial_adapter_tensors, folder=folder)
        budget = {name: value for name, value in tensors.items() if name.startswith("rank_budget.")}
        trained = {name: value for name, value in tensors.items() if not name.startswith((INITIAL, "rank_budget."))}
        restore_parameters(self.module, trained, folder=folder)
        self.initial_adapter_tensors = first
        if self.budget is not None:
            self.budget.restore(budget, ranks=notes["ranks"])

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer in the layout of transformers or peft."""
        export(self, folder)

    # Inference

    @property
    def fingerprint(self) -> str:
        """Hash of what affects outputs; equal for a trained model in memory and its saved files, unless merged.

        Trained weights are hashed by content, an unchanged base model by its files or its Hub commit.
        """
        if self._fingerprint is not None and not self.trainable:
            return self._fingerprint
        if self._identity is None:
            self._identity = identity(self)
        self._fingerprint = short_digest(self._identity, tensors_digest(sorted(changed_tensors(self).items())))
        return self._fingerprint
