"""Tests that `predict` with a server writes the same file as without."""

import datetime
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import pandas as pd
import pytest

from partita import DataError, Model, ModelError, PartitaError, ResumeError, ServerError
from partita.backends.endpoint import request_sender
from partita.backends.endpoint.protocol import AnswerError
from partita.backends.endpoint.receiving import Response
from partita.backends.endpoint.redaction import Redaction
from partita.backends.row_server import generator
from partita.backends.row_server.description import RowServer, why_refused
from partita.backends.row_server.sender import RowSender
from partita.data.sources.sources import open_rows
from partita.serving.engine import ServingEngine
from partita.serving.limits import ServerLimits
from partita.serving.request_queue import AnswerEnd, AnswerRequest, OnEvent
from partita.serving.row_jobs import RowJob
from partita_schema.sections.backend import EndpointBackendConfig

from ...forks import COMMAND, Forks
from .conftest import CONFIG, RunningServer, make_model, running, wait_for

ROWS = [{"question": f"{number} red balls and {number % 7} cats"} for number in range(40)]
FEW = ROWS[:24]
LABELS = {"type": "category", "decoder": {"labels": ["red", "blue", "green"]}}


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows), encoding="utf8"
    )
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTITA_TOKEN", raising=False)
    monkeypatch.setattr(request_sender, "FIRST_WAIT", 0.02)
    return tmp_path


def client_of(served: Model) -> Model:
    """Return another model of the same file, which is never loaded."""
    return Model(served.config, quiet=True)


def is_loaded(model: Model) -> bool:
    return vars(model._backend)["_pipeline"] is not None


