"""Metrics of a server in the format of Prometheus."""

from collections.abc import Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from partita.serving.engine import ServingEngine

disable_created_metrics()  # type: ignore[no-untyped-call]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PATHS = (
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/predict",
    "/tokenize",
    "/health",
    "/metrics",
)
"""Paths that are counted separately; all others are counted together, so that clients cannot add any."""


class ServerMetrics:
    """The metrics of a server."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: ServingEngine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.responses = Counter(
            "partita_http_responses", "Responses by path and status.", ("path", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "partita_http_seconds", "Time of a response.", ("path",), buckets=SECONDS, registry=self.registry
        )
        self.first_token = Histogram(
            "partita_first_token_seconds",
            "Time from a request to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.answer = Histogram(
            "partita_answer_seconds",
            "Time from a request to the end of its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(EngineCollector(engine))

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count a response."""
        known = path if path in PATHS else "other"
        self.responses.labels(known, str(status)).inc()
        self.seconds.labels(known).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics."""
        firsts, ends = self.engine.counts.take_times()
        for seconds in firsts:
            self.first_token.observe(seconds)
        for seconds in ends:
            self.answer.observe(seconds)
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The counts of an engine."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yield the counts as they are now."""
        counts = self.engine.counts
        for name, text, total in (
            ("requests", "Requests that the engine accepted.", counts.requests),
            ("requests_cancelled", "Requests whose client stopped or closed the connection.", counts.cancelled),
            ("requests_failed", "Requests without an answer.", counts.errors + self.engine.jobs.failed),
            ("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("generated_tokens", "Tokens of answers.", counts.generated_tokens),
            ("decode_steps", "Decoding steps, each of one token for every active request.", counts.steps),
        ):
            yield CounterMetricFamily(f"partita_{name}", text, value=total)
        for name, text, now in (
            ("requests_waiting", "Requests that wait for a slot.", self.engine.waiting),
            ("requests_active", "Requests that are being answered.", self.engine.active),
            ("slots", "Requests that are answered at a time at most.", self.engine.budget.current_limit),
        ):
            yield GaugeMetricFamily(f"partita_{name}", text, value=now)
