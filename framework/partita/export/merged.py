"""The format merged: a plain model of transformers, without adapter and quantization, in a chosen dtype."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partita.export.answers import ROWS, Answers, batches, ends_of_run, head_outputs, plain_answers
from partita.export.base import AnyModel, ExportAnswers, Exporter
from partita.export.prompts import CheckPrompts
from partita.export.templates import TemplateOfRun, render
from partita.lm.adapters.merging import plain_model
from partita.lm.base import GenerationOptions
from partita.lm.decoding.generation_defaults import TYPES
from partita.lm.encoder_decoder.model import EncoderDecoderModel
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.loading.base_models import quiet_progress
from partita.lm.model_config.kinds import class_of_kind, model_kind
from partita.lm.precision import quantized_layers
from partita.pipeline.build import LocalPipeline
from partita.pipeline.saved_model import write_metadata
from partita.tokenizers.vocabulary_file import copy_vocabulary
from partita_schema.errors import ModelError
from partita_trainers.checkpoints.file_sums import summed

COPIED = "the model has no adapter and no quantization: the export is a copy in the chosen dtype"


class MergedExporter(Exporter):
    """Writes a plain model of transformers, and loads it with transformers."""

    @property
    def dtype(self) -> str:
        return str(dtype_of(self.lm, self.options.dtype))[len("torch.") :]

    def write(self) -> None:
        dtype = dtype_of(self.lm, self.options.dtype)
        write_merged(
            self.lm,
            self.folder,
            dtype=dtype,
            pipeline=self.pipeline,
            template=self.template_of_run,
            notes=self.run_notes,
        )
        if self.lm.adapted is None and not quantized_layers(self.lm.module):
            self.notes.append(COPIED)

    def ask(self, prompts: CheckPrompts) -> ExportAnswers | None:
        from transformers import AutoTokenizer

        exported = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.lm.config.trust_remote_code)
        return ExportAnswers(
            merged_answers(self.lm, self.folder, prompts),
            template_equal=self.same_template(lambda messages: render(exported, messages)),
            prompts_equal=self.count_equal_prompts(
                prompts, lambda text: exported(text, add_special_tokens=False)["input_ids"]
            ),
        )


def write_merged(
    lm: AnyModel,
    folder: Path,
    *,
    dtype: torch.dtype,
    pipeline: LocalPipeline,
    template: TemplateOfRun,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write the model with its adapter merged into dequantized weights, and its tokenizer.

    Args:
        lm: The model.
        folder: Folder to write.
        dtype: Type of the weights.
        pipeline: The pipeline of the model; its configuration and labels are for partita.json.
        template: What the chat template begins with.
        notes: Further keys for partita.json, from the manifest of the run.

    Raises:
        ModelError: The weights do not fit in the dtype.
    """
    model = plain_model(lm.base)
    model.to(dtype)
    check_finite(model, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_progress(), summed(folder):
        if isinstance(lm, HuggingFaceModel):
            model.generation_config = exported_generation(lm, pipeline.generation)
        model.save_pretrained(str(folder))
        if lm.head is not None:
            lm.head.write_files(folder, model=model, max_length=lm.context_length)
        lm.tokenizer.save_pretrained(folder)
        template.write(folder)
        copy_vocabulary(lm.source, folder, revision=pipeline.config.model_parameters.revision)
    write_metadata(folder, config=pipeline.config, labels=pipeline.labels, origin=None, notes=notes)


def check_finite(model: Any, *, dtype: torch.dtype) -> None:
    """Raise ModelError if a weight does not fit in the dtype."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            advice = "write --dtype bfloat16 or float32" if dtype == torch.float16 else "train again"
            raise ModelError(f"{name} has values that are not finite numbers in {str(dtype)[6:]}; {advice}")


def exported_generation(lm: HuggingFaceModel, options: GenerationOptions) -> Any:
    """Return the generation config of a run: its settings, and all tokens that end its answers.

    What a run does not set, such as the maximum length, is that of the checkpoint.
    """
    from transformers import GenerationConfig

    # With _from_model_config, transformers may replace the settings by those of the model's config.
    replaced = {*TYPES, "_from_model_config"} - {"max_new_tokens", "stop_strings"}
    own = {key: value for key, value in lm.original_generation_config.to_dict().items() if key not in replaced}
    settings = GenerationConfig(**{**own, **options.arguments})
    ends = ends_of_run(lm, options)
    settings.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    settings.pad_token_id = lm.tokenizer.pad_token_id
    if isinstance(lm, EncoderDecoderModel):
        settings.decoder_start_token_id = lm.start_token_id
    return settings


def dtype_of(lm: AnyModel, wanted: str) -> torch.dtype:
    """Return the dtype of the weights: the wanted one, or with auto the one that the model computes in."""
    dtype: torch.dtype = lm.base.dtype if wanted == "auto" else getattr(torch, wanted)
    return dtype


def merged_answers(lm: AnyModel, folder: Path, prompts: CheckPrompts) -> Answers:
    """Load the exported folder with transformers, and return its answers.

    Args:
        lm: The model of the run, which prepares the inputs.
        folder: The exported folder.
        prompts: The prompts.
    """
    model = load_merged(lm, folder).to(lm.device)
    if isinstance(lm, HeadModel):
        outputs = [row for part in batches(prompts, ROWS) for row in head_outputs(lm, part, model)]
        return Answers(outputs=tuple(outputs))
    ends = model.generation_config.eos_token_id
    return plain_answers(lm, model, prompts, ends=[ends] if isinstance(ends, int) else ends or ())


def load_merged(lm: AnyModel, folder: Path) -> Any:
    """Return the model in an exported folder as transformers loads it, on the CPU.

    Args:
        lm: The model that was exported.
        folder: The exported folder.
    """
    import transformers

    if isinstance(lm, HeadModel):
        auto_class: Any = getattr(transformers, lm.own_head.auto_class)
    else:
        auto_class = class_of_kind(model_kind(lm.base.config, source=str(folder)))
    with quiet_progress():
        return auto_class.from_pretrained(folder, dtype="auto", trust_remote_code=lm.config.trust_remote_code).eval()
