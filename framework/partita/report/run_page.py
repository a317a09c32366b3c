"""`report.html` of a run: is it better, how did training go, what did it learn from, where is it wrong, what did it
cost, how is it repeated.
"""

import logging
from pathlib import Path

from partita.report.folds_page import FOLDS, folds_page, read_folds
from partita.report.measures import measures_of
from partita.report.page import render_page
from partita.report.run_record import RunRecord, read_run
from partita.report.section import Section
from partita.report.sections.answers import answer_sections
from partita.report.sections.cost import cost_section, repeat_section
from partita.report.sections.data import data_section
from partita.report.sections.dialogues import dialogues_section
from partita.report.sections.headline import facts_of, headline
from partita.report.sections.metrics import metrics_section
from partita.report.sections.preferences import preferences_section
from partita.report.sections.rounds import rounds_section
from partita.report.sections.training import training_section
from partita.runs.files import why_not_written
from partita_schema.common.files import write_atomically
from partita_schema.common.text import describe_error
from partita_schema.errors import WriteError

REPORT = "report.html"

logger = logging.getLogger(__name__)


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run directory or the folder of a cross-validation, and return its path.

    Raises:
        DataError: The folder holds no run, or its results are damaged.
        PartitaError: Its manifest is damaged.
        WriteError: The page cannot be written.
    """
    text = folds_page(read_folds(folder)) if (folder / FOLDS).is_file() else report_of(read_run(folder))
    path = folder / REPORT
    try:
        write_atomically(path, text)
    except OSError as error:
        raise WriteError(why_not_written(error, path)) from error
    return path


def try_to_write_report(folder: Path) -> None:
    """Write the report of a run that has ended; a failure is logged and never ends the run."""
    try:
        path = write_report(folder)
    except Exception as error:  # the work is done, and nothing that a page cannot show may lose it
        cause = describe_error(error)
        logger.warning("the report was not written (%s); partita report %s tries again", cause, folder)
    else:
        logger.info("report: %s", path)


def report_of(run: RunRecord) -> str:
    """Return the report of a run as HTML."""
    splits = [
        measures_of(results, is_plain_text=run.is_plain_text, may_have_base=not (run.is_new_model or run.is_untrained))
        for results in run.results
    ]
    return render_page(
        run.name,
        facts=facts_of(run),
        lead=headline(run, splits[0] if splits else None),
        sections=[
            section
            for section in (
                metrics_section(run, splits),
                training_section(run),
                preferences_section(run),
                data_section(run),
                *answer_sections(run.results),
                rounds_section(run),
                dialogues_section(run),
                cost_section(run),
                repeat_section(run),
            )
            if isinstance(section, Section)
        ],
    )
