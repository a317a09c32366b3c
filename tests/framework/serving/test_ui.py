"""Tests of the chat page in headless Chromium against the real server."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from partita import Model
from partita.model import open_engine
from partita.serving.app import ServerState, make_app

from ...json_lines import read_json_lines, write_json_lines
from .browser import CHROMIUM, Browser, browser
from .chat_model import chat_config, write_chat_model

WIDTHS = (400, 800, 1400)
CONTRAST = (Path(__file__).parents[1] / "contrast.js").read_text(encoding="utf8")
MIN_CONTRAST = 4.5
"""Of text and its background (WCAG 2.2, success criterion 1.4.3)."""
SENT = "!document.getElementById('regenerate').disabled"
"""Whether the last message has its answer."""
FORM = "write an object with messages in each line, or a JSON list of such objects."
FEW_TOKENS, MANY_TOKENS = "20", "1500"

HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><svg onload='window.hacked = 1'>",
    "[a](javascript:window.hacked=1) [b](data:text/html,<script>window.hacked=1</script>) [c](JaVaScRiPt:alert(1))",
    "[d](//example.org/x) [e](vbscript:x) ![f](http://example.org/f.png) [safe](https://example.org/a_(b))",
    "```html\n<script>window.hacked = 1</script>\n\nno end of the code",
    "\n".join(f"{'  ' * depth}- level {depth}" for depth in range(60)),
    "\n".join(f"{'> ' * depth}level {depth}" for depth in range(60)),
    "| a | b |\n| --- | --- |\n| <b>1</b> | `2` | 3 |\n| " + "wide " * 60 + " |",
    "**" * 5000,
    "[" * 10_000,
    "x" * 10_000,
    "`a" * 5000,
    "a *b **c _d __e ~~f [g](http://h " * 300,
    "\u202eright to left\u202c \x1b[31m \x00 \ud83d\ude00",
    "# " + "#" * 1000 + "\n\n***\n\n1. one\n   2. two\n\n\n   three",
]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@contextmanager
def serving(engine: Any, token: str | None = None) -> Iterator[str]:
    """Serve the engine and the page on a free port, and return the address."""
    app = make_app(ServerState(engine, name="chat", created=0, token=token, ui=True))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration of a model that answers with random words."""
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[Any]:
    with open_engine(Model(file, quiet=True), batch_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine: Any) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(chromium: Browser, address: str) -> Browser:
    """Return the page of a new chat."""
    chromium.console.clear()
    chromium.resize(800, 900)
    chromium.open(address)
    chromium.dialogs.clear()
    chromium.wait("document.getElementById('model').textContent === 'chat'")
    chromium.run("document.getElementById('settings').open = true")
    chromium.fill("#max-tokens", FEW_TOKENS)
    return chromium


