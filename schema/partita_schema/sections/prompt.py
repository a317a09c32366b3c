"""How a row becomes a prompt, and how answers are generated."""

import string
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from partita_schema.base import (
    BelowOne,
    ConfigModel,
    Fraction,
    Name,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    PositiveFraction,
    PositiveInt,
    Seed,
    StrictBool,
    is_set,
    rule_error,
)

TEMPLATE_PARAMETERS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Parameters of `apply_chat_template`, which partita sets."""
SPECIAL_FIELDS = ("__sample__", "__task__", "__context__")


def template_fields(template: str) -> list[str]:
    """Return the names in braces of a template, in order. `{{` and `}}` are literal braces.

    Raises:
        ValueError: A brace is unbalanced, or a name contains attributes, indices or format specifiers.
    """
    names = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        raise ValueError("there is a single brace; write {{ and }} for braces that are not column names") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or any(mark in name for mark in ".[]"):
            raise ValueError(f"{{{name}}} is not a plain column name; write {{column}}, and {{{{ and }}}} for braces")
        names.append(name)
    return names


class RandomRetrieval(ConfigModel):
    """Few-shot examples drawn at random for each row."""

    type: Literal["random"]
    """Random examples, seeded by the row."""
    k: PositiveInt = 3
    """Number of examples per prompt."""
    dataset: Name | None = None
    """File or glob with the examples. Default: the training split."""


class SemanticRetrieval(ConfigModel):
    """Few-shot examples whose inputs are most similar to the row's."""

    type: Literal["semantic"]
    """Most similar examples, by cosine similarity of sentence embeddings."""
    k: PositiveInt = 3
    """Number of examples per prompt."""
    dataset: Name | None = None
    """File or glob with the examples. Default: the training split."""
    model_name: Name = "sentence-transformers/all-MiniLM-L6-v2"
    """Embedding model: a sentence-transformers model id or folder."""


Retrieval = Annotated[RandomRetrieval | SemanticRetrieval, Field(discriminator="type")]


class Prompt(ConfigModel):
    """How a row becomes a prompt."""

    template: Name | None = None
    """Prompt text with column names in braces. {__sample__} inserts all inputs, {__task__} the task, and {__context__}
    the examples. Default: the task, the examples and the inputs, as far as they are given."""
    task: Name | None = None
    """Description of the task, for the model. Default: none."""
    system: Name | None = None
    """System message. Placed before the prompt if the model has no chat template. Default: none."""
    chat: Literal["auto"] | StrictBool = "auto"
    """Apply the chat template of the model. auto: if it has one."""
    chat_template_kwargs: dict[str, object] = {}
    """Further variables for the chat template, such as `{enable_thinking: true}` or `{date_string: 26 Jul 2024}`.
    enable_thinking is false unless it is set here."""
    examples: tuple[dict[str, str | int | float | bool | tuple[str, ...] | None], ...] = ()
    """Few-shot examples shown in every prompt: rows with the input and output columns."""
    retrieval: Retrieval | None = None
    """Few-shot examples retrieved for each row. Default: none."""

    @field_validator("template")
    @classmethod
    def braces_are_names(cls, template: str | None) -> str | None:
        try:
            template_fields(template or "")
        except ValueError as error:
            raise rule_error(str(error)) from None
        return template

    @field_validator("chat_template_kwargs")
    @classmethod
    def kwargs_are_variables_of_the_template(cls, kwargs: dict[str, object]) -> dict[str, object]:
        taken = next((name for name in kwargs if name in TEMPLATE_PARAMETERS), None)
        if taken is not None:
            raise rule_error(f"{taken} is set by partita; write variables that the template itself reads", at=taken)
        return kwargs

    @model_validator(mode="after")
    def kwargs_need_a_chat_template(self) -> "Prompt":
        if self.chat_template_kwargs and self.chat is False:
            raise rule_error("chat_template_kwargs has no effect with chat: false", at="chat_template_kwargs")
        return self

    @model_validator(mode="after")
    def template_shows_what_is_given(self) -> "Prompt":
        if self.template is None:
            return self
        fields = template_fields(self.template)
        if self.task is not None and "__task__" not in fields:
            raise rule_error(
                "the template never shows the task; add {__task__} to the template or remove task", at="task"
            )
        return self


