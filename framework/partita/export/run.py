"""An export from its start to its report: prompts, answers of the model, the files, and answers of the export."""

import shutil
from collections.abc import Callable
from contextlib import suppress

from partita.data.rows import Rows
from partita.export.answers import model_answers
from partita.export.base import Exporter
from partita.export.gguf import GgufExporter
from partita.export.merged import MergedExporter
from partita.export.ollama import OllamaExporter
from partita.export.onnx import OnnxExporter
from partita.export.options import ExportFormat, ExportOptions
from partita.export.prompts import check_prompts
from partita.export.report import AnswerAgreement, ExportReport, compare_answers
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel
from partita.pipeline.build import Pipeline
from partita.runs.files import writing
from partita.runs.waiting import waiting

EXPORTERS: dict[ExportFormat, type[Exporter]] = {
    "merged": MergedExporter,
    "gguf": GgufExporter,
    "ollama": OllamaExporter,
    "onnx": OnnxExporter,
}
"""The exporter of each format."""


def export_model(
    pipeline: Callable[[], Pipeline], options: ExportOptions, *, rows: Callable[[], tuple[str, Rows]]
) -> ExportReport:
    """Export a model, compare it with the export, and return the report, which is also written.

    Args:
        pipeline: Loads the model.
        options: What to export.
        rows: Returns rows whose prompts are answered, and what they are; raises PartitaError if there are none.

    Raises:
        PartitaError: The model cannot be exported, or an option is invalid.
    """
    options.check()
    exporter_class = EXPORTERS[options.to]
    exporter_class.check_options(options)
    parts = pipeline()
    assert isinstance(parts.lm, HuggingFaceModel | HeadModel), "an embedding bag is refused before"
    exporter = exporter_class(parts.lm, parts, options)
    exporter.check_model()
    prompts = check_prompts(parts, parts.lm, rows, must_exist=options.dataset is not None)
    with waiting("answering with the model", line=False):
        answers = model_answers(parts.lm, prompts)
    with writing(options.output), waiting(f"writing {options.output}", line=False):
        try:
            exporter.write()
        except BaseException:
            remove_content(options)
            raise
    with waiting("answering with the export", line=False):
        asked = exporter.ask(prompts)
    agreement = AnswerAgreement(None)
    if asked is not None:
        agreement = compare_answers(
            prompts, answers, asked.answers, decode=parts.lm.tokenizer.decode, tolerance=exporter.tolerance
        )
    report = ExportReport(
        folder=str(options.output),
        to=options.to,
        dtype=exporter.dtype,
        prompts=prompts.origin,
        rows=len(prompts.requests),
        **vars(agreement),
        prompts_equal=None if asked is None else asked.prompts_equal,
        template_equal=None if asked is None else asked.template_equal,
        min_agreement=options.min_agreement,
        notes=tuple(exporter.notes),
    )
    with writing(options.output):
        report.write()
    return report


def remove_content(options: ExportOptions) -> None:
    """Empty the folder of an export that failed, so that the same command can be started again."""
    for path in options.output.iterdir() if options.output.is_dir() else ():
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
