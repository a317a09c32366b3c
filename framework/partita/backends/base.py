"""The protocol of a backend, and what all of them share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from partita.backends.context import RunContext
from partita.backends.refusals import EMBEDDING_BAG, HEAD, USE_THIS_PROCESS, Refusals
from partita.backends.reward_models import check_columns_of_reward, load_best_of
from partita.data.column_checks import check_columns
from partita.data.ledger import Ledger
from partita.export.options import ExportOptions
from partita.export.report import ExportReport
from partita.generation.best_of import BestOf
from partita.generation.job import PredictionPipeline
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import PredictionFiles, predict_rows
from partita.generation.prompts import PromptSource
from partita.generation.tables import check_output
from partita.pipeline.build import AnyPipeline, Pipeline
from partita.pipeline.eval_dataset import build_eval_dataset, tokens_made_once
from partita.pipeline.evaluate import EvaluationResult, Evaluator, evaluate_dataset
from partita.pipeline.fingerprint import answer_fingerprint, journal_path
from partita.runs.files import writing
from partita.runs.waiting import waiting
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, PartitaError, Problem
from partita_schema.rules.features import METRICS_OF_MODEL
from partita_schema.sections.model import EmbeddingBagModel
from partita_trainers.base import TrainResult
from partita_trainers.process_group import synchronized_errors

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions
    from partita.pipeline.batch_sizes import BatchSizes
    from partita.serving.engine import ServingEngine
    from partita.simulation.report import SimulationReport

logger = logging.getLogger(__name__)

Metrics = dict[str, dict[str, Any]]
"""Metrics by output: numbers, and tables such as the metrics of each label."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `Model.predict`."""

    output: Path | None = None
    """File to write."""
    batch_size: int | None = None
    """Rows generated at a time, set by the caller."""
    retry_errors: bool = False
    """Whether to generate rows again that ended in an error."""
    fresh: bool = False
    """Whether to discard earlier answers."""
    safe_csv: bool = False
    """Whether to escape text of a .csv that a spreadsheet would run as a formula."""


class Backend(ABC):
    """Where the verbs of a model run. A backend implements a verb, or refuses it with one sentence."""

    refusals: ClassVar[Refusals] = Refusals()
    """Verbs that the backend does not support."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._best_of: BestOf | None = None

    # What a backend implements

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return the pipeline for prediction, with the model of the last training, of the run, or the base model."""

    @abstractmethod
    def prediction_budget(self, prompts: PromptSource, *, batch_size: int | None) -> BatchBudget:
        """Return the batch budget for the prompts; `batch_size` is set by the caller, or None."""

    @abstractmethod
    def evaluator(self, *, batch_size: int | None) -> Evaluator:
        """Return the evaluator; `batch_size` is set by the caller, or None."""

    @abstractmethod
    def train(self, dataset: Any, run: str | Path | None, *, callbacks: Sequence[object] = ()) -> TrainResult:
        """Train as configured; see `Model.train`."""

    @abstractmethod
    def simulate(self, output: Path | None, *, batch_size: int | None, fresh: bool) -> "SimulationReport":
        """Roll out the episodes of the `simulation` section; see `Model.simulate`."""

    # What a backend may implement; otherwise it is refused

    def generate(
        self, prompts: str | Sequence[str], *, max_new_tokens: int | None, batch_size: int | None, stream: bool
    ) -> list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """Generate text after each prompt; see `Model.generate`."""
        self.refuse("generate")

    def tune(self, dataset: Any, *, fresh: bool) -> "BatchSizes":
        """Measure the best batch sizes; see `Model.tune`."""
        self.refuse("tune")

    def open_engine(self, *, max_tokens: int | None, batch_size: int | None, max_waiting: int) -> "ServingEngine":
        """Return the engine of a server or a chat, not started; see `open_engine` of `model.py`."""
        kind = self.context.config.backend.type
        raise PartitaError(
            f"serve and chat need the model in this process, and backend is {{type: {kind}}}; {USE_THIS_PROCESS}"
        )

    def save(self, folder: Path, *, origin: Path | None) -> None:
        """Write the model with the metadata for `Model.load`.

        Relative paths are resolved against `origin`, or without one against the saved folder.
        """
        self.refuse("save")

    def export(self, options: ExportOptions) -> ExportReport:
        """Export the model and compare it with the export; see `Model.export`."""
        self.refuse("export")

    def record_memory(self) -> None:
        """Record batch sizes that ran out of memory since the last call."""
        return  # by default nothing: only the sizes of a model in this process are known here

    # What all backends do alike

    def check_model(self, verb: str) -> None:
        """Raise PartitaError if the model is an embedding bag or has a head, and does not support the verb."""
        if isinstance(self.context.config.base_model, EmbeddingBagModel):
            EMBEDDING_BAG.check(verb)
        if self.context.config.head_output is not None:
            HEAD.check(verb)

    def refuse(self, verb: str) -> NoReturn:
        """Raise PartitaError: the model, or else the backend, does not support the verb."""
        self.check_model(verb)
        self.refusals.refuse(verb)

    def with_reward(self, pipeline: AnyPipeline) -> AnyPipeline:
        """Return the pipeline for `predict` and `evaluate`: also with the reward model of `generation.best_of`."""
        if self.context.config.generation.best_of is None:
            return pipeline
        if self._best_of is None:
            with synchronized_errors(self.context.process_group, "loading the reward model"):
                tokenizer = pipeline.generator.tokenizer
                self._best_of = load_best_of(self.context, pipeline.generation, tokenizer=tokenizer)
        return replace(pipeline, best_of=self._best_of)

    def refuse_best_of(self, verb: str) -> None:
        """Raise ConfigError if the file asks for several answers, of which the verb draws one."""
        if self.context.config.generation.best_of is not None:
            message = f"{verb} draws one answer and chooses none; remove best_of, or use predict or evaluate"
            raise ConfigError([Problem("generation.best_of", message)])

    def predict(self, dataset: Any, options: PredictOptions) -> "Predictions":
        """Predict every row and write a journal and the output; see `Model.predict`."""
        try:
            return predict_dataset(
                self.context,
                dataset,
                options,
                load=lambda: self.with_reward(self.pipeline()),
                weights=lambda: self.context.weights,
                budget=lambda prompts: self.prediction_budget(prompts, batch_size=options.batch_size),
            )
        finally:
            self.record_memory()

    def evaluate(self, dataset: Any, *, batch_size: int | None) -> Metrics:
        """Compute metrics on labeled rows; see `Model.evaluate`."""
        context, process_group = self.context, self.context.process_group
        pipeline = self.with_reward(self.pipeline())
        ledger = Ledger(None, max_bad_rows=1.0)
        with tokens_made_once(process_group, pipeline, folder=context.output_folder) as tokenizing:
            with synchronized_errors(process_group, "reading the rows"), waiting("reading the rows", line=False):
                split, rows = context.evaluation_rows() if dataset is None else (None, context.open_dataset(dataset))
                check_columns_of_reward(rows, pipeline.best_of)
                eval_dataset = build_eval_dataset(tokenizing, rows, split="test", ledger=ledger)
            ledger.log_warnings()
            counts = ledger.split("test")
            if counts.left_out:
                logger.warning(
                    "%s of %s rows cannot be scored and are left out of the metrics:\n%s",
                    f"{counts.left_out:,}",
                    f"{counts.rows:,}",
                    ledger.main_reasons(),
                )
            if counts.cut:
                cut, lost = counted(counts.cut, "row"), counted(counts.cut_tokens, "token")
                logger.warning("%s cut to the length limit, %s not read", cut, lost)
            evaluator = self.evaluator(batch_size=batch_size)
            record = context.recorded_evaluation(split, dataset, rows)
            with nullcontext() if record is None else writing(record.run):
                evaluation = evaluate_dataset(evaluator, eval_dataset, progress=context.progress, record=record)
            self.record_memory()
        skipped = {"skipped": float(counts.left_out)} if counts.left_out else {}
        outputs = output_metrics(evaluation, context.config, rows=len(eval_dataset.rows))
        metrics: Metrics = {name: {**values, **skipped} for name, values in outputs.items()}
        if evaluation.loss is None:
            return metrics
        named = tuple(f"{name}." for name in outputs)
        return {
            **metrics,
            METRICS_OF_MODEL: {key: value for key, value in evaluation.loss.items() if not key.startswith(named)},
        }


