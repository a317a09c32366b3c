"""Tests of wrong configurations: each gives one problem with the correct line and key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from partita_schema.common.text import folded
from partita_schema.compat.aliases import FOREIGN
from partita_schema.compat.ludwig_keys import IGNORED, RENAMED
from partita_schema.errors import ConfigError, Problem
from partita_schema.load import load_config
from partita_schema.problems.unknown_key import unknown_key
from partita_schema.reference import all_models
from partita_schema.schema_tree import keys_of

FOLDER = Path(__file__).parent / "wrong"
GOOD = (FOLDER / "good.yaml").read_text(encoding="utf-8")
EDITS = yaml.safe_load((FOLDER / "edits.yaml").read_text(encoding="utf-8"))
MINIMAL = "base_model: m\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"


def problems_of(text: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(text, overrides=overrides)
    return caught.value.problems


def test_the_valid_configuration_loads() -> None:
    assert load_config(GOOD).config.seed == 7


def test_there_are_two_hundred_wrong_files() -> None:
    assert len({(edit["old"], edit["new"]) for edit in EDITS}) >= 200


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit["new"].strip()[:40] or edit["old"].strip()[:40])
def test_one_error_gives_one_problem_with_its_line_and_key(edit: dict[str, Any]) -> None:
    old, new = str(edit["old"]), str(edit["new"])
    assert old in GOOD
    problems = {problem.path: problem for problem in problems_of(GOOD.replace(old, new, 1))}
    assert set(problems) == {edit["path"], *edit.get("others", ())}
    problem = problems[str(edit["path"])]
    assert problem.line == edit["line"]
    assert str(edit["says"]) in problem.message


def typos(name: str) -> set[str]:
    """Return typos with a letter added, removed, swapped or replaced, in the middle and at the end."""
    middle, last = len(name) // 2, len(name) - 1
    results = {name[:at] + name[at] + name[at:] for at in (middle, last)}
    if len(name) > 2:
        results |= {name[:at] + name[at + 1 :] for at in (middle, last)}
        results |= {name[:at] + "x" + name[at + 1 :] for at in (middle, last)}
        results.add(name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :])
    return results - {name}


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_a_one_letter_typo_of_any_key_is_reported_with_the_correct_key(model: type) -> None:
    keys = keys_of(model)
    known_elsewhere = {name.rpartition(".")[2] for name in (*FOREIGN, *RENAMED, *IGNORED)}
    for key in keys:
        for typo in typos(key):
            if typo in keys or typo in known_elsewhere or folded(typo) in map(folded, keys):
                continue
            advice = unknown_key(("section", typo), model=model, siblings=None, section={})
            assert key in advice.message.partition("did you mean ")[2], (typo, advice.message)


def test_all_errors_of_a_file_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = GOOD.replace("seed: 7", "sede: 7").replace("  r: 8\n", "  r: 0\n").replace("epochs: 3", "epohcs: 3")
    text = text.replace("min_new_tokens: 1", "min_new_tokens: 500").replace("- name: title", "- name: review")
    problems = problems_of(text)
    assert [problem.path for problem in problems] == [
        "sede",
        "input_features[1].name",
        "generation.min_new_tokens",
        "adapter.r",
        "trainer.epohcs",
    ]


def test_a_rule_between_keys_is_reported_together_with_a_typo_elsewhere() -> None:
    problems = problems_of(MINIMAL + "quantization: {bits: 4}\ntrainer: {type: finetune}\nsede: 3\n")
    assert [problem.path for problem in problems] == ["quantization", "sede"]


def test_a_rule_between_sections_is_reported_next_to_a_wrong_value_that_another_key_depends_on() -> None:
    text = GOOD.replace("decay: cosine", "decay: expo").replace("min_ratio: 0.1", "decay_rate: 0.9")
    problems = problems_of(text.replace("validation_metric: label.accuracy", "validation_metric: review.bleu"))
    assert [problem.path for problem in problems] == [
        "trainer.learning_rate_scheduler.decay",
        "trainer.validation_metric",
    ]


def test_a_decay_rate_that_lets_the_learning_rate_grow_is_reported() -> None:
    (problem,) = problems_of(
        GOOD.replace("decay: cosine", "decay: exponential").replace("min_ratio: 0.1", "decay_rate: 96")
    )
    assert problem.path == "trainer.learning_rate_scheduler.decay_rate"
    assert "at most 1" in problem.message


def test_repairing_one_problem_causes_no_other() -> None:
    problems = problems_of(MINIMAL + "quantization: {bits: 4}\ntrainer: {type: finetune}\nadapter: 5\n")
    assert [problem.path for problem in problems] == ["adapter"]
    problems = problems_of(MINIMAL + "generation: {do_sample: maybe, temperature: 0.5}\n")
    assert [problem.path for problem in problems] == ["generation.do_sample"]


def test_errors_after_a_mistyped_type_are_reported_too() -> None:
    problems = problems_of(MINIMAL + "trainer: {type: finetun, batch_size: 0}\n")
    assert [problem.path for problem in problems] == ["trainer.type", "trainer.batch_size"]


def test_errors_in_a_section_with_a_mistyped_name_have_their_lines() -> None:
    problems = problems_of(MINIMAL + "trianer:\n  type: finetune\n  epohcs: 3\n")
    assert [(problem.line, problem.path) for problem in problems] == [(4, "trianer"), (6, "trainer.epohcs")]


def test_a_problem_is_one_line_with_file_line_column_and_path(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "trainer:\n  type: finetune\n  batch_sise: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}:6:3: trainer.batch_sise: unknown key; did you mean batch_size?"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("adapter: {r: 8}", "4:1: adapter.type: is missing; add type: lora"),
        ("adapter: {typ: lora, r: 8}\ntrainer: {type: finetune}", "4:11: adapter.typ: unknown key; did you mean type?"),
        ("adapter: lora", "4:10: adapter: write a mapping; got lora, write adapter: {type: lora}"),
        ("data: rows.csv", "4:7: data: write a mapping; got rows.csv, write data: {source: rows.csv}"),
        ("prompt: Sort it.", "4:9: prompt: write a mapping; got Sort it., write prompt: {task: Sort it.}"),
        ("prompt: '{a} is'", "4:9: prompt: write a mapping; got '{a} is', write prompt: {template: '{a} is'}"),
        ("quantization: 4", "4:15: quantization: write a mapping; got 4, write quantization: {bits: 4}"),
        (
            "quantization: 5",
            "4:15: quantization: write a mapping with type: bitsandbytes or int8_dynamic_activation_int8_weight; got 5",
        ),
        ("generation: 5", "4:13: generation: write a mapping; got 5"),
        (
            "trainer: {type: finetune, learning_rate_scheduler: cosin}",
            (
                "4:52: trainer.learning_rate_scheduler: write a mapping; got cosin, write learning_rate_scheduler: "
                "{decay: cosine}"
            ),
        ),
        (
            "trainer: {type: finetune, optimizer: adamm}",
            "4:38: trainer.optimizer: write a mapping; got adamm, write optimizer: {type: adamw}",
        ),
        (
            "trainer: {type: finetune, optimizer: best}",
            (
                "4:38: trainer.optimizer: write a mapping with type: one of adamw, adam, adamw_8bit, paged_adamw, "
                "paged_adamw_8bit, adafactor, lion, lion_8bit, muon, schedule_free_adamw, sgd; got best"
            ),
        ),
        (
            "trainer: {type: finetune, optimizer: {type: adam, params: {eps: 1.e-8}}}",
            (
                "4:51: trainer.optimizer.params: unknown key; write one of type, betas, eps, weight_decay, momentum, "
                "nesterov, fused"
            ),
        ),
        (
            "trainer: {type: finetune, wieght_decay: 0.1}",
            "4:27: trainer.wieght_decay: unknown key; did you mean trainer.optimizer.weight_decay?",
        ),
        ("adapter: none", "4:10: adapter: none is a text here; write null, or remove the key"),
        ("trainer: none", "4:10: trainer: write a mapping; got none, write trainer: {type: none}"),
        ("trainer: {type: no}", "4:17: trainer.type: no is read by YAML as false; write none"),
        ("trainer: {type: null}", "4:17: trainer.type: null is read as nothing; write none, as a word"),
        ("trainer: {type: None}", "4:17: trainer.type: got None; did you mean none?"),
        ("trainer: null", "4:10: trainer: null is read as nothing; write {type: none}"),
        (
            "trainer: {type: none, epochs: 3}",
            "4:23: trainer.epochs: nothing is trained with type: none; write type: finetune or remove epochs",
        ),
        (
            "adapter: {type: lora, target_r: 3}\ntrainer: {type: finetune}",
            ("4:23: adapter.target_r: target_r has no effect with type: lora; remove it, it belongs to type: adalora"),
        ),
        (
            "backend: deepspeed",
            (
                "4:10: backend: deepspeed is not available yet; "
                "write a mapping with type: local, torchrun, ray or endpoint"
            ),
        ),
        ("backend: local", "4:10: backend: write a mapping; got local, write backend: {type: local}"),
        (
            "trainer: {type: custom, target: here}",
            ("4:33: trainer.target: got 'here'; write module:Class, such as my_package.parts:MyClass"),
        ),
        (
            "adapter: {type: adalora, init_r: 4}\ntrainer: {type: finetune}",
            (
                "4:34: adapter.init_r: init_r 4 is not above target_r 8; adalora only "
                "shrinks ranks, write init_r of at least 9"
            ),
        ),
        (
            "adapter: {type: adalora, target_r: 12}\ntrainer: {type: finetune}",
            (
                "4:36: adapter.target_r: init_r 12 is not above target_r 12; adalora only "
                "shrinks ranks, write init_r of at least 13"
            ),
        ),
        (
            "adapter: {type: boft, boft_block_num: 3}\ntrainer: {type: finetune}",
            (
                "4:39: adapter.boft_block_num: boft_block_size is 4 and "
                "boft_block_num is 3; write one of them, and 0 for the other"
            ),
        ),
        (
            "adapter: {type: oft, r: 3}\ntrainer: {type: finetune}",
            ("4:25: adapter.r: r is 3 and oft_block_size is 32; write one of them, and 0 for the other"),
        ),
        (
            "prompt: {template: '{a}', chat: false, examples: [{a: x, b: y}]}",
            (
                "4:40: prompt.examples: the template never "
                "shows the examples; add {__context__} to it or remove examples"
            ),
        ),
        (
            "data: {source: {type: csv, path: a.csv, delimiter: '::'}}",
            ("4:52: data.source.delimiter: got '::'; write one character, such as ';', '|' or \"\\t\" for a tab"),
        ),
        (
            "data: {source: {type: csv, path: a.csv, encoding: cp12522}}",
            (
                "4:51: data.source.encoding: no encoding is named 'cp12522'; write a name of Python, such as utf-8, "
                "utf-16, cp1252 (Windows), latin-1, cp1250, gb18030, shift_jis, euc_kr"
            ),
        ),
        (
            "data: {source: {type: csv, path: a.csv, header: [a, b, a]}}",
            "4:41: data.source.header: 'a' occurs twice; rename one",
        ),
        (
            "data: {source: {type: csv, path: a.csv, header: 'a,b'}}",
            "4:49: data.source.header: write a list of texts; got 'a,b', write header: ['a,b']",
        ),
        (
            "data: {source: {type: csv, path: a.csv, header: [a, 1]}}",
            "4:53: data.source.header[1]: 1 is a number; write '1' in quotes",
        ),
        (
            "\u00a0seed: 3",
            "4:1: \u00a0seed: unknown key; there is a no-break space in it, write an ordinary one",
        ),
        (
            "data: {source: {type: jsonl, path: a.jsonl, delimiter: ','}}",
            "4:56: data.source.delimiter: delimiter has no effect on jsonl; it is for csv and tsv",
        ),
        (
            "data: {source: {type: csv, path: a.csv, sheet: x}}",
            "4:48: data.source.sheet: sheet has no effect on csv; it is for xlsx",
        ),
        (
            "data: {dialogue: {columns: {instructions: question}}}",
            (
                "4:43: data.dialogue.columns.instructions: no format has a column 'instructions'; write the format's "
                "name first, as in {output: answer}; did you mean 'instruction'?"
            ),
        ),
        (
            "prompt: {chat_template_kwargs: {tokenize: true}}",
            (
                "4:43: prompt.chat_template_kwargs.tokenize: tokenize is set by partita; write variables that the "
                "template itself reads"
            ),
        ),
        (
            "prompt: {chat: false, chat_template_kwargs: {enable_thinking: true}}",
            "4:23: prompt.chat_template_kwargs: chat_template_kwargs has no effect with chat: false",
        ),
        (
            "quantization: {bits: 4}\ntrainer: {type: finetune}",
            (
                "4:1: quantization: quantized weights cannot be trained; "
                "add adapter: {type: lora} or remove quantization"
            ),
        ),
        (
            "model_parameters: {device: gpu}",
            ("4:28: model_parameters.device: got 'gpu'; write auto, cpu, cuda, cuda:N, mps or xpu"),
        ),
        (
            "generation: {stop: '###'}",
            "4:20: generation.stop: write a list of texts; got '###', write stop: ['###']",
        ),
        ("data: {split: {probabilities: [1, 0, 0]}}", "4:8: data.split.type: is missing; add type: random"),
        ("model_type: ecd", "4:13: model_type: write llm; got 'ecd'"),
    ],
)
def test_the_text_of_a_problem(line: str, text: str) -> None:
    assert [str(problem) for problem in problems_of(MINIMAL + line + "\n")] == [text]


def test_the_heads_of_a_new_model_must_divide_its_width() -> None:
    text = MINIMAL.replace("m\n", "{type: scratch, hidden_size: 64, num_attention_heads: 5}\n", 1)
    (problem,) = problems_of(text)
    assert str(problem) == (
        "1:67: base_model.num_attention_heads: num_attention_heads 5 does not divide hidden_size 64; "
        "write a divisor of 64"
    )
    text = MINIMAL.replace("m\n", "{type: scratch, num_key_value_heads: 3, num_attention_heads: 4}\n", 1)
    (problem,) = problems_of(text)
    assert problem.message == "num_key_value_heads 3 does not divide num_attention_heads 4; write a divisor of 4"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            "{type: objekt}",
            "is not a JSON Schema: 'objekt' is not valid under any of the given schemas; fix json_schema.type",
        ),
        ("{$schema: [1]}", "no draft is named [1]; remove $schema"),
        ("{$schema: 'http://x'}", "no draft is named 'http://x'; remove $schema"),
        (
            "{items: {$ref: '#/$defs/a'}}",
            "$ref '#/$defs/a' leads nowhere in this schema; write what it means under $defs",
        ),
        (
            "{items: {$ref: 'http://x/y'}}",
            "$ref 'http://x/y' leads nowhere in this schema; write what it means under $defs",
        ),
    ],
)
def test_a_json_schema_is_checked_with_the_configuration(schema: str, message: str) -> None:
    text = MINIMAL.replace("type: text", f"type: json, decoder: {{json_schema: {schema}}}")
    (problem,) = problems_of(text)
    assert (problem.path, problem.message) == ("output_features[0].decoder.json_schema", message)


def test_a_json_schema_may_refer_to_itself() -> None:
    schema = "{$defs: {a: {type: integer}}, items: {$ref: '#/$defs/a'}}"
    load_config(MINIMAL.replace("type: text", f"type: json, decoder: {{json_schema: {schema}}}"))


def test_a_dictionary_is_checked_without_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"base_modl": "m", "input_features": [{"name": "a"}], "output_features": [], "seed": True})
    assert {str(problem) for problem in caught.value.problems} == {
        "base_modl: unknown key; did you mean base_model?",
        "output_features: the list is empty; write at least 1 of them",
        "seed: write an integer from 0 to 4294967295; got true",
    }


def test_an_empty_dictionary_is_reported_with_the_missing_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({})
    assert [str(problem) for problem in caught.value.problems] == [
        "base_model: is missing; add base_model: with a Hub id, a folder, or {type: scratch}",
        (
            "output_features: is missing; add output_features: with a list of mappings with type: text, category, "
            "number, json, set, tags, score, embedding or preference"
        ),
    ]


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_a_configuration_without_keys(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^1:1: the file is empty; write at least base_model, input_features and"):
        load_config(text)


def test_keys_of_one_section_and_rules_between_sections_are_reported_together() -> None:
    text = (
        "base_model: m\ninput_features: [{name: a}]\noutput_features: [{name: a, type: text}]\n"
        "generation: {temperature: 0.7, top_p: 0.9}\ntrainer: {type: finetune, batch_size: 8, max_batch_size: 4}\n"
    )

    assert [problem.path for problem in problems_of(text)] == [
        "output_features[0].name",
        "generation.temperature",
        "generation.top_p",
        "trainer.max_batch_size",
    ]


@pytest.mark.parametrize("keys", ["constrain: true", "decoder: {constrain: true}"])
def test_a_key_of_another_output_type_is_not_advised_to_go_where_it_stands(keys: str) -> None:
    text = f"base_model: m\ninput_features: [{{name: a}}]\noutput_features: [{{name: b, type: category, {keys}}}]\n"
    [problem] = problems_of(text)
    assert problem.message == "unknown key; constrain is for output_features with type: json or set; remove it"
