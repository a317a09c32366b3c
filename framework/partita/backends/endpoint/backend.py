"""The verbs with a model on a server: `backend: {type: endpoint}`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.backends.base import Backend
from partita.backends.context import RunContext
from partita.backends.endpoint.protocol import server_options, written_messages
from partita.backends.endpoint.server import EndpointClient, server_of
from partita.backends.refusals import ENDPOINT
from partita.data.formatting.base import Segment
from partita.data.formatting.chat import ChatTemplate, Rendered
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.retrieval import build_retriever
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.formatting.tool_calls import ToolCallForm
from partita.data.rows import Rows
from partita.data.tokenized import TokenizedDataset
from partita.generation.answer_lengths import default_new_tokens
from partita.generation.oom_backoff import BatchBudget
from partita.generation.prompts import PromptSource
from partita.generation.requests import GenerationSettings
from partita.outputs.decode import Decoder
from partita.pipeline.build import Pipeline
from partita.simulation.build import section_of
from partita.simulation.report import SimulationReport
from partita_schema.dialogues.common_form import is_structured
from partita_schema.errors import PartitaError, RowError
from partita_trainers.base import TrainResult
from partita_trainers.process_group import SINGLE_PROCESS


class Messages(ChatTemplate):
    """A substitute for a chat template that writes a dialogue as `written_messages` does."""

    def __init__(self, *, system: str | None) -> None:
        self.system = system
        self.needs_end = False
        self._before = ""

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        form: ToolCallForm | None = None,
    ) -> str:
        """Return the messages, one per line.

        Args:
            messages: The messages.
            prompt: Not used: the server adds the generation prompt.
            tools: Not sent.
            form: Not used.

        Raises:
            RowError: There are tools, tool calls or reasoning, which are not sent.
        """
        if tools or any(is_structured(message) for message in messages):
            raise RowError(
                "tools, tool calls and reasoning are not sent to a server; load the model in this process, or write "
                "data.dialogue: {ignore_keys: [tools, tool_calls, reasoning_content]}"
            )
        return written_messages(messages)

    def dialogue(
        self, messages: Sequence[Mapping[str, Any]], *, marks: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rendered:
        """Return the messages, one per line."""
        return Rendered(self.apply(messages, prompt=False, tools=tools))

    def answer_segments(self, prompt: str, whole: Rendered, answer: str | Mapping[str, Any]) -> tuple[Segment, ...]:
        """Return the message of the answer."""
        return (Segment(whole.text[len(prompt) :], True),)


class EndpointBackend(Backend):
    """Predicts, evaluates and generates with a model on a server."""

    refusals = ENDPOINT

    def __init__(self, context: RunContext) -> None:
        """Connect to nothing; the server is asked when a verb first needs it."""
        super().__init__(context)
        self._pipeline: Pipeline | None = None
        self._client: EndpointClient | None = None

    @property
    def client(self) -> EndpointClient:
        """The client of the server. Raise PartitaError in a process group."""
        if self._client is None:
            self.context.check_single_process()
            self._client = server_of(self.context.config)
        return self._client

    def pipeline(self) -> Pipeline:
        """Return the pipeline for prediction with the model on the server."""
        if self._pipeline is None:
            self._pipeline = build_endpoint_pipeline(self.context, self.client)
        return self._pipeline

    def concurrency(self, batch_size: int | None) -> int:
        """Return the number of concurrent requests: `batch_size` if set, else backend.concurrency."""
        return batch_size or self.client.backend.concurrency

    def prediction_budget(self, prompts: PromptSource, *, batch_size: int | None) -> BatchBudget:
        """Return the number of concurrent requests as a budget."""
        return BatchBudget(self.concurrency(batch_size))

    def evaluator(self, *, batch_size: int | None) -> "EndpointEvaluator":
        """Return the evaluator, which computes no loss."""
        return EndpointEvaluator(self.with_reward(self.pipeline()), self.concurrency(batch_size))

    def generate(
        self, prompts: str | Sequence[str], *, max_new_tokens: int | None, batch_size: int | None, stream: bool
    ) -> list[str]:
        """Generate text after each prompt; a chat server replies to it.

        Args:
            prompts: One prompt, or several.
            max_new_tokens: Limit of generated tokens per prompt.
            batch_size: Concurrent requests. Default: backend.concurrency.
            stream: Not supported by servers.

        Raises:
            PartitaError: `stream` is set.
            DataError: A prompt is empty.
            ModelError: The server returned no answer.
        """
        self.refuse_best_of("generate")
        pipeline = self.pipeline()
        if stream:
            raise PartitaError("a server's answers come whole; leave stream out, or remove backend: {type: endpoint}")
        settings = GenerationSettings(
            pipeline.generation, BatchBudget(self.concurrency(batch_size)), self.context.config.sampling_seed
        )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        completions = self.client.write(texts, settings, max_new_tokens=max_new_tokens or pipeline.max_new_tokens)
        return [generated.text for generated in completions]

    def train(self, dataset: Any, run: str | Path | None, *, callbacks: Sequence[object] = ()) -> TrainResult:
        """Refuse to train."""
        self.context.refuse_code("training")
        self.refusals.refuse("train")

    def simulate(self, output: Path | None, *, batch_size: int | None, fresh: bool) -> SimulationReport:
        """Refuse to simulate."""
        section_of(self.context.config)
        self.context.refuse_code("simulation")
        self.refusals.refuse("simulate")


class EndpointEvaluator:
    """Scores the answers of a server."""

    process_group = SINGLE_PROCESS

    def __init__(self, pipeline: Pipeline, concurrency: int) -> None:
        self.pipeline = pipeline
        self.concurrency = concurrency

    def loss(self, encoded: TokenizedDataset) -> None:
        """Return None: a server computes no loss."""

    @contextmanager
    def generation_budget(self, rows: Rows) -> Iterator[BatchBudget]:
        """Yield the number of concurrent requests as a budget."""
        yield BatchBudget(self.concurrency)


def build_endpoint_pipeline(context: RunContext, client: EndpointClient) -> Pipeline:
    """Build the pipeline of a run on a server."""
    config, folder = context.config, context.loaded.folder
    labels, training = context.known_labels()
    retriever = build_retriever(config, training=training, folder=folder)
    chat = Messages(system=config.prompt.system) if client.mode == "chat" else None
    formatter = Formatter(config, tokenizer=client.tokenizer, labels=labels, retriever=retriever, chat=chat)
    return Pipeline(
        config=config,
        generator=client,
        folder=folder,
        labels=labels,
        row_tokenizer=RowTokenizer(formatter),
        decoder=Decoder(config, labels=labels),
        generation=server_options(config),
        # A label is never shorter in bytes than in tokens.
        max_new_tokens=default_new_tokens(config, tokenizer=client.tokenizer, labels=labels),
    )
