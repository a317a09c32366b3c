"""Run directories as partita writes them, without a training."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.data.episode import Episode
from partita.report.transcript_page import write_page
from partita.runs.manifest import versions
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path
from partita.simulation.report import SimulationReport, outcomes_of
from partita.simulation.run import SimulationResult
from partita_schema.common.checksums import sealed
from partita_schema.load import load_config
from partita_schema.records import FORMAT_VERSION

from ..recorded_results import write_row_results, write_transcript

Results = Sequence[RecordedRow]
LABELS = ("billing", "shipping", "returns")


def write_run(
    folder: Path,
    *,
    outputs: Mapping[str, str] | None = None,
    results: Results = (),
    base: Results | None = None,
    steps: int = 40,
    split: str = "test",
    config: Mapping[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """Write a run directory.

    Args:
        folder: The run directory.
        outputs: Types of the outputs, by name.
        results: Results of the rows of a split.
        base: Those of the base model.
        steps: Number of logged steps.
        split: The split.
        config: Keys of the configuration.
        manifest: Further entries of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = config_of(outputs or {}, **(config or {}))
    entries = {
        "format_version": FORMAT_VERSION,
        "status": "done",
        "created": "2026-11-23T07:00:00+00:00",
        "versions": versions(),
        "device": "cpu",
        "seed": 42,
        "config": load_config(settings).config.model_dump(mode="json"),
        "steps": steps,
        "data": {"training": {"rows": 320, "fingerprint": "3ecb9861e791be39"}},
    }
    (folder / "manifest.json").write_text(json.dumps(sealed(entries | manifest)), encoding="utf8")
    (folder / "config.yaml").write_text(json.dumps(settings, indent=1), encoding="utf8")
    (folder / "log.jsonl").write_text("".join(log_line(step) for step in range(1, steps + 1)), encoding="utf8")
    for rows, model in ((results, "result"), (base, "base")):
        if rows:
            header = EvaluationHeader(split, model, "f00d", steps, outputs or {})  # type: ignore[arg-type]
            write_row_results(evaluation_path(folder, split, base=model == "base"), header, rows)
    return folder


