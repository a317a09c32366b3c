"""Rules for the data and the sections that depend on its number of rows."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.sources import SimulationSource
from partita_schema.sections.trainer import FinetuneTrainer


def two_splits(config: ConfigSections) -> Iterator[Refusal]:
    """Yield the second of two splits."""
    if config.data.split is not None and config.preprocessing.split is not None:
        yield "preprocessing.split", "preprocessing.split and data.split cannot both be set; write data.split"


def impossible_folds(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what leaves nothing to cross-validate."""
    if config.split.type != "kfold":
        return
    at = "data.split" if config.data.split is not None else "preprocessing.split"
    if config.data.validation is not None:
        yield "data.validation", f"with {at}: {{type: kfold}} each fold is validated on its own rows; remove it"
    if not config.trains:
        yield at, "cross-validation trains a model per fold; write a trainer, or another split"
    if config.simulation is not None and config.simulation.self_training is not None:
        yield at, "self-training makes its own rows; write another split"
    sources = [config.data.source, *(part.source for part in config.data.mix or ())]
    if all(source is None or isinstance(source, SimulationSource) for source in sources) and any(sources):
        yield at, "transcripts of a simulation are training rows only; write another split"


def streaming_conflicts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield keys that need the number of rows, which a stream does not have."""
    if not config.data.streaming:
        return
    at = "data.source.streaming" if config.data.mix is None else "data.mix.0.source.streaming"
    if not config.trains:
        yield at, "with trainer: {type: none} all rows are needed each time; remove streaming"
    if isinstance(config.trainer, FinetuneTrainer) and config.trainer.max_steps is None:
        yield "trainer", "a stream has no known length; write max_steps, the number of optimizer steps"
    if isinstance(config.trainer, FinetuneTrainer) and config.trainer.epochs is not None:
        yield "trainer.epochs", "a stream has no known length; remove epochs, max_steps says when the run ends"
    for key, instead in (
        ("evaluations_per_epoch", "steps_per_evaluation"),
        ("checkpoints_per_epoch", "steps_per_checkpoint"),
    ):
        if getattr(config.trainer, key, 1.0) not in (0, 1.0):
            yield f"trainer.{key}", f"an epoch of a stream has no known length; remove {key}, and write {instead}"
    batching = config.data.batching
    longest = getattr(batching, "max_tokens", 0) in (None, "auto")
    if longest and config.preprocessing.global_max_sequence_length is None:
        yield (
            "data.batching",
            (
                "the longest row of a stream is not known; write max_tokens here, or "
                "preprocessing.global_max_sequence_length"
            ),
        )
    preprocessing = config.preprocessing
    for key in ("split", "sample_ratio", "sample_size"):
        if is_set(preprocessing, key):
            yield f"preprocessing.{key}", f"{key} needs the number of rows, and a stream has none; remove it"
    if config.prompt.retrieval is not None and config.prompt.retrieval.dataset is None:
        yield "prompt.retrieval", "examples are not retrieved from a stream; write dataset, the rows to retrieve from"
    for index, output in enumerate(config.output_features):
        if output.has_labels and output.labels is None:
            yield (
                f"output_features.{index}.decoder.labels",
                f"the beginning of a stream need not show every label of {output.name}; write them here",
            )
