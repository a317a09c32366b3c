"""The model before training, which losses of dpo and kto compare with, in evaluations of a finished run.

Log-probabilities that the run has recorded are read from its directory. The others are computed before the loss of the
trained model: with its adapter off if a new adapter was trained, otherwise with the weights that training began with,
which are loaded a second time and freed when all log-probabilities are known.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.data.rows import Rows
from partita.lm.base import GenerativeModel
from partita.lm.load_model import load_model
from partita.lm.trained_model import TrainedModel
from partita.lm.training.exporting import origin
from partita.pipeline.build import LocalPipeline, initial_batches
from partita.runs.manifest import MODEL_BEFORE_TRAINING, read_manifest
from partita.runs.rounds import num_kept_rounds, round_folder
from partita_schema.config import Config
from partita_schema.errors import ModelError, PartitaError
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext
from partita_trainers.objectives.prepare_references import compute_step
from partita_trainers.objectives.references import References, RelativeObjective
from partita_trainers.process_group import ProcessGroup, synchronized_errors
from partita_trainers.steps.micro_batches import MicroBatchSplitter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelBeforeTraining:
    """The model that the training of a finished run began with."""

    run: Path | None
    """The run that trained the model, of self-training the directory of its last round; None without one."""
    saved: Path | None
    """Folder of the weights before the last round of self-training; None if they are those of the configuration."""
    manifest: Mapping[str, Any]
    """The manifest of the run; empty without one."""
    training_rows: Callable[[], Rows | None]
    """Opens the training rows, for the init of an adapter that depends on them."""

    @classmethod
    def of_run(cls, run: Path | None, *, training_rows: Callable[[], Rows | None]) -> "ModelBeforeTraining":
        """Return the model before the training of a run, or before its last round of self-training that was kept."""
        manifest, saved = read_manifest(run) if run is not None else {}, None
        kept = num_kept_rounds(manifest)
        if run is not None and kept:
            before = round_folder(run, kept - 1) / "model"
            saved = before if kept > 1 or before.is_dir() else None
            run = round_folder(run, kept)
            manifest = read_manifest(run)
        return cls(run, saved, manifest, training_rows)

    @contextmanager
    def opened(self, pipeline: LocalPipeline) -> Iterator[GenerativeModel]:
        """Yield the model before training; only inside the context.

        Args:
            pipeline: The pipeline with the trained model.

        Raises:
            PartitaError: It cannot be loaded, or is not the one that training began with.
        """
        lm = pipeline.lm
        if isinstance(lm, TrainedModel) and lm.has_reference:
            with lm.reference():
                yield lm
        elif isinstance(lm, TrainedModel) and lm.is_base_without_adapter and self.is_base(lm):
            with lm.adapter_off():
                yield lm
        else:
            yield self.load(pipeline)

    def is_base(self, lm: TrainedModel) -> bool:
        """Return whether training began with the base model of a trained model, as far as it is recorded."""
        return self.saved is None and self.is_origin(origin(lm, adapter=False))

    def is_origin(self, found: str) -> bool:
        """Return whether training began with the weights with this hash, as far as it is recorded."""
        return bool(found == self.manifest.get(MODEL_BEFORE_TRAINING, found))

    def load(self, pipeline: LocalPipeline) -> GenerativeModel:
        """Load the model as training began with it. Raises PartitaError if it cannot be loaded, or has changed."""
        config: Config = pipeline.config
        tokenizer = pipeline.lm.tokenizer

        def batches() -> Iterator[Batch]:
            return initial_batches(config, self.training_rows(), pipeline.row_tokenizer, tokenizer)

        lm = load_model(
            config, folder=pipeline.folder, tokenizer=tokenizer, saved=self.saved, batches=batches, trainable=True
        )
        if not self.is_origin(origin(lm)):
            source = lm.source if lm.adapter_source is None else lm.adapter_source
            raise ModelError(f"{source} has changed since training began")
        lm.module.eval()
        return lm


def complete_references(
    objective: RelativeObjective,
    before: ModelBeforeTraining,
    pipeline: LocalPipeline,
    batches: Iterable[Batch],
    *,
    process_group: ProcessGroup,
) -> bool:
    """Give an objective all log-probabilities before training that the losses of some rows need.

    All ranks call this together, each with its own rows.

    Args:
        objective: What is computed.
        before: The model before training.
        pipeline: The pipeline with the trained model.
        batches: The rows of this rank; can be iterated several times.
        process_group: The ranks that share the rows.

    Returns:
        Whether all are known; if not, a warning says why.

    Raises:
        TrainingError: A row does not fit in memory.
    """
    references = objective.references
    assert references is not None
    with synchronized_errors(process_group, "the log-probabilities before training"):
        references.read(before.run)
    context = ObjectiveContext(pipeline.lm, pipeline.lm.module, process_group)
    unknown = [batch for batch in objective.reference_batches(context, batches) if not references.knows(batch)]
    if any(process_group.all_gather_object(bool(unknown), "the log-probabilities before training")):
        with ExitStack() as stack:
            try:
                with synchronized_errors(process_group, "loading the model before training"):
                    lm = stack.enter_context(before.opened(pipeline))
            except PartitaError as error:
                logger.warning(
                    "the metrics have no loss, no rewards, no logps/chosen and no logps/rejected: they are computed "
                    "together with the model before training, which cannot be loaded: %s",
                    error,
                )
                return False
            with synchronized_errors(process_group, "the log-probabilities before training"):
                compute(references, ObjectiveContext(lm, lm.module), unknown)
    references.started = True
    return True


def compute(references: References, context: ObjectiveContext, batches: Sequence[Batch]) -> None:
    """Compute the log-probabilities of the rows of batches, in smaller batches if memory runs out."""
    splitter = MicroBatchSplitter()
    for batch in batches:
        compute_step(references, context, [batch], splitter=splitter)


def notes_of(run: Path | None) -> Mapping[str, Any]:
    """Return what a saved model needs of the manifest of its run to be compared with the model before training."""
    manifest = ModelBeforeTraining.of_run(run, training_rows=lambda: None).manifest
    return {key: manifest[key] for key in (MODEL_BEFORE_TRAINING, "undesirable_weight") if key in manifest}
