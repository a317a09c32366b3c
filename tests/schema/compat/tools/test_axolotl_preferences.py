"""Tests of the conversion of axolotl's files with `rl`: losses, and rows of each type of dataset as they are read."""

from pathlib import Path
from typing import Any

import pytest

from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.objectives import DpoLoss, OrpoLoss, SimpoLoss
from partita_schema.sections.trainer import KtoTrainer, PreferenceTrainer

from .conversions import converted, missing

HEAD = "base_model: org/base\nlearning_rate: 1e-6\n"
PAIRS = "datasets: [{path: org/pairs, split: train, type: chatml.intel}]\n"
LABELLED = "datasets: [{path: org/liked, type: llama3.ultra}]\n"
ASKED, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ("rl: dpo\n", DpoLoss(type="dpo")),
        (
            "rl: dpo\nrl_beta: 0.2\nrpo_alpha: 0.5\ndpo_label_smoothing: 0.1\n",
            DpoLoss(type="dpo", beta=0.2, rpo_alpha=0.5, label_smoothing=0.1),
        ),
        ("rl: dpo\nrl_beta: 0.2\ntrl: {beta: 0.3}\n", DpoLoss(type="dpo", beta=0.3)),
        ("rl: ipo\nrl_beta: 0.2\n", DpoLoss(type="dpo", variant="ipo", beta=0.2)),
        ("rl: orpo\norpo_alpha: 0.3\n", OrpoLoss(type="orpo", beta=0.3)),
        ("rl: simpo\n", SimpoLoss(type="simpo", beta=0.1, gamma=0.5)),
        ("rl: simpo\nrl_beta: 2.5\nsimpo_gamma: 1.2\ncpo_alpha: 0.0\n", SimpoLoss(type="simpo", beta=2.5, gamma=1.2)),
    ],
)
def test_methods_become_losses_with_their_constants(keys: str, loss: Any, tmp_path: Path) -> None:
    config, _ = converted(HEAD + PAIRS + keys, "axolotl", tmp_path)

    assert isinstance(config.trainer, PreferenceTrainer)
    assert config.trainer.loss == loss
    assert config.trainer.learning_rate == 1e-6


def test_kto_keeps_its_weights(tmp_path: Path) -> None:
    keys = "rl: kto\nrl_beta: 0.2\nkto_desirable_weight: 0.5\nkto_undesirable_weight: 2.0\n"
    trainer = converted(HEAD + LABELLED + keys, "axolotl", tmp_path)[0].trainer

    assert isinstance(trainer, KtoTrainer)
    assert (trainer.beta, trainer.desirable_weight, trainer.undesirable_weight) == (0.2, 0.5, 2.0)


@pytest.mark.parametrize("rl", ["dpo", "ipo", "orpo", "simpo", "kto"])
@pytest.mark.parametrize("keys", ["", "lora_dropout: 0.1\n"])
def test_dropout_is_off(rl: str, keys: str, tmp_path: Path) -> None:
    lora = f"adapter: lora\nlora_r: 8\nlora_target_linear: true\n{keys}"
    rows = LABELLED if rl == "kto" else PAIRS
    config, report = converted(f"{HEAD}{rows}rl: {rl}\n{lora}", "axolotl", tmp_path)

    assert config.adapter is not None
    assert config.adapter.dropout == 0  # type: ignore[union-attr]
    assert [one for one in report.defaults if one[1] == "adapter.dropout"] == [
        ("disable_dropout: true", "adapter.dropout", 0)
    ]
    unneeded = {problem.path: problem.message for problem in report.unneeded}
    assert unneeded.get("lora_dropout") == ("dropout is off in training on preferences" if keys else None)


def test_what_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    keys = "rl: dpo\nmax_prompt_len: 512\nrl_adapter_ref_model: true\ndpo_use_weighting: true\ndpo_norm_loss: true\n"
    config, report = converted(
        f"{HEAD}{PAIRS}{keys}precompute_ref_log_probs: true\ntrain_on_inputs: true\nsimpo_gamma: 1\n",
        "axolotl",
        tmp_path,
    )

    assert missing(report) == {
        "max_prompt_len": (
            "write preprocessing.max_sequence_length at the input, or data.dialogue: {context_tokens: ...} for "
            "dialogues"
        ),
        "rl_adapter_ref_model": "the reference is the model before training, with its adapter if one is loaded",
        "dpo_use_weighting": "pairs are not weighted by their likelihood",
        "dpo_norm_loss": "it has no counterpart; see the keys of trainer: {type: preference}, kto and reward",
    }
    unneeded = {problem.path: problem.message for problem in report.unneeded}
    assert unneeded["simpo_gamma"] == "this loss does not have it"
    assert unneeded["train_on_inputs"] == "answers are compared, not prompts"
    assert isinstance(config.trainer, PreferenceTrainer)
    assert config.trainer.references == "before"


def test_the_part_of_simpo_that_is_left_out_is_noted(tmp_path: Path) -> None:
    keys = "rl: simpo\nsimpo_gamma: 1\n"
    notes = converted(f"{HEAD}{PAIRS}{keys}cpo_alpha: 0.7\n", "axolotl", tmp_path)[1].notes

    assert (
        "axolotl adds 0.7 times the cross-entropy of the chosen answer to simpo (cpo_alpha); simpo has no such part "
        "here"
    ) in notes
    assert not any(
        "cpo_alpha" in note for note in converted(f"{HEAD}{PAIRS}{keys}cpo_alpha: 0\n", "axolotl", tmp_path)[1].notes
    )


