"""Tests that loading any input raises no error other than ConfigError."""

import contextlib
import random
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.yaml.files import decoded

from ..properties import examples

GOOD = (Path(__file__).parent / "wrong" / "good.yaml").read_text(encoding="utf-8")
RAW = yaml.safe_load(GOOD)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "lora"])
)
KEYS = st.sampled_from(["type", "r", "name", "source", "trainer", "decoder", "match", "labels"]) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


def load_or_config_error(source: object, *overrides: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(source, overrides=overrides)  # type: ignore[arg-type]


@examples(200)
@given(st.binary(max_size=300))
def test_random_bytes(raw: bytes) -> None:
    try:
        text = decoded(raw, "run.yaml")
    except ConfigError:
        return
    load_or_config_error(text + "\n")


@examples(200)
@given(st.text(st.sampled_from("ab:-{}[]&*#|>'\"!%@ \n\t,?~<01."), max_size=80))
def test_random_yaml_marks(text: str) -> None:
    load_or_config_error(text + "\n")


@examples(200)
@given(st.dictionaries(st.sampled_from(list(RAW)) | KEYS, VALUES, max_size=6))
def test_random_dictionaries(raw: dict[str, object]) -> None:
    load_or_config_error({**raw, "base_model": "m"})
    load_or_config_error({"model_type": "llm", "base_model": "m", **raw})


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


PLACES = [place for place in places(RAW) if place]


@examples(200)
@given(st.sampled_from(PLACES), VALUES, st.booleans())
def test_a_valid_configuration_with_any_value_anywhere(
    place: tuple[str | int, ...], value: object, ludwig: bool
) -> None:
    raw = yaml.safe_load(GOOD)
    holder = raw
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = value
    if ludwig:
        del raw["version"]
        raw["model_type"] = "llm"
    load_or_config_error(raw)


@examples(200)
@given(st.integers())
def test_a_valid_configuration_with_random_edits(seed: int) -> None:
    draw = random.Random(seed)
    text = list(GOOD)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(text))
        text[at : at + draw.randint(0, 3)] = draw.choice(["", " ", "\n", ":", "-", "{", "'", "x", "\t", "&a ", "*a"])
    load_or_config_error("".join(text) + "\n")


@examples(200)
@given(
    st.text(max_size=10) | st.sampled_from(["trainer", "a.b", "input_features.0", "data.source.type"]),
    st.text(max_size=10),
)
def test_random_overrides(key: str, value: str) -> None:
    load_or_config_error(GOOD, f"{key}={value}", key)
