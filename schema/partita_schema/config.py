"""The model of the whole file, and the rules that involve more than one section."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from partita_schema.adapter import Adapter
from partita_schema.backend import Backend, EndpointBackendConfig, LocalBackendConfig
from partita_schema.base import ConfigModel, Name, NonNegativeInt, StrictBool, is_set, rule_error
from partita_schema.constraint_rules import refused_by_constraints
from partita_schema.data import Data, Preprocessing, RandomSplit, Split
from partita_schema.endpoint_rules import refused_by_endpoint
from partita_schema.features import Defaults, DialogueInput, InputFeature
from partita_schema.hogwild_rules import refused_by_hogwild
from partita_schema.model import EmbeddingBagModel, ModelParameters, Quantization, ScratchModel
from partita_schema.outputs import OutputFeature
from partita_schema.prompt import SPECIAL_FIELDS, Generation, Prompt, template_fields
from partita_schema.sharding_rules import refused_by_sharding
from partita_schema.simulation import Simulation
from partita_schema.trainer import FinetuneTrainer, NoTrainer, Trainer

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


class Config(ConfigModel):
    """The configuration of one run: the content of one YAML file."""

    version: Literal[1] = 1
    """Version of the configuration format. 1 is the only version."""
    model_type: Literal["llm"] = "llm"
    """Kind of model. Only llm (language models) is supported."""
    base_model: Annotated[ScratchModel | EmbeddingBagModel, Field(discriminator="type")] | Name
    """Model to start from: a Hugging Face Hub id or a local folder. `{type: scratch, ...}` trains a new language model
    from random weights; `{type: embedding_bag}` trains a new bag-of-words classifier."""
    model_parameters: ModelParameters = ModelParameters.model_construct()
    """How the base model is loaded and run: dtype, device, attention kernel."""
    trust_remote_code: StrictBool = False
    """Run Python code that comes with the model repository, as in transformers. false: that code is never run."""
    seed: NonNegativeInt = 42
    """Random seed of the run: weight initialization, row order, splits and sampling."""
    input_features: Annotated[tuple[InputFeature, ...], Field(min_length=1)]
    """Columns that go into the prompt. `type` defaults to text."""
    output_features: Annotated[tuple[OutputFeature, ...], Field(min_length=1)]
    """What the model answers. With several outputs, the answer is one JSON object with the output names as keys."""
    prompt: Prompt = Prompt.model_construct()
    """How a row becomes a prompt."""
    generation: Generation = Generation.model_construct()
    """How the model generates answers (decoding options)."""
    adapter: Adapter | None = None
    """PEFT adapter (such as LoRA) to train on the frozen base model. Default: no adapter; all weights are trained."""
    quantization: Quantization | None = None
    """Load the base model in 4 or 8 bits with bitsandbytes. Default: no quantization."""
    preprocessing: Preprocessing = Preprocessing.model_construct()
    """Row sampling and length limits."""
    data: Data = Data.model_construct()
    """Datasets, splits, and how rows are grouped into batches."""
    trainer: Trainer = NoTrainer.model_construct(type="none")
    """How the model is trained. none: not at all (zero-shot); finetune: supervised fine-tuning; hogwild: lock-free
    training of a bag of words; custom: your own class."""
    backend: Backend = LocalBackendConfig.model_construct()
    """Where the run executes: this process, torchrun, Ray, or an OpenAI-compatible server."""
    simulation: Simulation | None = None
    """Multi-turn simulation (`partita simulate`): the model talks to an environment, to the user turns of a dataset, or
    to another model. Default: none."""
    tracking: tuple[Tracker, ...] = ()
    """Experiment trackers that receive the metrics, through accelerate. Default: none."""
    defaults: Defaults = Defaults.model_construct()
    """Default options by feature type."""

    @model_validator(mode="after")
    def names_are_unique(self) -> "Config":
        seen: set[str] = set()
        sections = (("input_features", self.input_features), ("output_features", self.output_features))
        for section, features in sections:
            for place, feature in enumerate(features):
                at = f"{section}.{place}.name"
                if feature.name in seen:
                    raise rule_error(f"another feature is named {feature.name!r}; write a different name", at=at)
                if feature.name in SPECIAL_FIELDS:
                    raise rule_error(f"the name {feature.name} has a meaning in templates; choose another", at=at)
                seen.add(feature.name)
        return self

    @model_validator(mode="after")
    def template_does_not_show_the_answer(self) -> "Config":
        inputs = {name for feature in self.input_features for name in (feature.name, feature.source_column)}
        for feature in self.output_features:
            leaks = {feature.name, feature.source_column} - inputs
            shown = next((name for name in template_fields(self.prompt.template or "") if name in leaks), None)
            if shown is not None:
                raise rule_error(
                    f"the template shows the output {{{shown}}} and gives the answer away; remove it",
                    at="prompt.template",
                )
        return self

    @model_validator(mode="after")
    def examples_are_shown(self) -> "Config":
        prompt = self.prompt
        used = [key for key, value in (("examples", prompt.examples), ("retrieval", prompt.retrieval)) if value]
        if used and prompt.template and prompt.chat is False and "__context__" not in template_fields(prompt.template):
            raise rule_error(
                f"the template never shows the {used[0]}; add {{__context__}} to it or remove {used[0]}",
                at=f"prompt.{used[0]}",
            )
        needed = {*self.shown_columns, *(feature.name for feature in self.output_features)}
        for place, example in enumerate(prompt.examples):
            missing = sorted(needed - set(example))
            if missing:
                raise rule_error(
                    f"the example has no {', '.join(missing)}; an example needs {', '.join(sorted(needed))}",
                    at=f"prompt.examples.{place}",
                )
        return self

    @model_validator(mode="after")
    def dialogue_is_the_whole_prompt(self) -> "Config":
        if self.dialogue_input is None:
            if is_set(self.data, "dialogue"):
                raise rule_error(
                    "no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it",
                    at="data.dialogue",
                )
            return self
        for place, feature in enumerate(self.input_features):
            if feature is not self.dialogue_input:
                what = "a second dialogue" if feature.type == "dialogue" else "another input"
                raise rule_error(
                    f"{what} beside {self.dialogue_input.name!r}, which is the whole prompt; remove it, "
                    "or make it a message of the dialogue",
                    at=f"input_features.{place}",
                )
        if len(self.output_features) > 1:
            raise rule_error("a dialogue has one output, its reply; remove the others", at="output_features.1")
        if not self.output_features[0].free_text:
            raise rule_error(
                f"the reply of a dialogue is a text, not a {self.output_features[0].type}; write type: text",
                at="output_features.0.type",
            )
        return self

    @model_validator(mode="after")
    def dialogue_has_no_template(self) -> "Config":
        for key in ("template", "task", "examples", "retrieval") if self.dialogue_input else ():
            if is_set(self.prompt, key):
                instead = "write system" if key in ("template", "task") else "put the examples into the dialogues"
                raise rule_error(
                    f"{key} has no place in a dialogue, whose messages are the prompt; remove it, or {instead}",
                    at=f"prompt.{key}",
                )
        if self.dialogue_input and self.data.formatter is not None:
            raise rule_error(
                "a custom formatter takes rows of text; remove it, or write type: text", at="data.formatter"
            )
        return self

    @model_validator(mode="after")
    def quantized_weights_are_not_trained(self) -> "Config":
        if self.quantization is not None and isinstance(self.base_model, ScratchModel):
            raise rule_error("a new model has no weights worth quantizing; remove quantization", at="quantization")
        if self.quantization is not None and self.adapter is None and self.trains:
            raise rule_error(
                "quantized weights cannot be trained; add adapter: {type: lora} or remove quantization",
                at="quantization",
            )
        return self

    @model_validator(mode="after")
    def servers_are_only_asked(self) -> "Config":
        if isinstance(self.backend, EndpointBackendConfig):
            for key, message in refused_by_endpoint(self):
                raise rule_error(message, at=key)
        return self

    @model_validator(mode="after")
    def sharded_models_can_be_trained(self) -> "Config":
        for key, message in refused_by_sharding(self):
            raise rule_error(message, at=key)
        return self

    @model_validator(mode="after")
    def bags_are_trained_without_locks(self) -> "Config":
        for key, message in refused_by_hogwild(self):
            raise rule_error(message, at=key)
        return self

    @model_validator(mode="after")
    def simulated_dialogues_are_dialogues(self) -> "Config":
        if self.simulation is not None and self.dialogue_input is None:
            raise rule_error(
                "no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it",
                at="simulation",
            )
        return self

    @model_validator(mode="after")
    def rounds_can_be_trained(self) -> "Config":
        if self.simulation is None or self.simulation.self_training is None:
            return self
        if not isinstance(self.trainer, FinetuneTrainer):
            raise rule_error(
                f"trainer: {{type: {self.trainer.type}}} trains no rounds; write type: finetune, or remove "
                "self_training",
                at="simulation.self_training",
            )
        if self.data.streaming:
            raise rule_error(
                "rounds are mixed with rows by index; remove streaming, or train on data first and write rounds in a "
                "separate file, with base_model: runs/NAME/model",
                at="simulation.self_training",
            )
        if isinstance(self.base_model, ScratchModel) and self.data.source is None and self.data.mix is None:
            raise rule_error("a new model cannot speak yet; write data.source, rows to learn from", at="data")
        return self

    @model_validator(mode="after")
    def constraints_can_be_kept(self) -> "Config":
        for key, message in refused_by_constraints(self):
            raise rule_error(message, at=key)
        return self

    @model_validator(mode="after")
    def split_is_said_once(self) -> "Config":
        if self.data.split is not None and self.preprocessing.split is not None:
            raise rule_error(
                "preprocessing.split and data.split say the same; keep data.split", at="preprocessing.split"
            )
        return self

    @model_validator(mode="after")
    def only_answers_take_the_fastest_type(self) -> "Config":
        if self.model_parameters.dtype == "fastest" and self.trains:
            raise rule_error(
                "fastest is for answers alone; write auto, or with an adapter bfloat16", at="model_parameters.dtype"
            )
        return self

    @model_validator(mode="after")
    def streams_have_an_end(self) -> "Config":
        if not self.data.streaming:
            return self
        at = "data.source.streaming" if self.data.mix is None else "data.mix.0.source.streaming"
        if not self.trains:
            raise rule_error("with trainer: {type: none} all rows are needed each time; remove streaming", at=at)
        if isinstance(self.trainer, FinetuneTrainer) and self.trainer.max_steps is None:
            raise rule_error(
                "a stream has no known length; write max_steps, the number of optimizer steps", at="trainer"
            )
        if isinstance(self.trainer, FinetuneTrainer) and self.trainer.epochs is not None:
            raise rule_error(
                "a stream has no known length; remove epochs, max_steps says when the run ends", at="trainer.epochs"
            )
        for key, instead in (
            ("evaluations_per_epoch", "steps_per_evaluation"),
            ("checkpoints_per_epoch", "steps_per_checkpoint"),
        ):
            if getattr(self.trainer, key, 1.0) not in (0, 1.0):
                raise rule_error(
                    f"an epoch of a stream has no known length; remove {key}, and write {instead}", at=f"trainer.{key}"
                )
        batching = self.data.batching
        longest = getattr(batching, "max_tokens", 0) in (None, "auto")
        if longest and self.preprocessing.global_max_sequence_length is None:
            raise rule_error(
                "the longest row of a stream is not known; write max_tokens here, or "
                "preprocessing.global_max_sequence_length",
                at="data.batching",
            )
        preprocessing = self.preprocessing
        for key in ("split", "sample_ratio", "sample_size"):
            if is_set(preprocessing, key):
                raise rule_error(
                    f"{key} needs the number of rows, and a stream has none; remove it", at=f"preprocessing.{key}"
                )
        if self.prompt.retrieval is not None and self.prompt.retrieval.dataset is None:
            raise rule_error(
                "examples are not retrieved from a stream; write dataset, the rows to retrieve from",
                at="prompt.retrieval",
            )
        for place, output in enumerate(self.output_features):
            if output.has_labels and output.labels is None:
                raise rule_error(
                    f"the beginning of a stream need not show every label of {output.name}; write them here",
                    at=f"output_features.{place}.decoder.labels",
                )
        return self

    @model_validator(mode="after")
    def size_of_a_batch_is_said_once(self) -> "Config":
        if self.data.batching.type == "token_budget" and isinstance(self.trainer.batch_size, int):
            raise rule_error(
                "batch_size has no effect with data.batching: {type: token_budget}; write max_tokens or max_rows there",
                at="trainer.batch_size",
            )
        return self

    @model_validator(mode="after")
    def validation_metric_names_an_output(self) -> "Config":
        if not isinstance(self.trainer, FinetuneTrainer) or "." not in self.trainer.validation_metric:
            return self
        metric = self.trainer.validation_metric
        names = [feature.name for feature in self.output_features]
        if not any(metric.startswith(f"{name}.") for name in names):
            raise rule_error(
                f"{metric!r} names no output; write loss, or a metric after one of {', '.join(f'{n}.' for n in names)}",
                at="trainer.validation_metric",
            )
        return self

    @property
    def trains(self) -> bool:
        """Whether the trainer changes weights; `trainer: {type: none}` only evaluates."""
        return self.trainer.type != "none"

    @property
    def dialogue_input(self) -> DialogueInput | None:
        """The input feature of type dialogue, or None."""
        return next((feature for feature in self.input_features if isinstance(feature, DialogueInput)), None)

    @property
    def split(self) -> Split:
        """The split of the source; random 90/5/5 by default."""
        return self.data.split or self.preprocessing.split or RandomSplit()

    @property
    def shown_columns(self) -> tuple[str, ...]:
        """Names that the prompt shows: input features, and data columns that only the template names.

        Without a template, or with {__sample__} in it, every input is shown. As in Ludwig, a template may also name
        data columns that are not features. Inputs that the template does not show are not read.
        """
        inputs = tuple(feature.name for feature in self.input_features)
        if self.prompt.template is None:
            return inputs
        fields = template_fields(self.prompt.template)
        named = [name for name in fields if name not in SPECIAL_FIELDS]
        return tuple(dict.fromkeys([*inputs, *named] if "__sample__" in fields else named))
