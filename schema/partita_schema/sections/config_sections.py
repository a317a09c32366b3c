"""All sections of the configuration, without the rules between them."""

from typing import Annotated, Literal

from pydantic import Field

from partita_schema.base import ConfigModel, Name, Seed, StrictBool
from partita_schema.dialogues.common_form import CONTENT
from partita_schema.sections.adapter import Adapter
from partita_schema.sections.backend import Backend, LocalBackendConfig
from partita_schema.sections.callbacks import CallbackConfig
from partita_schema.sections.data import Data, Preprocessing, RandomSplit, Split
from partita_schema.sections.features import Defaults, DialogueInput, InputFeature
from partita_schema.sections.model import ENCODERS, EmbeddingBagModel, ModelParameters, ScratchModel
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.prompt import SPECIAL_FIELDS, Generation, Prompt, template_fields
from partita_schema.sections.quantization import Quantization
from partita_schema.sections.simulation import Simulation
from partita_schema.sections.sweep import SweepConfig
from partita_schema.sections.trainer import NoTrainer, Trainer

Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]


class ConfigSections(ConfigModel):
    """The sections of a configuration. `Config` adds the rules between them."""

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
    seed: Seed = 42
    """Random seed of the run: weight initialization, row order, splits and sampling."""
    input_features: tuple[InputFeature, ...] = ()
    """Columns that go into the prompt. `type` defaults to text. Default: none; the output is a text without a prompt
    (language modelling)."""
    output_features: Annotated[tuple[OutputFeature, ...], Field(min_length=1)]
    """What the model answers. With several outputs, the answer is one JSON object with the output names as keys; in a
    dialogue, they can also follow one another (data.dialogue.answers)."""
    prompt: Prompt = Prompt.model_construct()
    """How a row becomes a prompt."""
    generation: Generation = Generation.model_construct()
    """How the model generates answers (decoding options)."""
    adapter: Adapter | None = None
    """PEFT adapter (such as LoRA) to train on the frozen base model. Default: no adapter; all weights are trained."""
    quantization: Quantization | None = None
    """Quantize the weights of the base model, with bitsandbytes if `type` is not written. Default: no quantization."""
    preprocessing: Preprocessing = Preprocessing.model_construct()
    """Row sampling and length limits."""
    data: Data = Data.model_construct()
    """Datasets, splits, and how rows are grouped into batches."""
    trainer: Trainer = NoTrainer.model_construct(type="none")
    """How the model is trained. none: not at all (zero-shot); finetune: supervised fine-tuning; preference: on pairs of
    a better and a worse answer; kto: on answers that are good or bad; reward: a model that scores answers; hogwild:
    lock-free training of a bag of words; custom: your own class."""
    backend: Backend = LocalBackendConfig.model_construct()
    """Where the run executes: this process, torchrun, Ray, or an OpenAI-compatible server."""
    simulation: Simulation | None = None
    """Multi-turn simulation (`partita simulate`): the model talks to an environment, to the user turns of a dataset, or
    to another model. Default: none."""
    sweep: SweepConfig | None = None
    """Several runs with other values of some keys (`partita sweep`). Default: none."""
    tracking: tuple[Tracker, ...] = ()
    """Experiment trackers that receive the metrics, through accelerate. Default: none."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Classes that are called during training, on rank 0: after each step, evaluation and checkpoint. They may end the
    training. Default: none."""
    defaults: Defaults = Defaults.model_construct()
    """Default options by feature type."""

    @property
    def trains(self) -> bool:
        """Whether the trainer changes weights; `trainer: {type: none}` only evaluates."""
        return self.trainer.type != "none"

    @property
    def run_backend(self) -> Backend:
        """The backend of a run of this file. A trial of a sweep that Ray places is a local run."""
        places_trials = self.sweep is not None and self.backend.type == "ray"
        return LocalBackendConfig() if places_trials else self.backend

    @property
    def sampling_seed(self) -> int:
        """Seed of sampled answers: generation.seed, otherwise the seed of the file."""
        return self.seed if self.generation.seed is None else self.generation.seed

    @property
    def plain_text(self) -> bool:
        """Whether rows are documents without a prompt, for language modelling."""
        return not self.input_features

    @property
    def dialogue_input(self) -> DialogueInput | None:
        """The input feature of type dialogue, or None."""
        return next((feature for feature in self.input_features if isinstance(feature, DialogueInput)), None)

    @property
    def is_new_encoder(self) -> bool:
        """Whether the model is a new encoder, whose outputs have a head even if the file does not say so."""
        return isinstance(self.base_model, ScratchModel) and self.base_model.architecture in ENCODERS

    @property
    def head_output(self) -> OutputFeature | None:
        """The output that a head predicts, or None; it is then the only output."""
        return next((feature for feature in self.output_features if feature.has_head), None)

    @property
    def scores_answers(self) -> bool:
        """Whether the model is a reward model: a head scores answers to prompts."""
        output = self.head_output
        return output is not None and output.head_reads == "answers"

    @property
    def has_answer_texts(self) -> bool:
        """Whether rows are prompts with answers as text; those of other heads are a text with a value."""
        return self.head_output is None or self.scores_answers

    @property
    def has_turn_outputs(self) -> bool:
        """Whether a turn of a dialogue is answered with named outputs, and not only with a text."""
        first, *others = self.output_features
        is_text = first.free_text and first.column in (None, CONTENT)
        return self.dialogue_input is not None and (bool(others) or not is_text)

    @property
    def compares_answers(self) -> bool:
        """Whether a row has two answers to compare, or an answer with a label; of a dialogue, the last answer."""
        return any(output.has_pairs or output.has_label for output in self.output_features)

    @property
    def answers_in_sequence(self) -> bool:
        """Whether the outputs of a turn are answered one after the other."""
        return self.dialogue_input is not None and self.data.dialogue.answers == "in_sequence"

    @property
    def split(self) -> Split:
        """The split of the source; random 90/5/5 by default."""
        return self.data.split or self.preprocessing.split or RandomSplit()

    @property
    def cross_validates(self) -> bool:
        """Whether `train` trains a model per fold."""
        return self.split.type == "kfold" and self.split.fold is None

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
