"""Scores of answers by a reward model, for what compares answers: best of several samples, or a checker.

A reward model reads texts: it formats them as its own file says, with its own chat template and tokenizer. Those of the
model that wrote the answers may differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from partita.generation.generator import generate_requests
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationRequest
from partita.lm.reward_model import RewardModel
from partita.outputs.registry import output_type
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import LocalPipeline
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.rows import check_rows
from partita_schema.sections.features import TextInput
from partita_schema.sections.outputs.preference import PreferenceOutput


@dataclass(frozen=True)
class AnswerScore:
    """The score of an answer."""

    value: float | None
    """The score; None if there is none."""
    error: str | None = None
    """Why there is no score."""


class AnswerScorer:
    """Scores answers with a reward model in this process."""

    def __init__(self, pipeline: LocalPipeline, tuner: BatchSizeTuner) -> None:
        """Use a loaded reward model.

        Args:
            pipeline: The model, and what formats rows for it.
            tuner: Finds its batch sizes.

        Raises:
            ConfigError: The model is not a reward model.
        """
        config = pipeline.config
        if not config.scores_answers:
            message = "its file trains no reward model; name a run with trainer: {type: reward}"
            raise ConfigError([Problem("trainer.type", message)])
        output = config.output_features[0]
        assert isinstance(output, PreferenceOutput)
        self.pipeline, self.tuner, self._output = pipeline, tuner, output

    @property
    def config(self) -> Config:
        """The file of the reward model."""
        return self.pipeline.config

    @property
    def fingerprint(self) -> str:
        """Hash of the reward model."""
        return self.pipeline.lm.fingerprint

    def scores(self, row: Mapping[str, Any], answers: Sequence[str]) -> list[AnswerScore]:
        """Return the scores of several answers to a row; its prompt is computed once where the model supports that.

        Args:
            row: The row by column, as in the data of the reward model. Answers that it holds are not read.
            answers: The answers.
        """
        lm = self.pipeline.lm
        assert isinstance(lm, RewardModel), "load_model gives a file with this output such a model"
        return self._scores([self._scored_row(row, answer) for answer in answers], requests_of=lm.requests_of)

    def scores_of_dialogues(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[str]
    ) -> list[AnswerScore]:
        """Return the score of an answer to each dialogue.

        Args:
            prompts: Messages with `role` and `content`, of each dialogue up to the answer.
            answers: An answer to each dialogue.

        Raises:
            ConfigError: The reward model reads no dialogues, and a dialogue has more than a single question.
        """
        config = self.pipeline.config
        column = config.dialogue_input.source_column if config.dialogue_input is not None else None
        inputs = [feature for feature in config.input_features if isinstance(feature, TextInput)]
        longest = max((len(messages) for messages in prompts), default=0)
        if column is None and (len(inputs) != 1 or longest > 1):
            names = ", ".join(feature.name for feature in inputs) or "no input"
            raise ConfigError(
                [
                    Problem(
                        "input_features",
                        f"the reward model reads {names}, and the prompts are dialogues of up to "
                        f"{counted(longest, 'message')}; name a reward model with an input of type dialogue",
                    )
                ]
            )
        rows = [
            {inputs[0].source_column: messages[0]["content"]}
            if column is None
            else {column: [dict(one) for one in messages]}
            for messages in prompts
        ]
        asked = [self._scored_row(row, answer) for row, answer in zip(rows, answers, strict=True)]
        return self._scores(asked, requests_of=separate_requests)

    def _scored_row(self, row: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Return a row whose answers are replaced by an answer to score."""
        output, dialogue = self._output, self.pipeline.config.data.dialogue
        hidden = {dialogue.columns.get(name, name) for name in (*output.answer_columns, output.scored_column)}
        return {name: value for name, value in row.items() if name not in hidden} | {output.scored_column: answer}

    def _scores(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        requests_of: Callable[[Sequence[Sequence[int]]], list[GenerationRequest]],
    ) -> list[AnswerScore]:
        """Return the scores of rows with a single answer each.

        Args:
            rows: The rows.
            requests_of: Returns the requests that score the token ids of rows, in their order.
        """
        pipeline = self.pipeline
        checked = check_rows(pipeline.row_schema, rows)
        results = {index: AnswerScore(None, "; ".join(reasons)) for index, reasons in checked.bad.items()}
        keys = [str(index) for index in checked.clean]
        texts = dict[int, Sequence[int]]()
        prompts = pipeline.row_tokenizer.encode_prompts(list(checked.clean.values()), keys)
        for index, prompt in zip(checked.clean, prompts, strict=True):
            if prompt.error is not None:
                results[index] = AnswerScore(None, prompt.error)
            else:
                texts[index] = prompt.input_ids
        values = self._values(requests_of(list(texts.values()))) if texts else []
        results |= {index: AnswerScore(value) for index, value in zip(texts, values, strict=True)}
        return [results[index] for index in range(len(rows))]

    def _values(self, requests: Sequence[GenerationRequest]) -> list[float]:
        """Return the scores of the answers of requests."""
        pipeline, reader = self.pipeline, output_type(self._output).reader(())
        size = self.tuner.generation(np.array([len(request.input_ids) for request in requests]))
        with self.tuner.work("generation", size) as budget:
            settings = GenerationSettings(pipeline.generation, budget, pipeline.config.sampling_seed)
            completions = generate_requests(pipeline.lm, requests, settings)
        return list(chain.from_iterable(reader.read(generated.text) for generated in completions))


def separate_requests(texts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    """Return a request for each text."""
    return [GenerationRequest(text, 0) for text in texts]
