"""Tests of `partita chat`: piped messages, commands, settings, and a terminal."""

import fcntl
import io
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model
from partita.serving.terminal_chat import TerminalChat, printable

from ...json_lines import read_json_lines
from ..conftest import Command
from ..serving.chat_model import chat_config, write_chat_model

Chat = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration of a model that answers with random words."""
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def chat(
    file: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Chat:
    """Return a function that pipes messages into the command: exit status, lines of output and of errors."""
    monkeypatch.chdir(tmp_path)

    def call(text: str | bytes, *words: object, config: Path = file) -> tuple[int, list[str], list[str]]:
        raw = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = command("chat", config, *words)
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return call


def saved(chat: Chat, text: str, *words: object) -> list[dict[str, Any]]:
    """Pipe messages, save the chat, and return its messages."""
    code, _, err = chat(f"{text}\n/save saved.jsonl\n", *words)
    assert code == 0, err
    return list(read_json_lines(Path("saved.jsonl"))[-1]["messages"])


def test_each_line_is_a_message_and_answers_are_the_only_output(chat: Chat) -> None:
    code, out, err = chat("what colour is it\n\nis it red\n/save saved.jsonl\n")

    assert code == 0, err
    (row,) = read_json_lines(Path("saved.jsonl"))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert "\n".join(out) == "\n".join(message["content"] for message in row["messages"][1::2])
    notes = [line for line in err if "tokens/s" in line]
    assert len(notes) == 2
    assert all(re.match(r"\d+ tokens?, \d+\.\d tokens/s", note) for note in notes)


def test_the_answer_is_that_of_the_model_to_the_whole_chat(chat: Chat, file: Path) -> None:
    messages = saved(chat, "what colour is it\nis it red", "--system", "be short")

    assert messages[0] == {"role": "system", "content": "be short"}
    rows = [{"messages": [{key: one[key] for key in ("role", "content")} for one in messages[:end]]} for end in (2, 4)]
    predicted = [row["reply"] for row in Model(file, quiet=True).predict(rows)]
    assert [message["content"].strip() for message in messages[2::2]] == predicted


def test_a_backslash_joins_lines_and_two_slashes_are_one(chat: Chat) -> None:
    messages = saved(chat, "what\\\ncolour\\\nis it\n//red")
    assert [message["content"] for message in messages[::2]] == ["what\ncolour\nis it", "/red"]


def test_only_a_backslash_at_the_end_of_a_line_joins_the_next_one(chat: Chat) -> None:
    messages = saved(chat, "what\\\\\n\ncolour\\\nis it\nred")
    assert [message["content"] for message in messages[::2]] == ["what\\\n", "colour\nis it", "red"]


def test_the_system_prompt_is_set_and_removed(chat: Chat) -> None:
    assert saved(chat, "/system be short\nred")[0] == {"role": "system", "content": "be short"}
    assert saved(chat, "/system\nred", "--system", "be short")[0]["role"] == "user"
    assert saved(chat, "red", "--system", "")[0]["role"] == "user"


def test_without_a_text_the_system_prompt_is_that_of_the_file(chat: Chat) -> None:
    of_file = ("--set", "prompt.system=two words")
    assert chat("/system\nred\n")[2][0] == "no system prompt"
    code, out, err = chat("/system be short\n/system\nred\n", *of_file)
    assert code == 0, err
    assert err[:2] == ["system prompt set", "the system prompt is that of the file: two words"]
    assert out == chat("red\n", "--system", "two words")[1]
    assert out == chat("red\n", "--system", "", *of_file)[1]


def test_regenerate_replaces_the_last_answer(chat: Chat) -> None:
    settings = ("--temperature", "2", "--seed", "1")
    first = saved(chat, "red", *settings)
    again = saved(chat, "red\n/regenerate", *settings)
    assert len(again) == 2
    assert again[0] == first[0]
    assert again[1] != first[1]


def test_reset_starts_a_new_chat_with_the_system_prompt(chat: Chat) -> None:
    messages = saved(chat, "red\n/reset\nblue", "--system", "be short")
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "blue"


def test_a_seed_repeats_the_answers(chat: Chat) -> None:
    settings = ("--temperature", "2", "--seed")
    first = saved(chat, "red\nblue", *settings, "1")
    assert saved(chat, "red\nblue", *settings, "1") == first
    assert saved(chat, "red\nblue", *settings, "2") != first
    assert saved(chat, "red\nblue", *settings[:2]) != saved(chat, "red\nblue", *settings[:2])


def test_the_settings_reach_the_model(chat: Chat) -> None:
    greedy = saved(chat, "red\nblue")
    assert saved(chat, "red\nblue", "--temperature", "2", "--seed", "1", "--top-p", "0") == greedy
    _, _, err = chat("red\n", "--max-new-tokens", "3")
    assert err[-1].startswith("3 tokens, ")
    assert err[-1].endswith("; the answer ended at the limit of 3 tokens")


@pytest.mark.parametrize("words", [(), ("--temperature", "0")])
def test_a_share_of_probability_has_no_effect_on_greedy_answers(chat: Chat, words: tuple[str, ...]) -> None:
    code, out, err = chat("red\n", "--top-p", "0.5", "--seed", "3", *words)
    assert (code, out) == (2, [])
    assert err[-1] == (
        "error: --top-p has no effect on greedy generation; write --temperature with a number above 0, or leave "
        "--top-p out"
    )
    assert saved(chat, "red", "--top-p", "1", "--seed", "3") == saved(chat, "red")


def test_an_answer_that_ended_at_the_limit_has_no_weight(chat: Chat) -> None:
    messages = saved(chat, "red", "--max-new-tokens", "2", "--set", "generation.min_new_tokens=2")
    assert messages[-1]["weight"] == 0


def test_old_messages_that_are_longer_than_the_context_of_the_model_are_left_out(chat: Chat) -> None:
    code, _, err = chat(f"{'red ' * 300}\n" * 2)
    assert code == 0, err
    assert "the first 2 messages were left out, the context holds 2,048 tokens" in " ".join(" ".join(err).split())


def test_old_messages_are_left_out_of_a_full_context_with_a_note(chat: Chat) -> None:
    text = "red\n" * 6
    assert "left out" not in "\n".join(chat(text, "--set", "generation.min_new_tokens=12")[2])
    code, _, err = chat(text, "--context", "100", "--set", "generation.min_new_tokens=12")
    assert code == 0, err
    assert re.search(r"; the first \d+ messages were left out, the context holds\s+100 tokens", "\n".join(err))


def test_an_answer_without_text_is_not_added(chat: Chat) -> None:
    code, _, err = chat("red\n/save saved.jsonl\n", "--set", f"generation.stop={list(' abcdefghijklmnopqrstuvwxyz')}")
    assert code == 2
    assert err[-2:] == [
        "the model answered without any text; nothing was added to the chat",
        "error: there is no answer to save yet; write a message first",
    ]


def test_an_answer_of_white_space_is_not_added(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, answers = TerminalChat._generate, iter(["\n", None])

    def blank_at_first(self: TerminalChat, prompt: Any) -> Any:
        text, generated = generate(self, prompt)
        return next(answers) or text, generated

    monkeypatch.setattr(TerminalChat, "_generate", blank_at_first)
    code, _, err = chat("red\nblue\n")
    assert code == 0, err
    assert err.count("the model answered without any text; nothing was added to the chat") == 1


def test_a_model_cannot_control_the_terminal() -> None:
    assert printable("\x1b[2Ja\tb\n\x07\x9b\u202ec\r") == "\ufffd[2Ja\tb\n\ufffd\ufffd\ufffdc\ufffd"


ERRORS = {
    "red\n/save\n": "error: write the file after the command, such as /save chat.jsonl",
    "/save chat.jsonl\n": "error: there is no answer to save yet; write a message first",
    "\ufeff/regenerate\n": "error: there is no answer to generate again; write a message first",
    "/regenerate\n": "error: there is no answer to generate again; write a message first",
    "/usr/bin is red\n": (
        "error: there is no command /usr; write one of /system, /regenerate, /reset, /save, /help, /quit, or "
        "//usr/bin is red to send the text"
    ),
    b"\xff\n": "error: standard input is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start "
    "byte); convert it",
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_ends_piped_input(text: str | bytes, chat: Chat) -> None:
    code, _, err = chat(text)
    assert code == 2
    assert err[-1] == ERRORS[text].replace("command /usr;", "command /usr/bin;")


def test_quit_ends_the_input(chat: Chat) -> None:
    code, out, _ = chat("/quit\nred\n")
    assert (code, out) == (0, [])


def test_help_lists_the_commands_in_80_columns(chat: Chat) -> None:
    code, out, err = chat("/help\n")
    assert (code, out) == (0, [])
    assert {line.split()[0] for line in err} >= {"/system", "/regenerate", "/reset", "/save", "/help", "/quit"}
    assert max(map(len, err)) <= 80


def test_a_message_that_does_not_fit_is_an_error(chat: Chat) -> None:
    code, _, err = chat("red " * 60, "--context", "40")
    assert code == 2
    assert re.search(r"error: the message has \d+ tokens .* the context holds 40 tokens .*write a shorter", err[-1])


def test_a_saved_chat_is_training_data(chat: Chat, file: Path, tmp_path: Path) -> None:
    for number in range(4):
        saved(chat, f"red\nblue\n{'what ' * number}", "--temperature", "1", "--seed", "1", "--max-new-tokens", "60")
    saved(chat, "red", "--max-new-tokens", "2", "--set", "generation.min_new_tokens=2")
    trainer = {"type": "finetune", "epochs": 1, "batch_size": 2, "evaluate_generated": False}
    model = yaml.safe_load(file.read_text())["base_model"]
    split = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}
    data = {"source": str(tmp_path / "saved.jsonl"), "max_bad_rows": 0.5, "split": split}
    run = tmp_path / "run"

    Model(chat_config(base_model=model, trainer=trainer, data=data), quiet=True).train(run=run)

    (bad,) = read_json_lines(run / "quarantine.jsonl")
    assert "no answer to learn" in str(bad), "the only answer has ended at the limit"


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"name": "label", "type": "category", "decoder": {"labels": ["red", "blue"]}}, "category"),
        ({"name": "answer", "type": "preference", "head": "linear"}, "a score"),
    ],
)
def test_a_model_that_does_not_answer_with_text_is_refused(
    output: dict[str, Any], kind: str, chat: Chat, file: Path, tmp_path: Path
) -> None:
    model = yaml.safe_load(file.read_text())["base_model"]
    config = {"base_model": model, "input_features": [{"name": "text"}], "output_features": [output]}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(config | {"trainer": {"type": "none"}}), encoding="utf8")

    code, out, err = chat("red\n", config=other)

    assert (code, out) == (2, [])
    assert err[-1] == (
        f"error: partita chat needs a model that answers with text, and the output of this one is {kind}; use "
        "partita predict for rows, or partita serve and its route /predict"
    )


def test_a_model_that_answers_outputs_in_sequence_is_refused(chat: Chat, file: Path, tmp_path: Path) -> None:
    config = {
        "base_model": yaml.safe_load(file.read_text())["base_model"],
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "state", "type": "text"}, {"name": "reply", "type": "text", "column": "content"}],
        "data": {"dialogue": {"answers": "in_sequence"}},
        "trainer": {"type": "none"},
    }
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(config), encoding="utf8")

    code, out, err = chat("red\n", config=other)

    assert (code, out) == (2, [])
    assert "the output of this one is several texts in sequence; use partita predict for rows" in err[-1]


def test_a_model_without_a_chat_template_is_refused(chat: Chat, file: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(file.parent / "model", model)
    (model / "chat_template.jinja").unlink()
    config = chat_config(base_model=str(model), input_features=[{"name": "text"}])
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(config), encoding="utf8")

    code, out, err = chat("red\n", config=plain)

    assert (code, out) == (2, [])
    assert err[-1] == (
        "error: the model has no chat template, so partita chat cannot write messages as a prompt; use partita predict "
        "for rows, or partita serve and its route /v1/completions for texts"
    )


def test_without_prompt_toolkit_a_terminal_is_refused(
    file: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert command("chat", file) == 2

    assert capsys.readouterr().err == (
        "error: partita chat in a terminal needs prompt_toolkit, which is missing here; pip install 'partita[chat]', "
        "or pipe one message per line into the command\n"
    )


class Terminal:
    """The command in a terminal of 80 columns, in which Ctrl-C is a signal."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process, self.master = process, master
        self.shown = ""

    def type(self, text: str | bytes) -> None:
        os.write(self.master, text.encode() if isinstance(text, str) else text)

    def wait_for(self, pattern: str) -> str:
        """Return new output up to the first match, without the escape sequences of the terminal."""
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, (pattern, self.shown)
            if select.select([self.master], [], [], 0.1)[0]:
                raw = os.read(self.master, 65536).decode("utf8", "replace")
                if "\x1b[6n" in raw:  # prompt_toolkit asks for the position of the cursor
                    os.write(self.master, b"\x1b[1;1R")
                self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before


