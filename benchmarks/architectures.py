"""How each architecture of the installed transformers is batched, compared with single rows.

A tiny random model of each is saved and loaded. Greedy answers to short and long prompts, to prompts of one token and
of none, and to prompts with a shared prefix are generated in slots and in batches, and compared with those of
transformers' `generate` for each row alone. The comparison is repeated with windows shorter than the rows. Every second
model has a generation_config.json with penalties and forbidden tokens, which both apply. Writes
docs/guides/architectures.md; each part writes its own table.
"""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, Limit, Result, main
from tiny_models import BOS, CONTEXT, LEFT_OUT, WINDOWS, encoder_decoder_kinds, kinds, write_tiny_model

from partita_schema.errors import ModelError

PAGE = ROOT / "docs" / "guides" / "architectures.md"
SHORT_WINDOW = 16
TIE = 1e-3
"""Difference of the two best scores, relative to their spread, below which either token may be chosen."""
QUICK = ("llama", "gpt2", "mamba", "rwkv", "recurrent_gemma", "mixtral", "mistral", "bart", "xlnet")
WAYS = {
    "slots": "slots",
    "padded": "padded batches",
    "equal lengths": "batches of equal length",
    "one row": "one row at a time",
    "not supported": "not supported",
}


@dataclass
class Measured:
    """The result for an architecture."""

    kind: str
    slots: str | None = None
    """Why it is not answered in slots, or None."""
    batches: str = "padded"
    """Which rows share a batch without slots."""
    batches_reason: str | None = None
    compared: int = 0
    """Answers that were compared."""
    differing: list[str] = field(default_factory=list)
    """Answers that differ from those of the row alone."""
    failure: str | None = None
    """The error of transformers for single rows."""

    @property
    def way(self) -> str:
        """Return how rows without special options are batched."""
        if self.failure is not None:
            return "not supported"
        return "slots" if self.slots is None else self.batches

    @property
    def reason(self) -> str:
        """Return why rows are not answered in slots, or not in padded batches."""
        if self.failure is not None:
            return self.failure
        return "; ".join(filter(None, (self.slots, self.batches_reason)))


class Prompts:
    """Prompts in the format of the engine."""

    def __init__(self, ids: Sequence[list[int]]) -> None:
        self.ids = list(ids)
        self.lengths = np.array([len(prompt) for prompt in ids], dtype=np.int32)
        self.keys = np.arange(2 * len(ids), dtype=np.uint64).reshape(len(ids), 2).view(np.uint8)
        self.prefix: list[int] = []
        self.digests = self.keys.view("V16")[:, 0]
        self.prefix_groups = None
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        return [self.ids[row] for row in rows]


def prompts() -> list[list[int]]:
    """Return prompts: short, long, one token, none, of equal length, and with a shared prefix."""
    draw = np.random.default_rng(0)
    lengths = (1, 50, 2, 17, 9, 30, 5, 9, 20)
    random = [draw.integers(3, 250, length).tolist() for length in lengths]
    common = draw.integers(3, 250, 12).tolist()
    return [*random, [], [BOS], *([*common, *draw.integers(3, 250, length).tolist()] for length in (1, 6, 15))]


def measure(kind: str, folder: Path) -> Measured:
    """Save, load and test a tiny model."""
    measured = Measured(kind)
    if kind in LEFT_OUT:
        measured.failure = LEFT_OUT[kind]
        return measured
    try:
        lm = saved_and_loaded(kind, folder / "plain")
    except ModelError as refusal:
        measured.failure = str(refusal).split(": ", 2)[-1]
        return measured
    compare(lm, measured, engines=("slots", "static"))
    if measured.failure is None and any(getattr(lm.base.config.get_text_config(), name, None) for name in WINDOWS):
        lm = saved_and_loaded(kind, folder / "windows", window=SHORT_WINDOW)
        compare(lm, measured, engines=("static",))
    return measured


def saved_and_loaded(kind: str, folder: Path, *, window: int | None = None, two_sided: bool = False) -> Any:
    """Save a tiny model; return it loaded by partita."""
    from partita.lm.load_model import load_model
    from partita.tokenizers.load import load_tokenizer
    from partita_schema.config import Config

    features = {
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "none"},
    }
    scratch = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": CONTEXT}
    tokenizer = load_tokenizer(
        Config.model_validate({"base_model": scratch, **features}), folder=folder, texts=list, saved=None
    )
    write_tiny_model(kind, folder, tokenizer=tokenizer, window=window, two_sided=two_sided)
    config = Config.model_validate({"base_model": str(folder), **features})
    return load_model(config, folder=folder, tokenizer=tokenizer, saved=None, trainable=False)