def send(page: Browser, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    page.fill("#message", text)
    page.click("#send")
    page.wait("document.getElementById('stop').disabled")


def messages(page: Browser) -> list[list[str]]:
    """Return class and text of each message on the page."""
    rows = "[...document.querySelectorAll('article')].map(one => [one.className, one.children[1].innerText])"
    return list(page.run(rows))


def test_a_message_is_answered_by_the_model(page: Browser, engine: Any) -> None:
    send(page, "what colour\nis it")

    (question, answer) = messages(page)
    assert question == ["user", "what colour\nis it"]
    assert answer[0] == "assistant"
    assert answer[1].strip()
    assert page.text("article:last-child .meta").startswith(f"{FEW_TOKENS} tokens, ")
    assert page.text("article:last-child .meta").endswith("tokens/s; the answer ended at the limit of tokens")
    assert page.console == []


def test_enter_sends_and_shift_enter_does_not(page: Browser) -> None:
    page.fill("#message", "red")
    page.press("Enter", code=13, shift=True)
    assert messages(page) == []
    page.press("Enter", code=13)
    page.wait(SENT)
    assert messages(page)[0] == ["user", "red"]


def test_an_answer_is_stopped_and_generated_again(page: Browser) -> None:
    page.fill("#max-tokens", MANY_TOKENS)
    page.fill("#message", "red")
    page.click("#send")
    page.wait("document.querySelector('article.assistant .text')?.textContent.length > 5")
    assert page.run("document.getElementById('send').disabled")
    page.click("#stop")
    page.wait("document.getElementById('stop').disabled")
    assert page.text("article:last-child .meta") == "stopped"

    page.fill("#max-tokens", FEW_TOKENS)
    page.click("#regenerate")
    page.wait(SENT)

    assert [kind for kind, _ in messages(page)] == ["user", "assistant"]
    assert page.text("article:last-child .meta") != "stopped"
    assert page.console == []


def test_escape_stops_an_answer(page: Browser) -> None:
    page.fill("#max-tokens", MANY_TOKENS)
    page.fill("#message", "red")
    page.click("#send")
    page.wait("document.querySelector('article.assistant .text')?.textContent.length > 5")
    page.press("Escape", code=27)
    page.wait("document.getElementById('stop').disabled")
    assert page.text("article:last-child .meta") == "stopped"


def test_a_message_is_copied_as_the_model_wrote_it(page: Browser, address: str) -> None:
    origin = address.removesuffix("/")
    page.call("Browser.grantPermissions", origin=origin, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    send(page, "what *colour*")
    page.click("article button")
    page.wait("document.querySelector('article button').textContent === 'Copied'")
    assert page.run("navigator.clipboard.readText()") == "what *colour*"
    page.wait("document.querySelector('article button').textContent === 'Copy'")


def test_settings_and_system_prompt_are_sent(page: Browser) -> None:
    for field, value in {"#system": "be short", "#temperature": "2", "#top-p": "0.9", "#seed": "7"}.items():
        page.fill(field, value)
    page.run("window.bodies = []; const real = fetch; window.fetch = (a, b) => (bodies.push(b.body), real(a, b))")
    send(page, "red")
    first = messages(page)[1]
    page.click("#regenerate")
    page.wait(SENT)
    assert messages(page)[1] == first, "the seed repeats the answer"

    body = json.loads(page.run("bodies[0]"))

    assert body["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "red"}]
    settings = {"temperature": 2, "top_p": 0.9, "max_tokens": int(FEW_TOKENS), "seed": 7}
    assert {name: body[name] for name in settings} == settings
    page.fill("#seed", "8")
    page.click("#regenerate")
    page.wait(SENT)
    assert messages(page)[1] != first


def test_probabilities_of_tokens_are_shown_on_hover_and_on_arrow_keys(page: Browser) -> None:
    page.click("#probabilities")
    send(page, "red")
    assert page.run("document.querySelectorAll('.token').length") == int(FEW_TOKENS)

    page.hover("article:last-child .token:nth-child(2)")
    lines = page.text("#tooltip").splitlines()
    assert len(lines) == 6, "the token, and five alternatives"
    shares = [float(line.split("%")[0]) for line in lines]
    assert shares[1:] == sorted(shares[1:], reverse=True)
    assert shares[0] == shares[1], "decoding is greedy"
    assert 0 < sum(shares[1:]) <= 100.5

    page.hover("h1")
    assert page.run("document.getElementById('tooltip').hidden")
    page.run("document.querySelector('article:last-child .text').focus()")
    page.press("ArrowRight", code=39)
    page.press("ArrowRight", code=39)
    assert page.run("[...document.querySelectorAll('.token')].findIndex(one => one.matches('.current'))") == 1
    assert page.text("#tooltip").splitlines() == lines

    page.click("#probabilities")
    assert page.run("document.querySelectorAll('.token').length") == 0
    assert page.console == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_hostile_markdown_is_text_that_stays_in_the_viewport(page: Browser, is_dark: bool, tmp_path: Path) -> None:
    chat = [{"role": role, "content": text} for text in HOSTILE for role in ("user", "assistant")]
    write_json_lines(tmp_path / "hostile.jsonl", [{"messages": chat}])

    page.upload("#file", tmp_path / "hostile.jsonl")
    page.wait(f"document.querySelectorAll('article').length === {len(chat)}")

    time.sleep(0.2)  # an image or a script would be loaded meanwhile
    assert page.run("window.hacked ?? null") is None
    assert page.run("document.querySelectorAll('article :is(script, img, svg, iframe, b)').length") == 0
    assert page.run("[...document.querySelectorAll('article a')].map(one => one.href)") == ["https://example.org/a_(b)"]
    assert page.run("document.querySelectorAll('article a[target=_blank][rel~=noopener]').length") == 1
    assert page.console == []
    for text in ("<script>window.hacked = 1</script>", "no end of the code", "level 59", "x" * 10_000):
        assert page.run(f"document.querySelector('#log').textContent.includes({json.dumps(text)})"), text[:40]
    for width in WIDTHS:
        page.resize(width, 800, is_dark=is_dark)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_with_all_its_parts_stays_in_the_viewport(page: Browser, is_dark: bool) -> None:
    page.click("#probabilities")
    page.fill("#temperature", "2")
    send(page, "red " * 100)
    page.hover("article:last-child .token:nth-child(2)")
    page.fill("#top-p", "7")
    page.run("document.getElementById('sign-in').hidden = false")
    page.run(
        "for (const id of ['error', 'note']) Object.assign(document.getElementById(id), "
        "{textContent: 'x'.repeat(300), hidden: false})"
    )
    for width in WIDTHS:
        page.resize(width, 800, is_dark=is_dark)
        outside = page.run(
            "[...document.querySelectorAll('body *')].filter(one => one.offsetParent && "
            "(one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1))"
            ".map(one => one.outerHTML.slice(0, 80))"
        )
        assert outside == []
    page.run(f"{CONTRAST}; window.contrast = contrast")
    faint = page.run(
        "[...document.querySelectorAll('body *')].filter(one => !one.children.length && one.textContent.trim() && "
        f"!one.disabled && contrast(one) < {MIN_CONTRAST}).map(one => one.outerHTML.slice(0, 80))"
    )
    assert faint == []
    page.run("document.getElementById('settings').open = false")
    assert page.run("document.documentElement.scrollHeight") <= 800, "only the messages scroll"


def test_every_control_has_a_name_for_screen_readers(page: Browser) -> None:
    send(page, "red")
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    kinds = ("button", "textbox", "spinbutton", "checkbox", "log")
    controls = [one for one in nodes if one.get("role", {}).get("value") in kinds]
    assert len(controls) >= 14
    assert [one for one in controls if not one["name"]["value"]] == []


def test_a_saved_chat_is_loaded_again_and_incomplete_answers_have_no_weight(page: Browser, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.fill("#system", "be short")
    send(page, "red")
    page.click("#save")
    while not (files := list(tmp_path.glob("chat-*.jsonl"))):
        time.sleep(0.02)
    shown = messages(page)

    (row,) = read_json_lines(files[0])
    answer = row["messages"].pop()
    assert row["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "red"}]
    assert (answer["role"], answer["weight"]) == ("assistant", 0), "it has ended at the limit"

    write_json_lines(tmp_path / "two.jsonl", [{"messages": []}, *read_json_lines(files[0])])
    page.click("#new")
    assert messages(page) == []
    page.fill("#system", "")
    page.upload("#file", tmp_path / "two.jsonl")
    page.wait("document.querySelectorAll('article').length === 2")
    assert messages(page) == shown
    assert page.run("document.getElementById('system').value") == "be short"
    assert page.text("#note") == "The file has 2 dialogues; this is the last one."
    assert page.dialogs == [], "a saved chat is discarded without a question"
    assert page.console == []


def test_weights_of_messages_are_kept(page: Browser, tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "be short", "weight": 0},
        {"role": "user", "content": "red", "weight": 1},
        {"role": "assistant", "content": "blue", "weight": 0.5},
        {"role": "assistant", "content": "green"},
    ]
    write_json_lines(tmp_path / "weights.jsonl", [{"messages": [*chat[:3], {**chat[3], "weight": None}]}])
    page.upload("#file", tmp_path / "weights.jsonl")
    page.wait("document.querySelectorAll('article').length === 3")
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click("#save")
    while not (files := list(tmp_path.glob("chat-*.jsonl"))):
        time.sleep(0.02)
    assert read_json_lines(files[0]) == [{"messages": chat}]
    page.click("#regenerate")
    page.wait(SENT)
    assert messages(page)[2][1] != "green"
    assert page.text("#error") == ""


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_is_loaded(page: Browser, is_list: bool, indent: int | None, tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": text}]} for text in ("red", "blue")]
    content = json.dumps(chats if is_list else chats[1], indent=indent)
    (tmp_path / "chats.json").write_text(content, encoding="utf-8-sig")
    page.upload("#file", tmp_path / "chats.json")
    page.wait("document.querySelectorAll('article').length === 1")
    assert messages(page) == [["user", "blue"]]
    assert page.text("#note") == ("The file has 2 dialogues; this is the last one." if is_list else "")


def test_texts_from_right_to_left_are_shown_so(page: Browser, tmp_path: Path) -> None:
    arabic = "\u0645\u0631\u062d\u0628\u0627"
    parts = [
        f"# {arabic}",
        f"{arabic} (a).",
        f"- {arabic}",
        f"> {arabic}",
        f"| {arabic} |\n| --- |",
        "```\na\n```",
        "a",
    ]
    chat = [{"role": "user", "content": f"{arabic} a."}, {"role": "assistant", "content": "\n\n".join(parts)}]
    write_json_lines(tmp_path / "arabic.jsonl", [{"messages": chat}])
    page.upload("#file", tmp_path / "arabic.jsonl")
    page.wait("document.querySelectorAll('article').length === 2")
    page.fill("#message", arabic)

    shown = "article.user > div:nth-child(2), article.assistant > div:nth-child(2) > *, #message"
    directions = page.run(f"[...document.querySelectorAll('{shown}')].map(one => getComputedStyle(one).direction)")

    assert directions == ["rtl"] * 6 + ["ltr", "ltr", "rtl"]
    page.fill("#message", "a")
    assert page.run("getComputedStyle(document.getElementById('message')).direction") == "ltr"


def test_an_unsaved_chat_is_discarded_after_a_question(page: Browser) -> None:
    send(page, "red")
    page.click("#new")
    assert page.dialogs == ["This chat is not saved. Discard it?"]
    assert messages(page) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"The file is empty; {FORM}"),
        (" []", f"The file is empty; {FORM}"),
        ("{", "The file is not JSON ("),
        ('{"messages": []}\n{', "Line 2 is not JSON ("),
        ('{"text": "a"}', f"The file has no list of messages; {FORM}"),
        ('{"messages": []}\n\n{"text": "a"}', f"Line 3 has no list of messages; {FORM}"),
        ('[{"messages": []},\n{"text": "a"}]', f"Dialogue 2 has no list of messages; {FORM}"),
        (
            '{"messages": [], "tools": [], "id": 3}',
            "The file has tools, id beside messages; this page reads only messages, and Save would lose the rest.",
        ),
        (
            '{"messages": [{"role": "narrator", "content": "a"}]}',
            'The file, message 1: the role is "narrator"; it must be one of system, user, assistant, tool.',
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}',
            "The file, message 1 has tool_calls; this page reads only a role, text as content, and a weight.",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "The file, message 1 has content that is not text; this page reads only",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": "0"}]}',
            'The file, message 1: the weight is "0"; it must be a number, such as 0 or 1.',
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(page: Browser, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(text, encoding="utf8")
    page.upload("#file", tmp_path / "bad.jsonl")
    page.wait("!document.getElementById('error').hidden")
    assert page.text("#error").startswith(message)


def test_an_error_of_the_server_is_a_sentence_and_the_message_is_kept(page: Browser) -> None:
    page.fill("#top-p", "0")
    send(page, "what colour")
    assert page.text("#error").startswith("top_p: ")
    assert messages(page) == []
    assert page.run("document.getElementById('message').value") == "what colour"


def test_a_wrong_number_is_named(page: Browser) -> None:
    page.fill("#temperature", "-1")
    send(page, "red")
    assert page.text("#error").startswith("Temperature: ")
    assert messages(page) == []


def test_old_messages_are_left_out_with_a_note(page: Browser) -> None:
    text = "red " * 200
    send(page, text)
    assert page.text("#note") == ""
    for _ in range(2):
        send(page, text)
    assert page.text("#error") == ""
    note = "The first 2 messages were left out: with them, prompt and answer do not fit into the context of the model."
    assert page.text("#note") == note
    assert len(messages(page)) == 6

    send(page, "red " * 600)
    assert page.text("#error")
    assert len(messages(page)) == 6
    assert page.text("#note") == note


def test_old_messages_are_left_out_before_an_answer_is_cut_short(chromium: Browser, file: Path) -> None:
    sections = ["generation.max_new_tokens=40", "generation.min_new_tokens=40"]
    model = Model(file, overrides=sections, quiet=True)
    with open_engine(model, context=300, batch_size=2) as engine, serving(engine) as address:
        chromium.open(address)
        chromium.wait("document.getElementById('model').textContent === 'chat'")
        asked = 0
        while not chromium.text("#note"):
            send(chromium, "red blue " * 3)
            asked += 1
            assert chromium.text("#error") == ""
            assert chromium.text("article:last-child .meta").startswith("40 tokens, "), asked
        assert asked > 2
        before = len(messages(chromium))

        send(chromium, "red " * 67)  # which leaves less than 40 tokens, even alone

        assert chromium.text("#note").startswith(f"The first {before} messages were left out: ")
        assert 0 < int(chromium.text("article:last-child .meta").split()[0]) < 40


def test_half_of_the_context_is_for_the_prompt_if_answers_may_be_longer(chromium: Browser, file: Path) -> None:
    model = Model(file, overrides=["generation.max_new_tokens=180"], quiet=True)
    with open_engine(model, context=200, batch_size=2) as engine, serving(engine) as address:
        chromium.open(address)
        chromium.wait("document.getElementById('model').textContent === 'chat'")
        chromium.run("document.getElementById('settings').open = true")
        chromium.fill("#max-tokens", FEW_TOKENS)
        send(chromium, "red")
        chromium.run("document.getElementById('max-tokens').value = ''; window.limits = []; window.real = fetch")
        chromium.run("window.fetch = (a, b) => (limits.push(JSON.parse(b.body).max_tokens ?? null), real(a, b))")
        send(chromium, "blue")
        assert chromium.run("limits") == [180, 100]
        assert chromium.text("#note") == ""
        send(chromium, "green " * 10)
        assert chromium.run("limits") == [180, 100, 180, 100, 180, 100, None]
        assert chromium.text("#note").startswith("The first 4 messages were left out: ")


def test_the_page_asks_for_the_token_of_the_server(chromium: Browser, engine: Any) -> None:
    with serving(engine, token="secret-1") as address:
        chromium.open(address)
        chromium.wait("!document.getElementById('sign-in').hidden")
        assert chromium.text("#error") == "This server needs its token."
        chromium.fill("#token", "wrong")
        chromium.click("#sign-in button")
        chromium.wait("document.getElementById('error').textContent === 'The server does not accept this token.'")
        chromium.fill("#token", "secret-1")
        chromium.click("#sign-in button")
        chromium.wait("document.getElementById('model').textContent === 'chat'")
        assert chromium.run("document.getElementById('sign-in').hidden")
        chromium.fill("#message", "red")
        chromium.click("#send")
        chromium.wait(SENT)
        assert len(messages(chromium)) == 2


def test_a_server_that_has_ended_is_named(chromium: Browser, engine: Any) -> None:
    with serving(engine) as address:
        chromium.open(address)
        chromium.wait("document.getElementById('model').textContent === 'chat'")
    send(chromium, "red")
    assert chromium.text("#error") == "The server does not answer. Check that partita serve is still running."
    assert chromium.run("document.getElementById('message').value") == "red"


def test_an_answer_that_breaks_off_stays_as_an_incomplete_one(chromium: Browser, file: Path) -> None:
    with open_engine(Model(file, quiet=True), batch_size=2) as engine, serving(engine) as address:
        chromium.open(address)
        chromium.wait("document.getElementById('model').textContent === 'chat'")
        chromium.run("document.getElementById('settings').open = true")
        chromium.fill("#max-tokens", MANY_TOKENS)
        chromium.fill("#message", "red")
        chromium.click("#send")
        chromium.wait("document.querySelector('article.assistant .text')?.textContent.length > 5")
        engine.stop(finish_seconds=0)
        chromium.wait("document.getElementById('stop').disabled")
    assert chromium.text("#error") == "the server is stopping"
    assert chromium.text("article:last-child .meta") == "incomplete"
    assert len(messages(chromium)) == 2


def test_a_connection_that_breaks_during_an_answer_is_named(chromium: Browser, engine: Any) -> None:
    with serving(engine) as address:
        chromium.open(address)
        chromium.wait("document.getElementById('model').textContent === 'chat'")
        chromium.run("document.getElementById('settings').open = true")
        chromium.fill("#max-tokens", "1900")
        chromium.fill("#message", "red")
        chromium.click("#send")
        chromium.wait("document.querySelector('article.assistant .text')?.textContent.length > 5")
    chromium.wait("document.getElementById('stop').disabled")
    assert chromium.text("#error") == "The connection to the server broke before the answer was complete."
    assert chromium.text("article:last-child .meta") == "incomplete"


def test_an_answer_without_text_is_named_and_the_message_is_kept(chromium: Browser, file: Path) -> None:
    stop = [f"generation.stop={list(' abcdefghijklmnopqrstuvwxyz')}"]
    with open_engine(Model(file, overrides=stop, quiet=True), batch_size=2) as engine, serving(engine) as address:
        chromium.open(address)
        send(chromium, "red")
    assert chromium.text("#error") == "The model answered without any text."
    assert messages(chromium) == []
    assert chromium.run("document.getElementById('message').value") == "red"


def test_a_model_that_answers_no_messages_is_named(chromium: Browser, file: Path, tmp_path: Path) -> None:
    shutil.copytree(file.parent / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    config = chat_config(base_model=str(tmp_path / "model"), input_features=[{"name": "text"}])
    with open_engine(Model(config, quiet=True), batch_size=2) as engine, serving(engine) as address:
        chromium.open(address)
        chromium.wait("!document.getElementById('error').hidden")
        chromium.fill("#message", "red")
        chromium.press("Enter", code=13)
        assert messages(chromium) == []
    message = "This model does not answer messages. Send rows to /predict, or texts to /v1/completions."
    assert chromium.text("#error") == message
    assert chromium.run("document.getElementById('message').value") == "red"
    assert chromium.run("document.getElementById('send').disabled")