def config_of(outputs: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """Return a configuration with these outputs."""
    options: dict[str, dict[str, Any]] = {
        "category": {"decoder": {"labels": list(LABELS)}},
        "set": {"decoder": {"labels": list(LABELS)}},
    }
    heads = {"type": "scratch", "architecture": "distilbert", "size": "nano", "tokenizer": "word"}
    has_head = any(kind in ("tags", "score", "embedding") for kind in outputs.values())
    inputs = [{"name": "message", "type": "text"}]
    if "score" in outputs.values():
        inputs.append({"name": "passage", "type": "text"})
    features = [{"name": name, "type": kind, **options.get(kind, {})} for name, kind in outputs.items()]
    plain = {"output_features": [{"name": "text", "type": "text"}]}
    answers = {"input_features": inputs, "output_features": features}
    return (
        {"base_model": heads if has_head else {"type": "scratch", "size": "nano"}, "trainer": {"type": "finetune"}}
        | (answers if outputs else plain)
        | changes
    )


def log_line(step: int) -> str:
    """Return a line of log.jsonl."""
    record = {
        "step": step,
        "epoch": step / 20,
        "loss": 6 / step**0.5,
        "learning_rate": 1e-4,
        "gradient_norm": 2.0,
        "rows": 16,
        "loss_tokens": 32,
        "tokens": 419,
        "padding": 0.1,
        "seconds": 0.08,
        "batch_hash": "9f1fb5fc0290e475",
    }
    return json.dumps(record) + "\n"


def rows_of(
    count: int, output: Callable[[random.Random], Mapping[str, OutputResult]], *, seed: int = 1
) -> list[RecordedRow]:
    """Return rows with the outputs that a function draws."""
    rng = random.Random(seed)
    return [
        RecordedRow(f"row-{index}", f"Message {index}: where is it?", "an answer", rng.random(), 2, output(rng))
        for index in range(count)
    ]


def category(share: float, *, labels: Sequence[str] = LABELS, name: str = "team") -> Callable[[random.Random], Any]:
    """Return a function that draws a category that is right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = rng.choice(labels)
        value = reference if rng.random() < share else rng.choice(labels)
        scores = {label: math.log(0.8 if label == value else 0.2 / (len(labels) - 1)) for label in labels}
        return {name: OutputResult(reference, value, reference == value, scores)}

    return draw


def number(error: float, *, name: str = "price") -> Callable[[random.Random], Any]:
    """Return a function that draws a number with an error of this size."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = rng.uniform(0, 100)
        return {name: OutputResult(reference, reference + rng.gauss(0, error), False)}

    return draw


def label_set(share: float, *, name: str = "topics") -> Callable[[random.Random], Any]:
    """Return a function that draws a set of labels that is right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = [label for label in LABELS if rng.random() < 0.5]
        value = reference if rng.random() < share else [LABELS[0]]
        return {name: OutputResult(reference, value, reference == value)}

    return draw


def tags(share: float, *, name: str = "people") -> Callable[[random.Random], Any]:
    """Return a function that draws tags of words that are right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = ["O", "B-PER", "I-PER", "O"]
        value = reference if rng.random() < share else ["O", "B-PER", "O", "O"]
        return {name: OutputResult(reference, value, reference == value)}

    return draw


def score(share: float, *, name: str = "fit") -> Callable[[random.Random], Any]:
    """Return a function that draws a score of one of 40 queries that is near the reference in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = float(rng.random() < 0.4)
        near = abs(reference - rng.uniform(0, 0.4))
        value = near if rng.random() < share else rng.random()
        return {name: OutputResult(reference, value, False, of_row={"query": f"query {rng.randrange(40)}"})}

    return draw


def text(share: float, *, name: str = "summary") -> Callable[[random.Random], Any]:
    """Return a function that draws a text that is right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        value = "the parcel is late" if rng.random() < share else "the parcel was lost"
        return {name: OutputResult("the parcel is late", value, value == "the parcel is late")}

    return draw


def json_value(share: float, *, name: str = "booking") -> Callable[[random.Random], Any]:
    """Return a function that draws a JSON object that is right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        reference = {"guests": rng.randint(1, 8), "day": "friday"}
        value: Any = reference if rng.random() < share else rng.choice([None, {"guests": 2, "day": "monday"}])
        return {name: OutputResult(reference, value, reference == value)}

    return draw


def dialogue(key: str, *, answer: str = "two", gold: str | None = "two", status: Any = "done", **rest: Any) -> Episode:
    """Return a dialogue of one question; `rest` are attributes of it."""
    result = Episode(key, key, {}, 1)
    result.observe([{"role": "user", "content": "how many?"}], gold=gold)
    result.act(answer, (1,))
    result.end(status, rest.pop("reason", None))
    for name, value in rest.items():
        setattr(result, name, value)
    return result


def write_dialogues(folder: Path, **histories: Sequence[Episode]) -> None:
    """Write the transcripts of a run with their page, as `partita simulate` does."""
    transcripts = folder / "transcripts"
    for history, episodes in histories.items():
        write_transcript(transcripts / f"{history}.jsonl", (episode.line() for episode in episodes))
    outcomes = {history: outcomes_of(episodes, repeats=1) for history, episodes in histories.items()}
    write_page(SimulationResult(SimulationReport(outcomes, str(transcripts)), histories))


def joined(*draws: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    """Return a function that draws several outputs."""
    return lambda rng: {name: value for draw in draws for name, value in draw(rng).items()}


def pair(share: float, *, name: str = "reply", answered: bool = True) -> Callable[[random.Random], Any]:
    """Return a function that draws a pair of answers, of which the chosen one is preferred in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        margin = rng.random() * (1 if rng.random() < share else -1)
        chosen, rejected = rng.gauss(-1, 0.1), rng.gauss(-2, 0.1)
        of_row: dict[str, Any] = {"rewards/chosen": chosen, "rewards/rejected": chosen - margin}
        of_row |= {"logps/chosen": 10 * chosen, "logps/rejected": 10 * rejected, "rejected": "it was lost"}
        if not answered:
            return {name: OutputResult("it is late", None, of_row=of_row)}
        value = "it is late" if rng.random() < share else "it was"
        of_row |= {"rouge_1": 0.5, "rouge_2": 0.5, "rouge_l": 0.5, "bleu": [2, 1, 0, 0, 3, 2, 1, 0, 3, 3]}
        return {name: OutputResult("it is late", value, value == "it is late", of_row=of_row)}

    return draw


def scores(share: float, *, name: str = "reply") -> Callable[[random.Random], Any]:
    """Return a function that draws the scores of a pair by a reward model, which prefers the chosen answer in a share
    of the rows."""
    draw_pair = pair(share, name=name, answered=False)

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        output = draw_pair(rng)[name]
        of_row = {key: value for key, value in output.of_row.items() if not key.startswith("logps/")}
        return {name: replace(output, of_row=of_row)}

    return draw


def labelled(share: float, *, name: str = "reply") -> Callable[[random.Random], Any]:
    """Return a function that draws a labelled answer, whose reward is right in a share of the rows."""

    def draw(rng: random.Random) -> dict[str, OutputResult]:
        is_good = rng.random() < 0.5
        reward = rng.random() * (1 if is_good == (rng.random() < share) else -1)
        of_row: dict[str, Any] = {"reward": reward, "logp": rng.gauss(-10, 1), "is_good": int(is_good)}
        if not is_good:
            return {name: OutputResult("it was lost", None, of_row=of_row)}
        value = "it is late" if rng.random() < share else "it was"
        of_row |= {"rouge_1": 0.5, "rouge_2": 0.5, "rouge_l": 0.5, "bleu": [2, 1, 0, 0, 3, 2, 1, 0, 3, 3]}
        return {name: OutputResult("it is late", value, value == "it is late", of_row=of_row)}

    return draw


def preference_log(steps: int, *, names: Sequence[str]) -> str:
    """Return the lines of log.jsonl of a trainer on preferences with these metrics."""
    lines = (json.loads(log_line(step)) | dict.fromkeys(names, 1 - 2 / step) for step in range(1, steps + 1))
    return "".join(json.dumps(line) + "\n" for line in lines)


PAIR_METRICS = ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")
KTO_METRICS = ("rewards/margins", "logps/chosen", "logps/rejected", "kl")


def write_preference_run(
    folder: Path,
    *,
    results: Results,
    base: Results | None = None,
    loss: str = "dpo",
    config: Mapping[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """Write the directory of a run of the trainer preference with this loss, or of the trainer kto.

    Args:
        folder: The run directory.
        results: Results of the test rows.
        base: Those of the base model.
        loss: dpo, orpo, simpo or kto.
        config: Further keys of the configuration.
        manifest: Further entries of the manifest.
    """
    is_kto = loss == "kto"
    names = KTO_METRICS if is_kto else PAIR_METRICS
    output = {"name": "reply"} | ({"type": "text", "label": "good"} if is_kto else {"type": "preference"})
    settings = {
        "base_model": "org/model",
        "output_features": [output],
        "trainer": {"type": "kto"} if is_kto else {"type": "preference", "loss": {"type": loss}},
        **(config or {}),
    }
    evaluations = [
        {"step": step, "split": "validation", "loss": 0.6} | dict.fromkeys(names, 1 - 3 / step)
        for step in (10, 20, 30, 40)
    ]
    entries = {"evaluations": evaluations} | manifest
    kind = {"reply": str(output["type"])}
    run = write_run(folder, outputs=kind, results=results, base=base, config=settings, **entries)
    (run / "log.jsonl").write_text(preference_log(40, names=names), encoding="utf8")
    return run
