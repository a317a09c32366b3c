"""Whether the values of a metric mean the same in all trials of a sweep, as `partita compare` asks of two runs."""

import json
from collections.abc import Iterable, Iterator, Mapping

from partita_schema.base import Refusal
from partita_schema.metrics import full_name, metrics_without_output
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.data import FixedSplit
from partita_schema.sections.model import EmbeddingBagModel
from partita_schema.sections.objectives import OBJECTIVE_METRICS
from partita_schema.sections.outputs import checkpoint_metrics
from partita_schema.sections.sweep import SearchSpace, values_of
from partita_schema.sections.trainer import FinetuneTrainer

KIND = ("trainer.type", "trainer.loss.type")
"""Keys on which it depends whether a trial is compared with the model before training."""
FORMULA = (
    *("trainer.loss", "trainer.beta", "trainer.center", "trainer.desirable_weight", "trainer.undesirable_weight"),
    "trainer.completion_only_loss",
)
"""Keys of the formula of a loss."""
TOKENS = ("base_model.type", "base_model.tokenizer", "base_model.vocab_size")
"""Keys that decide the tokens of a text."""
SHARES = ("rewards/accuracies", "chosen_falls")
"""Metrics that count pairs, whatever the scale of their rewards."""


def sweep_metric(config: ConfigSections) -> str:
    """Return the full name of the metric that compares the trials of a sweep."""
    written = config.sweep.metric if config.sweep is not None else None
    trained = config.trainer.validation_metric if isinstance(config.trainer, FinetuneTrainer) else "loss"
    return full_name(written or trained, config.output_features)


def incomparable_trials(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a default metric that means something else in other trials. A metric that the file names is allowed."""
    metric = sweep_metric(config)
    key = changing_parameter(config, metric)
    if config.sweep is None or config.sweep.metric is not None or key is None:
        return
    others = [name for name in computed_metrics(config) if changing_parameter(config, name) is None]
    instead = f"a metric that it does not change, such as metric: {others[0]}, or " if others else ""
    what = f"trials are compared by {metric}, and {key} changes what it measures"
    yield "sweep.metric", f"{what}; write {instead}metric: {metric} to compare them all the same"


def computed_metrics(config: ConfigSections) -> Iterator[str]:
    """Yield the metrics of the validation rows of a run."""
    yield from metrics_without_output(config)
    generates = not isinstance(config.trainer, FinetuneTrainer) or config.trainer.evaluate_generated is not False
    for output in config.output_features if generates and not config.plain_text else ():
        yield from (f"{output.name}.{name}" for name in checkpoint_metrics(output))


def why_incomparable(config: ConfigSections) -> str | None:
    """Return why the metric of a valid sweep may not compare its trials, for a warning; None if it does."""
    metric = sweep_metric(config)
    key = changing_parameter(config, metric)
    if key is not None:
        return f"{key} changes what {metric} measures, so trials with other values of it cannot be compared by {metric}"
    parameters = config.sweep.parameters if config.sweep is not None else {}
    key = varied_key(parameters, keys_of_validation_rows(config))
    if key is not None:
        return f"{key} changes the validation rows, so trials with other values of it are compared on other rows"
    models = values_of(config.sweep.parameters.get("base_model")) if config.sweep is not None else None
    if len(set(map(str, models or ()))) > 1 and set(TOKENS) & set(defining_keys(config, metric)):
        return (
            f"{metric} is measured in tokens, so trials of base models with other tokenizers cannot be compared by it"
        )
    return None


def changing_parameter(config: ConfigSections, metric: str) -> str | None:
    """Return the first parameter of the sweep that changes what a metric measures; None without one."""
    parameters = config.sweep.parameters if config.sweep is not None else {}
    return varied_key(parameters, defining_keys(config, metric))


def keys_of_validation_rows(config: ConfigSections) -> tuple[str, ...]:
    """Return the keys that decide which rows are validation rows."""
    if config.data.validation is not None:
        return ("data.validation",)
    seed = () if isinstance(config.data.split, FixedSplit) else ("seed",)
    return ("data.source", "data.mix", "data.split", "preprocessing.sample_ratio", "preprocessing.sample_size", *seed)


def defining_keys(config: ConfigSections, metric: str) -> tuple[str, ...]:
    """Return the keys on which it depends what a metric measures."""
    tokens = () if writes_no_text(config) else TOKENS
    if metric in SHARES:
        return KIND
    if metric in ("perplexity", "logps/chosen"):
        return *KIND, *tokens
    if metric in OBJECTIVE_METRICS:
        return *KIND, *FORMULA, *tokens
    if metric != "loss":
        return ()
    return *KIND, *FORMULA, *tokens, *supervised_keys(config)


def supervised_keys(config: ConfigSections) -> Iterator[str]:
    """Yield the keys that decide which values or which parts of the texts a loss is computed on."""
    if writes_no_text(config):
        yield "output_features"
        return
    for number in range(len(config.output_features)):
        yield from (f"output_features.{number}.type", f"output_features.{number}.preprocessing")
    if isinstance(config.trainer, FinetuneTrainer) and not config.trainer.completion_only_loss:
        yield from ("input_features", "prompt")


def writes_no_text(config: ConfigSections) -> bool:
    """Return whether the model predicts values and writes no text, so that the loss has no tokens."""
    is_bag = isinstance(config.base_model, EmbeddingBagModel)
    return is_bag or config.is_new_encoder or not config.has_answer_texts


def varied_key(parameters: Mapping[str, object], defining: Iterable[str]) -> str | None:
    """Return the first parameter whose values differ in one of these keys; None without one."""
    keys = tuple(defining)
    return next((key for key, space in parameters.items() if any(varies(key, space, one) for one in keys)), None)


def varies(key: str, space: object, defining: str) -> bool:
    """Return whether the values of a parameter differ in a key."""
    inside = key == defining or key.startswith(f"{defining}.")
    if not inside and not defining.startswith(f"{key}."):
        return False
    if isinstance(space, SearchSpace) and space.choice is None:
        return True
    path = () if inside else tuple(defining.removeprefix(f"{key}.").split("."))
    return len({json.dumps(part_of(value, path), sort_keys=True) for value in values_of(space) or ()}) > 1


def part_of(value: object, path: tuple[str, ...]) -> object:
    """Return a part of a section; None where it is missing."""
    if not path:
        return value
    if isinstance(value, list | tuple):
        value = {str(number): item for number, item in enumerate(value)}
    return part_of(value.get(path[0]), path[1:]) if isinstance(value, Mapping) else None
