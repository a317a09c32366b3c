"""Tests of the rules for trainers on preferences, and of their sections."""

from typing import Any, get_args

import pytest

from partita_schema.load import load_config
from partita_schema.sections.objectives import DpoLoss, OrpoLoss, SimpoLoss
from partita_schema.sections.trainer import FinetuneTrainer, KtoTrainer, PreferenceTrainer, RewardTrainer
from partita_schema.training_defaults import default_learning_rate

from ..refusals import problems_of

PAIR = {"name": "answer", "type": "preference"}
GOOD_OR_BAD = {"name": "answer", "type": "text", "label": "liked"}
DIALOGUE = {"input_features": [{"name": "messages", "type": "dialogue"}]}


def file(trainer: str | dict[str, Any] = "preference", *, output: dict[str, Any] = PAIR, **sections: Any) -> Any:
    """Return a configuration with a trainer, given by its type or with its keys."""
    base = {"base_model": "m", "input_features": [{"name": "prompt"}], "output_features": [output]}
    return base | {"trainer": {"type": trainer} if isinstance(trainer, str) else trainer} | sections


def test_a_preference_has_the_default_columns_and_the_original_loss() -> None:
    config = load_config(file()).config
    trainer, output = config.trainer, config.output_features[0]

    assert isinstance(trainer, PreferenceTrainer)
    assert trainer.loss == DpoLoss(type="dpo", beta=0.1, variant="sigmoid", rpo_alpha=0.0, label_smoothing=0.0)
    assert trainer.references == "auto"
    assert (output.source_column, output.more_columns) == ("chosen", ("rejected",))
    assert output.free_text


def test_the_losses_have_the_constants_of_their_papers() -> None:
    losses = {kind: load_config(file({"type": "preference", "loss": {"type": kind}})).config for kind in LOSSES}

    assert {kind: config.trainer.loss for kind, config in losses.items()} == LOSSES  # type: ignore[union-attr]


LOSSES = {"orpo": OrpoLoss(type="orpo", beta=0.1), "simpo": SimpoLoss(type="simpo", beta=2.0, gamma=1.0)}


@pytest.mark.parametrize(
    ("trainer", "output", "section"),
    [
        ("preference", PAIR, PreferenceTrainer),
        ("reward", PAIR, RewardTrainer),
        ("kto", GOOD_OR_BAD, KtoTrainer),
    ],
)
def test_the_trainers_have_the_keys_of_fine_tuning(trainer: str, output: dict[str, Any], section: type) -> None:
    keys = {"type": trainer, "max_steps": 3, "effective_batch_size": 8, "optimizer": {"type": "sgd"}}
    config = load_config(file(keys, output=output)).config

    assert isinstance(config.trainer, section)
    assert isinstance(config.trainer, FinetuneTrainer)
    assert config.trainer.step_rows == 8


