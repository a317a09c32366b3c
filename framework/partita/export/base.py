"""What an exporter of a format does, and what all of them share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from partita.export.answers import Answers
from partita.export.options import ExportOptions
from partita.export.prompts import CheckPrompts
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.precision import quantized_layers
from partita.pipeline.build import Pipeline

EXACT = 1e-4
"""Largest relative difference of equal outputs of a head in float32."""
ROUNDED = 0.05
"""The same if weights were rounded to 16 bits, or dequantized."""

AnyModel = HuggingFaceModel | HeadModel
"""A model that can be exported."""


@dataclass(eq=False)
class Exporter(ABC):
    """Writes a model in one format, and asks what it wrote."""

    lm: AnyModel
    pipeline: Pipeline
    options: ExportOptions
    notes: list[str] = field(default_factory=list)
    """What to know about the export, for its report."""

    @classmethod
    def check_options(cls, options: ExportOptions) -> None:
        """Raise PartitaError if another program that is needed is missing. Called before the model is loaded."""
        return  # most formats need none

    @property
    def folder(self) -> Path:
        """The folder to write."""
        return self.options.output

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Type of the exported weights."""

    @abstractmethod
    def write(self) -> None:
        """Write the export into the folder, which is empty. Raise PartitaError if the model cannot be exported."""

    @abstractmethod
    def answers(self, prompts: CheckPrompts) -> Answers | None:
        """Return what the export answers; None if the program that would answer is not installed."""

    @abstractmethod
    def template_equal(self) -> bool | None:
        """Return whether the export renders the same bytes; None without a chat template, or if it is not compared."""

    @property
    def tolerance(self) -> float:
        """Largest relative difference of equal outputs of a head."""
        exact = self.dtype == "float32" and str(self.lm.base.dtype) == "torch.float32"
        return EXACT if exact and not quantized_layers(self.lm.module) else ROUNDED
