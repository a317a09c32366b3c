"""Rows: sources, splits, formatting, batching and loading."""

from .bases import FINETUNE, SEEN, data
from .effects import GENERIC, Flip, Group
from .inputs import write_transcripts
from .observers import Config, training

CSV: Config = {"type": "csv", "path": "rows.csv"}
JSONL: Config = {"type": "jsonl", "path": "rows.jsonl"}
HUB: Config = {"type": "hub", "name": "hub", "subset": "one"}
CUSTOM: Config = {"type": "custom", "target": "programs_of_effects:Numbered"}
EARLIER_TRANSCRIPTS: Config = {"type": "simulation", "path": "earlier/predicted.jsonl", "select": "corrected"}
STREAM: Config = {
    "data": {"split": None, "batching": {"type": "fixed"}},
    "trainer": {"skip_all_evaluation": True},
}


def split(place: str) -> dict[str, Flip]:
    """Return the keys of the types of splits."""
    section = place.partition(".")[0]

    def given(**section_of_split: object) -> Config:
        return {section: {"split": section_of_split}}

    shares, others = [0.6, 0.2, 0.2], [0.4, 0.3, 0.3]
    drawn = given(type="random", probabilities=shares)
    hashed = given(type="hash", column="text", probabilities=shares)
    even = given(type="stratify", column="label", probabilities=shares)
    fixed = given(type="fixed", column="split")
    folds = given(type="kfold", folds=3, fold=1)
    return {
        f"{place}[random].type": Flip({"type": "fixed"}, given=drawn),
        f"{place}[random].probabilities": Flip(others, given=drawn),
        f"{place}[hash].type": Flip({"type": "random", "probabilities": shares}, given=hashed),
        f"{place}[hash].probabilities": Flip(others, given=hashed),
        f"{place}[hash].column": Flip("answer", given=hashed),
        f"{place}[stratify].type": Flip({"type": "random", "probabilities": shares}, given=even),
        f"{place}[stratify].probabilities": Flip(others, given=even),
        f"{place}[stratify].column": Flip("split", given=even),
        f"{place}[fixed].type": Flip({"type": "random"}, given=fixed),
        f"{place}[fixed].column": Flip("label", given=fixed),
        f"{place}[kfold].type": Flip({"type": "random"}, given=folds),
        f"{place}[kfold].folds": Flip(4, given=folds),
        f"{place}[kfold].column": Flip("label", given=folds),
        f"{place}[kfold].fold": Flip(2, given=folds),
    }


def sources(place: str) -> dict[str, Flip]:
    """Return the keys of the sources at a place; streams are tested elsewhere."""

    def given(source: Config) -> Config:
        name = place.rpartition(".")[2]
        if place == "data.mix.source":
            return {"data": {"source": None, "mix": [{"source": source}, {"source": "more.jsonl"}]}}
        return {"data": {name: source}}

    return {
        place: Flip("more.csv", given=given("rows.csv")),
        f"{place}[csv].type": Flip("jsonl", given=given(CSV), part="refusal"),
        f"{place}[csv].path": Flip("more.csv", given=given(CSV)),
        f"{place}[csv].delimiter": Flip(";", given=given(CSV), part="refusal"),
        f"{place}[csv].quoting": Flip("none", given=given(CSV | {"path": "quoted.csv"}), part="refusal"),
        f"{place}[csv].header": Flip(["text", "answer", "more"], given=given(CSV), part="refusal"),
        f"{place}[csv].encoding": Flip("utf-16", given=given(CSV), part="refusal"),
        f"{place}[csv].sheet": Flip("more", given=given(CSV), part="refusal"),
        f"{place}[hub].type": Flip(CSV, given=given(HUB)),
        f"{place}[hub].name": Flip("hub2", given=given(HUB)),
        f"{place}[hub].subset": Flip("two", given=given(HUB)),
        f"{place}[hub].split": Flip("test", given=given(HUB)),
        f"{place}[custom].type": Flip(CSV, given=given(CUSTOM)),
        f"{place}[custom].target": Flip("programs_of_effects:Lettered", given=given(CUSTOM)),
        f"{place}[custom].options": Flip({"word": "box"}, given=given(CUSTOM)),
    }


def streams(place: str) -> dict[str, Flip]:
    """Return the keys for streaming the rows of a place."""

    def given(source: Config) -> Config:
        if place == "data.mix.source":
            mix = {"source": None, "mix": [{"source": source}, {"source": source, "name": "again"}]}  # both are changed
            return {**STREAM, "data": STREAM["data"] | mix}
        return {**STREAM, "data": STREAM["data"] | {"source": source}}

    return {
        f"{place}[{tag}].streaming": Flip(True, given=given(source))
        for tag, source in (("csv", JSONL), ("hub", HUB), ("custom", CUSTOM))
    }


def never_streams(place: str) -> dict[str, Flip]:
    name = place.rpartition(".")[2]
    return {
        f"{place}[{tag}].streaming": Flip(True, given={"data": {name: source}}, part="refusal")
        for tag, source in (("csv", JSONL), ("hub", HUB), ("custom", CUSTOM))
    }


