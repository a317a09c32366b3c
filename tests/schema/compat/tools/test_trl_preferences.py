"""Tests of the conversion of TRL's files for DPO, KTO and SimPO: the trainer, its loss, and the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.objectives import DpoLoss, SimpoLoss
from partita_schema.sections.trainer import FinetuneTrainer, KtoTrainer, PreferenceTrainer

from .conversions import converted, missing, refusal_of

HEAD = "model_name_or_path: org/base\ndataset_name: org/pairs\n"
ASKED, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)


@pytest.mark.parametrize(
    ("keys", "loss"),
    [
        ("beta: 0.2\n", DpoLoss(type="dpo", beta=0.2)),
        ("loss_type: sigmoid\nlabel_smoothing: 0.1\n", DpoLoss(type="dpo", variant="sigmoid", label_smoothing=0.1)),
        ("loss_type: ipo\nlabel_smoothing: 0.1\n", DpoLoss(type="dpo", variant="ipo")),
        ("loss_type: [sigmoid_norm]\n", DpoLoss(type="dpo", variant="sigmoid_norm")),
        ("loss_type: sigmoid\nrpo_alpha: 1.0\n", DpoLoss(type="dpo", rpo_alpha=1.0)),
        ("loss_type: [sigmoid, sft]\nloss_weights: [2.0, 1.0]\n", DpoLoss(type="dpo", rpo_alpha=0.5)),
        ("loss_type: [hinge, sft]\n", DpoLoss(type="dpo", variant="hinge", rpo_alpha=1.0)),
        ("loss_type: simpo\n", SimpoLoss(type="simpo", beta=0.1, gamma=0.5)),
        (
            "loss_type: simpo\nbeta: 2.5\nsimpo_gamma: 1.4\ncpo_alpha: 0.0\n",
            SimpoLoss(type="simpo", beta=2.5, gamma=1.4),
        ),
    ],
)
def test_losses_have_the_constants_of_the_file(keys: str, loss: Any, tmp_path: Path) -> None:
    config, _ = converted(HEAD + keys, "trl", tmp_path)

    assert isinstance(config.trainer, PreferenceTrainer)
    assert config.trainer.loss == loss
    assert config.trainer.learning_rate == 1e-6
    assert config.preprocessing.global_max_sequence_length == 1024


@pytest.mark.parametrize("keys", ["desirable_weight: 0.5\n", "loss_type: kto\nundesirable_weight: 2.0\n"])
def test_kto_is_known_by_its_keys(keys: str, tmp_path: Path) -> None:
    trainer = converted(f"{HEAD}{keys}beta: 0.3\n", "trl", tmp_path)[0].trainer

    assert isinstance(trainer, KtoTrainer)
    assert trainer.beta == 0.3
    assert (trainer.desirable_weight, trainer.undesirable_weight) in [(0.5, 1.0), (1.0, 2.0)]


def test_references_can_be_computed_before(tmp_path: Path) -> None:
    for keys, when in (("precompute_ref_log_probs: true\n", "before"), ("precompute_ref_log_probs: false\n", "auto")):
        trainer = converted(f"{HEAD}{keys}beta: 0.1\n", "trl", tmp_path)[0].trainer
        assert isinstance(trainer, PreferenceTrainer)
        assert trainer.references == when


@pytest.mark.parametrize(
    ("keys", "dropout"),
    [("", 0.0), ("lora_dropout: 0.1\n", 0.0), ("lora_dropout: 0.1\ndisable_dropout: false\n", 0.1)],
)
def test_dropout_is_off_unless_the_file_says_otherwise(keys: str, dropout: float, tmp_path: Path) -> None:
    config, report = converted(f"{HEAD}beta: 0.1\nuse_peft: true\n{keys}", "trl", tmp_path)

    assert config.adapter is not None
    assert config.adapter.dropout == dropout  # type: ignore[union-attr]
    assert (("disable_dropout: true", "adapter.dropout", 0) in report.defaults) == (dropout == 0.0)


def test_what_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    keys = "beta: 0.1\nreference_free: true\nsync_ref_model: true\nmax_prompt_length: 512\nref_adapter_name: old\n"
    keys += "completion_only_loss: true\nuse_weighting: true\nld_alpha: 0.5\nf_divergence_type: js_divergence\n"
    assert set(missing(converted(HEAD + keys, "trl", tmp_path)[1])) == {
        "reference_free",
        "sync_ref_model",
        "max_prompt_length",
        "ref_adapter_name",
        "use_weighting",
        "ld_alpha",
        "f_divergence_type",
    }
    _, report = converted(
        f"{HEAD}loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n", "trl", tmp_path
    )
    assert missing(report) == {
        "loss_type": "sigmoid, bco_pair, sft is not offered; write a variant of trainer.loss",
        "loss_weights": "losses are not combined",
    }
    _, report = converted(f"{HEAD}loss_type: simpo\ncpo_alpha: 1.0\n", "trl", tmp_path)
    assert "cpo_alpha" in missing(report)
    assert (
        "TRL adds 1.0 times the cross-entropy of the chosen answer to simpo (cpo_alpha); simpo has no such part here"
    ) in report.notes


def test_a_guess_is_noted_and_other_losses_of_cpo_are_refused(tmp_path: Path) -> None:
    notes = converted(f"{HEAD}beta: 0.1\n", "trl", tmp_path)[1].notes
    assert any(note.startswith("the keys are those of trl dpo; for a file of ORPO write") for note in notes)
    assert refusal_of(f"{HEAD}cpo_alpha: 1.0\n", "trl", tmp_path) == (
        "original.yaml:3:1: cpo_alpha: of the losses of CPOConfig only simpo is available; write loss_type: simpo"
    )


@pytest.mark.parametrize(
    ("loss", "noted"), [("bco_pair", True), ("[bco_pair, sft]", True), ("sigmoid", False), ("ipo", False)]
)
def test_the_baseline_of_bco_pair_is_noted(loss: str, noted: bool, tmp_path: Path) -> None:
    note = (
        "the loss bco_pair of TRL compares rewards with their running mean over all steps; here it compares them with 0"
    )
    assert (note in converted(f"{HEAD}loss_type: {loss}\n", "trl", tmp_path)[1].notes) == noted


@pytest.mark.parametrize("keys", ["", "desirable_weight: 2.0\n", "undesirable_weight: 2.0\nbeta: 0.2\n"])
def test_other_losses_of_kto_are_refused(keys: str, tmp_path: Path) -> None:
    assert refusal_of(f"{HEAD}loss_type: apo_zero_unpaired\n{keys}", "trl", tmp_path) == (
        "original.yaml:3:1: loss_type: of the losses of KTOConfig only kto is available; write loss_type: kto"
    )


@pytest.mark.parametrize(
    ("keys", "row", "clean"),
    [
        (
            "",
            {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
            {"prompt": ["q"], "answer": "g", "rejected": "b"},
        ),
        ("", {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, {"prompt": ["q"], "answer": "g", "rejected": "b"}),
        ("", {"prompt": "q", "chosen": "g", "rejected": "b"}, {"prompt": "q", "reply": "g", "reply.rejected": "b"}),
        ("", {"chosen": "qg", "rejected": "qb"}, {"reply": "qg", "reply.rejected": "qb"}),
        (
            "",
            {"prompt": "q", "completion": "g", "label": True},
            {"prompt": "q", "completion": "g", "completion.label": True},
        ),
        (
            "beta: 0.1\n",
            {"prompt": [ASKED], "completion": [GOOD], "label": False},
            {"prompt": ["q"], "answer": "g", "label": False},
        ),
    ],
)
def test_rows_of_a_local_file_decide_and_are_read(
    keys: str, row: dict[str, Any], clean: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config, _ = converted(f"model_name_or_path: org/base\ndataset_name: rows.jsonl\n{keys}", "trl", tmp_path)
    checked = check_rows(row_schema(config, supervised=True), [row])
    assert checked.bad == {}
    found = checked.clean[0]
    dialogue = found.get("messages")
    if isinstance(dialogue, dict):
        rejected = {"rejected": dialogue["rejected"]["content"]} if "rejected" in dialogue else {}
        label = {"label": found["reply.label"]} if "reply.label" in found else {}
        prompt = [message["content"] for message in dialogue["messages"]]
        found = {"prompt": prompt, "answer": dialogue["labels"][0], **rejected, **label}
    assert found == clean
    assert type(config.trainer) is (KtoTrainer if "label" in row else PreferenceTrainer)


def test_a_file_of_supervised_training_stays_one(tmp_path: Path) -> None:
    assert type(converted(HEAD, "trl", tmp_path)[0].trainer) is FinetuneTrainer