@pytest.mark.parametrize(
    ("trainer", "output", "rates"),
    [
        ("preference", PAIR, (1e-5, 1e-4, 1e-6)),
        ("kto", GOOD_OR_BAD, (1e-5, 1e-4, 1e-6)),
        ("reward", PAIR, (1e-4, 1e-3, 1e-5)),
        ("finetune", {"name": "answer", "type": "text"}, (2e-4, 1e-3, 2e-5)),
    ],
)
def test_the_default_learning_rates_are_those_of_the_trainer(
    trainer: str, output: dict[str, Any], rates: tuple[float, float, float]
) -> None:
    adapter, new = {"adapter": {"type": "lora"}}, {"base_model": {"type": "scratch"}}
    files = (file(trainer, output=output, **sections) for sections in (adapter, new, {}))

    assert tuple(default_learning_rate(load_config(one).config)[0] for one in files) == rates


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"type": "dpo", "beta": 0}, "trainer.loss.beta: write a number above 0; got 0"),
        ({"type": "dpo", "label_smoothing": 0.5}, "trainer.loss.label_smoothing: write a number of at least 0"),
        ({"type": "dpo", "rpo_alpha": -1}, "trainer.loss.rpo_alpha: write a number of at least 0; got -1"),
        ({"type": "dpo", "variant": "aot"}, "trainer.loss.variant: write one of sigmoid, hinge, ipo"),
        ({"type": "dpo", "gamma": 1.0}, "trainer.loss.gamma: gamma has no effect with type: dpo; remove it"),
        ({"type": "orpo", "label_smoothing": 0.1}, "trainer.loss.label_smoothing: label_smoothing has no effect with"),
        ({"type": "simpo", "gamma": -1}, "trainer.loss.gamma: write a number of at least 0; got -1"),
        (
            {"type": "dpo", "variant": "ipo", "label_smoothing": 0.1},
            (
                "trainer.loss.label_smoothing: label_smoothing has no effect on variant: ipo; remove it, or write "
                "variant: sigmoid or robust"
            ),
        ),
    ],
)
def test_a_wrong_loss_is_refused(loss: dict[str, Any], message: str) -> None:
    [problem] = problems_of(file({"type": "preference", "loss": loss}))

    assert problem.startswith(message)


def test_label_smoothing_goes_with_the_robust_variant() -> None:
    loss = {"type": "dpo", "variant": "robust", "label_smoothing": 0.1}

    assert problems_of(file({"type": "preference", "loss": loss})) == []


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference_have_no_references(loss: str) -> None:
    assert problems_of(file({"type": "preference", "loss": {"type": loss}, "references": "before"})) == [
        (
            f"trainer.references: references has no effect on loss: {{type: {loss}}}, which compares with no other "
            "model; remove it"
        )
    ]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            PAIR | {"column": "answers"},
            (
                "output_features[0].column: a preference has two columns; write chosen and rejected, the names of "
                "their columns"
            ),
        ),
        (
            PAIR | {"chosen": "a", "rejected": "a"},
            "output_features[0].rejected: both answers are in the column 'a'; write the column of the worse one",
        ),
    ],
)
def test_a_preference_needs_two_columns(output: dict[str, Any], message: str) -> None:
    assert problems_of(file(output=output)) == [message]


def test_only_a_reward_model_has_a_margin() -> None:
    output = PAIR | {"margin": ["score_chosen", "score_rejected"]}

    assert problems_of(file("reward", output=output)) == []
    assert problems_of(file(output=output)) == [
        (
            "output_features[0].margin: margin has no effect with trainer: {type: preference}; remove it, or write "
            "type: reward there"
        )
    ]
    assert problems_of(file("reward", output=PAIR | {"margin": "chosen"})) == [
        "output_features[0].margin: the column 'chosen' holds an answer; write a column of numbers"
    ]


@pytest.mark.parametrize(
    ("trainer", "output", "message"),
    [
        (
            "preference",
            {"name": "answer", "type": "text"},
            (
                "output_features[0].type: trainer: {type: preference} learns from pairs of answers, and this is a "
                "text; write type: preference, with chosen and rejected"
            ),
        ),
        (
            "reward",
            {"name": "answer", "type": "category"},
            (
                "output_features[0].type: trainer: {type: reward} learns from pairs of answers, and this is a "
                "category; write type: preference, with chosen and rejected"
            ),
        ),
        (
            "kto",
            PAIR,
            (
                "output_features[0].type: kto learns from single texts that are good or bad, and this is a preference; "
                "write type: text, with label: COLUMN"
            ),
        ),
        (
            "kto",
            {"name": "answer", "type": "text"},
            "output_features[0]: kto must know which answers are good; write label: COLUMN, the column that says it",
        ),
        (
            "finetune",
            PAIR,
            (
                "output_features[0].type: a preference has two answers, and trainer: {type: finetune} learns one; "
                "write type: text, with column: chosen, or trainer: {type: preference}"
            ),
        ),
        (
            "none",
            PAIR,
            (
                "output_features[0].type: a preference has two answers, and trainer: {type: none} learns no answer; "
                "write type: text, with column: chosen, or head: linear to score answers"
            ),
        ),
        (
            "finetune",
            GOOD_OR_BAD,
            (
                "output_features[0].label: label has no effect with trainer: {type: finetune}; remove it, or write "
                "type: kto there"
            ),
        ),
    ],
)
def test_the_output_must_fit_the_trainer(trainer: str, output: dict[str, Any], message: str) -> None:
    assert problems_of(file(trainer, output=output)) == [message]


