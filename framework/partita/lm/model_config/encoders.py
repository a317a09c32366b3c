"""What a configuration means for the kind of its model: outputs of an encoder have a head, also if it does not say so.

The kind is known from the model's config.json, which the schema does not read.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from partita.lm.model_config.context_length import read_config
from partita.lm.model_config.kinds import describes_encoder
from partita.tokenizers.hub import find_base
from partita.tokenizers.saved_adapters import base_of_adapter
from partita_schema.base import Refusal
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.load import LoadedConfig, load_config
from partita_schema.rules.encoder_decoders import refused_by_encoder_decoder
from partita_schema.rules.heads import refused_without_heads, why_no_text
from partita_schema.sections.model import ENCODER_DECODERS, EmbeddingBagModel, ScratchModel
from partita_schema.yaml.overrides import path_of
from partita_schema.yaml.tree import dotted


def with_heads(loaded: LoadedConfig, *, saved: Path | None = None) -> LoadedConfig:
    """Return a loaded configuration with `head: linear` in each output of an encoder.

    `saved` is the folder of trained weights, which need no base model any more if they are a whole model.
    """
    config = heads_of_encoder(loaded.config, folder=loaded.folder, saved=saved)
    return loaded if config is loaded.config else replace(loaded, config=config)


def heads_of_encoder(config: Config, *, folder: Path, saved: Path | None = None) -> Config:
    """Return a configuration with `head: linear` in each output of an encoder; others unchanged.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        saved: Folder of trained weights.

    Raises:
        ConfigError: Keys conflict with the kind of the model. It has every problem.
        ModelError: The model's config.json cannot be read.
    """
    if all(output.has_head for output in config.output_features) or not config.backend.loads_model:
        return config
    kind = kind_of(config, folder=folder, saved=saved)
    if kind != "encoder":
        refuse(refused_without_heads(config))
        if kind == "encoder-decoder":
            refuse(refused_by_encoder_decoder(config))
        return config
    name = str(config.base_model)
    outputs = enumerate(config.output_features)
    refuse((f"output_features.{i}.type", why_no_text(name, out.type)) for i, out in outputs if not out.can_have_head)
    sections: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    for output in sections["output_features"]:
        output["head"] = "linear"
    return load_config(sections, finished=saved is not None).config


def kind_of(
    config: Config, *, folder: Path, saved: Path | None = None
) -> Literal["encoder", "encoder-decoder", "decoder", "bag"]:
    """Return the kind of the configured model. Raise ModelError.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        saved: Folder of trained weights.
    """
    base = config.base_model
    if isinstance(base, EmbeddingBagModel):
        return "bag"
    if isinstance(base, ScratchModel):
        if base.architecture in ENCODER_DECODERS:
            return "encoder-decoder"
        return "encoder" if config.is_new_encoder else "decoder"
    if saved is None:
        source = find_base(base, folder=folder)
    else:
        is_whole = (saved / "config.json").exists()
        source = str(saved) if is_whole else base_of_adapter(saved, config, folder=folder)
    described = read_config(config, source)
    if describes_encoder(described):
        return "encoder"
    return "encoder-decoder" if getattr(described, "is_encoder_decoder", False) else "decoder"


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raise ConfigError with all refusals, if there are any."""
    problems = [Problem(dotted(path_of(key)), message) for key, message in refusals]
    if problems:
        raise ConfigError(problems)
