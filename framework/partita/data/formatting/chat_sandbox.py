"""Limits for chat templates: programs that come with a model and may loop without end or fill the memory.

transformers renders them in jinja's sandbox, which blocks access to files and Python's internals but not
`{% for %}` within `{% for %}`, `'a' * 10**10` or `10 ** (10 ** 10)`. Here the same sandbox counts steps: each loop
iteration, each call and each hundred characters written or copied. A value that would be too large is rejected before
it is created. Nothing depends on time or signals, so a template stops at the same point in every thread and every run.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from partita.lm.transformers_internals import TemplateCompiler, replace_template_compiler

MAX_STEPS = 300_000
"""Maximum steps of one rendering; a dialogue of a hundred messages takes about a thousand."""
MAX_SIZE = 10_000_000
"""Maximum number of characters of a text, or of items of a list, that a template creates."""
MAX_BITS = 10_000
"""Maximum number of bits of an integer."""
CHARACTERS_OF_A_STEP = 100
WIDTH = re.compile(r"\d{6,}")
CHARGE = "_charge"
CONCATENATE = "_concatenate"

local = threading.local()


class LimitError(TemplateError):
    """A template exceeds its limits."""


@contextmanager
def limited_template() -> Iterator[None]:
    """Render chat templates with limits while in this context, also inside transformers' functions.

    Any other exception of a template, such as ZeroDivisionError or RecursionError, becomes a TemplateError as well.

    Raises:
        jinja2.TemplateError: If a template fails or exceeds its limits.
    """
    install()
    before = getattr(local, "steps", None)
    local.steps = MAX_STEPS
    try:
        yield
    except TemplateError:
        raise
    except RecursionError as error:
        raise TemplateError("it calls itself without end (RecursionError)") from error
    except Exception as error:  # a template is a program, and can raise anything
        raise TemplateError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    finally:
        local.steps = before


@functools.cache
def install() -> None:
    """Make transformers compile chat templates in LimitedEnvironment; limits apply only in `limited_template`."""
    replace_template_compiler(limited_compiler)


def limited_compiler(original: TemplateCompiler) -> TemplateCompiler:
    """Return a compiler whose environment has the filters and globals of the original one, and limits."""

    @functools.lru_cache
    def compile_limited(chat_template: str) -> Any:
        plain = original("").environment
        environment = LimitedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[type(extension) for extension in plain.extensions.values()],
        )
        environment.globals.update(plain.globals)
        environment.globals.pop("lipsum", None)  # it returns as many random words as requested
        own = {CHARGE: charge_filter, CONCATENATE: concatenate}
        environment.filters = {name: limited(function) for name, function in plain.filters.items()} | own
        return environment.from_string(chat_template)

    return compile_limited


def charge(steps: int) -> None:
    """Count steps of the current rendering. Raise LimitError if there are too many."""
    left = getattr(local, "steps", None)
    if left is None:
        return
    local.steps = left - steps
    if local.steps < 0:
        raise LimitError(f"it takes more than {MAX_STEPS:,} steps")


def charge_size(value: Any) -> None:
    if isinstance(value, str | list | tuple | dict | range):
        charge(len(value) // CHARACTERS_OF_A_STEP)


@pass_context  # keeps the optimizer from evaluating it once, at compile time
def charge_filter(context: Any, steps: int) -> str:
    charge(steps)
    return ""


@pass_context
def concatenate(context: Any, parts: list[Any]) -> str:
    """Concatenate values: the operator `~`."""
    texts = [str(part) for part in parts]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def check_size(size: int) -> None:
    """Raise LimitError if a value would be too large; otherwise count it as steps."""
    if size > MAX_SIZE:
        raise LimitError(f"it makes a text or a list of more than {MAX_SIZE:,} characters or items")
    charge(size // CHARACTERS_OF_A_STEP)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts steps and rejects values that are too large."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        blocks: Any = list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for block in blocks:
            written = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
            block.body.insert(0, charge_statement(1 + written // CHARACTERS_OF_A_STEP, block))
        replace_concatenations(template)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation of a template. Raise an error if its result would be too large.

        Args:
            context: The context of the template.
            operator: The operator, such as "+".
            left: Left operand.
            right: Right operand.
        """
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            check_size(len(left) + len(right))
        elif operator == "*":
            check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            check_widths(left)
        charge(1)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja's own
        charge(1)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            check_arguments(__obj.__name__, (text, *args), kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        charge_size(result)
        return result


def limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts steps and rejects arguments that would make it write too much."""

    @functools.wraps(function)  # keeps the attributes that jinja set
    def call(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        check_arguments(getattr(function, "__name__", "").removeprefix("do_"), values, kwargs)
        result = function(*args, **kwargs)
        charge_size(result)
        return result

    return call


def check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise LimitError if a string method or a filter would write too much."""
    subject, values = (args[0] if args else ""), [*args[1:], *kwargs.values()]
    size = len(subject) if isinstance(subject, str | list | tuple | dict) else 1
    charge(1 + size // CHARACTERS_OF_A_STEP)
    for value in values:
        if isinstance(value, int) and abs(value) > CHARACTERS_OF_A_STEP:
            check_size(min(size + 1, MAX_SIZE) * abs(value) // CHARACTERS_OF_A_STEP)
            check_size(abs(value))
    if name in ("format", "format_map") and isinstance(subject, str):
        check_widths(subject)
    elif name == "replace" and len(values) > 1 and isinstance(subject, str):
        check_size((size + 1) * len(str(values[1])))
    elif name == "join":
        separator, parts = (subject, values[0]) if isinstance(subject, str) and values else ("", subject)
        if isinstance(parts, list | tuple):
            between = max((len(str(value)) for value in (separator, *values) if isinstance(value, str)), default=0)
            check_size(sum(len(part) if isinstance(part, str) else 10 for part in parts) + between * len(parts))


def check_product(left: Any, right: Any) -> None:
    """Raise LimitError if a product would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
        return
    for items, count in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(count, int):
            check_size(len(items) * max(count, 0))


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitError(f"it makes a number of more than {MAX_BITS:,} bits")


def check_widths(text: str) -> None:
    if WIDTH.search(text):
        raise LimitError(f"it formats a value with the width {WIDTH.findall(text)[0][:20]}")


def charge_statement(steps: int, statement: nodes.Node) -> nodes.Node:
    """Return a statement that counts steps when it runs."""
    value = nodes.Const(steps, lineno=statement.lineno)
    call = nodes.Filter(value, CHARGE, [], [], None, None, lineno=statement.lineno)
    return nodes.ExprStmt(call, lineno=statement.lineno)


def replace_concatenations(node: nodes.Node) -> None:
    """Replace every `~` by a filter with a limit."""
    for name, value in list(node.iter_fields()):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                replace_concatenations(child)
        if isinstance(value, list):
            setattr(node, name, [limited_concatenation(child) for child in value])
        else:
            setattr(node, name, limited_concatenation(value))


def limited_concatenation(node: Any) -> Any:
    if not isinstance(node, nodes.Concat):
        return node
    parts = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(parts, CONCATENATE, [], [], None, None, lineno=node.lineno, environment=node.environment)
