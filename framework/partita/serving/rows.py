"""Rows of requests: the same prompts, answers and columns as those of `predict`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np

from partita.data.column_checks import check_columns, check_prompt_columns
from partita.data.rows import RowKeys, Rows, digest
from partita.data.sources.in_memory import list_of
from partita.generation.encoded_prompts import EncodedPrompts
from partita.generation.job import record_of
from partita.generation.predictions import Answer, PredictionColumns, answer_of
from partita.generation.record import PredictionRecord
from partita.generation.requests import RowResult, unanswerable, usable_lengths
from partita.pipeline.fingerprint import model_fingerprint, section_fingerprints
from partita.serving.answers import AsyncEngine
from partita.serving.bodies import MAX_ROWS
from partita.serving.request_queue import AnswerRequest

NAME = "request"
RECORD_KEYS = ("status", "text", "tokens", "finish_reason", "logprob", "scores", "reward", "samples", "error")
"""Keys of the record of an answer."""


class RowService:
    """Answers rows like `predict`."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Choose how rows are answered: as requests of the engine, or as jobs between its steps."""
        self.engine, core = engine, engine.engine
        self.pipeline, self.config = core.row_pipeline, core.row_pipeline.config
        options = self.pipeline.generation
        self.in_slots = (
            core.why_batches is None
            and self.pipeline.sequence is None
            and self.pipeline.best_of is None
            and not options.scores_labels
            and self.config.head_output is None
            and options.beams == 1
        )
        """Whether a row is one request of the engine."""

    def open(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str] | None) -> Rows:
        """Return the rows of a request. Raise DataError if a column is missing."""
        store, columns = list_of(rows)
        named = RowKeys.counted(NAME, len(rows)) if keys is None else NamedKeys(keys)
        opened = Rows(store, columns=columns, keys=named, fingerprint="")
        check_columns(opened, self.config, supervised=False)
        if self.pipeline.best_of is not None:
            check_prompt_columns(opened, self.pipeline.best_of.reward.config)
        return opened

    @cached_property
    def description(self) -> dict[str, Any]:
        """What determines the answers to rows; clients compare it with their file."""
        core = self.engine.engine
        best_of = self.pipeline.best_of
        reward = () if best_of is None else (best_of.reward.fingerprint,)
        labels = {name: list(values) for name, values in core.pipeline.labels.items()}
        return {
            "fingerprint": digest(
                model_fingerprint(core.pipeline, result=core.weights, folder=core.pipeline.folder),
                json.dumps(labels, sort_keys=True),
                *reward,
            ),
            "sections": section_fingerprints(self.config),
            "labels": labels,
            "do_sample": self.pipeline.generation.do_sample,
            "max_new_tokens": self.pipeline.max_new_tokens,
            "context_tokens": core.context_tokens if self.in_slots else None,
            "model_context_tokens": core.lm.context_length,
            "max_rows": MAX_ROWS,
        }

    @cached_property
    def _row_schema(self) -> Any:
        """The schema of a row without answers."""
        return self.pipeline.row_schema

    async def answers(self, rows: Rows) -> list[Answer]:
        """Return the answer to each row. Raise RequestError if the engine does not accept them."""
        if not self.in_slots:
            return list(await self.engine.rows(rows))
        requests = await asyncio.to_thread(self.requests, rows)
        asked = {row: one for row, one in enumerate(requests) if isinstance(one, AnswerRequest)}
        ends = dict(zip(asked, await self.engine.ends(list(asked.values())), strict=True))
        records = [
            one
            if isinstance(one, PredictionRecord)
            else record_of(RowResult(row, ends[row].generated, ends[row].error), key="")
            for row, one in enumerate(requests)
        ]
        return [answer_of(record, self.pipeline.decoder) for record in records]

    def encoded(self, rows: Rows) -> EncodedPrompts:
        """Return the prompts of rows."""
        return EncodedPrompts(rows, self.pipeline.row_tokenizer, self._row_schema)

    def requests(self, rows: Rows) -> list[AnswerRequest | PredictionRecord]:
        """Return the request for each row, or the record of a row for which nothing is generated."""
        prompts = self.encoded(rows)
        context, options = self.engine.engine.context_tokens, self.pipeline.generation
        limit = self.pipeline.max_new_tokens
        errors = unanswerable(prompts, max_new_tokens=limit, context_length=context)
        lengths, new_tokens = usable_lengths(prompts.lengths, limit, context_length=context)
        asked = [row for row in range(len(rows)) if lengths[row]]
        ids = dict(zip(asked, prompts.prompts(asked), strict=True))
        requests: list[AnswerRequest | PredictionRecord] = []
        for row in range(len(rows)):
            if row in ids:
                key = prompts.sampling_key(row) if options.do_sample else b""
                requests.append(AnswerRequest(ids[row], int(new_tokens[row]), options, key=key))
            else:
                skipped = prompts.skipped.get(row)
                status: Any = "error" if skipped is None else "skipped"
                requests.append(PredictionRecord("", row, status, error=skipped or errors[row]))
        return requests

    def predictions(self, rows: Rows, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Return the rows with the columns of predictions."""
        columns = PredictionColumns(rows.columns, config=self.config)
        values = rows.get(range(len(rows)))
        return [
            columns.row(answer, row, key=rows.key(index))
            for index, (answer, row) in enumerate(zip(answers, values, strict=True))
        ]


def record_fields(answer: Answer) -> dict[str, Any]:
    """Return the record of an answer, without the values that are parsed from it."""
    record = asdict(answer.record)
    return {key: record[key] for key in RECORD_KEYS}


class NamedKeys(RowKeys):
    """Keys of rows that a client names."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(keys, np.arange(len(keys)), np.ones(len(keys)))

    def source_key(self, index: int) -> str:
        """Return the key of a row."""
        return str(self.names[self.files[index]])