def transcripts(place: str) -> dict[str, Flip]:
    """Return the keys of transcripts at a place."""

    def given(source: Config) -> Config:
        name = place.rpartition(".")[2]
        if place == "data.mix.source":
            return {"data": {"source": None, "mix": [{"source": source}, {"source": "talks.jsonl"}]}}
        return {"data": {name: source}}

    path = f"{place}[simulation]"
    return {
        f"{path}.type": Flip({"type": "jsonl", "path": "more-talks.jsonl"}, given=given(EARLIER_TRANSCRIPTS)),
        f"{path}.path": Flip("more-earlier/predicted.jsonl", given=given(EARLIER_TRANSCRIPTS)),
        f"{path}.select": Flip("all", given=given(EARLIER_TRANSCRIPTS)),
        f"{path}.target": Flip("every_agent_turn", given=given(EARLIER_TRANSCRIPTS)),
    }


TALK: Config = SEEN | {
    "base_model": "bytes",
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "data": {"source": "talks.jsonl", "batching": {"type": "fixed"}},
}
BATCHING = {
    "data.batching[auto].type": Flip({"type": "pack"}, given=data(batching={"type": "auto"})),
    "data.batching[fixed].type": {"type": "bucket"},
    "data.batching[fixed].shuffle": GENERIC,
    "data.batching[fixed].drop_last": GENERIC,
    **{
        f"data.batching[bucket].{key}": Flip(value, given=data(batching={"type": "bucket", "window": 12}))
        for key, value in {
            "type": {"type": "pack"},
            "window": 4,
            "noise": 1.0,
            "longest_first": True,
            "length_spread": 1,
            "drop_last": True,
        }.items()
    },
    "data.batching[pack].type": Flip({"type": "fixed"}, given=data(batching={"type": "pack"})),
    "data.batching[pack].max_tokens": Flip(60, given=data(batching={"type": "pack"})),
    "data.batching[pack].window": Flip(4, given=data(batching={"type": "pack", "max_tokens": 60})),
}
BUDGET = data(batching={"type": "token_budget", "max_tokens": 40, "window": 12}) | {
    "trainer": {"batch_size": "auto", "effective_batch_size": None, "eval_batch_size": 4}
}
DOCUMENTS: Config = {"input_features": [], "output_features": [{"name": "text", "type": "text"}]}
CHUNKS: Config = data(batching={"type": "chunk", "context_length": 16, "window": 12})
CHUNKS_OF_A_STREAM: Config = {
    "data": {"split": None, "source": {**JSONL, "streaming": True}, **CHUNKS["data"]},
    "trainer": STREAM["trainer"],
}
DATA = [
    Group(
        "batches",
        training,
        SEEN,
        "batches",
        {
            **BATCHING,
            **split("data.split"),
            **split("preprocessing.split"),
            **sources("data.source"),
            **sources("data.mix.source"),
            "data.mix.weight": Flip(
                3.0, given=data(source=None, mix=[{"source": "rows.jsonl"}, {"source": "more.jsonl"}])
            ),
            "data.mix.name": Flip(
                "mine", given=data(source=None, mix=[{"source": "rows.jsonl"}, {"source": "more.jsonl"}])
            ),
            "data.stop": Flip(
                "first",
                given=data(source=None, mix=[{"source": "rows.jsonl"}, {"source": "three.jsonl", "weight": 0.5}]),
            ),
            "preprocessing.sample_ratio": 0.5,
            "preprocessing.sample_size": 9,
            "preprocessing.global_max_sequence_length": 8,
            "data.formatter": "programs_of_effects:Shout",
            "data.collate": "programs_of_effects:Backwards",
            "data.max_row_bytes": Flip(80, given=data(max_bad_rows=20)),
            "data.max_bad_rows": Flip(0, given=data(source="gaps.jsonl", max_bad_rows=20), part="refusal"),
            "data.encode": Flip("cache", part="token_cache"),
        },
    ),
    Group(
        "splits",
        training,
        SEEN,
        "data",
        {
            **sources("data.validation"),
            **sources("data.test"),
            **never_streams("data.validation"),
            **never_streams("data.test"),
        },
        long=True,
    ),
    Group(
        "finetune data",
        training,
        FINETUNE,
        "plan",
        {
            **streams("data.source"),
            **streams("data.mix.source"),
            **{
                f"data.batching[token_budget].{key}": Flip(value, given=BUDGET, also=also)
                for key, value, also in (
                    ("window", 4, {}),
                    ("noise", 1.0, {}),
                    ("longest_first", True, {}),
                    ("type", {"type": "fixed"}, {"trainer": {"batch_size": 4}}),
                    ("max_tokens", 60, {}),
                    ("max_rows", 2, {}),
                    ("multiple_of", 2, {}),
                )
            },
        },
        long=True,
    ),
    Group(
        "chunks",
        training,
        SEEN | DOCUMENTS,
        "batches",
        {
            f"data.batching[chunk].{key}": Flip(value, given=CHUNKS)
            for key, value in {
                "type": {"type": "fixed"},
                "context_length": 24,
                "shuffle": False,
                "isolate_documents": True,
            }.items()
        },
    ),
    Group(
        "windows of documents",
        training,
        FINETUNE | DOCUMENTS,
        "plan",
        {"data.batching[chunk].window": Flip(4, given=CHUNKS_OF_A_STREAM)},
    ),
    Group(
        "transcripts",
        training,
        TALK,
        "batches",
        {**transcripts("data.source"), **transcripts("data.mix.source")},
        prepare=write_transcripts,
        long=True,
    ),
    Group(
        "transcripts of splits",
        training,
        TALK,
        "data",
        {**transcripts("data.validation"), **transcripts("data.test")},
        prepare=write_transcripts,
        long=True,
    ),
]
