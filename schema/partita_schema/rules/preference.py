"""Rules for trainers on preferences: which output they need, and what pairs and labelled answers exclude."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.sections.outputs.text import TextOutput
from partita_schema.sections.sources import SimulationSource
from partita_schema.sections.trainer import (
    CustomTrainer,
    FinetuneTrainer,
    HogwildTrainer,
    KtoTrainer,
    PreferenceTrainer,
    RewardTrainer,
)


def refused_by_preferences(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with a trainer on preferences, and outputs that only such a trainer reads."""
    yield from outputs_of_other_trainers(config)
    trainer = config.trainer
    if not isinstance(trainer, PreferenceTrainer | RewardTrainer | KtoTrainer):
        return
    yield from unfit_outputs(config)
    yield from refused_rows(config)
    if is_set(trainer, "completion_only_loss"):
        yield "trainer.completion_only_loss", "answers are compared, not prompts; remove it"
    if isinstance(trainer, RewardTrainer):
        yield from refused_by_reward_models(config, trainer)


def refused_by_reward_models(config: ConfigSections, trainer: RewardTrainer) -> Iterator[Refusal]:
    """Yield keys for answers that a reward model would write."""
    if config.simulation is not None and config.simulation.self_training is not None:
        yield "simulation.self_training", "a reward model writes no answers for episodes; remove it"
    if trainer.evaluate_generated is True:
        yield "trainer.evaluate_generated", "a reward model predicts a score and writes no answers; remove it"


def unfit_transcripts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a selection of transcripts that does not make the rows that the output needs."""
    output = config.output_features[0]
    for at, select in selections(config):
        if output.has_pairs and select not in ("corrected", "best_and_worst"):
            yield at, f"{select} makes single answers, and this output has pairs; write corrected or best_and_worst"
        elif output.has_label and select != "all":
            reason = "labelled answers are those of all dialogues, good and bad ones"
            yield at, f"{reason}; write all"
        elif select == "best_and_worst" and not output.has_pairs:
            reason = f"best_and_worst makes pairs of answers, and this output is a {output.type}"
            yield at, f"{reason}; write type: preference there, or select: corrected, succeeded or all"


def selections(config: ConfigSections) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of `select` of each source that reads transcripts, and of self-training."""
    data, simulation = config.data, config.simulation
    sources = {f"data.{name}": getattr(data, name) for name in ("source", "validation", "test")}
    sources |= {f"data.mix.{index}.source": part.source for index, part in enumerate(data.mix or ())}
    for at, source in sources.items():
        if isinstance(source, SimulationSource):
            yield f"{at}.select", source.select
    if simulation is not None and simulation.self_training is not None:
        yield "simulation.self_training.select", simulation.self_training.select


def outputs_of_other_trainers(config: ConfigSections) -> Iterator[Refusal]:
    """Yield pairs and labels that the trainer does not read. A custom trainer may read both."""
    trainer = config.trainer
    if isinstance(trainer, CustomTrainer | HogwildTrainer):
        return  # hogwild refuses all outputs but categories
    for index, output in enumerate(config.output_features):
        at = f"output_features.{index}"
        if isinstance(output, PreferenceOutput) and output.has_head:
            if trainer.type not in ("reward", "none"):
                reason = f"a head scores answers, and trainer: {{type: {trainer.type}}} learns to write them"
                yield f"{at}.head", f"{reason}; remove head, or write type: reward there"
        elif output.has_pairs and not isinstance(trainer, PreferenceTrainer | RewardTrainer | KtoTrainer):
            instead = ", or head: linear to score answers" if trainer.type == "none" else ""
            instead = instead or ", or trainer: {type: preference}"
            learns = "no answer" if trainer.type == "none" else "one"
            yield (
                f"{at}.type",
                (
                    f"a preference has two answers, and trainer: {{type: {trainer.type}}} learns {learns}; write type: "
                    f"text, with column: {output.source_column}{instead}"
                ),
            )
        if isinstance(output, PreferenceOutput) and output.margin is not None and trainer.type in ("preference", "kto"):
            yield (
                f"{at}.margin",
                f"margin has no effect with trainer: {{type: {trainer.type}}}; remove it, or write type: reward there",
            )
        if isinstance(output, TextOutput) and output.label is not None and not isinstance(trainer, KtoTrainer):
            yield (
                f"{at}.label",
                f"label has no effect with trainer: {{type: {trainer.type}}}; remove it, or write type: kto there",
            )


def unfit_outputs(config: ConfigSections) -> Iterator[Refusal]:
    """Yield outputs that a trainer on preferences cannot learn from."""
    kind, output = config.trainer.type, config.output_features[0]
    if len(config.output_features) > 1:
        yield "output_features.1", f"trainer: {{type: {kind}}} learns a single output; write one file for each output"
    if isinstance(config.trainer, KtoTrainer):
        yield from unlabelled_outputs(config, output)
    elif not output.has_pairs:
        yield (
            "output_features.0.type",
            (
                f"trainer: {{type: {kind}}} learns from pairs of answers, and this is a {output.type}; write type: "
                "preference, with chosen and rejected"
            ),
        )


def unlabelled_outputs(config: ConfigSections, output: OutputFeature) -> Iterator[Refusal]:
    """Yield what KTO needs and a file lacks: a text, its label and a prompt."""
    if not isinstance(output, TextOutput):
        reason = f"kto learns from single texts that are good or bad, and this is a {output.type}"
        yield "output_features.0.type", f"{reason}; write type: text, with label: COLUMN"
    elif output.label is None:
        reason = "kto must know which answers are good"
        yield "output_features.0", f"{reason}; write label: COLUMN, the column that says it"
    if config.plain_text:
        yield "input_features", "kto learns from answers to prompts; name the columns that the model sees"


def refused_rows(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options that would make other rows than one per pair or labelled answer."""
    if isinstance(config.data.batching, ChunkBatching) and isinstance(config.trainer, FinetuneTrainer):
        reason = "chunk cuts rows, and the answers of a row belong together"
        yield "data.batching.type", f"{reason}; write pack, bucket or token_budget"
    if config.dialogue_input is None:
        return
    dialogue = config.data.dialogue
    if dialogue.mode in ("packed_dialogue", "squash"):
        yield "data.dialogue.mode", "only the last answer of a dialogue is compared; remove mode, or write last_turn"
    if dialogue.labels != "first":
        yield "data.dialogue.labels", "a dialogue is one row, with the answers of the data; remove labels"