@contextmanager
def terminal(*words: object, folder: Path) -> Iterator[Terminal]:
    """Run the command as the leader of a session on its own terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from partita.cli.main import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.long
def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(tmp_path: Path) -> None:
    generation = {"max_new_tokens": 2000, "min_new_tokens": 2000}
    file = write_chat_model(tmp_path, generation=generation)
    with terminal("chat", file, folder=tmp_path) as window:
        hint = window.wait_for(r"Ctrl-D\s+ends\.")
        assert "Esc Enter" in hint
        window.wait_for(">")
        window.type("what\x1b\rcolour\\\ris it\r")
        window.wait_for(r"is it\s+\w+")
        window.type("\x03")
        window.wait_for("stopped")
        window.wait_for(">")
        window.type("\x03")
        window.wait_for("Ctrl-D or /quit ends the chat")
        window.type(b"caf\xe9\r")
        window.wait_for(r"error: the message has bytes that are not UTF-8, and was not\s+sent; type it again")
        window.type("/nothing\r")
        window.wait_for("error: there is no command /nothing")
        window.type("/save saved.jsonl\r")
        window.wait_for("1 incomplete answer")
        window.wait_for(">")
        window.type("\x04")
        assert window.process.wait(60) == 0
    (row,) = read_json_lines(tmp_path / "saved.jsonl")
    question, answer = row["messages"]
    assert question["content"] == "what\ncolour\nis it"
    assert answer["content"]
    assert answer["weight"] == 0


@pytest.mark.long
def test_a_malformed_event_of_a_mouse_is_ignored(file: Path, tmp_path: Path) -> None:
    with terminal("chat", file, folder=tmp_path) as window:
        window.wait_for(">")
        window.type("\x1b[<0;1M\x1b[<0;1;1M/nothing\r")
        assert "Traceback" not in window.wait_for("error: there is no command /nothing")


@pytest.mark.long
def test_sigterm_ends_the_chat_during_an_answer(tmp_path: Path) -> None:
    file = write_chat_model(tmp_path, generation={"max_new_tokens": 2000, "min_new_tokens": 2000})
    with terminal("chat", file, folder=tmp_path) as window:
        window.wait_for(">")
        window.type("red\r")
        window.wait_for(r"red\s+\w+")
        window.process.send_signal(signal.SIGTERM)
        assert window.process.wait(60) == 128 + signal.SIGTERM
