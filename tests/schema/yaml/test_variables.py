"""Tests of environment variables in values of a configuration."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.dump import native_yaml, resolved_yaml
from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.yaml.variables import escaped, expanded

from ..refusals import message_of

TEXT = """\
base_model: ${MODEL}
input_features: [{name: a}]
output_features: [{name: b, type: text}]
data: {source: "${FOLDER:-data}/rows.csv"}
trainer:
  type: finetune
  epochs: ${EPOCHS:-3}
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOLDER", "EPOCHS", "NOWHERE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL", "org/name")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("SWITCH", "no")
    monkeypatch.setenv("SEVERAL", "a\nseed: 5")


def problem_of(text: str, *overrides: str) -> str:
    return message_of(text, overrides=overrides)


def task_of(written: str) -> object:
    return load_config(f"{TEXT}prompt:\n  task: {written}\n").config.prompt.task


def test_variables_and_defaults_are_expanded_and_their_origin_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TEXT)

    loaded = load_config(tmp_path / "run.yaml")

    assert (loaded.config.base_model, loaded.config.data.source) == ("org/name", "data/rows.csv")
    assert loaded.config.trainer.type == "finetune"
    assert loaded.config.trainer.epochs == 3
    assert loaded.text == TEXT, "the text that a run saves as config.yaml"
    assert loaded.origins["base_model"] == f"{tmp_path / 'run.yaml'}:1: ${{MODEL}}"
    assert loaded.origins["data.source"].endswith("run.yaml:4: ${FOLDER:-data}/rows.csv")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("x ${MODEL} y ${MODEL}", "x org/name y org/name"),
        ("${EMPTY:-d}", "d"),
        ("${NOWHERE:-}.", "."),
        ('"${EMPTY}."', "."),
        ("'${SWITCH}'", "no"),
        ("${SEVERAL}", "a\nseed: 5"),
        ("$${MODEL}", "${MODEL}"),
        ("$$${MODEL}", "$${MODEL}"),
        ("a $5 $MODEL $$ {x}", "a $5 $MODEL $$ {x}"),
    ],
)
def test_a_value_is_expanded_once_and_remains_one_value(written: str, value: str) -> None:
    assert task_of(written) == value


@pytest.mark.parametrize(
    ("value", "seen"), [("2.5", "2.5"), ("1x", "7:11: trainer.epochs: "), ("no", "7:11: trainer.")]
)
def test_an_unquoted_variable_is_parsed_like_a_value_in_the_file(
    value: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPOCHS", value)

    def outcome(text: str) -> str:
        try:
            return str(load_config(text).config.trainer.epochs)  # type: ignore[union-attr]
        except ConfigError as error:
            return str(error).removesuffix("; it is written as ${EPOCHS:-3}")

    assert outcome(TEXT) == outcome(TEXT.replace("${EPOCHS:-3}", value))
    assert outcome(TEXT).startswith(seen)


def test_a_quoted_value_remains_a_text() -> None:
    options = "{type: custom, target: 'a:B', options: {x: '${SWITCH}', y: " + "'${FOLDER:-1}'}}"
    text = TEXT.partition("trainer:")[0] + f"trainer: {options}\n"
    assert load_config(text).config.trainer.options == {"x": "no", "y": "1"}  # type: ignore[union-attr]


def test_a_variable_that_is_not_set_is_an_error_at_its_line() -> None:
    message = problem_of(TEXT.replace("${MODEL}", "${NOWHERE}"))
    assert message == (
        "1:13: base_model: the environment variable NOWHERE is not set; run `export NOWHERE=...` first, or write "
        "${NOWHERE:-default}, or $${NOWHERE} for the text itself"
    )
    assert load_config(TEXT.replace("${MODEL}", "${NOWHERE}"), overrides=["base_model=m"]).config.base_model == "m"


@pytest.mark.parametrize("written", ["${}", "${1}", "${A-b}", "a ${", "${ MODEL }"])
def test_a_dollar_brace_without_a_variable_is_an_error(written: str) -> None:
    message = problem_of(f"{TEXT}prompt:\n  task: '{written}'\n")
    assert (
        message == "9:9: prompt.task: ${ opens no variable; write ${NAME} or ${NAME:-default}, or $${ for the text ${"
    )


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "HF_TOKEN", "db_password", "SECRET"])
def test_a_variable_named_like_a_secret_is_refused_and_its_value_not_shown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "sk-123")
    message = problem_of(TEXT.replace("${MODEL}", f"${{{name}}}"))
    assert message.startswith(
        f"1:13: base_model: {name} looks like a secret, and values of the configuration are written"
    )
    assert "sk-123" not in message


def test_overrides_are_expanded_and_dictionaries_are_not() -> None:
    assert load_config(TEXT, overrides=["base_model=${SWITCH}x"]).config.base_model == "nox"
    assert "--set base_model=${NOWHERE}: base_model: the environment" in problem_of(TEXT, "base_model=${NOWHERE}")
    given = yaml.safe_load(TEXT.replace("${EPOCHS:-3}", "3"))
    assert load_config(given).config.base_model == "${MODEL}"


def test_braces_with_columns_are_not_expanded() -> None:
    text = f"{TEXT}prompt:\n  template: 'It costs ${{a}}.'\n"
    loaded = load_config(text)
    assert loaded.config.prompt.template == "It costs ${a}."
    assert load_config(resolved_yaml(loaded)).config == loaded.config


@pytest.mark.parametrize("form", [resolved_yaml, lambda loaded: native_yaml(loaded.config)], ids=["resolved", "native"])
def test_dumped_values_are_not_expanded_again(form) -> None:  # type: ignore[no-untyped-def]
    loaded = load_config(f"{TEXT}prompt:\n  task: |\n    a $${{MODEL}} $$${{MODEL}}\n    ${{MODEL}}\n")
    assert loaded.config.prompt.task == "a ${MODEL} $${MODEL}\norg/name\n"
    assert load_config(form(loaded)).config == loaded.config


@given(st.text(alphabet=st.sampled_from("${}:-AB") | st.characters(codec="utf-8")))
def test_escaped_text_is_expanded_to_itself(text: str) -> None:
    assert expanded(str(escaped(text)), {}) == text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("seed: ${EMPTY}", "there is no value; write an integer from 0 to 4294967295, or remove the key"),
        ("seed: ${MODEL}", "write an integer from 0 to 4294967295; got org/name"),
    ],
)
def test_a_wrong_value_of_a_variable_is_shown_with_its_name(line: str, problem: str) -> None:
    assert problem_of(TEXT + line).endswith(f"seed: {problem}; it is written as {line.removeprefix('seed: ')}")
    assert problem_of(TEXT, line.replace(": ", "=")).endswith(f"; it is written as {line.removeprefix('seed: ')}")