SWITCHED_OFF = {"do_sample": False, "num_beams": 1, "renormalize_logits": False, "stop": ()}
"""Values of `generation` that only override a value of the checkpoint and turn the option off."""


class Generation(ConfigModel):
    """How answers are generated: options of transformers' GenerationConfig. A key that is not set takes its value from
    the checkpoint's generation_config.json; without that file, decoding is greedy."""

    defaults: Literal["checkpoint", "none"] = "checkpoint"
    """Source of values for keys that are not set. checkpoint: the generation_config.json of base_model. none: ignore
    that file. Its end-of-sequence tokens are used in both cases."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of generated tokens. Default: the max_sequence_length of the output; otherwise the max_new_tokens
    of the checkpoint; otherwise 256."""
    min_new_tokens: NonNegativeInt | None = None
    """Minimum number of generated tokens. Default: the checkpoint's value, otherwise no minimum."""
    do_sample: StrictBool | None = None
    """Sample instead of greedy decoding. Default: the checkpoint's value, otherwise false."""
    temperature: NonNegative | None = None
    """Sampling temperature; above 1 flattens the distribution, below 1 sharpens it. Needs do_sample. 0 is greedy
    decoding."""
    top_k: NonNegativeInt | None = None
    """Sample from the k most likely tokens; 0 uses all tokens."""
    top_p: Fraction | None = None
    """Nucleus sampling: sample from the smallest set of tokens whose total probability reaches top_p (Holtzman et al.
    2019)."""
    min_p: Fraction | None = None
    """Sample from tokens whose probability is at least min_p times that of the most likely token."""
    typical_p: PositiveFraction | None = None
    """Locally typical sampling: probability mass to keep (Meister et al. 2022)."""
    epsilon_cutoff: BelowOne | None = None
    """Epsilon sampling: sample from tokens whose probability is at least this (Hewitt et al. 2022)."""
    eta_cutoff: BelowOne | None = None
    """Eta sampling: entropy-dependent probability cutoff (Hewitt et al. 2022)."""
    top_h: PositiveFraction | None = None
    """Top-H sampling: limit the entropy of the sampling distribution."""
    num_beams: PositiveInt | None = None
    """Number of beams of beam search; 1 disables it. Default: the checkpoint's value, otherwise 1."""
    length_penalty: Number | None = None
    """Exponent of the length in beam search scores; above 0 favors longer answers."""
    early_stopping: StrictBool | None = None
    """Stop beam search as soon as num_beams answers are complete."""
    repetition_penalty: Positive | None = None
    """Penalty for tokens that already occurred; above 1 makes them less likely, 1 has no effect (Keskar et al.
    2019)."""
    no_repeat_ngram_size: NonNegativeInt | None = None
    """Size of n-grams that may occur only once."""
    exponential_decay_length_penalty: tuple[NonNegativeInt, Positive] | None = None
    """[start, factor]: after `start` generated tokens, the end of the answer becomes more likely by `factor` with each
    token."""
    suppress_tokens: tuple[NonNegativeInt, ...] | None = None
    """Token ids that are never generated."""
    begin_suppress_tokens: tuple[NonNegativeInt, ...] | None = None
    """Token ids that are never generated as the first token."""
    bad_words: tuple[Name, ...] | None = None
    """Texts that are never generated."""
    renormalize_logits: StrictBool | None = None
    """Renormalize the logits after all filters. Default: the checkpoint's value, otherwise false."""
    guidance_scale: Positive | None = None
    """Scale of classifier-free guidance; above 1 follows the prompt more closely."""
    stop: tuple[Name, ...] | None = None
    """Texts that end an answer; they are removed from it. A special token, such as <|im_end|>, also ends one. Default:
    the checkpoint's stop_strings, otherwise none."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end an answer, in addition to the model's end-of-sequence tokens."""
    logprobs: StrictBool = False
    """Add the column `logprob` to predictions: the natural log of the probability of the whole answer."""
    slots: StrictBool = True
    """Continuous batching: start the next row as soon as an answer is finished. false: static batches, which wait for
    their longest answer."""
    kv_cache: Literal["auto", "slots", "paged"] = "auto"
    """Layout of the KV cache in continuous batching. slots: one contiguous slot per row, as long as the longest row.
    paged: blocks, which rows with a common prefix share; decode steps have constant shapes and are captured as CUDA
    graphs on a GPU (not yet tested on a GPU). auto: paged on a GPU for which torch has a paged attention kernel, slots
    elsewhere."""
    seed: Seed | None = None
    """Random seed of sampling. Default: the seed of the run."""
    best_of: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Number of answers that predict and evaluate sample for each row; the one with the highest reward is kept. Needs
    reward and sampling."""
    reward: Name | None = None
    """Reward model that chooses among the answers of best_of: the directory of a run with trainer: {type: reward}, or a
    model saved from one. It reads the columns of the row that its own file names."""
    keep_samples: StrictBool = False
    """Add the column `samples` to predictions: all answers of best_of, each with its reward."""

    @model_validator(mode="after")
    def sampling_keys_need_do_sample(self) -> "Generation":
        keys = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
        sampling = [key for key in keys if getattr(self, key) is not None]
        sampling += ["temperature"] if self.temperature else []
        if sampling and not self.do_sample:
            raise rule_error(
                f"{sampling[0]} has no effect on greedy generation; add do_sample: true or remove it", at=sampling[0]
            )
        if self.do_sample and self.temperature == 0:
            raise rule_error(
                "temperature 0 is greedy; remove do_sample or write a temperature above 0", at="temperature"
            )
        return self

    @model_validator(mode="after")
    def best_of_has_a_reward_model(self) -> "Generation":
        if self.best_of is not None and self.reward is None:
            raise rule_error(
                "a reward model chooses among the answers; add reward, the directory of a run with trainer: "
                "{type: reward}, or remove best_of",
                at="best_of",
            )
        for key in ("reward", "keep_samples"):
            if self.best_of is None and is_set(self, key):
                raise rule_error(f"{key} has no effect on a single answer; add best_of: 8 or remove it", at=key)
        return self

    @model_validator(mode="after")
    def best_of_samples(self) -> "Generation":
        if self.best_of is None:
            return self
        if self.do_sample is False or self.temperature == 0:
            key = "temperature" if self.do_sample is not False else "do_sample"
            raise rule_error(
                "all answers of best_of are the same without sampling; write do_sample: true and a temperature above "
                "0, or remove best_of",
                at=key,
            )
        if (self.num_beams or 1) > 1:
            raise rule_error("best_of samples answers, and beams search for one; remove num_beams", at="num_beams")
        return self

    @model_validator(mode="after")
    def kv_cache_needs_slots(self) -> "Generation":
        if self.kv_cache == "paged" and not self.slots:
            raise rule_error(
                "kv_cache: paged is a kind of continuous batching, and slots: false turns it off; remove one of them",
                at="kv_cache",
            )
        return self

    @model_validator(mode="after")
    def beams_are_said(self) -> "Generation":
        beams = self.num_beams or 1
        if self.logprobs and beams > 1:
            raise rule_error(
                "beams come without log probabilities; remove logprobs or write num_beams: 1", at="logprobs"
            )
        beam_keys = [key for key in ("length_penalty", "early_stopping") if getattr(self, key) is not None]
        if beam_keys and beams == 1:
            raise rule_error(
                f"{beam_keys[0]} needs beam search; add num_beams of at least 2 or remove it", at=beam_keys[0]
            )
        return self

    @model_validator(mode="after")
    def least_is_not_above_most(self) -> "Generation":
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise rule_error(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}; "
                f"write {self.max_new_tokens} or less",
                at="min_new_tokens",
            )
        return self

    def asks_for(self, key: str) -> bool:
        """Return whether a key is set to a value that changes answers, unlike `num_beams: 1`, which only turns an
        option off."""
        return is_set(self, key) and getattr(self, key) != SWITCHED_OFF.get(key)
