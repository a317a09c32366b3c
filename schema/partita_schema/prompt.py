"""What the model is asked, and how its answer is generated."""

import string
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from partita_schema.base import (
    Base,
    Count,
    Flag,
    Name,
    NonNegative,
    NonNegativeCount,
    Number,
    Positive,
    Share,
    broken,
    changed,
)

SPECIAL_FIELDS = ("__sample__", "__task__", "__context__")


def template_fields(template: str) -> list[str]:
    """Names in braces of a template, in order; `{{` and `}}` stand for braces.

    Raises ValueError where a brace is alone or a name holds more than a name (no attributes, indices or formats).
    """
    names = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        raise ValueError("a brace stands alone; write {{ and }} for braces that are no column names") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} is no plain column name; write {{column}}, and {{{{ and }}}} for braces")
        names.append(name)
    return names


class RandomRetrieval(Base):
    """Examples drawn at random for each row, seeded by the row."""

    type: Literal["random"]
    """Random examples."""
    k: Count = 3
    """Examples a prompt."""
    dataset: Name | None = None
    """Where examples come from: a file or glob. Default: the training split."""


class SemanticRetrieval(Base):
    """Examples whose inputs are nearest in meaning."""

    type: Literal["semantic"]
    """Nearest examples by cosine of sentence embeddings."""
    k: Count = 3
    """Examples a prompt."""
    dataset: Name | None = None
    """Where examples come from: a file or glob. Default: the training split."""
    model_name: Name = "sentence-transformers/all-MiniLM-L6-v2"
    """Embedding model: a sentence-transformers id or folder."""


Retrieval = Annotated[RandomRetrieval | SemanticRetrieval, Field(discriminator="type")]


class Prompt(Base):
    """How a row becomes a prompt."""

    template: Name | None = None
    """The prompt with column names in braces; also {__sample__} (all inputs), {__task__} and {__context__} (examples).
    Default: task, context and sample, those that there are."""
    task: Name | None = None
    """What is to be done, in words."""
    system: Name | None = None
    """System message, for models with a chat template; before the prompt otherwise."""
    chat: Literal["auto"] | Flag = "auto"
    """Use the model's chat template. auto: when it has one."""
    examples: tuple[dict[str, str | int | float | bool | None], ...] = ()
    """Worked examples for every prompt: rows with the input and output columns."""
    retrieval: Retrieval | None = None
    """Worked examples chosen for each row."""

    @field_validator("template")
    @classmethod
    def braces_are_names(cls, template: str | None) -> str | None:
        try:
            template_fields(template or "")
        except ValueError as error:
            raise broken(str(error)) from None
        return template

    @model_validator(mode="after")
    def template_shows_what_is_given(self) -> "Prompt":
        if self.template is None:
            return self
        fields = template_fields(self.template)
        if self.task is not None and "__task__" not in fields:
            raise broken("the template never shows the task; add {__task__} to the template or remove task", at="task")
        return self


SWITCHED_OFF = {"do_sample": False, "num_beams": 1, "renormalize_logits": False, "stop": ()}
"""Values of `generation` that only keep a checkpoint's own from being applied."""


