"""A rank of a job: `FOLDER STEP...`, where a step is the name of a function below, with its argument after a colon.

Rank 0 writes the results of the steps to FOLDER/results.json.
"""

import itertools
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import yaml

from partita import Model, PartitaError
from partita.distributed.process_group import DistributedGroup
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.products import fast_linear
from partita.lm.products.product import Product

Settings = dict[str, Any]


def work(folder: Path, steps: list[str]) -> None:
    """Run all steps in order."""
    os.chdir(folder)
    settings = yaml.safe_load(Path("run.yaml").read_text(encoding="utf8"))
    actual: dict[str, Any] = {}
    for step in steps:
        name, _, argument = step.partition(":")
        actual[step] = STEPS[name](settings, argument)
    if os.environ.get("RANK", "0") == "0":
        Path("results.json").write_text(json.dumps(actual), encoding="utf8")


def train(settings: Settings, max_steps: str) -> dict[str, Any]:
    """Train up to a step, resuming the run if it exists."""
    changed = settings | {"trainer": settings["trainer"] | {"max_steps": int(max_steps)}}
    result = Model(changed, quiet=True).train(run="run")
    return {"steps": result.steps, "metrics": result.metrics, "resumed_from": result.resumed_from}


def train_by_onednn(settings: Settings, max_steps: str) -> dict[str, Any]:
    """Train with all products of linear layers by oneDNN."""
    fast_linear.LEAST, fast_linear.LEAST_IN_TRAINING = fast_linear.Least(weights=0), 0
    fast_linear.faster_for_training = lambda layers: {  # type: ignore[assignment]
        tuple(layer.weight.shape): frozenset(Product) for layer in layers
    }
    computed = Counter[str]()
    pays_off = fast_linear.pays_off

    def counted(product: Product, onednn: Collection[Product], *, multiplications: int) -> bool:
        by_onednn = pays_off(product, onednn, multiplications=multiplications)
        computed[product] += by_onednn
        return by_onednn

    fast_linear.pays_off = counted
    return train(settings, max_steps) | {"computed": dict(+computed)}


def train_out_of_memory(settings: Settings, call: str) -> None:
    """Train until rank 1 runs out of memory in forward pass number `call`; write the error of each rank to a file."""
    rank, calls = os.environ["RANK"], itertools.count(1)
    loss = HuggingFaceModel.loss

    def failing(self: HuggingFaceModel, *given: Any) -> Any:
        if rank == "1" and next(calls) == int(call):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, *given)

    HuggingFaceModel.loss = failing  # type: ignore[method-assign]
    try:
        Model(settings, quiet=True).train(run="run")
    except PartitaError as error:
        Path(f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf8")
        raise


class StopAtTwo:
    """Asks to stop after step 2, and counts its calls on each rank."""

    def on_step(self, state: Any) -> None:
        with Path(f"steps-{os.environ['RANK']}.txt").open("a", encoding="utf8") as file:
            file.write(f"{state.step} ")
        if state.step == 2:
            state.stop("enough")


class FailAtTwo:
    """Fails after step 2."""

    def on_step(self, state: Any) -> None:
        if state.step == 2:
            raise RuntimeError("no more")


def train_with_callbacks(settings: Settings, which: str) -> dict[str, Any]:
    """Train with a callback that every rank passes; write the error of each rank to a file."""
    callback = {"stop": StopAtTwo, "fail": FailAtTwo}[which]()
    try:
        result = Model(settings, quiet=True).train(run="run", callbacks=[callback])
    except PartitaError as error:
        Path(f"error-{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf8")
        raise
    return {"steps": result.steps, "stopped_early": result.stopped_early}


def predict(settings: Settings, name: str) -> dict[str, Any]:
    """Predict with the trained model."""
    model = Model.load("run", quiet=True)
    predictions = model.predict(f"{name}.jsonl", output=f"{name}.out.jsonl", batch_size=4)
    assert len(predictions) == predictions.stats.rows
    return {"rows": predictions.stats.rows, "resumed": predictions.stats.resumed}


def evaluate(settings: Settings, name: str) -> dict[str, Any]:
    """Evaluate the trained model."""
    return Model.load("run", quiet=True).evaluate(f"{name}.jsonl")


def predict_zero_shot(settings: Settings, name: str) -> list[str]:
    """Predict with the untrained model."""
    return [row["colour"] for row in Model(settings, quiet=True).predict(f"{name}.jsonl", batch_size=4, fresh=True)]


def evaluate_zero_shot(settings: Settings, name: str) -> dict[str, Any]:
    """Evaluate the untrained model."""
    return Model(settings, quiet=True).evaluate(f"{name}.jsonl", batch_size=3)


def tune(settings: Settings, name: str) -> dict[str, Any]:
    """Search batch sizes; write those of every rank to a file."""
    sizes = Model.load("run", quiet=True, overrides=["trainer.eval_batch_size=auto"]).tune(f"{name}.jsonl", fresh=True)
    Path(f"sizes-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(sizes.records()), encoding="utf8")
    return sizes.records()


def simulate(settings: Settings, output: str) -> dict[str, Any]:
    """Run a simulation that writes its transcripts into a folder.

    The report of each rank is written to a file, with the number of collective calls by their description.
    """
    meetings: Counter[str] = Counter()
    gather = DistributedGroup.all_gather_object

    def counted(self: DistributedGroup, mine: Any, about: str) -> list[Any]:
        meetings[about] += 1
        return gather(self, mine, about)

    DistributedGroup.all_gather_object = counted  # type: ignore[method-assign,assignment]
    report = Model(Path("run.yaml"), quiet=True).simulate(output)
    result = {"report": report.record(), "meetings": meetings}
    Path(f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result), encoding="utf8")
    return report.record()


STEPS: dict[str, Callable[[Settings, str], Any]] = {
    "train": train,
    "train_by_onednn": train_by_onednn,
    "train_out_of_memory": train_out_of_memory,
    "train_with_callbacks": train_with_callbacks,
    "predict": predict,
    "evaluate": evaluate,
    "predict_zero_shot": predict_zero_shot,
    "evaluate_zero_shot": evaluate_zero_shot,
    "tune": tune,
    "simulate": simulate,
}

if __name__ == "__main__":
    try:
        work(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a normal exit takes each rank half a second