def test_a_custom_trainer_may_read_pairs_and_labels() -> None:
    trainer = {"type": "custom", "target": "a:B"}

    assert problems_of(file(trainer)) == []
    assert problems_of(file(trainer, output=GOOD_OR_BAD)) == []


def test_a_bag_of_words_has_no_pairs() -> None:
    problems = problems_of(file("hogwild", base_model={"type": "embedding_bag"}))

    assert problems == [
        (
            "output_features[0].type: a bag of words chooses a label, and this is a preference; write type: category, "
            "or a language model as base_model"
        )
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"output_features": [PAIR, {"name": "b", "type": "text"}]},
            "output_features[1]: trainer: {type: preference} learns a single output; write one file for each output",
        ),
        (
            {"trainer": {"type": "preference", "completion_only_loss": False}},
            "trainer.completion_only_loss: answers are compared, not prompts; remove it",
        ),
        (
            {"data": {"batching": {"type": "chunk"}}, "input_features": []},
            (
                "data.batching.type: chunk cuts rows, and the answers of a row belong together; write pack, bucket or "
                "token_budget"
            ),
        ),
        (
            {"data": {"dialogue": {"mode": "squash"}}, **DIALOGUE},
            "data.dialogue.mode: only the last answer of a dialogue is compared; remove mode, or write last_turn",
        ),
        (
            {"data": {"dialogue": {"labels": "all"}}, **DIALOGUE},
            "data.dialogue.labels: a dialogue is one row, with the answers of the data; remove labels",
        ),
        (
            {"base_model": {"type": "scratch", "architecture": "t5"}},
            (
                "trainer.type: preference compares answers after one reading of the prompt, which is written for "
                "decoders, and this is an encoder-decoder; choose a causal language model"
            ),
        ),
        (
            {"base_model": {"type": "scratch", "architecture": "bert"}},
            (
                "output_features[0].type: bert is an encoder, which writes no text, and a preference is written; write "
                "type: category, set, number, tags, score or embedding, or choose a decoder as base_model"
            ),
        ),
        (
            {"prompt": {"template": "{prompt} {rejected}"}},
            "prompt.template: the template shows the output {rejected} and gives the answer away; remove it",
        ),
        (
            {"backend": {"type": "endpoint", "url": "http://localhost:1/v1"}},
            "trainer.type: a server is only queried, never trained; write type: none, or remove backend",
        ),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(sections: dict[str, Any], message: str) -> None:
    assert problems_of(file(**{"trainer": "preference", **sections})) == [message]


def test_pairs_go_with_packing_dialogues_and_no_input() -> None:
    assert problems_of(file(data={"batching": {"type": "pack"}})) == []
    assert problems_of(file(data={"dialogue": {"mode": "last_turn", "context_turns": 3}}, **DIALOGUE)) == []
    assert problems_of(file(input_features=[])) == []


def test_kto_needs_a_prompt() -> None:
    assert problems_of(file("kto", output=GOOD_OR_BAD, input_features=[])) == [
        "input_features: kto learns from answers to prompts; name the columns that the model sees"
    ]


def rounds(**self_training: Any) -> dict[str, Any]:
    """Return a simulation with self-training."""
    world = {"type": "environment", "environment": "guest:Guest"}
    return {"world": world, "tasks": {"count": 2}, "self_training": {"tasks": {"count": 2}, **self_training}}


