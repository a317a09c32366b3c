"""Tests of values that mean something else in the tools than here: the report names them, or they are converted."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita_schema.compat.tools.conversion import Report
from partita_schema.config import Config
from partita_schema.convert import ToolName
from partita_schema.sections.data import RandomSplit
from partita_schema.sections.trainer import FinetuneTrainer

from .conversions import converted, missing, refusal_of

AXOLOTL = "base_model: org/model\ndatasets: [{path: org/data, type: chat_template%s}]\n"
TRL = "model_name_or_path: org/model\ndataset_name: org/data\nassistant_only_loss: true\n"


def axolotl(more: str, folder: Path, *, dataset: str = "") -> tuple[Config, Report]:
    return converted(AXOLOTL % dataset + more, "axolotl", folder)


def scheduler(config: Config) -> dict[str, Any]:
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer.learning_rate_scheduler.model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("tool", "text", "key"),
    [
        (
            "axolotl",
            "base_model: org/model\ndatasets: [{path: %s, type: chat_template, split: '%s'}]\n",
            "datasets[0].split",
        ),
        ("trl", "model_name_or_path: org/model\ndataset_name: %s\ndataset_train_split: '%s'\n", "dataset_train_split"),
        ("trl", "model_name_or_path: org/model\ndatasets: [{path: %s, split: '%s'}]\n", None),
    ],
)
def test_a_split_of_a_file_has_no_counterpart(tool: ToolName, text: str, key: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    reason = "all rows of a file are read; write a file with those of the split"
    for path, split, is_unread in (
        ("rows.jsonl", "train[:10%]", True),
        ("rows.jsonl", "train", False),
        ("org/data", "train[:10%]", False),
    ):
        _, report = converted(text % (path, split), tool, tmp_path)
        if key is None:
            assert (f"a dataset has a split: {reason}" in report.notes) == is_unread
        else:
            assert missing(report) == ({key: reason} if is_unread else {})


@pytest.mark.parametrize(
    ("roles", "others"),
    [
        ("{assistant: [customer], user: [agent]}", "customer, agent"),
        ("{user: [student], assistant: [gpt, teacher]}", "student, teacher"),
    ],
)
def test_roles_with_another_meaning_are_refused(roles: str, others: str, tmp_path: Path) -> None:
    message = refusal_of(AXOLOTL % f", roles: {roles}", "axolotl", tmp_path)
    assert message.endswith(f"roles: {others} would be another role here; rename the roles in the data")


def test_the_usual_roles_are_not_needed(tmp_path: Path) -> None:
    _, report = axolotl("", tmp_path, dataset=", roles: {user: [human, user], assistant: [gpt, assistant]}")
    assert [problem.path for problem in report.unneeded] == ["datasets[0].roles"]


def test_axolotl_leaves_out_rows_that_are_too_long_and_partita_cuts_them(tmp_path: Path) -> None:
    note = "rows longer than sequence_len are cut, and counted in the ledger; axolotl leaves them out"
    assert note in axolotl("", tmp_path)[1].notes
    _, report = axolotl("excess_length_strategy: drop\n", tmp_path)
    assert missing(report)["excess_length_strategy"] == f"{note}; remove them from the data"
    assert note not in report.notes
    _, report = axolotl("excess_length_strategy: truncate\n", tmp_path)
    assert note not in report.notes
    assert "excess_length_strategy" in [problem.path for problem in report.unneeded]


def test_no_maximum_length_of_trl_stays_none(tmp_path: Path) -> None:
    assert converted(TRL, "trl", tmp_path)[0].preprocessing.global_max_sequence_length == 1024
    config, report = converted(TRL + "max_length: null\n", "trl", tmp_path)
    assert config.preprocessing.global_max_sequence_length is None
    assert "max_length is null: rows are cut only at the context length of the model, as here" in report.notes


def test_a_constant_rate_of_transformers_has_no_warmup(tmp_path: Path) -> None:
    for more in ("", "warmup_steps: 5\n", "warmup_ratio: 0.1\n"):
        found = scheduler(converted(TRL + "lr_scheduler_type: constant\n" + more, "trl", tmp_path)[0])
        assert found == {"decay": "constant", "warmup_steps": 0}
        found = scheduler(axolotl("lr_scheduler: constant\n" + more, tmp_path)[0])
        assert found == {"decay": "constant", "warmup_steps": 0}
    _, report = axolotl("lr_scheduler: constant\n", tmp_path)
    assert ("warmup_steps", "trainer.learning_rate_scheduler.warmup_steps", 0) in report.defaults
    warm = scheduler(converted(TRL + "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\n", "trl", tmp_path)[0])
    assert warm == {"decay": "constant", "warmup_steps": 5}


@pytest.mark.parametrize(
    ("tool", "text", "key"),
    [
        ("trl", TRL, "lr_scheduler_type"),
        ("llama_factory", "model_name_or_path: org/model\ndataset: mine\n", "lr_scheduler_type"),
        ("axolotl", AXOLOTL % "", "lr_scheduler"),
    ],
)
def test_a_schedule_without_a_counterpart_is_the_one_that_the_report_names(
    tool: ToolName, text: str, key: str, tmp_path: Path
) -> None:
    for name, used in (("reduce_lr_on_plateau", "cosine"), ("polynomial", "linear"), ("one_cycle", "cosine")):
        config, report = converted(f"{text}{key}: {name}\n", tool, tmp_path)
        others = "others are linear, cosine, constant, inverse_sqrt, wsd"
        assert missing(report)[key] == f"{name} is not available, and {used} is used; {others}"
        assert scheduler(config)["decay"] == used


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ("", {}),
        ("lr_scheduler_kwargs: {num_cycles: 1}\n", {}),
        ("lr_scheduler_kwargs: {num_cycles: 3}\n", {"lr_scheduler_type", "lr_scheduler_kwargs"}),
    ],
)
def test_a_cosine_with_one_cycle_has_no_restart(options: str, unread: set[str], tmp_path: Path) -> None:
    config, report = converted(f"{TRL}lr_scheduler_type: cosine_with_restarts\n{options}", "trl", tmp_path)
    assert scheduler(config) == {"decay": "cosine", "warmup_steps": 0, "min_ratio": 0}
    assert set(missing(report)) == set(unread)


@pytest.mark.parametrize(
    ("tool", "text", "key"),
    [
        ("trl", TRL, "test_split_size"),
        ("llama_factory", "model_name_or_path: org/model\ndataset: mine\n", "val_size"),
        ("axolotl", AXOLOTL % "", "val_set_size"),
        ("axolotl", "base_model: org/model\n", "val_set_size"),
    ],
)
def test_no_rows_are_held_out_for_a_number_of_validation_rows(
    tool: ToolName, text: str, key: str, tmp_path: Path
) -> None:
    config, report = converted(f"{text}{key}: 20\n", tool, tmp_path)
    assert missing(report)[key] == (
        "a number of rows is not available, so no rows are held out (data.split.probabilities: [1, 0, 0]); write the "
        "share of validation rows there"
    )
    for written, shares in (("20", (1, 0, 0)), ("0.1", (0.9, 0.1, 0)), ("0", (1, 0, 0)), ("", (1, 0, 0))):
        config, report = converted(f"{text}{key}: {written}\n", tool, tmp_path)
        assert isinstance(config.data.split, RandomSplit)
        assert config.data.split.probabilities == shares
    assert (key, "data.split", 0) in report.defaults


def test_no_rows_are_held_out_next_to_a_dataset_for_validation(tmp_path: Path) -> None:
    """Also none for tests, of which partita's default takes a share."""
    (tmp_path / "dataset_info.json").write_text('{"a": {"file_name": "a.json"}}')
    rows = f"model_name_or_path: org/model\ndataset_dir: {tmp_path}\ndataset: a\neval_dataset: a\n"
    tests = AXOLOTL % "" + "test_datasets: [{path: org/b, type: chat_template}]\n"
    for tool, text, key in (("axolotl", tests, "val_set_size"), ("llama_factory", rows, "val_size")):
        for more in ("", f"{key}: 0.1\n", f"{key}: 0\n"):
            config, report = converted(text + more, tool, tmp_path)  # type: ignore[arg-type]
            assert config.data.validation is not None
            assert isinstance(config.data.split, RandomSplit)
            assert config.data.split.probabilities == (1, 0, 0)
            assert missing(report) == ({key: "there is a dataset for validation"} if "0.1" in more else {})
            assert ((key, "data.split", 0) in report.defaults) == (not more)


