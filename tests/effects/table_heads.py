"""Outputs that only a head predicts."""

from .bases import FINETUNE, data
from .effects import Flip, Group
from .observers import Config, training


def tags(source: str = "tags.jsonl", **keys: object) -> Config:
    """Return sections with tags of words."""
    output = {"name": "answer", "type": "tags", "column": "tags", **keys}
    return {"output_features": [output], "generation": {"max_new_tokens": None}, **data(source=source, max_bad_rows=30)}


def embedding(source: str = "rows.jsonl", **keys: object) -> Config:
    """Return sections with embeddings of texts."""
    output = {"name": "answer", "type": "embedding", **keys}
    return {"output_features": [output], "generation": {"max_new_tokens": None}, **data(source=source, max_bad_rows=30)}


def score(source: str = "scores.jsonl", **keys: object) -> Config:
    """Return sections with scores of two texts."""
    output = {"name": "answer", "type": "score", "column": "score", **keys}
    inputs = [{"name": "text"}, {"name": "label"}]
    sections = {"input_features": inputs, "output_features": [output], "generation": {"max_new_tokens": None}}
    return sections | data(source=source, max_bad_rows=30)


FILLED = {"missing_value_strategy": "fill_with_const", "fill_value": ""}
HEADS = [
    Group(
        "tags",
        training,
        FINETUNE,
        "losses",
        {
            "output_features[tags].type": Flip({"type": "text", "name": "answer"}, given=tags()),
            "output_features[tags].name": Flip("said", given=tags(), part="labels"),
            "output_features[tags].column": Flip("others", given=tags()),
            "output_features[tags].decoder.labels": Flip(["O", "B-A", "I-A", "B-B"], given=tags()),
            "output_features[tags].preprocessing.words": Flip("whitespace", given=tags()),
            "output_features[tags].preprocessing.missing_value_strategy": Flip(
                "fill_with_const", given=tags("tag-gaps.jsonl")
            ),
            "output_features[tags].preprocessing.fill_value": Flip(
                "B-A", given=tags("tag-gaps.jsonl", preprocessing=FILLED), part="left out"
            ),
        },
    ),
    Group(
        "scores",
        training,
        FINETUNE,
        "losses",
        {
            "output_features[score].type": Flip({"type": "text", "name": "answer"}, given=score()),
            "output_features[score].name": Flip(
                "said", given=score() | {"trainer": {"evaluate_generated": True}}, part="metrics"
            ),
            "output_features[score].column": Flip("other", given=score()),
            "output_features[score].decoder.loss": Flip("squared_error", given=score()),
            "output_features[score].preprocessing.missing_value_strategy": Flip(
                "fill_with_const", given=score("gaps-of-scores.jsonl")
            ),
            "output_features[score].preprocessing.fill_value": Flip(
                "1", given=score("gaps-of-scores.jsonl", preprocessing=FILLED | {"fill_value": "0"})
            ),
        },
    ),
    Group(
        "embeddings",
        training,
        FINETUNE,
        "losses",
        {
            "output_features[embedding].type": Flip({"type": "text", "name": "answer"}, given=embedding()),
            "output_features[embedding].name": Flip("said", given=embedding(column="answer"), part="metrics"),
            "output_features[embedding].column": Flip("label", given=embedding()),
            "output_features[embedding].decoder.pooling": Flip("mean", given=embedding()),
            "output_features[embedding].decoder.temperature": Flip(0.5, given=embedding()),
            "output_features[embedding].preprocessing.negatives": Flip(["label"], given=embedding()),
            "output_features[embedding].preprocessing.prefix": Flip("ball ", given=embedding()),
            "output_features[embedding].preprocessing.missing_value_strategy": Flip(
                "fill_with_const", given=embedding("gaps-of-texts.jsonl", preprocessing={"fill_value": "ball"})
            ),
            "output_features[embedding].preprocessing.fill_value": Flip(
                "box", given=embedding("gaps-of-texts.jsonl", preprocessing=FILLED | {"fill_value": "ball"})
            ),
        },
    ),
]
