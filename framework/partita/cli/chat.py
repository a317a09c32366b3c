"""`partita chat`: talk to a model in the terminal, or answer messages from standard input."""

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from partita.cli.loading import open_model
from partita.cli.options import AnswerOverrides, Context, FilesOrRun, TrustRemoteCode
from partita.cli.printing import print_wrapped
from partita_schema.errors import DataError, ModelError, PartitaError

if TYPE_CHECKING:
    from partita.lm.base import GenerationOptions
    from partita.serving.engine import ServingEngine
    from partita_schema.config import Config

ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def chat(
    sources: FilesOrRun,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default=False)] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Temperature of sampling; 0 is greedy.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Sample from this share of probability.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens of an answer; overrides the file.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling. Default: drawn.", show_default=False)] = None,
    context: Context = None,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
) -> None:
    """Talk to a model in the terminal. Piped input is answered line by line."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    terminal = PromptTerminal() if is_interactive else PipedInput()
    model = open_model(
        sources,
        overrides=overrides,
        quiet=not is_interactive,
        trust_remote_code=trust_remote_code,
        one_process=True,
    )
    check_has_text_answers(model.config)
    from partita.model import open_engine
    from partita.serving.conversation import Conversation
    from partita.serving.terminal_chat import HINT, ChatSettings, TerminalChat

    engine = open_engine(model, context=context, batch_size=1)
    options = sampling_of(engine, temperature=temperature, top_p=top_p)
    settings = ChatSettings(options, max_new_tokens or engine.default_new_tokens, seed)
    with engine:
        if is_interactive:
            print_wrapped(HINT)
        signal.signal(signal.SIGTERM, end)  # otherwise SIGTERM would only stop an answer, as Ctrl-C does
        TerminalChat(engine, settings, terminal, Conversation(system or None)).run()


def sampling_of(engine: "ServingEngine", *, temperature: float | None, top_p: float | None) -> "GenerationOptions":
    """Return the generation options of a chat. Raise PartitaError if the model cannot chat, or an option has no effect.

    Args:
        engine: The engine that answers.
        temperature: Overrides the temperature of the file.
        top_p: Overrides the share of probability of the file.
    """
    from partita.serving.chat_prompts import NO_EFFECT, ineffective_setting, sampling_options

    if engine.prompts.why_none is not None:
        raise ModelError(
            "the model has no chat template, so partita chat cannot write messages as a prompt; use partita predict "
            "for rows, or partita serve and its route /v1/completions for texts"
        )
    more = {} if top_p is None else {"top_p": top_p}
    options = sampling_options(engine.options, temperature=temperature, more=more)
    if ineffective_setting(options, more) is not None:
        raise PartitaError(
            f"{NO_EFFECT.format('--top-p')}; write --temperature with a number above 0, or leave --top-p out"
        )
    return options


def end(number: int, frame: FrameType | None) -> NoReturn:
    """End the program."""
    raise SystemExit(ENDED_BY_SIGTERM)


def check_has_text_answers(config: "Config") -> None:
    """Raise PartitaError if the model of a configuration does not answer with text."""
    others = {output.type for output in config.output_features} - {"text", "preference"}
    if others or config.scores_answers or config.answers_in_sequence:
        found = "a score" if config.scores_answers else ", ".join(sorted(others)) or "several texts in sequence"
        raise PartitaError(
            f"partita chat needs a model that answers with text, and the output of this one is {found}; "
            "use partita predict for rows, or partita serve and its route /predict"
        )


class PromptTerminal:
    """A terminal with line editing, several lines per message, and a history of messages."""

    is_interactive = True

    def __init__(self) -> None:
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.enums import DEFAULT_BUFFER
            from prompt_toolkit.filters import has_focus
            from prompt_toolkit.key_binding import KeyBindings
            from prompt_toolkit.keys import Keys
        except ImportError:
            raise PartitaError(
                "partita chat in a terminal needs prompt_toolkit, which is missing here; "
                "pip install 'partita[chat]', or pipe one message per line into the command"
            ) from None
        keys = KeyBindings()

        @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
        def send(event: Any) -> None:
            buffer = event.current_buffer
            if buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
        def break_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.Vt100MouseEvent)
        def ignore(event: Any) -> None:
            """Ignore the mouse: prompt_toolkit reads its events even if they are malformed, and fails."""

        self._session: Any = PromptSession(
            "> ", multiline=True, key_bindings=keys, prompt_continuation="  ", reserve_space_for_menu=0
        )
        self.answers = sys.stdout
        self.notes = sys.stdout

    def read(self) -> str:
        """Return the next message.

        Raises:
            EOFError: At Ctrl-D.
            KeyboardInterrupt: At Ctrl-C.
            DataError: The message has bytes that are not UTF-8.
        """
        text = str(self._session.prompt())
        try:
            text.encode("utf8")
        except UnicodeEncodeError:
            raise DataError("the message has bytes that are not UTF-8, and was not sent; type it again") from None
        return text


class PipedInput:
    """Messages on standard input, one per line; a backslash at the end of a line joins the next one."""

    is_interactive = False

    def __init__(self) -> None:
        self.answers = sys.stdout
        self.notes = sys.stderr

    def read(self) -> str:
        """Return the next message. Raise EOFError after the last one."""
        line = self._line()
        if not line:
            raise EOFError
        lines = [line.rstrip("\r\n")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line().rstrip("\r\n"))
        return "\n".join(lines)

    def _line(self) -> str:
        """Return a line with its end, or an empty text after the last one."""
        try:
            return sys.stdin.buffer.readline().decode("utf-8-sig")  # without a byte order mark
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not UTF-8 ({error}); convert it") from error