@pytest.mark.parametrize(
    ("template", "kind", "system", "why"),
    [
        ("chatml", "chat_template", "Be kind.", None),
        ("llama3", "chat_template", None, "axolotl uses it only with chat_template: chatml"),
        (None, "chat_template", None, "axolotl uses it only with chat_template: chatml"),
        ("chatml", "alpaca", None, "axolotl uses it only in a chat template"),
        ("chatml", "input_output", None, "axolotl uses it only in a chat template"),
        ("chatml", "completion", None, "axolotl uses it only in a chat template"),
    ],
)
def test_a_default_system_message_of_axolotl_is_that_of_its_chatml(
    template: str | None, kind: str, system: str | None, why: str | None, tmp_path: Path
) -> None:
    text = f"base_model: org/model\ndatasets: [{{path: org/data, type: {kind}}}]\ndefault_system_message: Be kind.\n"
    text += f"chat_template: {template}\n" if template else ""
    config, report = converted(text, "axolotl", tmp_path)
    assert config.prompt.system == system
    unneeded = {problem.path: problem.message for problem in report.unneeded}
    assert unneeded.get("default_system_message") == why


ROWS_OF_ANSWERS = (
    "if the model has no chat template, or one that rewrites earlier turns, each answer of a dialogue becomes a row "
    "with all turns before it, "
)
MORE_ROWS = f"{ROWS_OF_ANSWERS}so that an epoch has more rows and steps (partita preview shows them)"
LEARNED_AGAIN = f"{ROWS_OF_ANSWERS}which are in the loss of each of these rows (partita preview shows them)"


