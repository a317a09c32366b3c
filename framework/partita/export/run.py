"""An export from its start to its report: prompts, answers of the model, the files, and answers of the export."""

import logging
from collections.abc import Callable
from pathlib import Path

from partita.data.rows import Rows
from partita.export.answers import model_answers
from partita.export.base import ExportAnswers, Exporter
from partita.export.gguf import GgufExporter
from partita.export.merged import MergedExporter
from partita.export.ollama import OllamaExporter
from partita.export.onnx import OnnxExporter
from partita.export.options import ExportFormat, ExportOptions
from partita.export.partial_folder import completed, partial_folder
from partita.export.prompts import CheckPrompts, check_prompts
from partita.export.report import AnswerAgreement, ExportReport, compare_answers
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel
from partita.pipeline.before_training import notes_of
from partita.pipeline.build import LocalPipeline
from partita.runs.waiting import waiting
from partita_schema.common.text import describe_error

logger = logging.getLogger(__name__)

EXPORTERS: dict[ExportFormat, type[Exporter]] = {
    "merged": MergedExporter,
    "gguf": GgufExporter,
    "ollama": OllamaExporter,
    "onnx": OnnxExporter,
}
"""The exporter of each format."""


def export_model(
    load_pipeline: Callable[[], LocalPipeline],
    options: ExportOptions,
    *,
    rows: Callable[[], tuple[str, Rows]],
    run: Path | None,
) -> ExportReport:
    """Export a model, compare it with the export, and return the report, which is also written.

    The folder is complete, with its report, or is not there: files are written to a folder next to it until then.

    Args:
        load_pipeline: Loads the model.
        options: What to export.
        rows: Returns rows whose prompts are answered, and what they are; raises PartitaError if there are none.
        run: The run's directory; None for a model without a run.

    Raises:
        PartitaError: The model cannot be exported, or an option is invalid.
    """
    options.check()
    exporter_class = EXPORTERS[options.to]
    exporter_class.check_options(options)
    pipeline = load_pipeline()
    assert isinstance(pipeline.lm, HuggingFaceModel | HeadModel), "an embedding bag is refused before"
    exporter = exporter_class(pipeline.lm, pipeline, options, partial_folder(options.output), notes_of(run))
    exporter.check_model()
    prompts = check_prompts(pipeline, pipeline.lm, rows, must_exist=options.dataset is not None)
    with waiting("answering with the model", line=False):
        answers = model_answers(pipeline.lm, prompts, options=pipeline.generation)
    with completed(exporter.folder, options.output):
        with waiting(f"writing {options.output}", line=False):
            exporter.write()
        if exporter.template_of_run.note is not None:
            exporter.notes.append(exporter.template_of_run.note)
        with waiting("answering with the export", line=False):
            asked = answers_of(exporter, prompts)
        agreement = AnswerAgreement(None)
        if asked is not None:
            agreement = compare_answers(
                prompts, answers, asked.answers, decode=pipeline.lm.tokenizer.decode, tolerance=exporter.tolerance
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
            reasons=tuple(exporter.reasons),
        )
        report.write(exporter.folder)
    return report


def answers_of(exporter: Exporter, prompts: CheckPrompts) -> ExportAnswers | None:
    """Return what the export answers; None, with the reason as a note, if it could not be asked."""
    try:
        return exporter.ask(prompts)
    except Exception as error:
        logger.debug("the export could not be asked", exc_info=True)
        exporter.reasons.append(f"its answers could not be compared: {describe_error(error)}")
        return None