def compare(lm: Any, measured: Measured, *, engines: Sequence[str]) -> None:
    """Compare answers of the engines with those of `generate` for each row alone."""
    from partita.generation.generator import LocalGenerator
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationJob, GenerationSettings
    from partita.lm.batch_generation.generation import generation_options

    options = generation_options(lm.config, tokenizer=lm.tokenizer, checkpoint=lm.checkpoint_generation)
    asked = prompts()
    try:
        alone = [answer_alone(lm, prompt) if prompt else None for prompt in asked]
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError) as failure:
        measured.failure = f"transformers' generate fails: {' '.join(str(failure).split())}"
        return
    support = lm.batch_support(options, tokens=CONTEXT)
    if measured.batches_reason is None:
        measured.batches, measured.batches_reason = support.rows, support.reason
    for engine in engines:
        if engine == "slots":
            measured.slots = lm.why_no_slots(options, tokens=CONTEXT)
            if measured.slots is not None:
                continue
        settings = GenerationSettings(options, BatchBudget(4), 0)
        job = GenerationJob(Prompts(asked), settings, engine, max_new_tokens=8)  # type: ignore[arg-type]
        found = LocalGenerator(lm).generate(job, done=np.zeros(len(asked), dtype=np.bool_))
        answers = {result.row: result for batch in found for result in batch.results}
        for row, wanted in enumerate(alone):
            if wanted is None:
                assert row not in answers
                continue
            measured.compared += 1
            if not wanted.same(answers[row].generated):
                generated = answers[row].generated
                answer = generated.ids if generated is not None else answers[row].error
                measured.differing.append(f"{engine}, {len(asked[row])} tokens: {answer}, alone {wanted.ids}")


@dataclass(frozen=True)
class Alone:
    """A greedy answer of transformers to one row."""

    ids: tuple[int, ...]
    margins: tuple[float, ...]
    """Margin of each token's score over the second best, relative to the spread of the scores."""

    def same(self, generated: Any) -> bool:
        """Return whether an answer equals this one, up to a near tie of two tokens."""
        if generated is None:
            return False
        pairs = zip(self.ids, generated.ids, strict=False)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(generated.ids)))
        return generated.ids == self.ids or (first < len(self.margins) and self.margins[first] < TIE)


