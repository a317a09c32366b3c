"""Scores of answers by a reward model, for what compares answers: best of several samples, or a checker.

A reward model reads texts: it formats them as its own file says, with its own chat template and tokenizer. Those of the
model that wrote the answers may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.generation.generator import generate_requests
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationRequest
from partita.outputs.registry import output_type
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import Pipeline
from partita.tokenizers.load import tokenizer_digest
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

    def __init__(self, pipeline: Pipeline, tuner: BatchSizeTuner) -> None:
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

    def check_tokenizer(self, tokenizer: Any, *, key: str) -> None:
        """Raise ConfigError at a key of the file if token ids of a tokenizer are not those of the reward model.

        Call it only where the texts of the tokens are not known.
        """
        if tokenizer_digest(tokenizer) != tokenizer_digest(self.pipeline.lm.tokenizer):
            message = "the answers are tokens of a tokenizer that differs from the reward model's"
            raise ConfigError([Problem(key, f"{message}; name a reward model with the same tokenizer")])

    def scores(
        self, rows: Sequence[Mapping[str, Any]], answers: Sequence[str], *, batch_size: int | None = None
    ) -> list[AnswerScore]:
        """Return the score of an answer to each row.

        Args:
            rows: Rows by column, as in the data of the reward model. Answers that they hold are not read.
            answers: An answer for each row.
            batch_size: Rows that are computed together. Default: as the file of the reward model says, or measured.
        """
        output, dialogue = self._output, self.pipeline.config.data.dialogue
        hidden = {dialogue.columns.get(name, name) for name in (*output.answer_columns, output.scored_column)}
        asked = [
            {name: value for name, value in row.items() if name not in hidden} | {output.scored_column: answer}
            for row, answer in zip(rows, answers, strict=True)
        ]
        return self._scores(asked, batch_size=batch_size)

    def scores_of_dialogues(
        self,
        prompts: Sequence[Sequence[Mapping[str, Any]]],
        answers: Sequence[str],
        *,
        batch_size: int | None = None,
    ) -> list[AnswerScore]:
        """Return the score of an answer to each dialogue.

        Args:
            prompts: Messages with `role` and `content`, of each dialogue up to the answer.
            answers: An answer to each dialogue.
            batch_size: Rows that are computed together. Default: as the file of the reward model says, or measured.

        Raises:
            ConfigError: The reward model reads no dialogues, and a dialogue has more than a single question.
        """
        config = self.pipeline.config
        if config.dialogue_input is not None:
            rows = [{config.dialogue_input.source_column: [dict(one) for one in messages]} for messages in prompts]
            return self.scores(rows, answers, batch_size=batch_size)
        inputs = [feature for feature in config.input_features if isinstance(feature, TextInput)]
        longest = max((len(messages) for messages in prompts), default=0)
        if len(inputs) != 1 or longest > 1:
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
        rows = [{inputs[0].source_column: messages[0]["content"]} for messages in prompts]
        return self.scores(rows, answers, batch_size=batch_size)

    def _scores(self, rows: Sequence[Mapping[str, Any]], *, batch_size: int | None) -> list[AnswerScore]:
        """Return the scores of rows with a single answer each."""
        pipeline = self.pipeline
        checked = check_rows(pipeline.row_schema, rows)
        results = {index: AnswerScore(None, "; ".join(reasons)) for index, reasons in checked.bad.items()}
        keys = [str(index) for index in checked.clean]
        requests = dict[int, GenerationRequest]()
        prompts = pipeline.encoder.encode_prompts(list(checked.clean.values()), keys)
        for index, prompt in zip(checked.clean, prompts, strict=True):
            if prompt.error is not None:
                results[index] = AnswerScore(None, prompt.error)
            else:
                requests[index] = GenerationRequest(prompt.input_ids, 0, key=str(index).encode())
        reader = output_type(self._output).reader(())
        for index, text in zip(requests, self._texts(list(requests.values()), batch_size=batch_size), strict=True):
            results[index] = AnswerScore(reader.read(text)[0])
        return [results[index] for index in range(len(rows))]

    def _texts(self, requests: Sequence[GenerationRequest], *, batch_size: int | None) -> list[str]:
        """Return what the model answers to requests."""
        if not requests:
            return []
        pipeline = self.pipeline
        lengths = np.array([len(request.input_ids) for request in requests])
        size = self.tuner.generation(lengths, batch_size=batch_size)
        with self.tuner.work("generation", size) as budget:
            settings = GenerationSettings(pipeline.generation, budget, pipeline.sampling_seed)
            return [generated.text for generated in generate_requests(pipeline.lm, requests, settings)]