def read(rl: str, dataset: str, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row as the converted configuration reads it."""
    text = f"{HEAD}rl: {rl}\ndatasets:\n  - {{path: org/rows, {dataset}}}\n"
    config, _ = converted(text, "axolotl", folder)
    checked = check_rows(row_schema(config, supervised=True), [row])
    assert checked.bad == {}
    clean = checked.clean[0]
    dialogue = next((value for value in clean.values() if isinstance(value, dict)), None)
    if dialogue is None:
        return clean
    rest = {key: value for key, value in clean.items() if key.endswith((".label", ".liked"))}
    return {
        "prompt": [message["content"] for message in dialogue["messages"]],
        "answer": dialogue["labels"][0],
        **({"rejected": dialogue["rejected"]["content"]} if "rejected" in dialogue else {}),
        **({"label": next(iter(rest.values()))} if rest else {}),
    }


@pytest.mark.parametrize(
    ("dataset", "row", "prompt"),
    [
        ("type: chatml.intel", {"system": "s", "question": "q", "chosen": "g", "rejected": "b"}, ["s", "q"]),
        ("type: chatml.intel", {"system": "", "question": "q", "chosen": "g", "rejected": "b"}, ["q"]),
        ("type: llama3.icr", {"input": "q", "chosen": "g", "rejected": "b"}, ["q"]),
        ("type: llama3.prompt_pairs", {"prompt": "q", "chosen": "g", "rejected": "b"}, ["q"]),
        (
            "type: chatml.argilla",
            {"system": "s", "instruction": "q", "chosen_response": "g", "rejected_response": "b"},
            ["s", "q"],
        ),
        ("type: chatml.argilla_chat", {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, ["q"]),
        ("type: chatml.ultra", {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, ["q"]),
        ("type: chat_template.argilla", {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, ["q"]),
        (
            "type: chat_template.argilla_chat",
            {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]},
            ["s", "q"],
        ),
        ("type: chat_template.default", {"messages": [SYSTEM, ASKED], "chosen": GOOD, "rejected": BAD}, ["s", "q"]),
        ("type: chat_template.default", {"messages": [ASKED], "chosen": [GOOD], "rejected": "b"}, ["q"]),
        (
            (
                "type: chat_template.default, field_messages: said, field_chosen: better, field_rejected: worse, "
                "message_property_mappings: {role: from, content: value}, roles: {user: [human], assistant: [gpt]}"
            ),
            {
                "said": [{"from": "human", "value": "q"}],
                "better": {"from": "gpt", "value": "g"},
                "worse": {"from": "gpt", "value": "b"},
            },
            ["q"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("rl", ["dpo", "orpo"])
def test_pairs_of_each_type_are_read(
    rl: str, dataset: str, row: dict[str, Any], prompt: list[str], tmp_path: Path
) -> None:
    assert read(rl, dataset, row, tmp_path) == {"prompt": prompt, "answer": "g", "rejected": "b"}


@pytest.mark.parametrize(
    ("dataset", "row", "prompt"),
    [
        ("type: chatml.intel", {"system": "s", "question": "q", "completion": "g", "label": True}, ["s", "q"]),
        ("type: chatml.argilla", {"instruction": "q", "completion": "g", "label": True}, ["q"]),
        ("type: llama3.ultra", {"prompt": "q", "completion": "g", "label": True}, ["q"]),
        ("type: chatml.argilla_chat", {"completion": [ASKED, GOOD], "label": True}, ["q"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_labelled_answers_of_each_type_are_read(
    dataset: str, row: dict[str, Any], prompt: list[str], tmp_path: Path
) -> None:
    assert read("kto", dataset, row, tmp_path) == {"prompt": prompt, "answer": "g", "label": True}


def test_own_columns_keep_the_wording_of_the_prompt(tmp_path: Path) -> None:
    columns = 'type: {field_prompt: ask, field_chosen: yes_, field_rejected: no_, prompt_format: "Q: {prompt} {x}"}'
    config, _ = converted(f"{HEAD}rl: dpo\ndatasets:\n  - {{path: org/rows, {columns}}}\n", "axolotl", tmp_path)
    assert config.prompt.template == "Q: {ask} {{x}}"
    assert config.prompt.chat is False
    assert read("dpo", columns, {"ask": "q", "yes_": "g", "no_": "b"}, tmp_path) == {
        "ask": "q",
        "reply": "g",
        "reply.no_": "b",
    }
    columns = "type: {field_prompt: ask, field_completion: said, field_label: liked}"
    assert read("kto", columns, {"ask": "q", "said": "g", "liked": 1}, tmp_path) == {
        "ask": "q",
        "said": "g",
        "said.liked": True,
    }


def test_texts_that_are_formatted_already_stay_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "<|q|>", "chosen": "g", "rejected": "b"}
    assert read("dpo", "type: passthrough", row, tmp_path) == {"prompt": "<|q|>", "reply": "g", "reply.rejected": "b"}


def test_a_wording_that_is_replaced_is_noted(tmp_path: Path) -> None:
    notes = converted(f"{HEAD}rl: dpo\n{PAIRS}", "axolotl", tmp_path)[1].notes
    assert notes.count("the wording of chatml is replaced by the chat template of the model") == 1
