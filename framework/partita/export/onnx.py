"""The format onnx: one forward pass as a graph for onnxruntime.

For a head, one pass is the whole answer. For a model that writes text, the graph has the logits of all tokens without a
KV cache, so each new token computes the whole sequence again.
"""

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from partita.export.answers import ROWS, Answers, batches, cut, ends_of_run, without_padding
from partita.export.base import ExportAnswers, Exporter
from partita.export.merged import load_merged, write_merged
from partita.export.options import ExportOptions
from partita.export.prompts import CheckPrompts
from partita.export.templates import render
from partita.lm.encoder_decoder.model import EncoderDecoderModel
from partita.lm.head_model import HeadModel
from partita_schema.errors import ExportError, ModelError, PartitaError

FILE = "model.onnx"
PACKAGES = ("onnxruntime", "onnxscript")
MISSING = "ONNX files are written by onnxscript and checked by onnxruntime; run pip install 'partita[onnx]'"
WITHOUT_CACHE = (
    "the graph has no KV cache, so generation computes the whole sequence for each token; it is for scoring, and for "
    "short answers"
)
WITHOUT_POOLING = (
    "the output of the graph is the last hidden state of each token; the pooling of the embedding, and its division by "
    "its length, are not part of it"
)
TRACED_TOKENS = 6
"""Length of the rows that the graph is traced with; other lengths work as well."""


class ForwardPass(nn.Module):
    """A model whose inputs are tensors in a fixed order, and whose output is one tensor."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Wrap a model of transformers with inputs of these names."""
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the first output of the model."""
        output: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))[0]
        return output


class OnnxExporter(Exporter):
    """Writes the graph with torch, and runs it with onnxruntime on the CPU."""

    @classmethod
    def check_options(cls, options: ExportOptions) -> None:
        """Raise PartitaError without the packages."""
        if any(find_spec(name) is None for name in PACKAGES):
            raise PartitaError(MISSING)

    def check_model(self) -> None:
        """Raise ModelError for an encoder-decoder."""
        super().check_model()
        if isinstance(self.lm, EncoderDecoderModel):
            raise ModelError("an encoder-decoder is not exported to ONNX, because it is two graphs; use --to merged")

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def names(self) -> list[str]:
        """Names of the inputs."""
        typed = isinstance(self.lm, HeadModel) and self.lm.reads_token_types
        return ["input_ids", "attention_mask", *(["token_type_ids"] if typed else [])]

    @property
    def output(self) -> str:
        """Name of the output."""
        return "last_hidden_state" if self.lm.head is not None and self.lm.head.is_bare else "logits"

    def write(self) -> None:
        """Write the graph, the tokenizer, config.json with the labels, and a file with only the labels."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".merged-") as folder:
            merged = Path(folder)
            write_merged(self.lm, merged, dtype=torch.float32, pipeline=self.pipeline, template=self.template_of_run)
            model = load_merged(self.lm, merged)
        write_graph(model, self.folder / FILE, names=self.names, output=self.output)
        model.config.save_pretrained(self.folder)
        self.lm.tokenizer.save_pretrained(self.folder)
        self.template_of_run.write(self.folder)
        if self.lm.head is None:
            self.notes.append(WITHOUT_CACHE)
        elif self.lm.head.is_bare:
            self.notes.append(WITHOUT_POOLING)
        if self.lm.head is not None and self.lm.head.labels:
            labels = json.dumps(list(self.lm.head.labels), indent=2, ensure_ascii=False)
            (self.folder / "labels.json").write_text(labels + "\n", encoding="utf8")

    def ask(self, prompts: CheckPrompts) -> ExportAnswers | None:
        from transformers import AutoTokenizer

        session = open_graph(self.folder / FILE)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.lm.config.trust_remote_code)
        return ExportAnswers(
            head_answers(self.lm, session, prompts)
            if isinstance(self.lm, HeadModel)
            else greedy_answers(session, prompts, ends=ends_of_run(self.lm, self.pipeline.generation)),
            template_equal=self.same_template(lambda messages: render(tokenizer, messages)),
            prompts_equal=self.count_equal_prompts(
                prompts, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
            ),
        )


def write_graph(model: Any, path: Path, *, names: Sequence[str], output: str) -> None:
    """Write the forward pass of a model as ONNX, for any number of rows and tokens.

    Args:
        model: The model, on the CPU in float32.
        path: File to write.
        names: Names of the inputs.
        output: Name of the output.

    Raises:
        ExportError: torch cannot trace the model.
    """
    rows = torch.full((2, TRACED_TOKENS), 2)
    inputs = [rows, torch.ones_like(rows), torch.zeros_like(rows)][: len(names)]
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings(), redirect_stdout(StringIO()), only_errors("torch.onnx"):
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                ForwardPass(model, names),
                tuple(inputs),
                path,
                dynamo=True,
                input_names=list(names),
                output_names=[output],
                dynamic_shapes=(tuple(dynamic for _ in names),),
                verbose=False,
            )
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise ExportError(
                f"torch cannot write {type(model).__name__} as ONNX: {reason[0] if reason else type(error).__name__}"
            ) from error


@contextmanager
def only_errors(name: str) -> Iterator[None]:
    """Log only errors of a library, such as torch, which warns that torchvision is missing."""
    named = logging.getLogger(name)
    level = named.level
    named.setLevel(logging.ERROR)
    try:
        yield
    finally:
        named.setLevel(level)


def open_graph(path: Path) -> Any:
    """Return a session of onnxruntime with a graph, on the CPU."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def greedy_answers(session: Any, prompts: CheckPrompts, *, ends: Sequence[int]) -> Answers:
    """Return greedy answers by the logits of a graph, token by token.

    Args:
        session: A session of onnxruntime.
        prompts: The prompts.
        ends: End tokens of the run.
    """
    answers = []
    for request in prompts.requests:
        ids, start = list(request.input_ids), len(request.input_ids)
        while len(ids) - start < request.max_new_tokens and not set(ids[start:]) & set(ends):
            row_1T = np.array([ids], dtype=np.int64)
            logits_BTV = session.run(None, {"input_ids": row_1T, "attention_mask": np.ones_like(row_1T)})[0]
            ids.append(int(logits_BTV[0, -1].argmax()))
        answers.append(cut(ids[start:], ends=ends, limit=request.max_new_tokens))
    return Answers(tokens=tuple(answers))


def head_answers(lm: HeadModel, session: Any, prompts: CheckPrompts) -> Answers:
    """Return the outputs of a graph with a head, without padding.

    Args:
        lm: The model, which prepares the inputs.
        session: A session of onnxruntime.
        prompts: The prompts.
    """
    outputs: list[np.ndarray] = []
    for part in batches(prompts, ROWS):
        inputs = {name: tensor.cpu().numpy() for name, tensor in lm.inputs(lm.prompts(part)).items()}
        outputs += without_padding(session.run(None, inputs)[0], inputs["attention_mask"])
    return Answers(outputs=tuple(outputs))
