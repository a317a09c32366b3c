"""Tests of Ray workers: answers equal those of one process, and no row is lost or answered twice after a death."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from partita import ConfigError, JobError, Model, PartitaError
from partita.backends.refusals import USE_THIS_PROCESS
from partita.generation import encoded_prompts
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ..json_lines import read_json_lines, write_json_lines
from ..local_ray import local_ray
from ..seeds import session_seed
from .moments import when

pytestmark = pytest.mark.long

SETTINGS = {
    "base_model": "base",
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "generation": {"max_new_tokens": 12},
    "trainer": {"type": "none", "batch_size": 8},
}
POISON = "poison"
"""A word in the vocabulary of the tokenizer for which the model has no embedding."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start Ray on this machine, with resources for two workers while two others are ending."""
    with local_ray() as ray:
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, 300 rows, and the configuration of a job."""
    folder = tmp_path_factory.mktemp("ray")
    rng = random.Random(1)
    words = [f"w{number}" for number in range(60)]
    texts = [" ".join(rng.choices(words, k=rng.randint(2, 30))) for _ in range(300)]
    write_json_lines(folder / "rows.jsonl", [{"text": text, "answer": "w1"} for text in texts])
    base = {"type": "scratch", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    scratch = SETTINGS | {
        "base_model": base | {"context_length": 64, "tokenizer": "word", "vocab_size": 160},
        "data": {"source": str(folder / "words.jsonl")},
    }
    write_json_lines(folder / "words.jsonl", [{"text": f"{text} {POISON}", "answer": "w1"} for text in texts])
    Model(scratch, quiet=True).save(folder / "base")
    teach_word(folder / "base" / "tokenizer.json", POISON)
    (folder / "base" / SUMS).unlink()  # as the error message advises after changes of a saved model
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf8")
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path, address: str) -> Model:
    """Return a model on two workers, shared by several tests."""
    return on_ray(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> bytes:
    """Return the greedy answers of one process."""
    output = folder / "alone.jsonl"
    in_one_process(folder).predict(folder / "rows.jsonl", output=output)
    return output.read_bytes()


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def on_ray(folder: Path, **changes: Any) -> Model:
    return Model(folder / "run.yaml", overrides=["backend.type=ray", "backend.workers=2", *set_words(changes)])


def in_one_process(folder: Path, **changes: Any) -> Model:
    return Model(folder / "run.yaml", overrides=set_words(changes))


def set_words(changes: dict[str, Any]) -> list[str]:
    return [f"{section}.{key}={value}" for section, keys in changes.items() for key, value in keys.items()]


def teach_word(path: Path, word: str) -> None:
    """Add a word to a tokenizer, with an id beyond the embeddings of the model."""
    tokenizer = json.loads(path.read_text("utf8"))
    vocabulary = tokenizer["model"]["vocab"]
    number = max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])]) + 1
    for text in [text for text in vocabulary if word in text]:
        vocabulary[text], number = number, number + 1
    path.write_text(json.dumps(tokenizer), encoding="utf8")


def workers() -> list[psutil.Process]:
    """Return the worker processes started by this one."""
    results = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::Worker"):
                results.append(process)
        except psutil.NoSuchProcess:
            continue
    return results


def answered(output: str) -> int:
    """Return the number of records in the journal of an output."""
    return sum(path.read_bytes().count(b"\n") - 1 for path in Path("runs/run/journal").glob(f"{output}-*.jsonl"))


def recorded(output: str) -> list[int]:
    """Return the rows in the journal of an output."""
    [path] = Path("runs/run/journal").glob(f"{output}-*.jsonl")
    return [json.loads(line)["row"] for line in path.read_text("utf8").splitlines()[1:]]


def test_greedy_answers_equal_those_of_one_process(pool: Model, alone: bytes) -> None:
    result = pool.predict("rows.jsonl", output="greedy.jsonl")

    assert Path("greedy.jsonl").read_bytes() == alone
    assert result.stats.ok == 300
    assert result.stats.slots_in_use > 0, "answered in slots"
    assert sorted(recorded("greedy")) == list(range(300))


def test_prompts_that_begin_alike_share_a_prefill_in_workers(
    pool: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded_prompts, "PREFIX_GROUP_TOKENS", 16)
    rng = random.Random(2)
    words = [f"w{number}" for number in range(60)]
    documents = [" ".join(rng.choices(words, k=24)) for _ in range(4)]
    texts = [f"{document} {' '.join(rng.choices(words, k=3))}" for document in documents for _ in range(12)]
    write_json_lines(folder / "documents.jsonl", [{"text": text, "answer": "w1"} for text in texts])
    result = pool.predict("documents.jsonl", output="shared.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(encoded_prompts, "PREFIX_GROUP_TOKENS", 1000)
        alone = in_one_process(folder).predict("documents.jsonl", output="whole.jsonl")
    assert result.stats.prompt_tokens < 0.6 * alone.stats.prompt_tokens
    assert Path("shared.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_workers_resume_a_journal_of_one_process(pool: Model, folder: Path, alone: bytes) -> None:
    in_one_process(folder).predict("rows.jsonl", output="both.jsonl")
    [journal] = Path("runs/run/journal").glob("both-*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:120]))

    result = pool.predict("rows.jsonl", output="both.jsonl")

    assert result.stats.resumed == 119
    assert Path("both.jsonl").read_bytes() == alone


@pytest.mark.parametrize("rows", [1, 3])
def test_there_may_be_fewer_rows_than_workers(pool: Model, folder: Path, rows: int) -> None:
    write_json_lines(Path("few.jsonl"), [{"text": f"w{number} w7"} for number in range(rows)])
    with Path("few.jsonl").open("a", encoding="utf8") as file:
        file.write("{broken\n")

    pool.predict("few.jsonl", output=f"few-{rows}.jsonl")
    in_one_process(folder).predict("few.jsonl", output=f"few-{rows}-alone.jsonl")

    assert Path(f"few-{rows}.jsonl").read_bytes() == Path(f"few-{rows}-alone.jsonl").read_bytes()
    lines = read_json_lines(Path(f"few-{rows}.jsonl"))
    assert [line["status"] for line in lines] == ["ok"] * rows + ["error"]


def test_an_error_in_a_worker_is_assigned_to_its_row(pool: Model, folder: Path) -> None:
    rows = [{"text": f"w{number} {POISON if number % 5 == 0 else 'w3'} w9"} for number in range(40)]
    write_json_lines(Path("poisoned.jsonl"), rows)

    result = pool.predict("poisoned.jsonl", output="poisoned.out.jsonl")
    in_one_process(folder).predict("poisoned.jsonl", output="poisoned.alone.jsonl")

    assert (result.stats.ok, result.stats.errors) == (32, 8)
    out = read_json_lines(Path("poisoned.out.jsonl"))
    assert all(row["error"] == "IndexError: index out of range in self" for row in out[::5])
    assert Path("poisoned.out.jsonl").read_bytes() == Path("poisoned.alone.jsonl").read_bytes()


@pytest.mark.long
def test_a_killed_worker_loses_no_row(pool: Model, alone: bytes, caplog: pytest.LogCaptureFixture) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    after = rng.randint(1, 200)
    killer = when(lambda: answered("killed") >= after, lambda: rng.choice(workers()).kill())

    result = pool.predict("rows.jsonl", output="killed.jsonl")
    killer.join()

    assert result.stats.ok == 300, f"seed {seed}"
    assert Path("killed.jsonl").read_bytes() == alone, f"seed {seed}"
    assert sorted(recorded("killed")) == list(range(300)), f"seed {seed}"
    assert "is gone; a new one replaces it" in caplog.text


@pytest.mark.long
def test_an_interrupted_job_finishes_the_started_rows(pool: Model, alone: bytes) -> None:
    signals = when(lambda: answered("asked") >= 30, lambda: os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(KeyboardInterrupt):
        pool.predict("rows.jsonl", output="asked.jsonl")
    signals.join()

    kept = answered("asked")
    assert 30 <= kept < 300
    assert pool.predict("rows.jsonl", output="asked.jsonl").stats.resumed == kept
    assert Path("asked.jsonl").read_bytes() == alone


def test_scores_equal_those_of_one_process(pool: Model, folder: Path) -> None:
    assert pool.evaluate("rows.jsonl") == in_one_process(folder).evaluate("rows.jsonl")


@pytest.mark.parametrize("static", [False, True], ids=["slots", "batches"])
def test_sampled_answers_equal_those_of_one_process(folder: Path, address: str, alone: bytes, static: bool) -> None:
    changes = {"generation": {"do_sample": True, "temperature": 0.9, "slots": not static}, "trainer": {"batch_size": 8}}
    names = [f"sampled-{static}.jsonl", f"sampled-{static}-alone.jsonl"]

    on_ray(folder, **changes).predict("rows.jsonl", output=names[0])
    in_one_process(folder, **changes).predict("rows.jsonl", output=names[1])

    assert Path(names[0]).read_bytes() == Path(names[1]).read_bytes()
    assert Path(names[0]).read_bytes() != alone


@pytest.mark.long
def test_workers_that_die_repeatedly_end_the_job(folder: Path, address: str) -> None:
    model = on_ray(folder)
    others = {process.pid for process in workers()}
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.02):
            for process in workers():
                if process.pid not in others:
                    process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(JobError, match="3 workers have died one after the other without answering a row"):
            model.predict("rows.jsonl", output="never.jsonl")
    finally:
        ended.set()
        killer.join()


@pytest.mark.long
def test_a_killed_command_resumes(pool: Model, folder: Path, address: str, alone: bytes) -> None:
    command = [sys.executable, "-m", "partita", "predict", "run.yaml", "--dataset", "rows.jsonl"]
    backend = ["--set", "backend.type=ray", "--set", "backend.workers=2", "--set", f"backend.address={address}"]
    job = subprocess.Popen(
        [*command, "--output", "stopped.jsonl", *backend], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while answered("stopped") < 20:
        assert job.poll() is None, job.communicate()
        time.sleep(0.001)
    job.kill()
    job.communicate(timeout=30)
    assert not Path("stopped.jsonl").exists()

    result = pool.predict("rows.jsonl", output="stopped.jsonl")

    assert 20 <= result.stats.resumed < 300
    assert Path("stopped.jsonl").read_bytes() == alone


def test_missing_ray_is_reported_with_the_command_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError) as error:
        on_ray(folder).predict("rows.jsonl")

    assert str(error.value) == (
        "backend.type: Ray is not installed; run `pip install 'partita[ray]'`, or remove backend"
    )


@pytest.mark.parametrize(
    ("verb", "name", "instead"),
    [
        ("train", "train with trainer: {type: none}", "evaluate scores rows with the workers"),
        (
            "tune",
            "tune",
            f"the workers find their sizes themselves; for those of this process, {USE_THIS_PROCESS}",
        ),
    ],
)
def test_methods_that_workers_do_not_support_are_refused(folder: Path, verb: str, name: str, instead: str) -> None:
    with pytest.raises(PartitaError) as error:
        getattr(on_ray(folder), verb)()

    assert str(error.value) == f"backend: {{type: ray}} does not {name}: {instead}"


def test_a_head_on_workers_predicts_as_in_one_process(folder: Path, address: str) -> None:
    rows = read_json_lines(folder / "rows.jsonl")
    kinds = [row | {"kind": "few" if len(row["text"]) < 50 else "many"} for row in rows]
    write_json_lines(folder / "kinds.jsonl", kinds)
    shape = {"type": "scratch", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {
        "base_model": shape | {"context_length": 64, "tokenizer": "word", "vocab_size": 160},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "kind", "type": "category", "head": "linear"}],
        "data": {"source": str(folder / "kinds.jsonl")},
        "trainer": {"type": "finetune", "max_steps": 10, "batch_size": 8, "eval_batch_size": 8, "learning_rate": 0.01},
    }
    Model(settings, quiet=True).train(run="kinds")
    workers = ["backend.type=ray", "backend.workers=2"]
    models = [Model.load("kinds", overrides=overrides, quiet=True) for overrides in ([], workers)]

    answers = [list(model.predict("kinds.jsonl", f"kinds-{n}.out.jsonl")) for n, model in enumerate(models)]
    assert answers[0] == answers[1]
    assert {row["kind"] for row in answers[1]} == {"few", "many"}
    assert models[0].evaluate("kinds.jsonl") == models[1].evaluate("kinds.jsonl")


BEST_OF = {"best_of": 4, "reward": "rm", "do_sample": True, "temperature": 1.5, "keep_samples": True}


@pytest.fixture(scope="module")
def reward(folder: Path) -> Path:
    """Train a reward model on pairs of the rows' words."""
    rows = read_json_lines(folder / "rows.jsonl")
    pairs = [{"text": row["text"], "chosen": "w1 w2", "rejected": " ".join(row["text"].split()[:2])} for row in rows]
    write_json_lines(folder / "pairs.jsonl", pairs)
    shape = {"type": "scratch", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {
        "base_model": shape | {"context_length": 64, "tokenizer": "word", "vocab_size": 160},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": str(folder / "pairs.jsonl")},
        "trainer": {"type": "reward", "max_steps": 3, "batch_size": 8, "eval_batch_size": 8},
    }
    Model(settings, quiet=True).train(run=folder / "rm")
    return folder / "rm"


@pytest.mark.parametrize("static", [False, True], ids=["slots", "batches"])
def test_the_best_of_several_answers_are_those_of_one_process(
    folder: Path, address: str, reward: Path, static: bool, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"generation": BEST_OF | {"slots": not static}}
    names = [f"best-{static}.jsonl", f"best-{static}-alone.jsonl"]

    with caplog.at_level(logging.INFO):
        result = on_ray(folder, **changes).predict("rows.jsonl", output=names[0])
    message = "a prompt is computed 4 times, once for each answer of best_of: without continuous batching"
    assert (message in caplog.messages) == static
    alone = in_one_process(folder, **changes).predict("rows.jsonl", output=names[1])

    assert Path(names[0]).read_bytes() == Path(names[1]).read_bytes()
    assert len({row["reward"] for row in read_json_lines(Path(names[0]))}) > 200
    if not static:
        # In one process, too, a prompt is computed again for a sample that starts after the others have ended.
        assert result.stats.prompt_tokens < 1.3 * alone.stats.prompt_tokens


def test_a_killed_worker_loses_no_answer_of_best_of(
    folder: Path, address: str, reward: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    changes = {"generation": BEST_OF}
    in_one_process(folder, **changes).predict("rows.jsonl", output="best-alone.jsonl")
    after = rng.randint(1, 200)
    others = {process.pid for process in workers()}  # of the models of other tests

    def kill() -> None:
        rng.choice([process for process in workers() if process.pid not in others]).kill()

    killer = when(lambda: answered("best-killed") >= after, kill)

    on_ray(folder, **changes).predict("rows.jsonl", output="best-killed.jsonl")
    killer.join()

    assert Path("best-killed.jsonl").read_bytes() == Path("best-alone.jsonl").read_bytes(), f"seed {seed}"
    assert sorted(recorded("best-killed")) == list(range(300)), f"seed {seed}"
    assert "is gone; a new one replaces it" in caplog.text
