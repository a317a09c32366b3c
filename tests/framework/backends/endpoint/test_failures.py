"""Tests of failing servers: errors, retries and lost connections."""

import logging
import re
import socket
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.backends.endpoint.request_sender import retry_after_seconds
from partita_schema.errors import ModelError, ServerError

from ....json_lines import read_json_lines
from .conftest import HangUp, LocalServer, Response, answer, error, prompt_of

MakeFile = Callable[..., dict[str, Any]]
RESUME_HINT = "The answers so far are saved; rerun the same command to resume"


def rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"question {n}"} for n in range(count)]


def predict(file: dict[str, Any], count: int, **options: Any) -> list[tuple[Any, ...]]:
    result = Model(file, quiet=True).predict(rows(count), "out.jsonl", **options)
    return [(row["status"], row["answer"], row["error"]) for row in result]


def ends(file: dict[str, Any], count: int = 1) -> str:
    with pytest.raises((ModelError, ServerError)) as caught:
        predict(file, count)
    return str(caught.value)


def journal() -> list[dict[str, Any]]:
    (path,) = Path("runs/run/journal").glob("*.jsonl")
    return read_json_lines(path)[1:]


def failing_first(server: LocalServer, *responses: Any) -> None:
    """Fail the first requests of each prompt, then answer it."""
    tried: dict[str, int] = {}

    def reply(body: dict[str, Any]) -> Response:
        prompt = prompt_of(body)
        with server.lock:
            tried[prompt] = tried.get(prompt, 0) + 1
        if tried[prompt] > len(responses):
            return answer(body, prompt.upper())
        response = responses[tried[prompt] - 1]
        if isinstance(response, Exception):
            raise response
        assert isinstance(response, Response)
        return response

    server.reply = reply


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_requests_to_a_busy_or_failing_server_are_retried(
    server: LocalServer, make_file: MakeFile, status: int
) -> None:
    failing_first(server, error(status, "not now"), error(status, "not now"))
    assert predict(make_file(), 3) == [("ok", f"QUESTION {n}", None) for n in range(3)]
    assert len(server.bodies) == 9


def test_a_lost_connection_is_opened_again(server: LocalServer, make_file: MakeFile) -> None:
    failing_first(server, HangUp())
    assert predict(make_file(), 3) == [("ok", f"QUESTION {n}", None) for n in range(3)]


def test_retries_are_reported_once(server: LocalServer, make_file: MakeFile, caplog: Any) -> None:
    failing_first(server, error(500, "oh no"), error(500, "oh no"))
    with caplog.at_level(logging.WARNING):
        predict(make_file(), 5)
    assert caplog.messages == ["the server failed (500): oh no; retrying in 0.0 s (logged once)"]