def predict_dataset(
    context: RunContext,
    dataset: Any,
    options: PredictOptions,
    *,
    load: Callable[[], PredictionPipeline],
    weights: Callable[[], Path | None],
    budget: Callable[[PromptSource], BatchBudget],
) -> "Predictions":
    """Predict every row and write a journal and the output.

    Args:
        context: The configuration and the run.
        dataset: The rows; see `Model.predict`.
        options: What is written, and which rows are generated again.
        load: Loads the model, or connects to one.
        weights: Returns, once the model is loaded, the folder of its trained weights; None for what `load` names.
        budget: Returns the batch budget for the prompts.

    Raises:
        ConfigError: The model has no inputs.
        DataError: The rows cannot be read, or the output cannot have this name or format.
        ModelError: The model cannot be loaded, or does not support the options.
        ResumeError: The journal holds the answers of another job.
        WriteError: The journal or the output cannot be written.
    """
    config, process_group, output = context.config, context.process_group, options.output
    if config.plain_text and not config.scores_answers:
        message = (
            "predict answers a prompt, and without inputs there is none; add input_features, or continue a text "
            "with Model.generate"
        )
        raise ConfigError([Problem("input_features", message)])
    if options.safe_csv and output is None:
        raise DataError("safe_csv is for a .csv output, and none is written; leave it out, or name an output")
    if output is not None:

        def check() -> None:
            check_output(output, safe_csv=options.safe_csv)
            context.check_not_read(output, dataset)

        process_group.run_on_rank_zero(check, "the file of predictions")
    pipeline = load()
    with synchronized_errors(process_group, "opening the data"):
        rows = context.open_dataset(dataset)
        check_columns(rows, config, supervised=False)
        check_columns_of_reward(rows, pipeline.best_of)
    fingerprint = answer_fingerprint(pipeline, rows, result=weights(), folder=context.loaded.folder)
    files = PredictionFiles(
        journal=journal_path(context.output_folder, output=output, fingerprint=fingerprint),
        fingerprint=fingerprint,
        output=output,
        safe_csv=options.safe_csv,
        retry_errors=options.retry_errors,
        fresh=options.fresh,
    )
    return predict_rows(
        pipeline, rows, files, budget=budget, bad=rows.bad, progress=context.progress, process_group=process_group
    )


def output_metrics(evaluation: EvaluationResult, config: Config, *, rows: int) -> Metrics:
    """Return the metrics by output: those of answers, or those of the objective for outputs without answers.

    Args:
        evaluation: The result of an evaluation.
        config: The configuration.
        rows: Number of rows.
    """
    if evaluation.scores is not None:
        scores = evaluation.scores
        return {name: {**values, **scores.details[name]} for name, values in scores.outputs.items()}
    outputs: Metrics = {}
    for name in (output.name for output in config.output_features if not output.is_compared):
        own = {key: value for key, value in (evaluation.loss or {}).items() if key.startswith(f"{name}.")}
        outputs[name] = {key.removeprefix(f"{name}."): value for key, value in own.items()} | {"n": float(rows)}
    return outputs