@pytest.mark.parametrize(
    ("tool", "text", "note"),
    [
        ("axolotl", AXOLOTL % "", MORE_ROWS),
        ("axolotl", f"{AXOLOTL % ''}train_on_inputs: true\n", LEARNED_AGAIN),
        ("axolotl", "base_model: org/model\ndatasets: [{path: org/data, type: alpaca}]\n", None),
        ("axolotl", "base_model: org/model\ndatasets: [{path: org/data, type: input_output}]\n", None),
        ("axolotl", "base_model: org/model\ndatasets: [{path: org/data, type: completion}]\n", None),
        ("axolotl", "base_model: org/model\ndatasets: [{path: org/data, type: chatml.intel}]\nrl: dpo\n", None),
        ("llama_factory", "dataset: chat\n", MORE_ROWS),
        ("llama_factory", "dataset: chat\ntrain_on_prompt: true\n", LEARNED_AGAIN),
        ("llama_factory", "dataset: chat\nmask_history: true\n", None),
        ("llama_factory", "dataset: chat\ndo_predict: true\n", None),
        ("llama_factory", "dataset: alpaca\n", None),
        ("llama_factory", "dataset: history\n", MORE_ROWS),
        ("llama_factory", "dataset: alpaca,chat\n", MORE_ROWS),
        ("trl", TRL, MORE_ROWS),
        ("trl", TRL.replace("true", "false"), LEARNED_AGAIN),
        ("trl", f"{TRL}loss_type: ipo\n", None),
        ("trl", "model_name_or_path: org/model\ncompletion_only_loss: true\n", None),
    ],
)
def test_dialogues_that_may_become_several_rows_are_named(
    tool: ToolName, text: str, note: str | None, tmp_path: Path
) -> None:
    if tool == "llama_factory":
        history = {"prompt": "instruction", "response": "output", "history": "history"}
        info: dict[str, Any] = {"alpaca": {}, "history": {"columns": history}, "chat": {"formatting": "sharegpt"}}
        described = {name: {"file_name": "a.json", **entry} for name, entry in info.items()}
        (tmp_path / "dataset_info.json").write_text(json.dumps(described))
        text = f"model_name_or_path: org/model\ndataset_dir: {tmp_path}\n{text}"
    notes = converted(text, tool, tmp_path)[1].notes
    assert [one for one in notes if one.startswith(ROWS_OF_ANSWERS)] == ([note] if note else [])