def test_a_requested_wait_applies_to_all_requests(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        if len(server.bodies) == 1:
            return error(429, "slowly", Retry_After="0.4")
        return answer(body, "fine")

    server.reply = reply
    assert [status for status, *_ in predict(make_file({"concurrency": 1}), 3)] == ["ok"] * 3
    assert server.times[1] - server.times[0] >= 0.4
    server.bodies.clear()
    server.times.clear()
    predict(make_file({"concurrency": 8}), 8, fresh=True)
    delays = [time - server.times[0] for time in server.times[8:]]
    assert len(server.times) == 9
    assert min(delays) >= 0.4


def test_a_wait_may_be_a_number_or_a_date() -> None:
    assert retry_after_seconds("2.5") == 2.5
    assert (
        retry_after_seconds(None)
        == retry_after_seconds("soon")
        == retry_after_seconds("-3")
        == retry_after_seconds("nan")
        == 0
    )
    assert retry_after_seconds("Fri, 01 Jan 2021 00:00:00 GMT") == 0
    far = retry_after_seconds(formatdate(4_000_000_000, usegmt=True))
    assert far > 1e8


def test_a_requested_wait_of_an_hour_is_an_error_of_the_row(server: LocalServer, make_file: MakeFile) -> None:
    server.reply = lambda body: error(429, "come back later", Retry_After="3600")
    message = "the server is busy (429): come back later; it asks to wait 3,600 s"
    assert predict(make_file(), 2) == [("error", None, message)] * 2
    assert len(server.bodies) == 2


def test_a_row_that_the_server_refuses_is_an_error_of_that_row(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        prompt = prompt_of(body)
        return error(400, f"{prompt} is too long") if prompt == "question 1" else answer(body, "fine")

    server.reply = reply
    assert predict(make_file(), 3) == [
        ("ok", "fine", None),
        ("error", None, "the server refused the row (400): question 1 is too long"),
        ("ok", "fine", None),
    ]
    assert len(server.bodies) == 3
    server.reply = lambda body: answer(body, "at last")
    assert [text for _, text, _ in predict(make_file(), 3, retry_errors=True)] == ["fine", "at last", "fine"]
    assert [record["attempt"] for record in journal() if record["row"] == 1] == [1, 2]


def test_many_rows_refused_for_their_content_do_not_end_the_job(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        prompt = prompt_of(body)
        last = prompt == "question 59"
        return answer(body, "fine") if last else error(400, f"{prompt} is too long")

    server.reply = reply
    result = predict(make_file({"concurrency": 4}), 60)
    assert [status for status, *_ in result] == ["error"] * 59 + ["ok"]


def test_a_job_ends_if_the_server_refuses_every_row_for_the_same_reason(
    server: LocalServer, make_file: MakeFile
) -> None:
    server.reply = lambda body: error(400, "unknown field top_k")
    assert ends(make_file({"concurrency": 4}), 60) == (
        "10 rows have failed one after the other, the last one because: the server refused the row (400): unknown "
        "field "
        f"top_k. {RESUME_HINT}, with --retry-errors also those that failed"
    )
    assert len(server.bodies) < 30
    server.reply = lambda body: answer(body, "fine")
    result = predict(make_file({"concurrency": 4}), 60, retry_errors=True)
    assert {status for status, *_ in result} == {"ok"}


def test_a_server_that_always_fails_ends_the_job(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        early = int(prompt_of(body).split()[1]) < 20
        return answer(body, "fine") if early else error(500, "broken")

    server.reply = reply
    assert ends(make_file({"concurrency": 2, "retries": 1}), 90) == (
        "10 rows have failed one after the other, the last one because: the server failed (500): broken (2 tries). "
        f"{RESUME_HINT}, with --retry-errors also those that failed"
    )
    assert {record["row"] for record in journal() if record["status"] == "ok"} == set(range(20))


def test_a_request_that_hangs_times_out(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        if prompt_of(body) == "question 1":
            server.hang()
        return answer(body, "fine")

    server.reply = reply
    assert predict(make_file({"timeout_seconds": 0.6, "retries": 1}), 3) == [
        ("ok", "fine", None),
        ("error", None, "no answer within 0.6 s (2 tries)"),
        ("ok", "fine", None),
    ]


def test_a_response_that_arrives_very_slowly_times_out(make_file: MakeFile, server: LocalServer) -> None:
    import threading

    listening = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
            while not stop.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    try:
        result = predict(make_file({"url": url, "timeout_seconds": 0.3, "retries": 0}), 1)
    finally:
        stop.set()
        thread.join()
        listening.close()
    assert result == [("error", None, "no answer within 0.3 s")]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (Response(200, "<html>welcome</html>"), "the server's response is not JSON: <html>welcome</html>"),
        (Response(200, {"ok": True}), 'the server\'s response holds no answer: {"ok": true}'),
        (Response(413, "too large"), "the server refused the row (413): too large"),
        (Response(500, ""), "the server failed (500): no message"),
    ],
)
def test_a_response_without_an_answer_is_reported(
    server: LocalServer, make_file: MakeFile, response: Response, expected: str
) -> None:
    server.reply = lambda body: response
    assert predict(make_file({"retries": 0}), 1) == [("error", None, expected)]


def test_an_unreachable_server_ends_the_job_and_no_row_is_lost(server: LocalServer, make_file: MakeFile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    assert ends(make_file({"url": url, "retries": 1}), 3) == (
        f"{url} cannot be reached: Connection refused (2 tries). Start the server, or correct backend.url. "
        f"{RESUME_HINT}"
    )
    assert journal() == []


def test_an_unknown_host_name_is_reported(server: LocalServer, make_file: MakeFile) -> None:
    text = ends(make_file({"url": "http://no-such-server.invalid/v1", "retries": 0}))
    assert re.fullmatch(
        r"http://no-such-server\.invalid/v1 cannot be reached: .*(Name or service not known|name resolution).*", text
    )


def test_a_wrong_key_ends_the_job_at_once_and_is_not_shown(
    server: LocalServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda body: error(401, "sk-secret is no key")
    monkeypatch.setenv("MY_KEY", "sk-secret")
    file = make_file({"api_key_env": "MY_KEY"})
    assert ends(file, 200) == f"the server does not take the key in MY_KEY (401): *** is no key. {RESUME_HINT}"
    assert len(server.bodies) <= 32
    assert journal() == []
    server.reply = lambda body: answer(body, "fine")
    assert predict(file, 200) == [("ok", "fine", None)] * 200


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (
            error(401, "who are you"),
            (
                "the server wants a key (401): who are you; write backend.api_key_env, the name of the environment "
                "variable that holds it"
            ),
        ),
        (
            error(403, "not for you"),
            (
                "the server wants a key (403): not for you; write backend.api_key_env, the name of the environment "
                "variable that holds it"
            ),
        ),
        (
            error(404, "no model small"),
            (
                "the server does not know small at URL, or takes no chat there (404): no model small; correct "
                "backend.model or backend.url, which mostly ends with /v1, or write backend.mode: completion"
            ),
        ),
        (
            Response(307, "", {"Location": "https://other/v1/chat/completions"}),
            (
                "the server sends elsewhere (307), to https://other/v1/chat/completions; write that address as "
                "backend.url"
            ),
        ),
        (
            error(429, "pay first", code="insufficient_quota"),
            "the account has nothing left (429): pay first",
        ),
        (error(402, "Insufficient Balance"), "the account has nothing left (402): Insufficient Balance"),
    ],
)
def test_a_failure_of_every_row_ends_the_job(
    server: LocalServer, make_file: MakeFile, response: Response, text: str
) -> None:
    server.reply = lambda body: response
    assert ends(make_file(), 5) == f"{text.replace('URL', server.url)}. {RESUME_HINT}"
    assert journal() == []


def test_a_forbidden_row_among_answered_ones_is_an_error_of_that_row(server: LocalServer, make_file: MakeFile) -> None:
    def reply(body: dict[str, Any]) -> Response:
        return error(403, "moderated") if prompt_of(body) == "question 1" else answer(body, "fine")

    server.reply = reply
    result = predict(make_file({"concurrency": 1}), 3)
    assert result == [
        ("ok", "fine", None),
        ("error", None, "the server refused the row (403): moderated"),
        ("ok", "fine", None),
    ]


def test_a_key_that_is_not_set_is_reported_before_any_request(
    server: LocalServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    file = make_file({"api_key_env": "MY_KEY"})
    assert ends(file) == "backend.api_key_env names MY_KEY, which is not set; run `export MY_KEY=...` first"
    monkeypatch.setenv("MY_KEY", "sk-\x07")
    assert ends(file) == "the key in MY_KEY holds characters that no key has; set it again"
    assert server.bodies == []


def test_answers_of_another_server_are_not_reused(server: LocalServer, make_file: MakeFile) -> None:
    from partita_schema.errors import ResumeError

    predict(make_file(), 1)
    with pytest.raises(ResumeError, match=r"model changed \(small \(chat\) at http.* -> other \(chat\) at http"):
        predict(make_file({"model": "other"}), 1)
    with pytest.raises(ResumeError, match=r"model changed .* with \{\"priority\": 1\}"):
        predict(make_file({"extra_body": {"priority": 1}}), 1)


def test_a_job_ends_when_the_credit_does_and_goes_on_with_the_rows_that_are_left(
    server: LocalServer, make_file: MakeFile
) -> None:
    answered = server.reply

    def reply(body: dict[str, Any]) -> Response:
        return answered(body) if len(server.bodies) <= 2 else error(402, "Insufficient Balance")

    server.reply = reply
    file = make_file({"concurrency": 1})
    assert ends(file, 5) == f"the account has nothing left (402): Insufficient Balance. {RESUME_HINT}"
    server.reply = answered
    assert [status for status, _, _ in predict(file, 5)] == ["ok"] * 5


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
def test_an_answer_that_the_server_interrupted_is_asked_for_again(
    server: LocalServer, make_file: MakeFile, reason: str
) -> None:
    answered = server.reply
    server.reply = lambda body: (
        answer(body, "QUES", finish_reason=reason) if len(server.bodies) == 1 else answered(body)
    )
    assert predict(make_file({"concurrency": 1, "retries": 1}), 1) == [("ok", "QUESTION 0", None)]


def test_an_answer_that_the_server_never_finishes_is_an_error(server: LocalServer, make_file: MakeFile) -> None:
    server.reply = lambda body: answer(body, "QUES", finish_reason="abort")
    stopped = "the server stopped in the middle of the answer (finish_reason abort) (2 tries)"
    assert predict(make_file({"concurrency": 1, "retries": 1}), 1) == [("error", None, stopped)]