class Generation(Base):
    """How answers are generated: options of transformers' GenerationConfig. A key that is not written keeps the value
    in the checkpoint's generation_config.json; without one, answers are greedy."""

    defaults: Literal["checkpoint", "none"] = "checkpoint"
    """Where keys that are not written come from. checkpoint: the generation_config.json of base_model; none: nowhere,
    as if the checkpoint had no such file. Its end tokens count in both cases."""
    max_new_tokens: Count | None = None
    """Tokens generated at most. Default: the output's max_sequence_length, else the checkpoint's max_new_tokens, else
    256."""
    min_new_tokens: NonNegativeCount | None = None
    """Tokens generated at least."""
    do_sample: Flag | None = None
    """Sample instead of taking the most likely token. Default: the checkpoint's, else false."""
    temperature: NonNegative | None = None
    """Flattens (above 1) or sharpens the distribution; needs do_sample. 0 is greedy."""
    top_k: NonNegativeCount | None = None
    """Sample among the k most likely tokens; 0 for all."""
    top_p: Share | None = None
    """Sample among the fewest tokens whose probability reaches this (Holtzman et al. 2019)."""
    min_p: Share | None = None
    """Sample among tokens at least this likely relative to the likeliest."""
    typical_p: Share | None = None
    """Locally typical sampling (Meister et al. 2022)."""
    epsilon_cutoff: Share | None = None
    """Sample among tokens at least this likely."""
    eta_cutoff: Share | None = None
    """Eta sampling (Hewitt et al. 2022)."""
    top_h: Share | None = None
    """Entropy-bounded sampling."""
    num_beams: Count | None = None
    """Beams of beam search; 1 for none. Default: the checkpoint's, else 1."""
    length_penalty: Number | None = None
    """Exponent on length in beam search."""
    early_stopping: Flag | None = None
    """Stop beam search when enough beams are finished."""
    repetition_penalty: Positive | None = None
    """Above 1 makes tokens that already stand there less likely (Keskar et al. 2019)."""
    no_repeat_ngram_size: NonNegativeCount | None = None
    """N-grams of this size occur once at most."""
    exponential_decay_length_penalty: tuple[NonNegativeCount, Positive] | None = None
    """[start, factor]: from that many new tokens on the end becomes likelier by the factor each token."""
    suppress_tokens: tuple[NonNegativeCount, ...] | None = None
    """Token ids that are never generated."""
    begin_suppress_tokens: tuple[NonNegativeCount, ...] | None = None
    """Token ids that are never generated first."""
    bad_words: tuple[Name, ...] | None = None
    """Texts that are never generated."""
    renormalize_logits: Flag | None = None
    """Normalise after all filters. Default: the checkpoint's, else false."""
    guidance_scale: Positive | None = None
    """Classifier-free guidance; above 1 follows the prompt more closely."""
    stop: tuple[Name, ...] | None = None
    """Texts that end an answer; they are not part of it. Default: the checkpoint's stop_strings, else none."""
    stop_token_ids: tuple[NonNegativeCount, ...] = ()
    """Token ids that end an answer, next to the model's own."""
    logprobs: Flag = False
    """Add the column logprob to predictions: the natural logarithm of the probability of the whole answer."""
    slots: Flag = True
    """Let the next row begin as soon as one has ended; false for batches that all end together."""
    seed: NonNegativeCount | None = None
    """Seed of sampling. Default: the file's seed."""

    @model_validator(mode="after")
    def sampling_is_said(self) -> "Generation":
        keys = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
        given = [key for key in keys if getattr(self, key) is not None]
        given += ["temperature"] if self.temperature else []
        if given and not self.do_sample:
            raise broken(
                f"{given[0]} has no effect on greedy generation; add do_sample: true or remove it", at=given[0]
            )
        if self.do_sample and self.temperature == 0:
            raise broken("temperature 0 is greedy; remove do_sample or write a temperature above 0", at="temperature")
        return self

    @model_validator(mode="after")
    def beams_are_said(self) -> "Generation":
        beams = self.num_beams or 1
        if self.logprobs and beams > 1:
            raise broken("beams come without log probabilities; remove logprobs or write num_beams: 1", at="logprobs")
        given = [key for key in ("length_penalty", "early_stopping") if getattr(self, key) is not None]
        if given and beams == 1:
            raise broken(f"{given[0]} needs beam search; add num_beams of at least 2 or remove it", at=given[0])
        return self

    @model_validator(mode="after")
    def least_is_not_above_most(self) -> "Generation":
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise broken(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}; "
                f"write {self.max_new_tokens} or less",
                at="min_new_tokens",
            )
        return self

    def asks_for(self, key: str) -> bool:
        """Return whether a key has a value that changes answers; `num_beams: 1` and the like only switch off."""
        return changed(self, key) and getattr(self, key) != SWITCHED_OFF.get(key)