def transcripts(select: str) -> dict[str, Any]:
    return {"source": {"type": "simulation", "path": "predicted.jsonl", "select": select}}


@pytest.mark.parametrize(
    ("trainer", "output", "select"),
    [
        ("preference", PAIR, "corrected"),
        ("preference", PAIR, "best_and_worst"),
        ("kto", GOOD_OR_BAD, "all"),
        ("finetune", {"name": "reply", "type": "text"}, "succeeded"),
    ],
)
def test_transcripts_and_rounds_make_what_the_output_needs(trainer: str, output: dict[str, Any], select: str) -> None:
    attempts = {"attempts": 2} if select == "best_and_worst" else {}
    assert problems_of(file(trainer, output=output, data=transcripts(select), **DIALOGUE)) == []
    assert problems_of(file(trainer, output=output, simulation=rounds(select=select, **attempts), **DIALOGUE)) == []


@pytest.mark.parametrize(
    ("trainer", "output", "select", "message"),
    [
        (
            "preference",
            PAIR,
            "succeeded",
            "succeeded makes single answers, and this output has pairs; write corrected or best_and_worst",
        ),
        (
            "kto",
            GOOD_OR_BAD,
            "corrected",
            "labelled answers are those of all dialogues, good and bad ones; write all",
        ),
        (
            "finetune",
            {"name": "reply", "type": "text"},
            "best_and_worst",
            (
                "best_and_worst makes pairs of answers, and this output is a text; write type: preference there, or "
                "select: corrected, succeeded or all"
            ),
        ),
    ],
)
def test_transcripts_that_the_output_cannot_learn_from_are_refused(
    trainer: str, output: dict[str, Any], select: str, message: str
) -> None:
    wrong = file(trainer, output=output, data=transcripts(select), **DIALOGUE)
    assert problems_of(wrong) == [f"data.source.select: {message}"]
    mixed = {"mix": [transcripts(select), {"source": "rows.jsonl"}]}
    wrong = file(trainer, output=output, data=mixed, **DIALOGUE)
    assert problems_of(wrong) == [f"data.mix[0].source.select: {message}"]
    wrong = file(trainer, output=output, simulation=rounds(select=select, attempts=2), **DIALOGUE)
    assert problems_of(wrong) == [f"simulation.self_training.select: {message}"]


def test_best_and_worst_needs_several_attempts() -> None:
    assert problems_of(file(simulation=rounds(select="best_and_worst"), **DIALOGUE)) == [
        "simulation.self_training.attempts: best_and_worst compares attempts at a task; write 2 or more"
    ]


def test_a_reward_model_has_a_head_also_if_the_file_does_not_say_so() -> None:
    written = load_config(file("reward", output=PAIR | {"head": "linear"})).config

    assert load_config(file("reward")).config == written
    assert written.scores_answers
    assert not written.output_features[0].is_compared
    assert not load_config(file()).config.scores_answers
    assert load_config(written).config == written


def test_a_reward_model_of_others_scores_answers_without_training() -> None:
    assert load_config(file("none", output=PAIR | {"head": "linear"})).config.scores_answers


@pytest.mark.parametrize("trainer", ["preference", "finetune"])
def test_a_head_of_pairs_does_not_learn_to_write(trainer: str) -> None:
    reason = f"a head scores answers, and trainer: {{type: {trainer}}} learns to write them"
    assert f"output_features[0].head: {reason}; remove head, or write type: reward there" in problems_of(
        file(trainer, output=PAIR | {"head": "linear"})
    )