def assert_same(served: Model, rows: list[Any], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Assert that files with and without a server are the same; return the rows."""
    data = written(folder / "new.jsonl", rows)
    served.predict(data, folder / "local.jsonl", batch_size=4)
    client = client_of(served)
    with running(served) as server:
        predictions = client.predict(data, folder / "served.jsonl", server=server.url, **options)
    assert (folder / "served.jsonl").read_bytes() == (folder / "local.jsonl").read_bytes()
    assert not is_loaded(client)
    return list(predictions)


def test_texts_and_rows_without_an_answer(model: Model, folder: Path) -> None:
    rows = [*ROWS[:5], {"question": ""}, '{"question": \n', {"question": "x" * 1100}, ROWS[0]]
    found = assert_same(model, rows, folder, batch_size=2)
    assert [row["status"] for row in found] == [*["ok"] * 5, "skipped", "error", "error", "ok"]
    assert "no room for an answer within 1,024" in found[7]["error"]


KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"generation": {"do_sample": True, "temperature": 0.9, "seed": 3}},
    "scored labels": {
        "output_features": [
            {"name": "answer", "type": "category", "decoder": {"labels": ["red", "blue", "green"], "scoring": True}}
        ],
    },
    "constrained": {
        "output_features": [
            {
                "name": "answer",
                "type": "json",
                "decoder": {
                    "constrain": True,
                    "json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
                },
            }
        ],
    },
    "a head": {"output_features": [{"name": "answer", "head": "linear", **LABELS}]},
    "beams": {"generation": {"num_beams": 2, "do_sample": False}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_answer(kind: str, folder: Path) -> None:
    served = make_model(folder, **KINDS[kind])
    # Probabilities depend in their last digits on which rows share a batch, with and without a server.
    found = assert_same(served, ROWS[:12], folder, batch_size=12 if kind == "scored labels" else 5)
    assert {row["status"] for row in found} == {"ok"}
    if kind in ("scored labels", "a head"):
        assert found[0]["answer_probabilities"].keys() == {"red", "blue", "green"}


def test_probabilities_of_several_requests_are_equal_up_to_rounding(folder: Path) -> None:
    served = make_model(folder, **KINDS["scored labels"])
    data = written(folder / "new.jsonl", ROWS)
    wanted = served.predict(data, batch_size=4)["answer_probabilities"]
    with running(served) as server:
        found = client_of(served).predict(data, server=server.url, batch_size=3)["answer_probabilities"]
    assert [pytest.approx(one, rel=1e-4) for one in wanted] == found
    other = served.predict(data, batch_size=7, fresh=True)["answer_probabilities"]
    assert other != wanted, "batches of another size have the same effect"


def test_the_best_of_several_answers(folder: Path) -> None:
    pairs = written(folder / "pairs.jsonl", [{"question": "a", "chosen": "b", "rejected": "c"}])
    output = {"name": "answer", "type": "preference", "head": "linear"}
    reward = CONFIG | {"output_features": [output], "data": {"source": str(pairs)}}
    Model(reward, quiet=True).save(folder / "rm")
    generation = {"do_sample": True, "best_of": 3, "reward": str(folder / "rm"), "keep_samples": True}
    served = make_model(folder, generation=generation)
    found = assert_same(served, ROWS[:4], folder)
    assert [len(row["samples"]) for row in found] == [3] * 4


def test_several_outputs_of_a_turn_in_sequence(folder: Path) -> None:
    outputs = [
        {"name": "action", **LABELS, "decoder": {"labels": ["serve", "close"], "scoring": True}},
        {"name": "reply", "type": "text", "column": "content", "decoder": {"max_new_tokens": 6}},
    ]
    dialogue = {"answers": "in_sequence", "speakers": {"user": "U: ", "assistant": "A: "}}
    sections = {
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": outputs,
        "prompt": {"chat": False},
    }
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"{number} teas"},
                {"role": "assistant", "content": "yes", "action": "serve"},
                {"role": "user", "content": "the bill" * (number % 3 + 1)},
            ]
        }
        for number in range(6)
    ]
    data = written(folder / "talks.jsonl", talks)
    served = make_model(folder, **sections, data={"source": str(data), "dialogue": dialogue})
    found = assert_same(served, talks, folder)
    assert {row["action"] for row in found} <= {"serve", "close"}
    assert all(row["reply_raw"] for row in found)
    with running(served) as server:
        answer = httpx2.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "two teas"}]}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the model writes no text to messages: it answers several outputs in sequence; send rows to /predict"
    )


def test_values_that_json_does_not_have(model: Model, folder: Path) -> None:
    values = [datetime.date(2026, 1, 5), float("nan"), 8.0, None, "plain", datetime.datetime(2026, 1, 5, 7, 30)]
    frame = pd.DataFrame({"question": pd.Series(values, dtype=object), "other": [datetime.date(2026, 1, 1)] * 6})
    wanted = model.predict(frame, folder / "local.csv")
    with running(model) as server:
        client_of(model).predict(frame, folder / "served.csv", server=server.url)
    assert (folder / "served.csv").read_bytes() == (folder / "local.csv").read_bytes()
    assert [row["status"] for row in wanted].count("skipped") == 2


def test_large_rows_are_sent_in_smaller_requests(model: Model, folder: Path) -> None:
    rows = [{"question": "x" * 300}] * 8 + [{"question": "y" * 2000}]
    with running(model, limits=ServerLimits(body_bytes=1500)) as server:
        found = client_of(model).predict(rows, server=server.url)
    assert [row["status"] for row in found] == ["ok"] * 8 + ["error"]
    reason = "the row has 2,016 bytes, and the server takes 1,350; start it with a larger --max-body"
    assert found[8]["error"] == reason


def test_a_row_that_json_does_not_have(model: Model, server: RunningServer) -> None:
    found = client_of(model).predict([{"question": "\ud800"}, ROWS[0]], server=server.url)
    assert found["status"] == ["error", "ok"]
    assert found["error"][0].startswith(
        "the row cannot be sent as JSON: UnicodeEncodeError: 'utf-8' codec can't encode"
    )


def test_a_server_that_queues_few_rows_gets_few_at_a_time(model: Model, folder: Path) -> None:
    wanted = model.predict(ROWS[:10])["answer"]
    with running(model, engine={"max_waiting": 2, "batch_size": 1}) as server:
        assert client_of(model).predict(ROWS[:10], server=server.url)["answer"] == wanted


def test_rows_of_two_clients_with_the_same_names_are_sampled_alike(folder: Path) -> None:
    # Two beams are answered in batches, which rows of several requests share.
    served = make_model(folder, generation={"do_sample": True, "num_beams": 2, "seed": 4})
    wanted = served.predict(ROWS[:6])["answer"]
    found: list[list[str]] = []
    with running(served) as server:

        def ask(output: str) -> None:
            found.append(client_of(served).predict(ROWS[:6], output, server=server.url)["answer"])

        # The engine waits at the end of another job, so that both requests are answered together.
        arrived = threading.Event()
        other = open_rows(ROWS[:1], folder=folder)
        server.engine.submit_job(RowJob(other, lambda answers, error: wait_for(arrived.is_set)))
        clients = [threading.Thread(target=ask, args=[f"{number}.jsonl"]) for number in range(2)]
        for one in clients:
            one.start()
        wait_for(lambda: len(server.engine.jobs.waiting) == 2)
        arrived.set()
        for one in clients:
            one.join()
    assert found == [wanted, wanted]


def journal(run: str, output: Path) -> Path:
    """Return the journal of an output."""
    [path] = Path(run, "journal").glob(f"{output.stem}-*.jsonl")
    return path


def answered(output: Path) -> int:
    """Return the number of rows in the journal of an output."""
    found = list(Path("runs/run/journal").glob(f"{output.stem}-*.jsonl"))
    return found[0].read_bytes().count(b"\n") - 1 if found else 0


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with answers of 40 tokens."""
    outputs = [{"name": "answer", "type": "text", "decoder": {"max_new_tokens": 40}}]
    return make_model(tmp_path_factory.mktemp("slow"), output_features=outputs)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_command_that_was_stopped_resumes(number: int, slow: Model, folder: Path, forks: Forks) -> None:
    slow.predict(written(folder / "new.jsonl", FEW), folder / "local.jsonl")
    config = json.loads(slow.config.model_dump_json(exclude_unset=True))
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf8")
    output = folder / "served.jsonl"
    words = ["partita", "predict", "run.yaml", "--dataset", "new.jsonl", "--output", output, "--batch-size", 1, "-q"]
    with running(slow, engine={"batch_size": 2}) as server:
        client = forks.start(COMMAND, *words, "--server", server.url, folder=folder)
        wait_for(lambda: answered(output) > 3 or client.poll() is not None)
        assert client.poll() is None, client.communicate()
        client.send_signal(number)
        client.wait()
        before = answered(output)
        assert 3 < before < len(FEW), "the client was stopped before its end"
        found = Model("run.yaml", quiet=True).predict("new.jsonl", output, server=server.url)
    assert found.stats.resumed == before
    assert output.read_bytes() == (folder / "local.jsonl").read_bytes()


def test_a_server_that_stops_keeps_its_answers_for_the_next_one(slow: Model, folder: Path) -> None:
    slow.predict(FEW, folder / "local.jsonl")
    output = folder / "served.jsonl"
    with running(slow, engine={"batch_size": 2}) as server:

        def stop() -> None:
            wait_for(lambda: answered(output) > 3)
            server.engine.refuse_new()

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(ServerError, match="The answers so far are saved; rerun the same command to resume"):
            client_of(slow).predict(FEW, output, server=server.url, batch_size=1)
        thread.join()
    before = answered(output)
    assert 3 < before < len(FEW)
    with running(slow) as server:
        found = client_of(slow).predict(FEW, output, server=server.url)
    assert found.stats.resumed == before
    assert output.read_bytes() == (folder / "local.jsonl").read_bytes()


def test_a_run_that_is_not_on_this_machine(folder: Path) -> None:
    sections = {"trainer": {"type": "finetune", "batch_size": 4, "max_steps": 1, "learning_rate": 0.05}}
    rows = written(folder / "train.jsonl", [row | {"answer": "cat"} for row in ROWS[:8]])
    Model(CONFIG | sections | {"data": {"source": str(rows)}}, quiet=True).train(run=folder / "trained")
    shutil.copytree(folder / "trained", folder / "copy", ignore=shutil.ignore_patterns("model", "checkpoints"))
    trained, copy = Model.load(folder / "trained", quiet=True), Model.load(folder / "copy", quiet=True)
    trained.predict(ROWS[:5], folder / "local.jsonl")
    output = folder / "served.jsonl"
    with running(trained) as server:
        copy.predict(ROWS[:5], output, server=server.url)
        Model.load(folder / "trained", quiet=True).predict(ROWS[:5], folder / "own.jsonl", server=server.url)
    assert output.read_bytes() == (folder / "local.jsonl").read_bytes()
    assert (folder / "own.jsonl").read_bytes() == output.read_bytes()
    headers = [
        json.loads(path.read_text("utf8").split("\n")[0])["fingerprint"]["model"]
        for path in (journal("copy", output), journal("trained", folder / "own.jsonl"))
    ]
    assert headers[0] == headers[1], "the model is the server's"


def test_a_row_that_fails_on_the_server_is_an_error_of_that_row(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ServingEngine.submit

    def refuse_long(engine: ServingEngine, request: AnswerRequest, on_event: OnEvent) -> Any:
        ticket = submit(engine, request, on_event)
        if len(request.input_ids) > 60:
            ticket.cancel()
            on_event(AnswerEnd(None, "does not fit in memory even alone"))
        return ticket

    monkeypatch.setattr(ServingEngine, "submit", refuse_long)
    with running(model) as server:
        found = client_of(model).predict([ROWS[0], {"question": "x" * 80}, ROWS[1]], server=server.url)
    assert found["status"] == ["ok", "error", "ok"]
    assert found["error"][1] == "does not fit in memory even alone"


def test_errors_are_answered_again_if_asked(model: Model, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROWS[0], {"question": "x" * 80}]
    client = client_of(model)
    with running(model, engine={"context": 64}) as server:
        found = client.predict(rows, folder / "o.jsonl", server=server.url)
        assert found[1]["error"] == "the prompt has 83 tokens and the context holds 64; nothing can be answered"
        assert "the server allows 64 tokens of a prompt and its answer, and the model 1,024; longer rows" in caplog.text
    with running(model) as server:
        assert client.predict(rows, folder / "o.jsonl", server=server.url).stats.errors == 1
        found = client.predict(rows, folder / "o.jsonl", server=server.url, retry_errors=True)
    assert found.stats.ok == 2
    assert found["answer"] == model.predict(rows)["answer"]


def test_another_model_behind_the_same_address(model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, client = folder / "o.jsonl", client_of(model)
    other = Model(model.config, quiet=True)
    with running(model) as server:
        client.predict(ROWS[:3], output, server=server.url)
    with running(other) as server, pytest.raises(ResumeError, match="model changed"):
        client.predict(ROWS[:3], output, server=server.url)
    # The same change between two requests of a job:
    with running(model) as server:
        served = generator.RowWork.submit

        def after_a_change(work: Any, *arguments: Any) -> None:
            at: RowServer = work.generator.server
            object.__setattr__(at.description, "fingerprint", "another")
            served(work, *arguments)

        monkeypatch.setattr(generator.RowWork, "submit", after_a_change)
        with pytest.raises(ModelError, match=f"another model is served at {server.url} now; the answers so far are"):
            client.predict(ROWS[:3], server=server.url)


def test_the_server_refuses_rows_for_another_model(server: RunningServer) -> None:
    found = httpx2.get(f"{server.url}/predict").json()["fingerprint"]
    body = {"rows": ROWS[:1], "fingerprint": "another"}
    response = httpx2.post(f"{server.url}/predict", json=body)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"the rows are for the model another, and this server has {found}",
        "type": "invalid_request_error",
        "param": "fingerprint",
        "code": "other_model",
    }
    assert httpx2.post(f"{server.url}/predict", json=body | {"fingerprint": found}).status_code == 200


REPLIES = {
    '{"records": []}': "the server answered 0 of 1 rows",
    '{"answers": []}': "the server's response holds no records: Field required",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_without_the_records(reply: str) -> None:
    settings = EndpointBackendConfig(type="endpoint", url="http://127.0.0.1:9")
    sender = RowSender(httpx2.AsyncClient(), settings, Redaction(None))
    response = Response(200, httpx2.Headers(), reply.encode())
    with pytest.raises(AnswerError, match=REPLIES[reply]):
        sender.read(response, {"rows": ROWS[:1]})
    late = Response(504, httpx2.Headers(), b'{"error": {"message": "no answer within 1 s"}}')
    failure = sender.failure(late, {"rows": ROWS[:2]})
    assert (failure.cause, failure.retry) == ("row", False)
    assert failure.reason == "the server failed (504): no answer within 1 s"


def test_a_server_of_another_file(model: Model, server: RunningServer) -> None:
    changed = Model({**CONFIG, "generation": {"max_new_tokens": 3}, "seed": 7}, quiet=True)
    message = (
        f"the server at {server.url} was started with other values than this file: generation, seed. Name the file or "
        "the run that it serves, with the same --set"
    )
    with pytest.raises(DataError) as error:
        changed.predict(ROWS, server=server.url)
    assert str(error.value) == message


def test_a_missing_column_and_too_many_rows(model: Model, server: RunningServer) -> None:
    with pytest.raises(DataError, match="question"):
        client_of(model).predict([{"text": "a"}], server=server.url)
    message = "batch_size is 1,025, and a request to a server has at most 1,024 rows; write at most that"
    with pytest.raises(DataError, match=message):
        client_of(model).predict(ROWS, server=server.url, batch_size=1025)


def test_the_reason_of_a_server_that_refuses_this_client_is_in_the_error() -> None:
    reason = "the header Host names another machine; ask 127.0.0.1, or start the server with --token"
    assert str(why_refused("http://a:1", 403, reason, None)) == f"http://a:1 refuses this client: {reason}"


def test_the_token_of_a_server(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-20-letters"
    with running(model, token=token) as server:
        client = client_of(model)
        with pytest.raises(ModelError) as error:
            client.predict(ROWS[:1], server=server.url)
        assert str(error.value) == f"{server.url} needs its token; set the environment variable PARTITA_TOKEN to it"
        monkeypatch.setenv("PARTITA_TOKEN", "another-token-of-it")
        with pytest.raises(ModelError) as error:
            client.predict(ROWS[:1], server=server.url)
        message = f"{server.url} does not take the token in PARTITA_TOKEN; set it to that of the server"
        assert str(error.value) == message
        monkeypatch.setenv("PARTITA_TOKEN", token)
        assert client.predict(ROWS[:1], server=server.url + "/v1/").stats.ok == 1
        monkeypatch.setenv("PARTITA_TOKEN", "Umlaut\u00e4")
        with pytest.raises(ModelError, match="PARTITA_TOKEN holds characters that no token has; set it again"):
            client.predict(ROWS[:1], server=server.url)


PRINTED = "write the address that partita serve prints, such as http://127.0.0.1:8000"
ADDRESSES = {
    "127.0.0.1:8000": f"--server '127.0.0.1:8000' is not an address; {PRINTED}",
    "ftp://a": f"--server 'ftp://a' is not an address; {PRINTED}",
    "http://a?b=c": f"--server 'http://a?b=c' has more than an address; {PRINTED}",
    "http://a:x": (
        f"--server 'http://a:x' is not a valid address: Port could not be cast to integer value as 'x'; {PRINTED}"
    ),
    "http://me:key@a": "--server: a token has no place in the address; set the environment variable PARTITA_TOKEN",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none(address: str, model: Model) -> None:
    with pytest.raises(DataError) as error:
        client_of(model).predict(ROWS, server=address)
    assert str(error.value) == ADDRESSES[address]


def test_an_address_without_a_server_and_one_of_another_program(model: Model, server: RunningServer) -> None:
    client = client_of(model)
    with pytest.raises(ServerError) as error:
        client.predict(ROWS, server="http://127.0.0.1:9")
    message = "http://127.0.0.1:9 cannot be reached: Connection refused. Start the server with partita serve, or "
    assert str(error.value) == f"{message}correct --server"
    with pytest.raises(DataError) as wrong:
        client.predict(ROWS, server=f"{server.url}/app")
    assert str(wrong.value) == (
        f"no server of partita answers at {server.url}/app; write the address that partita serve prints. For other "
        "servers, write backend: {type: endpoint} in the file"
    )


def test_a_file_with_another_backend(model: Model, server: RunningServer) -> None:
    endpoint = {"type": "endpoint", "url": "http://127.0.0.1:9/v1"}
    other = Model({**CONFIG, "base_model": "name", "backend": endpoint, "trainer": {"type": "none"}}, quiet=True)
    message = (
        r"the server has the model, and backend is \{type: endpoint\}; leave server out, or remove backend, or add "
    )
    with pytest.raises(PartitaError, match=message):
        other.predict(ROWS, server=server.url)
