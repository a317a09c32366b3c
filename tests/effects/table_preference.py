"""Pairs of answers, labelled answers, and the trainers that learn from them."""

from .bases import FINETUNE, SEEN, data
from .effects import GENERIC, Flip, Group
from .observers import Config, training

ALL_ROWS = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}


def pairs(source: str = "pairs.jsonl", **keys: object) -> Config:
    """Return sections with pairs of answers."""
    return {
        "output_features": [{"name": "answer", "type": "preference", **keys}],
        **data(source=source, max_bad_rows=30, split=ALL_ROWS),
    }


def labelled(**keys: object) -> Config:
    """Return sections with answers that are good or bad."""
    return {"output_features": [{"name": "answer", "type": "text", "label": "liked", **keys}], **data()}


STEPS = {key: value for key, value in FINETUNE["trainer"].items() if key != "type"}
FILLED = {"missing_value_strategy": "fill_with_const", "fill_value": "ball"}


def learning(type: str, **keys: object) -> Config:
    """Return a configuration that trains on pairs or labelled answers."""
    rows = labelled() if type == "kto" else pairs()
    sections = {**FINETUNE["data"], "source": "pairs.jsonl"}
    return FINETUNE | rows | {"data": sections, "trainer": {"type": type, **STEPS, **keys}}


def loss(type: str) -> Config:
    """Return sections with a loss."""
    return {"trainer": {"loss": {"type": type}}}


PREFERENCE = [
    Group(
        "pairs of answers",
        training,
        SEEN | pairs(),
        "batches",
        {
            "output_features[preference].type": Flip({"type": "text", "name": "answer"}),
            "output_features[preference].column": Flip("answer", part="refusal"),
            "output_features[preference].chosen": "other",
            "output_features[preference].rejected": "other",
            "output_features[preference].preprocessing.max_sequence_length": 1,
            "output_features[preference].preprocessing.lowercase": Flip(
                True, given=pairs("capital-pairs.jsonl") | {"base_model": "bytes"}
            ),
            "output_features[preference].preprocessing.missing_value_strategy": Flip(
                "fill_with_const",
                given=pairs("gaps-of-pairs.jsonl", preprocessing={"fill_value": "ball"}),
            ),
            "output_features[preference].preprocessing.fill_value": Flip(
                "box", given=pairs("gaps-of-pairs.jsonl", preprocessing=FILLED)
            ),
        },
    ),
    Group(
        "trainers on pairs",
        training,
        learning("preference"),
        "losses",
        {
            "output_features[preference].name": Flip(
                "said", given={"trainer": {"evaluate_generated": True}}, part="metrics"
            ),
            "output_features[preference].decoder.max_new_tokens": Flip(
                2,
                given={"trainer": {"evaluate_generated": True}, "generation": {"max_new_tokens": None}},
                part="metrics",
            ),
            "output_features[preference].head": Flip("linear", part="refusal"),
            "trainer[preference].type": Flip({"type": "finetune", **STEPS}, part="refusal"),
            "trainer[preference].learning_rate": Flip(0.02, part="rates"),
            "trainer[preference].references": Flip("in_step", part="files"),
            "trainer[preference].loss[dpo].type": Flip({"type": "orpo"}),
            "trainer[preference].loss[dpo].beta": Flip(GENERIC, given=loss("dpo")),
            "trainer[preference].loss[dpo].variant": Flip("hinge", given=loss("dpo")),
            "trainer[preference].loss[dpo].rpo_alpha": Flip(1.0, given=loss("dpo")),
            "trainer[preference].loss[dpo].label_smoothing": Flip(0.1, given=loss("dpo")),
            "trainer[preference].loss[orpo].type": Flip({"type": "simpo"}, given=loss("orpo")),
            "trainer[preference].loss[orpo].beta": Flip(GENERIC, given=loss("orpo")),
            "trainer[preference].loss[simpo].type": Flip({"type": "dpo"}, given=loss("simpo")),
            "trainer[preference].loss[simpo].beta": Flip(GENERIC, given=loss("simpo")),
            "trainer[preference].loss[simpo].gamma": Flip(GENERIC, given=loss("simpo")),
        },
        long=True,
    ),
    Group(
        "trainers on labelled answers",
        training,
        learning("kto"),
        "losses",
        {
            "output_features[text].label": "disliked",
            "trainer[kto].type": Flip({"type": "finetune", **STEPS}, part="refusal"),
            "trainer[kto].learning_rate": Flip(0.02, part="rates"),
            "trainer[kto].references": Flip("in_step", part="files"),
            "trainer[kto].beta": GENERIC,
            "trainer[kto].desirable_weight": GENERIC,
            "trainer[kto].undesirable_weight": 2.0,
        },
        long=True,
    ),
    Group(
        "reward models",
        training,
        learning("reward") | {"generation": {}},
        "losses",
        {
            "trainer[reward].type": Flip({"type": "preference", **STEPS}),
            "trainer[reward].learning_rate": Flip(0.02, part="rates"),
            "trainer[reward].center": 0.5,
            "output_features[preference].margin": Flip("label"),
        },
        long=True,
    ),
]
