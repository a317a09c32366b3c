"""The base class of exporters. Each format has one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from partita.export.answers import Answers
from partita.export.options import ExportOptions
from partita.export.prompts import CheckPrompts
from partita.export.templates import Messages, TemplateOfRun, find_template_of_run, same_rendering
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.precision import quantized_layers
from partita.lm.training.exporting import refuse_int8
from partita.pipeline.build import LocalPipeline
from partita_schema.errors import ModelError

EXACT = 1e-4
"""Largest relative difference of equal outputs of a head in float32."""
ROUNDED = 0.05
"""The same if weights were rounded to 16 bits, or dequantized."""

VIRTUAL = (
    "{method} learns virtual tokens, which are not weights and cannot be merged; use the adapter in the run's folder "
    "with peft"
)

AnyModel = HuggingFaceModel | HeadModel
"""A model that can be exported."""


@dataclass(frozen=True)
class ExportAnswers:
    """The answers of an export."""

    answers: Answers
    """Its answers to the prompts."""
    template_equal: bool | None = None
    """Whether it renders a chat template to the same bytes; None without a template."""
    prompts_equal: int | None = None
    """Number of prompts whose text has the same tokens; None if that was not compared."""


@dataclass(eq=False)
class Exporter(ABC):
    """Writes a model in one format, and answers prompts with the written files."""

    lm: AnyModel
    pipeline: LocalPipeline
    options: ExportOptions
    folder: Path
    """The folder to write, which gets the name `options.output` when it is complete."""
    run_notes: Mapping[str, Any]
    """What a model needs of the manifest of its run to be compared with the model before training."""
    notes: list[str] = field(default_factory=list)
    """Notes on the export, for its report."""
    reasons: list[str] = field(default_factory=list)
    """Why answers were not compared, or prompts have other tokens, for the report."""

    overridable_template: ClassVar[bool] = True
    """Whether values that a program passes to the chat template take precedence over those of the run."""

    @classmethod
    def check_options(cls, options: ExportOptions) -> None:
        """Raise PartitaError if another program that is needed is missing. Called before the model is loaded."""
        return  # most formats need none

    def check_model(self) -> None:
        """Raise ModelError if the model cannot be exported in this format."""
        refuse_int8(self.lm)
        if self.lm.virtual_tokens:
            raise ModelError(VIRTUAL.format(method=self.lm.adapter_method))

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Type of the exported weights."""

    @abstractmethod
    def write(self) -> None:
        """Write the export into the folder, which is empty. Raise PartitaError if it cannot be written."""

    @cached_property
    def template_of_run(self) -> TemplateOfRun:
        """How the chat template of the export renders the prompts of the run."""
        return find_template_of_run(self.lm.tokenizer, self.pipeline, overridable=self.overridable_template)

    def same_template(self, render: Callable[[Messages], str | None]) -> bool | None:
        """Return whether the export renders dialogues to the same bytes as its chat template; None without one.

        Args:
            render: Renders a dialogue with the export.
        """
        return same_rendering(self.lm.tokenizer, render, prefix=self.template_of_run.prefix)

    @abstractmethod
    def ask(self, prompts: CheckPrompts) -> ExportAnswers | None:
        """Return the answers of the export; None if the program that runs it is not installed."""

    def count_equal_prompts(self, prompts: CheckPrompts, tokens: Callable[[str], Sequence[int]]) -> int | None:
        """Return the number of prompts whose text has the same tokens; None if the prompts are not texts.

        Args:
            prompts: The prompts.
            tokens: Returns the tokens of a text in the export, without special tokens added.
        """
        if prompts.texts is None:
            return None
        count, tokenizer = 0, self.lm.tokenizer
        others = None
        for name, text in zip(prompts.names, prompts.texts, strict=True):
            ours, theirs = list(tokenizer(text, add_special_tokens=False)["input_ids"]), list(tokens(text))
            count += ours == theirs
            if ours != theirs and others is None:
                place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
                words = [tokenizer.convert_ids_to_tokens(ids[place : place + 3]) for ids in (ours, theirs)]
                others = f"row {name} has the tokens {words[0]} in the model and {words[1]} in the export"
        self.reasons += [others] if others is not None else []
        return count

    @property
    def tolerance(self) -> float:
        """Largest relative difference of equal outputs of a head."""
        exact = self.dtype == "float32" and str(self.lm.base.dtype) == "torch.float32"
        return EXACT if exact and not quantized_layers(self.lm.module) else ROUNDED