@pytest.mark.parametrize(
    ("tool", "text", "key", "title", "length"),
    [
        ("axolotl", AXOLOTL % "", "sequence_len", "axolotl", "512"),
        ("llama_factory", "model_name_or_path: org/model\n", "cutoff_len", "LLaMA-Factory", "2,048"),
        ("trl", TRL, "max_length", "TRL", "1,024"),
    ],
)
def test_a_default_length_is_named_for_models_with_a_shorter_context(
    tool: ToolName, text: str, key: str, title: str, length: str, tmp_path: Path
) -> None:
    note = (
        f"{key} is not in the file, so {title}'s default of {length} tokens is written out; for a model with a shorter "
        "context remove preprocessing.global_max_sequence_length, and rows are as long as the context allows"
    )
    assert note in converted(text, tool, tmp_path)[1].notes
    written = converted(f"{text}{key}: 256\n", tool, tmp_path)[1].notes
    assert not any(one.startswith(f"{key} is not in the file") for one in written)


def test_only_a_cosine_of_axolotl_has_a_lowest_rate(tmp_path: Path) -> None:
    assert scheduler(axolotl("cosine_min_lr_ratio: 0.1\n", tmp_path)[0])["min_ratio"] == 0.1
    for schedule in ("linear", "constant"):
        config, report = axolotl(f"lr_scheduler: {schedule}\ncosine_min_lr_ratio: 0.1\n", tmp_path)
        assert "min_ratio" not in scheduler(config)
        assert "cosine_min_lr_ratio" in [problem.path for problem in report.unneeded]


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ("learning_rate: 2.0e-5\nlr_scheduler_kwargs: {min_lr: 5.0e-6}\n", 0.25),
        ("learning_rate: 3e-5\nlr_scheduler_kwargs: {min_lr: 1e-5}\n", 0.333333),
        ("lr_scheduler_kwargs: {min_lr_rate: 0.1}\n", 0.1),
        ("lr_scheduler_kwargs: {min_lr: 5.0e-6}\n", None),
        ("learning_rate: 2.0e-5\nlr_scheduler_kwargs: {min_lr: 5.0e-6, num_cycles: 1}\n", None),
    ],
)
def test_a_lowest_rate_becomes_a_share_of_the_highest(tmp_path: Path, keys: str, share: float | None) -> None:
    config, report = converted(TRL + "lr_scheduler_type: cosine_with_min_lr\n" + keys, "trl", tmp_path)
    listed = [problem.path for problem in report.missing]
    if share is None:
        assert "lr_scheduler_kwargs" in listed
    else:
        assert (scheduler(config)["min_ratio"], "lr_scheduler_kwargs" in listed) == (share, False)


def test_inverse_sqrt_without_warmup_is_named(tmp_path: Path) -> None:
    _, report = converted(TRL + "lr_scheduler_type: inverse_sqrt\n", "trl", tmp_path)
    assert any(note.startswith("inverse_sqrt without warmup") for note in report.notes)


LLAMA_FACTORY = "model_name_or_path: org/model\ndataset: mine\n"


@pytest.mark.parametrize(
    ("tool", "text", "by_default"),
    [("trl", TRL, 10), ("axolotl", AXOLOTL % "", 10), ("llama_factory", LLAMA_FACTORY, 500)],
)
def test_evaluations_without_a_number_of_steps_take_place_when_losses_are_logged(
    tool: ToolName, text: str, by_default: int, tmp_path: Path
) -> None:
    note = (
        f"logging_steps is a share of all steps, which is not available, so evaluations are {by_default} steps apart; "
        "write trainer.steps_per_evaluation"
    )
    for more, expected in (
        ("", by_default),
        ("logging_steps: 25\n", 25),
        ("logging_steps: 25.0\n", 25),
        ("logging_steps: 0.1\n", by_default),
        ("logging_steps: 25\neval_steps: 7\n", 7),
    ):
        config, report = converted(f"{text}eval_strategy: steps\n{more}", tool, tmp_path)
        assert isinstance(config.trainer, FinetuneTrainer)
        assert config.trainer.steps_per_evaluation == expected
        assert (note in report.notes) == ("0.1" in more)


@pytest.mark.parametrize(
    ("tool", "text", "without_fp16"),
    [("trl", TRL, "bf16"), ("axolotl", AXOLOTL % "", "auto"), ("llama_factory", LLAMA_FACTORY, "no")],
)
def test_fp16_that_is_off_leaves_the_data_type_of_the_tool(
    tool: ToolName, text: str, without_fp16: str, tmp_path: Path
) -> None:
    for more, expected in (
        ("fp16: false\n", without_fp16),
        ("fp16: true\n", "fp16"),
        ("bf16: false\n", "no"),
        ("bf16: false\nfp16: false\n", "no"),
        ("bf16: true\nfp16: false\n", "bf16"),
    ):
        config, _ = converted(f"{text}{more}", tool, tmp_path)
        assert isinstance(config.trainer, FinetuneTrainer)
        assert config.trainer.mixed_precision == expected