NOTHING = "a head predicts the value and nothing is generated"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"type": "reward", "evaluate_generated": True}},
            "trainer.evaluate_generated: a reward model predicts a score and writes no answers; remove it",
        ),
        (
            {"output": PAIR | {"decoder": {"max_new_tokens": 5}}},
            f"output_features[0].decoder.max_new_tokens: {NOTHING}, so max_new_tokens has no effect; remove it",
        ),
        (
            {"generation": {"do_sample": True}},
            f"generation.do_sample: {NOTHING}, so do_sample has no effect; remove it",
        ),
        (
            {"adapter": {"type": "prompt_tuning"}},
            "adapter.type: prompt_tuning does not train the head; write lora",
        ),
        (
            {"trainer": {"type": "reward", "validation_metric": "rouge_l"}},
            (
                "trainer.validation_metric: no metric is named rouge_l; there are loss, rewards/accuracies, "
                "rewards/margins"
            ),
        ),
        (
            {"base_model": {"type": "scratch", "architecture": "t5"}},
            (
                "output_features[0].head: t5 is an encoder-decoder, which writes its answers; choose an encoder or "
                "decoder"
            ),
        ),
    ],
)
def test_what_only_a_model_that_writes_has_is_refused(sections: dict[str, Any], message: str) -> None:
    assert message in problems_of(file(**{"trainer": "reward", **sections}))


def test_a_reward_model_reads_prompts_as_a_model_that_answers() -> None:
    prompt = {"system": "Be brief.", "task": "Answer.", "chat": True}

    assert problems_of(file("reward", prompt=prompt, data={"batching": {"type": "pack"}})) == []
    assert problems_of(file("reward", output=PAIR | {"preprocessing": {"max_sequence_length": 5}})) == []
    by_margin = {"type": "reward", "validation_metric": "rewards/margins"}
    assert problems_of(file(by_margin, input_features=[])) == []


def test_an_encoder_scores_answers_too() -> None:
    assert problems_of(file("reward", base_model={"type": "scratch", "architecture": "bert"})) == []


@pytest.mark.parametrize(
    ("trainer", "output", "metric"),
    [
        ("preference", PAIR, "rewards/accuracies"),
        ("preference", PAIR, "chosen_falls"),
        ("preference", PAIR, "rouge_l"),
        ("reward", PAIR, "rewards/margins"),
        ("kto", GOOD_OR_BAD, "rewards/margins"),
    ],
)
def test_metrics_of_the_objective_can_select_the_checkpoint(trainer: str, output: dict[str, Any], metric: str) -> None:
    assert problems_of(file({"type": trainer, "validation_metric": metric}, output=output)) == []


def test_metrics_of_another_objective_cannot_select_the_checkpoint() -> None:
    kto = file({"type": "kto", "validation_metric": "rewards/accuracies"}, output=GOOD_OR_BAD)
    plain = file({"type": "finetune", "validation_metric": "chosen_falls"}, output={"name": "b", "type": "text"})

    assert problems_of(kto) == [
        (
            "trainer.validation_metric: no metric is named rewards/accuracies with trainer: {type: kto}; write loss, "
            "rewards/margins, rewards/chosen, or a metric of the output"
        )
    ]
    assert problems_of(plain) == [
        (
            "trainer.validation_metric: no metric is named chosen_falls with trainer: {type: finetune}; write loss, or "
            "a metric of the output"
        )
    ]


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("simpo", "got simpo; write type: preference, and loss: {type: simpo}"),
        ("ipo", "got ipo; write type: preference, and loss: {type: dpo, variant: ipo}"),
        ("rm", "got rm; write type: reward"),
    ],
)
def test_names_of_other_libraries_are_advised(written: str, advice: str) -> None:
    assert problems_of(file(written))[0] == f"trainer.type: {advice}"


@pytest.mark.parametrize("variant", get_args(DpoLoss.model_fields["variant"].annotation))
def test_a_variant_is_no_type_of_a_loss(variant: str) -> None:
    for loss, message in (
        ({"type": variant}, f"trainer.loss.type: got {variant}; write type: dpo, and variant: {variant}"),
        (variant, f"trainer.loss: write a mapping; got {variant}, write loss: {{type: dpo, variant: {variant}}}"),
    ):
        assert problems_of(file({"type": "preference", "loss": loss})) == [message]
