"""What is exported, and how it is checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from partita_schema.errors import DataError, PartitaError

ExportFormat = Literal["merged", "gguf", "ollama", "onnx"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]

MIN_AGREEMENT = 0.9
"""Default of the share of tokens, or of rows for a head, that must be equal."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `Model.export`."""

    to: ExportFormat
    """The format."""
    output: Path
    """Folder to write; new or empty."""
    dtype: Dtype = "auto"
    """Type of the weights of merged; auto is the type that the model computes in."""
    gguf_type: GgufType | None = None
    """Type of the weights of a GGUF file; None for f16."""
    dataset: Any = None
    """Rows whose prompts are answered; None for those of the file."""
    min_agreement: float = MIN_AGREEMENT
    """Share of tokens, or of rows for a head, that must be equal."""
    llama_cpp: Path | None = None
    """A checkout of llama.cpp; None for the one that the environment variable names."""

    @property
    def gguf_weights(self) -> GgufType:
        """Type of the weights of a GGUF file."""
        return self.gguf_type or "f16"

    def check(self) -> None:
        """Raise PartitaError if an option is invalid, or the folder holds files."""
        values = {
            "to": (self.to, ExportFormat),
            "dtype": (self.dtype, Dtype),
            "gguf_type": (self.gguf_weights, GgufType),
        }
        for name, (value, kind) in values.items():
            if value not in get_args(kind):
                raise PartitaError(f"{name} is {value!r}; write one of {', '.join(get_args(kind))}")
        if self.dtype != "auto" and self.to != "merged":
            raise PartitaError(f"dtype has no effect on {self.to}; it is for merged")
        if self.gguf_type is not None and self.to not in ("gguf", "ollama"):
            raise PartitaError(f"gguf_type (--quantize) has no effect on {self.to}; it is for gguf and ollama")
        if not 0 <= self.min_agreement <= 1:
            raise PartitaError(f"min_agreement is {self.min_agreement:g}; write a number from 0 to 1")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise DataError(f"{self.output} exists and is not an empty folder; name another folder for the export")
