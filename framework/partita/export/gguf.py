"""The format gguf: a file for llama.cpp, written by its converter and run by its server."""

import json
import tempfile
from pathlib import Path

import torch

from partita.export.answers import ends_of_run
from partita.export.base import ExportAnswers, Exporter
from partita.export.llama_cpp import NOT_COMPARED, convert, find_checkout, has_binding, server_answers, serving
from partita.export.merged import write_merged
from partita.export.options import ExportOptions
from partita.export.prompts import CheckPrompts
from partita.lm.encoder_decoder.model import EncoderDecoderModel
from partita.lm.huggingface import HuggingFaceModel
from partita.tokenizers.vocabulary_file import copy_vocabulary
from partita_schema.errors import ModelError

NO_VOCABULARY = (
    "{} has no tokenizer.model. If its tokenizer was made with SentencePiece, add that file: llama.cpp splits words by "
    "the scores in it"
)
MORE_CONTEXT = 8
"""Tokens of context beyond the longest prompt and its answer."""


def complete_config(folder: Path) -> None:
    """Add the key that the converter reads and transformers no longer writes: the context length of GPT-2."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    if "n_positions" in config:
        path.write_text(json.dumps({"n_ctx": config["n_positions"], **config}, indent=2), encoding="utf8")


class GgufExporter(Exporter):
    """Writes a GGUF file with the converter of llama.cpp."""

    overridable_template = False  # llama.cpp sets enable_thinking to true by default, which would override the run
    has_vocabulary = False
    """Whether the base model has the file of a SentencePiece vocabulary."""

    @classmethod
    def check_options(cls, options: ExportOptions) -> None:
        """Raise PartitaError without a checkout of llama.cpp."""
        find_checkout(options.llama_cpp)

    @property
    def dtype(self) -> str:
        return self.options.gguf_weights

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.folder / f"model-{self.options.gguf_weights}.gguf"

    def write(self) -> None:
        """Write a merged model in float32 next to the file, convert it, and remove it."""
        checkout = find_checkout(self.options.llama_cpp)
        pipeline = self.pipeline
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".merged-") as folder:
            merged = Path(folder) / self.options.output.resolve().name  # the converter writes this name into the file
            write_merged(self.lm, merged, dtype=torch.float32, pipeline=pipeline, template=self.template_of_run)
            revision = pipeline.config.model_parameters.revision
            self.has_vocabulary = copy_vocabulary(self.lm.source, merged, revision=revision, download=True)
            complete_config(merged)
            convert(checkout, merged, "--outfile", self.path, "--outtype", self.options.gguf_weights)

    def check_model(self) -> None:
        """Raise ModelError unless the model is a decoder that writes text."""
        super().check_model()
        if not isinstance(self.lm, HuggingFaceModel):
            raise ModelError("a GGUF file has no place for the head of the model; export it with --to onnx or merged")
        if isinstance(self.lm, EncoderDecoderModel):
            raise ModelError("llama.cpp answers with decoders, and the model is an encoder-decoder; use --to merged")

    def ask(self, prompts: CheckPrompts) -> ExportAnswers | None:
        """Return the answers of the file in llama.cpp; None without its binding."""
        if not has_binding():
            self.reasons.append(NOT_COMPARED)
            return None
        assert isinstance(self.lm, HuggingFaceModel)
        longest = max(len(request.input_ids) + request.max_new_tokens for request in prompts.requests)
        with serving(self.path, context_length=longest + MORE_CONTEXT) as server:
            same_tokens = self.count_equal_prompts(prompts, server.tokens)
            if same_tokens is not None and same_tokens < len(prompts.names) and not self.has_vocabulary:
                self.reasons.append(NO_VOCABULARY.format(self.lm.source or "the base model"))
            return ExportAnswers(
                server_answers(server, prompts, ends=ends_of_run(self.lm, self.pipeline.generation)),
                template_equal=self.same_template(server.render),
                prompts_equal=same_tokens,
            )
