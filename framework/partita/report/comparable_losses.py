"""Whether the losses of two runs can be compared, and their rewards: only those of the same tokens or values can."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.report.evaluation import Evaluation
from partita.report.preference_rows import (
    LOG_PROBS,
    MARGINS,
    REWARDS,
    SHARES,
    has_preferences,
    has_reference,
    labelled_of,
    pairs_of,
)
from partita.runs.listing import RunSummary
from partita.runs.manifest import MODEL_BEFORE_TRAINING
from partita.runs.rounds import manifest_of_training

TOKENIZER = "tokenizer.json"
IDENTITY = ("model", "added_tokens", "normalizer", "pre_tokenizer")
"""Parts of a tokenizer file that decide the tokens of a text; others, such as padding, do not."""

OTHER_REFERENCE = "each is relative to the model before its training, and these models differ"


def why_not_comparable(
    first: RunSummary, second: RunSummary, first_rows: Evaluation, second_rows: Evaluation
) -> str | None:
    """Return why the losses of two runs cannot be compared; None if they can.

    Args:
        first: A run.
        second: The other run.
        first_rows: Results of the first run.
        second_rows: Results of the other run, of the same rows.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    values = predicts_values(first.config), predicts_values(second.config)
    if values[0] != values[1]:
        return "one is that of predicted values, and the other that of generated text"
    if loss_settings(first) != loss_settings(second):
        return "the trainers have different losses"
    if values[0]:
        return why_values_differ(first, second)
    if has_reference(first.config) and not same_reference(first, second):
        return OTHER_REFERENCE
    if not same_tokenizer(first, second):
        return "the tokenizers differ, and it is a mean over tokens"
    if first_rows.tokens != second_rows.tokens:
        return "it is a mean over other tokens of the rows, because the prompts or the formats of answers differ"
    return None


def incomparable_rewards(first: RunSummary, second: RunSummary) -> tuple[tuple[str, ...], str]:
    """Return the metrics of preferences that cannot be compared, and why; none if all can be.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    configs = first.config, second.config
    if not all(map(has_preferences, configs)):
        return (), ""
    if all(config["trainer"]["type"] == "reward" for config in configs):
        return REWARDS, "only differences of the scores of a reward model have a meaning"
    with_reference = [has_reference(config) for config in configs]
    if with_reference[0] != with_reference[1]:
        return (*REWARDS, MARGINS, *SHARES, *LOG_PROBS), "only one loss compares with the model before training"
    if with_reference[0] and not same_reference(first, second):
        return (*REWARDS, MARGINS, *SHARES), OTHER_REFERENCE
    if not same_tokenizer(first, second):
        return (*REWARDS, MARGINS, *LOG_PROBS), "the tokenizers differ"
    if reward_settings(first.config) != reward_settings(second.config):
        return (*REWARDS, MARGINS), "the losses differ, and their factor is part of a reward"
    return (), ""


def notes_of_rewards(
    rewards: Mapping[int, tuple[Sequence[str], str]], names: Sequence[str], evaluations: Sequence[Evaluation]
) -> list[str]:
    """Return notes of the metrics of preferences that are not compared.

    Args:
        rewards: By the number of a run, the metrics that are not compared with those of the first run, and why.
        names: Names of the runs.
        evaluations: Their results.
    """
    if not evaluations or (pairs_of(evaluations[0]) is None and labelled_of(evaluations[0]) is None):
        return []
    return [
        f"{', '.join(metrics)} of {names[number]} are not compared with those of {names[0]}: {reason}"
        for number, (metrics, reason) in rewards.items()
        if metrics
    ]


def loss_settings(run: RunSummary) -> Any:
    """Return what a loss on preferences depends on apart from the rows; None for other losses.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    if not has_preferences(run.config):
        return None
    trainer = run.config["trainer"]
    weight = trainer.get("undesirable_weight")
    if weight == "auto":
        weight = manifest_of_training(run.folder, run.manifest).get("undesirable_weight", weight)
    return [*reward_settings(run.config), trainer.get("desirable_weight"), weight, trainer.get("center")]


def reward_settings(config: Mapping[str, Any]) -> list[Any]:
    """Return what the rewards of a trainer on preferences depend on apart from the rows."""
    return [config["trainer"].get(name) for name in ("type", "loss", "beta")]


def same_reference(first: RunSummary, second: RunSummary) -> bool:
    """Return whether the training of two runs began with the same model; by the names of its weights if it is unknown.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    origins = [origin_of(run) for run in (first, second)]
    if None not in origins:
        return origins[0] == origins[1]
    return names_of_weights(first.config) == names_of_weights(second.config)


def origin_of(run: RunSummary) -> str | None:
    """Return the hash of the model that the training of a run began with; None if it is not recorded.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    origin: str | None = manifest_of_training(run.folder, run.manifest).get(MODEL_BEFORE_TRAINING)
    return origin


def names_of_weights(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the base model of a configuration, and the adapter that is trained further."""
    return config.get("base_model"), (config.get("adapter") or {}).get("pretrained_adapter_weights")


def predicts_values(config: Mapping[str, Any]) -> bool:
    """Return whether a model predicts values directly, with a head or as a sparse classifier, and not as text."""
    base = config.get("base_model")
    is_bag = isinstance(base, Mapping) and base.get("type") == "embedding_bag"
    outputs = config.get("output_features") or ()
    return is_bag or any(output.get("head") or output.get("type") == "embedding" for output in outputs)


def why_values_differ(first: RunSummary, second: RunSummary) -> str | None:
    """Return why losses of predicted values cannot be compared; None if they can."""
    if first.manifest.get("labels") != second.manifest.get("labels"):
        return "the labels differ"
    outputs = [run.config.get("output_features") for run in (first, second)]
    return "the settings of the outputs differ" if outputs[0] != outputs[1] else None


def same_tokenizer(first: RunSummary, second: RunSummary) -> bool:
    """Return whether two runs tokenize texts in the same way; by their base models if they have no tokenizer files."""
    files = [tokenizer_file(run.folder) for run in (first, second)]
    if files[0] is None or files[1] is None:
        return bool(first.config.get("base_model") == second.config.get("base_model"))
    contents = [file.read_bytes() for file in files if file is not None]
    return contents[0] == contents[1] or identity_of(contents[0]) == identity_of(contents[1])


def tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer of a run; None if it has none."""
    candidates = (folder / "model" / TOKENIZER, folder / "tokenizer" / TOKENIZER)
    return next((path for path in candidates if path.is_file()), None)


def identity_of(content: bytes) -> Any:
    """Return what decides the tokens; the bytes of a file that is no JSON object."""
    try:
        parts = json.loads(content)
        return [parts.get(name) for name in IDENTITY]
    except (ValueError, AttributeError):
        return content
