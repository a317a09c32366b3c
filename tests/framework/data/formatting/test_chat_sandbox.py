"""Tests of untrusted chat templates: rendering always ends quickly, with a text or an error message."""

import threading
from typing import Any

import pytest

from partita.data.formatting.chat import ChatTemplate
from partita.data.formatting.chat_sandbox import limited_template
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import ModelError

MESSAGES = [{"role": "user", "content": "Hello"}]
GOOD = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BAD = {
    "division": "{{ 1 / 0 }}",
    "type": "{{ messages + 1 }}",
    "key": "{{ messages[0].content.nothing.more }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "range": "{{ range(10 ** 12)|list }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{{ 'a' * 10 ** 11 }}",
    "list": "{{ ([0] * 10 ** 11)|length }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "adding": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "center": "{{ 'a'.center(10 ** 11) }}",
    "center filter": "{{ 'a'|center(100000000000) }}",
    "format": "{{ '{:99999999999}'.format(1) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "format filter": "{{ '%99999999999d'|format(1) }}",
    "replace": "{% set a = 'a' * 9999999 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 9999999 %}{{ a|replace('a', a) }}",
    "join": "{% set a = 'a' * 9999999 %}{{ ([a] * 99999)|join }}",
    "join method": "{% set a = 'a' * 9999999 %}{{ ''.join([a] * 99999) }}",
    "batch": "{{ [1]|batch(100000000000, 0)|list }}",
    "output": "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ a.strip() }}{% endfor %}",
    "indent": "{{ messages|tojson(indent=100000000000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ messages|nothing }}",
}


def tokenizer(template: str) -> Any:
    found = byte_tokenizer(max_length=None)
    found.chat_template = template
    return found


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_fails_or_never_ends_is_reported(name: str) -> None:
    with pytest.raises(ModelError) as error:
        ChatTemplate(tokenizer(BAD[name]), system=None)

    assert str(error.value).startswith("the model's chat template refuses the messages: ")
    assert len(str(error.value)) < 500


def test_limits_apply_in_any_thread() -> None:
    said: list[str] = []

    def render() -> None:
        try:
            ChatTemplate(tokenizer(BAD["loops"]), system=None)
        except ModelError as error:
            said.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert said == ["the model's chat template refuses the messages: it takes more than 300,000 steps"] * 2


@pytest.mark.parametrize(
    "template",
    [
        GOOD,
        "{{ '-' * 20 ~ messages[0].content ~ 1 ~ none }}",
        (
            "{% macro line(m) %}{{ m.role|upper }}: {{ m.content|trim }}\n{% endmacro %}"
            "{% for m in messages %}{{ line(m) }}{{ loop.index0 * 2 }}{% if loop.last %}!{% endif %}{% endfor %}"
        ),
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ messages|tojson(indent=2) }}{{ '%s and %05.1f' % ('a', 2) }}{{ '{:>10}'.format('b') }}",
        (
            "{% set n = namespace(count=0) %}{% for m in messages * 3 %}{% set n.count = n.count + 1 %}{% endfor %}"
            "{{ n.count }}{{ messages|map(attribute='role')|join(', ') }}{{ 'abc'.replace('b', 'xx') }}{{ 2 ** 10 }}"
        ),
        (
            "{% macro f() %}[{{ caller(1) }}]{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}"
            "{% filter upper %}{{ messages[0]['content'][::-1] }}{% endfilter %}"
        ),
    ],
)
def test_rendering_within_the_limits_equals_that_of_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    expected = _cached_compile_jinja_template(template).render(messages=MESSAGES, add_generation_prompt=True)
    with limited_template():
        rendered = tokenizer(template).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)

    assert rendered == expected


def test_a_long_dialogue_is_far_from_the_limits() -> None:
    with limited_template():
        text = tokenizer(GOOD).apply_chat_template(MESSAGES * 20_000, tokenize=False)

    assert text == "<user>Hello</s>" * 20_000
