"""Classes that the configurations name as `module:Class`."""

import json
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from partita.data.batching.collate import collate
from partita.data.formatting.base import FormattedText, Segment
from partita_schema.sections.trainer import CustomTrainer
from partita_trainers.base import Batch, TrainerContext, TrainResult
from partita_trainers.callbacks import TrainingState

WORDS = ("one", "two", "three", "red")


class Probe:
    """A trainer that takes a few plain steps and records batches, losses and trained parameters."""

    def __init__(self, section: CustomTrainer) -> None:
        self.steps = int(section.options.get("steps", 3))
        self.learned = int(section.options.get("learned", self.steps))

    def train(self, context: TrainerContext) -> TrainResult:
        assert context.batches is not None
        context.lm.prepare_training(self.steps)
        trained = {name: value for name, value in context.lm.module.named_parameters() if value.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=0.5)
        batches, losses = [], []
        with context.lm.training():
            for number, step in enumerate(islice(context.batches.steps(), self.steps)):
                batches.append([described(batch) for batch in step.micro_batches])
                if number >= self.learned:
                    continue
                torch.manual_seed(number)
                loss = torch.stack([context.lm.loss(context.lm.module, batch) for batch in step.micro_batches]).sum()
                losses.append(loss.item())
                extra = context.lm.auxiliary_loss()
                (loss if extra is None else loss + extra).backward()
                torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
                optimizer.step()
                context.lm.after_step(number + 1)
                optimizer.zero_grad()
        context.lm.save(context.run.folder / "model")
        results = {
            "batches": batches,
            "losses": losses,
            "trained": {name: list(value.shape) for name, value in trained.items()},
            "types": sorted({str(value.dtype) for value in context.lm.module.parameters()}),
        }
        (context.run.folder / "probe.json").write_text(json.dumps(results), encoding="utf8")
        metrics = context.evaluate("validation", generated=False) if "validation" in context.splits else {}
        return TrainResult(run=context.run.folder, metrics={"validation": metrics}, steps=self.steps)


class OtherProbe(Probe):
    """The same trainer with one more step."""

    def __init__(self, section: CustomTrainer) -> None:
        super().__init__(section)
        self.steps += 1


class Noting:
    """A callback that writes a file."""

    def __init__(self, name: str = "noted.txt") -> None:
        self.name = name

    def on_step(self, state: TrainingState) -> None:
        (state.run / self.name).write_text(str(state.step), encoding="utf8")


class NotingElsewhere(Noting):
    """A callback that writes another file."""

    def on_step(self, state: TrainingState) -> None:
        (state.run / "elsewhere.txt").write_text(str(state.step), encoding="utf8")


class NotingCheckpoints:
    """A callback that writes a file for each checkpoint."""

    def on_checkpoint(self, state: TrainingState) -> None:
        (state.run / f"saved-{state.step}.txt").touch()


def described(batch: Batch) -> dict[str, Any]:
    positions = batch.position_ids_BT
    return {
        "keys": batch.keys,
        "ids": batch.input_ids_BT.tolist(),
        "labels": batch.labels_BT.tolist(),
        "positions": positions.tolist() if positions is not None else None,
    }


class Numbered:
    """A source of rows."""

    def __init__(self, count: int = 12, word: str = "ball") -> None:
        self.count, self.word = count, word

    def rows(self) -> Iterator[dict[str, Any]]:
        for number in range(self.count):
            yield {"text": f"{self.word} {WORDS[number % 4]}", "answer": WORDS[number % 3], "split": number % 3}


class Lettered(Numbered):
    """A source of other rows."""

    def rows(self) -> Iterator[dict[str, Any]]:
        for row in super().rows():
            yield row | {"text": "green " + row["text"]}


class Counted(Numbered):
    """A source that records how many of its rows were read."""

    def rows(self) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(super().rows(), start=1):
            Path("read.txt").write_text(str(number), encoding="utf8")
            yield row


class Shout:
    """A formatter that writes rows in capitals."""

    def __init__(self, config: Any, *, tokenizer: Any) -> None:
        self.config = config

    def format_all(
        self, rows: Sequence[dict[str, Any]], keys: Sequence[str], *, supervised: bool
    ) -> list[FormattedText]:
        return [self.shape(row, supervised=supervised) for row in rows]

    def shape(self, row: dict[str, Any], *, supervised: bool) -> FormattedText:
        answer = (Segment(row["answer"], True),) if supervised else ()
        return FormattedText((Segment(self.text(row), False), *answer), begins=True, ends=supervised)

    def text(self, row: dict[str, Any]) -> str:
        return "box " + str(row["text"])


class Worker(Shout):
    """A formatter that writes the kind of its process."""

    def text(self, row: dict[str, Any]) -> str:
        kind = type(multiprocessing.current_process()).__name__
        return {"_MainProcess": "box", "ForkProcess": "red"}.get(kind, "blue") + " " + str(row["text"])


class Slow(Shout):
    """A slow formatter."""

    def text(self, row: dict[str, Any]) -> str:
        time.sleep(0.1)
        return super().text(row)


class Met(Shout):
    """A formatter that records whether the processes have met at the configured port."""

    def __init__(self, config: Any, *, tokenizer: Any) -> None:
        super().__init__(config, tokenizer=tokenizer)
        with socket.socket() as line:
            refused = line.connect_ex(("localhost", int(Path("port.txt").read_text("utf8"))))
        Path("met.txt").write_text("elsewhere" if refused else "PORT", encoding="utf8")


class Backwards:
    """A collator that reverses the tokens."""

    def __call__(self, encoded: Any, planned: Any, pad_token_id: int) -> Batch:
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, input_ids_BT=batch.input_ids_BT.flip(1), labels_BT=batch.labels_BT.flip(1))
