"""Tests of loading files, texts, dictionaries and configurations; invalid input is refused quickly."""

import subprocess
import sys
from pathlib import Path

import pytest

from partita_schema.config import Config
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

from ..work import counted_calls
from .refusals import message_of

TEXT = "base_model: m\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"


def message_of_bytes(raw: bytes, folder: Path) -> str:
    file = folder / "run.yaml"
    file.write_bytes(raw)
    return message_of(file).removeprefix(f"{file}:")


def test_a_file_a_text_a_dictionary_and_a_config_load_to_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    loaded = load_config(file)
    raw = {"base_model": "m", "input_features": [{"name": "a"}], "output_features": [{"name": "b", "type": "text"}]}
    assert loaded.config == load_config(TEXT).config == load_config(raw).config == load_config(loaded.config).config
    assert loaded.config == load_config(str(file)).config == Config.model_validate(raw)


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    loaded = load_config(file)
    assert (loaded.folder, loaded.file, loaded.text) == (tmp_path, str(file), TEXT)
    assert (load_config(TEXT).folder, load_config(TEXT).file) == (Path(), None)


def test_a_path_object_in_a_dictionary_is_converted_to_text() -> None:
    raw = {"base_model": Path("some/model"), "input_features": [{"name": "a"}]}
    raw["output_features"] = [{"name": "b", "type": "text"}]
    assert load_config(raw).config.base_model == "some/model"


def test_origins_distinguish_line_default_override_and_dictionary(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    origins = load_config(file, overrides=["seed=3", "adapter={type: lora}", "trainer.type=finetune"]).origins
    assert origins["base_model"] == f"{file}:1"
    assert origins["output_features[0].name"] == f"{file}:3"
    assert origins["seed"] == origins["adapter.type"] == "--set"
    assert origins["adapter.r"] == origins["trainer.batch_size"] == "default"
    assert load_config(load_config(file).config).origins["base_model"] == "given"


def test_defaults_apply_to_features_that_do_not_override_them() -> None:
    text = TEXT.replace("[{name: a}]", "[{name: a}, {name: c, preprocessing: {max_sequence_length: 9}}]")
    config = load_config(text + "defaults: {text: {preprocessing: {max_sequence_length: 5, lowercase: true}}}").config
    options = [feature.preprocessing for feature in config.input_features]
    assert [(o.max_sequence_length, o.lowercase) for o in options] == [(5, True), (9, True)]


def test_a_missing_file_is_reported_with_the_most_similar_name(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(TEXT)
    missing = tmp_path / "trian.yaml"
    assert message_of(missing) == f"{missing}: there is no such file; did you mean {tmp_path / 'train.yaml'}?"
    assert message_of(tmp_path / "zzzzzz.yaml").endswith("there is no such file; YAML files there: train.yaml")
    assert message_of("no/such/run.yaml") == "no/such/run.yaml: there is no such file; there is no folder no/such"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"{tmp_path}: is a folder; write the YAML file in it"


def test_a_folder_is_refused_with_the_file_to_write(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TEXT)
    assert message_of(tmp_path) == f"{tmp_path}: is a folder; write the YAML file in it: run.yaml"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(TEXT)
    assert message_of(tmp_path) == (
        f"{tmp_path}: is the folder of a run; write {resolved}, which holds every value of the run with its origin"
    )


def test_utf16_and_utf8_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for encoding in ("utf-16", "utf-8-sig"):
        file.write_bytes(TEXT.encode(encoding))
        assert load_config(file).config.base_model == "m"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "1:1: the file is empty; write at least base_model, input_features and output_features"),
        (
            b"# only a comment\n",
            "1:1: the file is empty; write at least base_model, input_features and output_features",
        ),
        (TEXT.encode("utf-16-le"), " holds zero bytes: no text, or UTF-16 without a mark; save it as UTF-8"),
        (b"\x89PNG\x00\x00", " holds zero bytes: no text, or UTF-16 without a mark; save it as UTF-8"),
        (b"a: b\nc: caf\xe9\n", "2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        (
            TEXT.encode("utf-16") + b"x",
            "4: byte 0x78 is not UTF-16, although the file begins with its byte order mark; save the file as UTF-8",
        ),
        (b"- a\n- b\n", "1:1: holds a list; write keys and values at the top, such as base_model: ..."),
        (b"hello\n", "1:1: holds a single text; write keys and values at the top, such as base_model: ..."),
    ],
)
def test_a_file_without_a_configuration_is_reported(raw: bytes, message: str, tmp_path: Path) -> None:
    assert message_of_bytes(raw, tmp_path) == message


