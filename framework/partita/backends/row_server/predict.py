"""`Model.predict` with a server of rows. No model is loaded here."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from partita.backends.base import PredictOptions, predict_dataset
from partita.backends.context import RunContext
from partita.backends.refusals import USE_THIS_PROCESS
from partita.backends.row_server.description import RowServer, check_fits, open_server
from partita.backends.row_server.generator import ROWS, RowServerGenerator
from partita.data.rows import digest, row_content
from partita.generation.job import PredictionJob, PredictionPipeline
from partita.generation.oom_backoff import BatchBudget
from partita.generation.prompts import PromptRows, PromptSource
from partita.lm.base import GenerationOptions
from partita.outputs.decode import Decoder
from partita_schema.errors import DataError, PartitaError
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowPrompt:
    """A row whose prompt the server renders."""

    text: str
    """Hash of the values that the prompt is made of."""
    input_ids: Sequence[int] = (0,)
    """A placeholder: the server tokenizes."""
    error: str | None = None
    cut_tokens: int = 0
    """Not known here."""


class RowPrompts:
    """Identifies prompts that the server renders; implements `PromptTokenizer`."""

    def encode_prompts(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[RowPrompt]:
        """Return what identifies the prompt of each row."""
        return [RowPrompt(digest(row_content(row))) for row in rows]


@dataclass(frozen=True, kw_only=True)
class ServedPipeline(PredictionPipeline):
    """The pipeline of a job on a server."""

    generator: RowServerGenerator

    def prediction_job(
        self,
        prompts: PromptSource,
        budget: Callable[[PromptSource], BatchBudget],
        *,
        rows: PromptRows,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> PredictionJob:
        """Return the job that sends rows.

        Args:
            prompts: What identifies the prompts.
            budget: Returns the number of rows in a request.
            rows: The rows.
            process_group: This process.
        """
        job = super().prediction_job(prompts, budget, rows=rows, process_group=process_group)
        return replace(job, generator=replace(self.generator, rows=rows))


def predict_on_server(context: RunContext, dataset: Any, options: PredictOptions, *, url: str) -> "Predictions":
    """Predict every row with the model of a server; see `Model.predict`.

    Args:
        context: The configuration.
        dataset: The rows.
        options: What is written, and which rows are generated again; the batch size is the rows of a request.
        url: Address of the server.

    Raises:
        DataError: No server of partita is there, or it was started with other values of the file.
        ModelError: The server needs a token.
        ServerError: The server cannot be reached, or fails.
    """
    kind = context.config.backend.type
    if kind != "local":
        raise PartitaError(
            f"the server has the model, and backend is {{type: {kind}}}; leave server out, or {USE_THIS_PROCESS}"
        )
    context.check_single_process()
    return predict_dataset(
        context,
        dataset,
        options,
        load=lambda: served_pipeline(context, open_server(url), batch_size=options.batch_size),
        weights=lambda: None,
        budget=lambda prompts: BatchBudget(options.batch_size or ROWS),
    )


def served_pipeline(context: RunContext, server: RowServer, *, batch_size: int | None) -> ServedPipeline:
    """Return the pipeline of a job on a server.

    Args:
        context: The configuration.
        server: The server.
        batch_size: Rows of a request, set by the caller.

    Raises:
        DataError: The server has other values of the file, or a request has too many rows.
    """
    config, described = context.config, server.description
    if batch_size is not None and batch_size > described.max_rows:
        raise DataError(
            f"batch_size is {batch_size:,}, and a request to a server has at most {described.max_rows:,} rows; write "
            "at most that"
        )
    check_fits(server, config, name=str(context.run or context.loaded.file or "this file"))
    limit, context_tokens = described.model_context_tokens, described.context_tokens
    if context_tokens is not None and context_tokens != limit:
        logger.warning(
            "the server allows %s tokens of a prompt and its answer, and the model %s; longer rows differ from "
            "predictions without a server, unless it is started with a larger --context",
            f"{context_tokens:,}",
            "any number" if limit is None else f"{limit:,}",
        )
    return ServedPipeline(
        config=config,
        generator=RowServerGenerator(server, config),
        row_tokenizer=RowPrompts(),
        decoder=Decoder(config, labels=described.labels),
        generation=GenerationOptions({"do_sample": described.do_sample}),
        max_new_tokens=described.max_new_tokens,
    )