@pytest.mark.parametrize("key", ["warmup_steps", "eval_steps", "save_steps"])
def test_numbers_that_are_not_finite_are_errors_of_their_key(key: str, tmp_path: Path) -> None:
    message = refusal_of(TRL + f"{key}: .nan\n", "trl", tmp_path)
    assert message.startswith("original.yaml:4:")
    assert "got nan" in message


def test_options_of_loftq_that_are_no_mapping_are_not_read(tmp_path: Path) -> None:
    config, _ = axolotl("adapter: lora\nlora_target_linear: true\npeft: {loftq_config: 3}\n", tmp_path)
    assert config.adapter.init == "loftq"  # type: ignore[union-attr]


def test_rows_for_tests_have_the_format_of_the_others(tmp_path: Path) -> None:
    message = refusal_of(AXOLOTL % "" + "test_datasets: [{path: org/tests, type: alpaca}]\n", "axolotl", tmp_path)
    assert "test_datasets: its rows have another format than those of datasets" in message


def test_arrays_of_json_are_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"messages": []}]')
    text = "model_name_or_path: org/model\ndatasets: [{path: json, data_files: rows.json}]\n"
    assert converted(text, "trl", tmp_path)[0].data.source.type == "json"  # type: ignore[union-attr]


def test_columns_that_llama_factory_does_not_read_are_ignored(tmp_path: Path) -> None:
    info = {
        "plain": {"file_name": "a.json"},
        "two": {"file_name": "a.json", "columns": {"prompt": "instruction", "response": "output"}},
        "all": {
            "file_name": "a.json",
            "columns": {
                "prompt": "instruction",
                "query": "input",
                "response": "output",
                "system": "system",
                "history": "history",
                "tools": "tools",
            },
        },
        "chat": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    expected = {
        "plain": ("system", "history", "tools"),
        "two": ("system", "history", "tools", "input"),
        "all": (),
        "chat": ("system", "tools"),
    }
    head = f"model_name_or_path: org/model\nstage: sft\ndataset_dir: {tmp_path / 'data'}\n"
    for name, ignored in expected.items():
        assert converted(head + f"dataset: {name}\n", "llama_factory", tmp_path)[0].data.dialogue.ignore_keys == ignored

    config, report = converted(head + "dataset: plain,chat\n", "llama_factory", tmp_path)
    assert config.data.dialogue.ignore_keys == ("system", "history", "tools")
    assert not any("does not declare" in note for note in report.notes)
    config, report = converted(head + "dataset: two,all\n", "llama_factory", tmp_path)
    assert (config.data.dialogue.format, config.data.dialogue.ignore_keys) == ("alpaca", ())
    assert (
        "two does not declare system, history, tools, input, which another dataset reads: rows of two with such a "
        "column are read with it; remove it from them"
    ) in report.notes


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (
            "alpaca_w_system",
            "the column system of alpaca_w_system is not read; write it into the instruction of each row",
        ),
        (
            "context_qa",
            "axolotl has another wording of the prompt for context_qa; change prompt.template if it matters",
        ),
        (
            "summarizetldr",
            "axolotl has another wording of the prompt for summarizetldr; change prompt.template if it matters",
        ),
        ("alpaca", None),
        (
            "{system_prompt: SYS, system_format: '<<{system}>>', format: 'Q: {instruction}'}",
            "system_format is not used; the system message is put before the prompt as it is",
        ),
    ],
)
def test_what_a_type_of_dataset_loses_is_named(kind: str, note: str | None, tmp_path: Path) -> None:
    text = f"base_model: org/model\ndatasets: [{{path: org/data, type: {kind}}}]\n"
    config, report = converted(text, "axolotl", tmp_path)
    wording = [one for one in report.notes if "wording" in one or "system" in one]
    assert wording == ([note] if note else [])
    if kind == "context_qa":
        assert [feature.name for feature in config.input_features] == ["question", "article"]