@pytest.mark.parametrize("raw", [b"[" * 10_000_000, b"a: 1\n" * 2_000_000, bytes(range(256)) * 40_000, b"x" * 10**7])
def test_ten_megabytes_of_garbage_are_refused(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(raw)
    assert message_of(file) == f"{file}: holds more than 1,000,000 bytes; a configuration is a few lines"


@pytest.mark.parametrize(
    "text", ["[" * 900_000, "a: {" * 200_000, "- " * 400_000, "a: 1\n" * 190_000, "a: \n" + "? " * 9000]
)
def test_a_megabyte_of_garbage_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert str(file) in message_of(file)


@pytest.mark.parametrize(
    "piece", ["[", "a: {", "- ", "a: 1\n", "? ", "key_{n}: 1\n", "- {n}: &a{n} [*a{n}]\n", "a: ${B}\n"]
)
def test_the_work_for_garbage_is_linear(piece: str) -> None:
    message_of("key: 1\n")  # exclude the work that is done once
    texts = ["".join(piece.replace("{n}", str(number)) for number in range(count)) for count in (2_000, 4_000)]
    few, many = (counted_calls(lambda text=text: message_of(f"\n{text}"))[1] for text in texts)

    assert many < 2.5 * few


def test_an_expansion_bomb_of_anchors_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert message_of("\n".join(lines)).endswith("holds more than 100,000 values, anchors counted; write less")


def test_a_lone_surrogate_in_a_text_is_refused() -> None:
    assert message_of("a: b\nc: \ud800\n") == "2: holds half a character (a surrogate); write the whole one"


def test_a_dictionary_inside_itself_is_refused() -> None:
    raw: dict[str, object] = {"base_model": "m"}
    raw["prompt"] = raw
    assert message_of(raw) == "is nested more than 64 levels deep; write it flatter"


def test_the_schema_imports_no_heavy_library() -> None:
    code = (
        "import sys, partita_schema.load, partita_schema.dump; "
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'numpy', 'pandas', 'marshmallow', 'jsonschema'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_many_unknown_keys_are_counted_and_the_first_are_reported() -> None:
    good = "base_model: m\ninput_features: [{name: a, type: text}]\noutput_features: [{name: b, type: text}]\n"
    with pytest.raises(ConfigError) as error:
        load_config(good + "trainer:\n  type: finetune\n" + "".join(f"  key_{i}: 1\n" for i in range(12_000)))

    lines = str(error.value).splitlines()
    assert len(error.value.problems) == 12_000
    assert len(lines) == 51
    assert lines[0] == "6:3: trainer.key_0: unknown key; see partita schema --markdown for the keys of this section"
    assert lines[-1] == "... and 11,950 more mistakes"


def test_a_mistyped_key_among_many_unknown_ones_is_still_reported() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("".join(f"key_{i}: 1\n" for i in range(40)) + "seeed: 1\n" + "more_{i}: 1\n" * 1)

    assert "41:1: seeed: unknown key; did you mean seed?" in str(error.value).splitlines()


def test_a_key_of_any_length_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("base_model: m\n" + "x" * 100_000 + ": 1\n")

    assert max(len(line) for line in str(error.value).splitlines()) < 600


def test_a_number_next_to_a_control_character_is_a_wrong_value() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_config({"base_model": "some/model", "trust_remote_code": "0\x1f"})


def test_a_text_of_a_million_digits_for_a_number_is_refused_in_one_pass(tmp_path: Path) -> None:
    """In quadratic time the test would exceed its time limit."""
    (tmp_path / "run.yaml").write_text(f"seed: {'1' * 900_000}x\n")

    with pytest.raises(ConfigError, match="seed: write an integer from 0 to 4294967295; got 1111"):
        load_config(tmp_path / "run.yaml")