def answer_alone(lm: Any, prompt: list[int]) -> Alone:
    """Answer with transformers' `generate`, without padding."""
    import torch

    lm.forget_rows()
    ids = torch.tensor([prompt])
    found = lm.base.generate(
        ids,
        generation_config=lm.original_generation_config,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    margins = []
    for scores in found.scores:
        allowed = scores[0].float()[scores[0].isfinite()]
        if len(allowed) == 1:  # a forced token
            margins.append(float("inf"))
            continue
        first, second = allowed.topk(2).values.tolist()
        margins.append((first - second) / float(allowed.std()))
    new = found.sequences[0, 1 if lm.base.config.is_encoder_decoder else len(prompt) :].tolist()
    end = lm.tokenizer.eos_token_id
    return Alone(tuple(new[: new.index(end)] if end in new else new), tuple(margins))


def page(found: Sequence[Measured], version: str) -> str:
    """Return docs/guides/architectures.md."""
    counts = {way: sum(one.way == way for one in found) for way in WAYS}
    summary = ", ".join(f"{count} {WAYS[way]}" for way, count in counts.items() if count)
    table = PAGE_HEAD.format(version=version, number=len(found), summary=summary) + "\n".join(map(line, found)) + "\n"
    return table + "".join(PAGE.read_text(encoding="utf8").partition(SECTION)[1:])


def line(one: Measured) -> str:
    """Return the line of an architecture in the table."""
    without = WAYS[one.batches] if one.failure is None else ""
    return f"| `{one.kind}` | {WAYS[one.way]} | {without} | {one.reason} |"


PAGE_HEAD = """# Architectures

Generated by `python benchmarks/architectures.py`; do not edit.

Greedy answers of a batch equal those that transformers' `generate` gives to each row alone. Not every architecture can
process rows of different lengths together. partita therefore tests the model before the first answer, and the log
reports the result:

- *slots*: [continuous batching](prediction.md#how-rows-are-answered), one KV-cache slot per row, without padding.
- *padded batches*: rows are sorted by length and padded on the left.
- *batches of equal length*: padding would change the answers, so a batch only contains prompts with the same number of
  tokens.
- *one row at a time*: other rows in the batch would change the answers.

The table lists each causal architecture of transformers {version}, tested with a tiny random model. *Without slots* is
the method where slots are not possible: with beams, with `generation: {{slots: false}}`, and for rows longer than a
window. {number} architectures:
{summary}.

| architecture | answered in | without slots | reason |
| --- | --- | --- | --- |
"""


# Encoder-decoders

SECTION = "\n## Encoder-decoders\n"
SECTION_HEAD = """
The table lists each [encoder-decoder](encoder-decoder.md) of transformers {version} that reads only text, tested in the
same way. *Loss* is the largest difference between partita's loss of a row in a batch and that of transformers for the
row alone.

| architecture | answered in | loss | reason |
| --- | --- | --- | --- |
"""


def measure_two_sided(kind: str, folder: Path) -> tuple[Measured, float | None]:
    """Save, load and test a tiny encoder-decoder; return also the largest relative difference of a row's loss.

    It is None if there is none: the model cannot be loaded, or its training is refused.
    """
    measured = Measured(kind)
    try:
        lm = saved_and_loaded(kind, folder / "plain", two_sided=True)
    except ModelError as refusal:
        measured.failure = str(refusal).split(": ", 2)[-1]
        return measured, None
    compare(lm, measured, engines=("slots", "static"))
    if measured.failure is not None:
        return measured, None
    try:
        lm.check_loss()
    except ModelError as refusal:
        measured.batches_reason = "training is refused: " + str(refusal).split(": ", 1)[-1]
        return measured, None
    return measured, loss_difference(lm)


def loss_difference(lm: Any) -> float:
    """Return the largest relative difference between the loss of a row in a batch and of the row alone."""
    import torch

    from partita_trainers.base import Batch

    borders, lengths = (12, 3, 13, 30), (20, 9, 15, 44)
    ids = torch.randint(3, 250, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    for row, (border, length) in enumerate(zip(borders, lengths, strict=True)):
        labels[row, border:length] = ids[row, border:length]
    batch = Batch(ids, labels, torch.tensor(lengths), tuple(map(str, range(len(lengths)))))
    worst = 0.0
    with torch.no_grad(), lm.evaluating():
        tokens = -lm.token_log_probs(lm.module, batch)
        for row, (border, length) in enumerate(zip(borders, lengths, strict=True)):
            prompt, answer = ids[row : row + 1, :border], ids[row : row + 1, border:length]
            # As transformers' data collator does: FSMT does not make the decoder's inputs from labels itself.
            inputs = {"input_ids": prompt, "decoder_input_ids": lm.decoder_inputs(answer)}
            alone = float(lm.base(**inputs, attention_mask=torch.ones_like(prompt), labels=answer).loss)
            worst = max(worst, abs(float(tokens[batch.loss_token_rows == row].mean()) - alone) / alone)
    return worst


def two_sided_line(one: Measured, difference: float | None) -> str:
    """Return the line of an encoder-decoder in the table."""
    loss = "" if difference is None else f"{difference:.0e}"
    return f"| `{one.kind}` | {WAYS[one.way]} | {loss} | {one.batches_reason or one.failure or ''} |"


def encoder_decoders(folder: Path, quick: bool) -> Result:
    """How each encoder-decoder that reads only text is batched, and its loss, compared with single rows."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = []
    for kind in ("bart", "t5") if quick else encoder_decoder_kinds():
        found.append(measure_two_sided(kind, folder / kind))
        one, difference = found[-1]
        print(kind, one.way, difference, *one.differing, sep="; ", flush=True)
        shutil.rmtree(folder / kind, ignore_errors=True)
    if not quick:
        before = PAGE.read_text(encoding="utf8").partition(SECTION)[0]
        head = SECTION + SECTION_HEAD.format(version=transformers.__version__)
        PAGE.write_text(before + head + "\n".join(two_sided_line(*pair) for pair in found) + "\n", encoding="utf8")
    rows = [
        {
            "answered in": name,
            "architectures": sum(one.way == way for one, _ in found),
            "answers compared": sum(one.compared for one, _ in found if one.way == way),
            "differing": sum(len(one.differing) for one, _ in found if one.way == way),
            "largest difference of a loss": max((error or 0.0 for one, error in found if one.way == way), default=0.0),
        }
        for way, name in WAYS.items()
        if any(one.way == way for one, _ in found)
    ]
    differing = sum(len(one.differing) for one, _ in found)
    losses = max(error for _, error in found if error is not None)
    return rows, [
        Limit("answers that differ from those of the row alone", differing, 0, "max"),
        Limit("largest relative difference of a loss", losses, 1e-4, "max"),
    ]


# Causal models


def causal(folder: Path, quick: bool) -> Result:
    """How each causal architecture is batched, with greedy answers compared with those of single rows."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = []
    for kind in QUICK if quick else kinds():
        found.append(measure(kind, folder / kind))
        print(kind, found[-1].way, *found[-1].differing, sep="; ", flush=True)
        shutil.rmtree(folder / kind, ignore_errors=True)
    if not quick:
        PAGE.write_text(page(found, transformers.__version__), encoding="utf8")
    rows = [
        {
            "answered in": name,
            "architectures": sum(one.way == way for one in found),
            "answers compared": sum(one.compared for one in found if one.way == way),
            "differing": sum(len(one.differing) for one in found if one.way == way),
        }
        for way, name in WAYS.items()
    ]
    differing = sum(len(one.differing) for one in found)
    return rows, [Limit("answers that differ from those of the row alone", differing, 0, "max")]


if __name__ == "__main__":
    main(causal, encoder_decoders)
