"""Prompts and answers: formatting, generation and decoding."""

from .bases import ANSWER, PROBE, SEEN
from .effects import Flip, Group
from .inputs import write_classifier, write_embedders, write_rewards
from .observers import Config, answers, asking, training

SAMPLED: Config = {"generation": {"do_sample": True}}
BEST_OF = {"max_new_tokens": 8, "min_new_tokens": 1, "do_sample": True, "best_of": 2, "reward": "rewards-texts1"}
BEAMS: Config = {"generation": {"num_beams": 2, "logprobs": False}}
SEMANTIC: Config = {"prompt": {"retrieval": {"type": "semantic", "k": 1, "model_name": "embedder"}}}
RANDOM: Config = {"prompt": {"retrieval": {"type": "random", "k": 1}}}
FILLED = {"missing_value_strategy": "fill_with_const", "fill_value": "ball"}
LABELS = ["red", "green", "blue"]


def feature(section: str, **keys: object) -> Config:
    """Return sections with one text input or output that has more keys."""
    base: Config = (
        {"name": "text", "type": "text"} if section == "input_features" else {"name": "answer", "type": "text"}
    )
    return {section: [base | keys]}


def text_input(path: str, place: str) -> dict[str, Flip]:
    """Return keys for writing a column into the prompt; `place` is a feature, or the defaults of features."""

    def given(source: str, **keys: object) -> Config:
        section = {"preprocessing": keys}
        whole = feature("input_features", **section) if place == "feature" else {"defaults": {"text": section}}
        return whole | {"base_model": "bytes", "data": {"source": source, "max_bad_rows": 30}}

    return {
        f"{path}.max_sequence_length": Flip(2, given=given("rows.jsonl")),
        f"{path}.missing_value_strategy": Flip("fill_with_const", given=given("gaps.jsonl", fill_value="ball")),
        f"{path}.fill_value": Flip("box", given=given("gaps.jsonl", **FILLED)),
        f"{path}.lowercase": Flip(True, given=given("capitals.jsonl")),
    }


def output(type: str, **keys: object) -> Config:
    return {"output_features": [{"name": "answer", "type": type, **keys}]}


def learned_output(type: str) -> dict[str, Flip]:
    """Return keys for writing a column as target."""
    path = f"output_features[{type}]"
    labels: Config = {"decoder": {"labels": [*LABELS, "ball", "box"]}} if type in ("category", "set") else {}
    source = {"text": "open", "category": "labels", "set": "sets", "number": "numbers", "json": "values"}[type]

    def given(name: str = source, **preprocessing: object) -> Config:
        whole = output(type, preprocessing=preprocessing, **(labels if preprocessing else {}))
        return whole | {"base_model": "bytes", "data": {"source": f"{name}.jsonl", "max_bad_rows": 30}}

    filler, other = ("7", "8") if type in ("number", "json") else ("ball", "box")
    filled = {"missing_value_strategy": "fill_with_const", "fill_value": filler}
    results = {
        f"{path}.column": Flip("other", given=given()),
        f"{path}.preprocessing.missing_value_strategy": Flip("fill_with_const", given=given(fill_value=filler)),
        f"{path}.preprocessing.fill_value": Flip(other, given=given(**filled)),
    }
    if type in ("text", "category"):
        results[f"{path}.preprocessing.lowercase"] = Flip(True, given=given(f"{source}-capitals"))
    if type in ("category", "set", "number"):
        results[f"{path}.head"] = Flip("linear", given=given() | {"generation": {"max_new_tokens": None}})
    if type == "set":
        results[f"{path}.preprocessing.format"] = Flip("comma", given=given())
        results[f"{path}.preprocessing.separator"] = Flip(";", given=given(format="json"))
    return results


ANSWERS = [
    Group(
        "prompts",
        training,
        SEEN,
        "batches",
        {
            "prompt.template": "say {text}",
            "prompt.task": "say more",
            "prompt.system": "say one",
            "prompt.chat": Flip(False, given={"base_model": "chat"}),
            "prompt.chat_template_kwargs": Flip({"mood": "more "}, given={"base_model": "chat"}),
            "prompt.examples": [{"text": "red ball", "answer": "one"}],
            "prompt.retrieval[random].k": Flip(2, given=RANDOM),
            "prompt.retrieval[random].dataset": Flip("more.jsonl", given=RANDOM),
            "input_features[text].name": Flip(
                "words",
                given={
                    "base_model": "bytes",
                    "input_features": [{"name": "text", "column": "text"}, {"name": "label"}],
                },
            ),
            "input_features[text].column": Flip("answer", given=feature("input_features", column="text")),
            **text_input("input_features[text].preprocessing", "feature"),
            **text_input("defaults.text.preprocessing", "defaults"),
            **learned_output("text"),
            **learned_output("category"),
            **learned_output("number"),
            **learned_output("json"),
            **learned_output("set"),
            "output_features[text].preprocessing.max_sequence_length": 1,
        },
    ),
    Group(
        "semantic retrieval",
        training,
        SEEN,
        "batches",
        {
            "prompt.retrieval[random].type": Flip(SEMANTIC["prompt"]["retrieval"], given=RANDOM),
            "prompt.retrieval[semantic].type": Flip({"type": "random", "k": 1}, given=SEMANTIC),
            "prompt.retrieval[semantic].k": Flip(2, given=SEMANTIC),
            "prompt.retrieval[semantic].dataset": Flip("more.jsonl", given=SEMANTIC),
            "prompt.retrieval[semantic].model_name": Flip("embedder2", given=SEMANTIC),
        },
        long=True,
        prepare=write_embedders,
    ),
    Group(
        "best of n",
        answers,
        ANSWER | {"generation": BEST_OF},
        "answers",
        {
            "generation.best_of": 5,
            "generation.reward": "rewards-texts2",
            "generation.keep_samples": True,
        },
        long=True,
        prepare=write_rewards,
    ),
    Group(
        "generation",
        answers,
        ANSWER,
        "answers",
        {
            "generation.defaults": Flip("none", given={"base_model": "settled"}),
            "generation.max_new_tokens": 3,
            "generation.min_new_tokens": Flip(8, given={"base_model": "brief"}),
            "generation.do_sample": True,
            "generation.temperature": Flip(3.0, given=SAMPLED),
            "generation.top_k": Flip(2, given=SAMPLED),
            "generation.top_p": Flip(0.1, given=SAMPLED),
            "generation.min_p": Flip(0.9, given=SAMPLED),
            "generation.typical_p": Flip(0.1, given=SAMPLED),
            "generation.epsilon_cutoff": Flip(0.3, given=SAMPLED),
            "generation.eta_cutoff": Flip(0.3, given=SAMPLED),
            "generation.top_h": Flip(0.1, given=SAMPLED),
            "generation.num_beams": Flip(3, given=BEAMS),
            "generation.length_penalty": Flip(-5.0, given=BEAMS | {"base_model": "brief"}),
            "generation.early_stopping": Flip(True, given=BEAMS | {"base_model": "brief"}),
            "generation.repetition_penalty": 5.0,
            "generation.no_repeat_ngram_size": 1,
            "generation.exponential_decay_length_penalty": [1, 9.0],
            "generation.suppress_tokens": list(range(3, 12)),
            "generation.begin_suppress_tokens": list(range(3, 12)),
            "generation.bad_words": ["red", "green", "blue", "one", "two"],
            "generation.renormalize_logits": Flip(
                True,
                given={"generation": {"do_sample": True, "top_k": 3, "num_beams": 2, "logprobs": False}},
            ),
            "generation.guidance_scale": 3.0,
            "generation.stop": ["e"],
            "generation.stop_token_ids": list(range(3, 12)),
            "generation.logprobs": False,
            "generation.slots": Flip(False, part="log"),
            "generation.kv_cache": Flip("paged", given={"generation": {"logprobs": False}}, part="log"),
            "generation.seed": Flip(7, given=SAMPLED),
            "trainer[none].batch_size": Flip(2, part="passes"),
            "trainer[none].eval_batch_size": Flip(2, given={"trainer": {"batch_size": "auto"}}, part="passes"),
            "trainer[none].max_batch_size": Flip(1, given={"trainer": {"batch_size": "auto"}}, part="passes"),
            "trainer[none].memory_budget": Flip("1kB", given={"trainer": {"batch_size": "auto"}}, part="refusal"),
            "model_parameters.dtype": "bfloat16",
            "model_parameters.attention": "eager",
            "model_parameters.device": Flip("mps", part="refusal"),
            "output_features[text].decoder.max_new_tokens": Flip(2, given={"generation": {"max_new_tokens": None}}),
            "output_features[text].name": "said",
            "output_features[category].decoder.scoring": Flip(
                True,
                given=output("category", decoder={"labels": LABELS})
                | {"generation": {"logprobs": False, "max_new_tokens": None}},
            ),
            "output_features[json].decoder.constrain": Flip(True, given=output("json")),
            "output_features[set].decoder.constrain": Flip(True, given=output("set", decoder={"labels": LABELS})),
        },
    ),
    Group(
        "heads",
        answers,
        ANSWER | {"base_model": "classifier", "generation": {}} | output("set", decoder={"labels": LABELS}),
        "answers",
        {"output_features[set].decoder.threshold": 0.01},
        prepare=write_classifier,
    ),
    Group(
        "zero-shot evaluation",
        training,
        ANSWER | {"data": {"source": "rows.jsonl"}},
        "metrics",
        {
            "trainer[none].evaluate": ["test"],
            "trainer[none].type": Flip(PROBE["trainer"], part="steps"),
        },
    ),
]

SERVED: Config = ANSWER | {"base_model": "served", "generation": {}, "trainer": {"type": "none"}}
NUMBER = output("number")
CATEGORY = output("category", decoder={"labels": LABELS})
SET = output("set", decoder={"labels": LABELS}, preprocessing={"format": "comma"})
MATCH = output("category", decoder={"match": {"red": {"type": "contains", "value": "one"}, "blue": {"value": "box"}}})


def served(backend: dict[str, Flip]) -> dict[str, Flip]:
    return {f"backend[endpoint].{key}": flip for key, flip in backend.items()}


ENDPOINT = [
    Group(
        "endpoint",
        asking,
        SERVED | {"backend": {"type": "endpoint", "url": "URL"}},
        "answers",
        {
            **served(
                {
                    "type": Flip({"type": "local"}, also={"base_model": "base"}),
                    "url": Flip("URL/more", part="paths"),
                    "model": Flip("other", part="bodies"),
                    "api_key_env": Flip("PARTITA_KEY_OF_EFFECTS", part="keys"),
                    "mode": Flip("completion", part="bodies"),
                    "concurrency": Flip(1, part="most_active"),
                    "retries": Flip(0, given={"prompt": {"task": "busy"}}, part="requests"),
                    "max_response_mb": Flip(0.0001),
                    "timeout_seconds": Flip(0.05, given={"prompt": {"task": "slow"}, "backend": {"retries": 0}}),
                    "extra_body": Flip({"min_tokens": 3}, part="bodies"),
                }
            ),
            "backend[local].type": Flip(
                {"type": "endpoint", "url": "URL", "model": "served"},
                given={"base_model": "base", "backend": {"type": "local"}},
            ),
            "output_features[number].name": Flip("said", given=NUMBER),
            "output_features[number].decoder.regex": Flip(r"say (\d+)", given=NUMBER),
            "output_features[number].decoder.pick": Flip("last", given=NUMBER),
            "output_features[number].decoder.minimum": Flip(2, given=NUMBER),
            "output_features[number].decoder.maximum": Flip(0.5, given=NUMBER),
            "output_features[number].preprocessing.max_sequence_length": Flip(3, given=NUMBER, part="bodies"),
            "output_features[number].type": Flip({"type": "json", "name": "answer"}, given=NUMBER),
            "output_features[json].name": Flip("said", given=output("json")),
            "output_features[json].type": Flip({"type": "number", "name": "answer"}, given=output("json")),
            "output_features[json].decoder.json_schema": Flip(
                {"required": ["two"]}, given=output("json") | {"prompt": {"task": "json"}}
            ),
            "output_features[json].decoder.max_new_tokens": Flip(3, given=output("json"), part="bodies"),
            "output_features[json].preprocessing.max_sequence_length": Flip(3, given=output("json"), part="bodies"),
            "output_features[text].type": Flip({"type": "number", "name": "answer"}),
            "output_features[category].type": Flip({"type": "text", "name": "answer"}, given=CATEGORY),
            "output_features[category].name": Flip("said", given=CATEGORY),
            "output_features[category].decoder.labels": Flip(["one", "two"], given=CATEGORY),
            "output_features[category].decoder.fallback_label": Flip("red", given=CATEGORY),
            "output_features[category].preprocessing.fallback_label": Flip("red", given=CATEGORY),
            "output_features[category].preprocessing.vocab": Flip(
                ["one", "two"], given=output("category", preprocessing={"vocab": LABELS})
            ),
            "output_features[category].preprocessing.max_sequence_length": Flip(1, given=CATEGORY, part="bodies"),
            "output_features[set].type": Flip({"type": "text", "name": "answer"}, given=SET),
            "output_features[set].name": Flip("said", given=SET),
            "output_features[set].decoder.labels": Flip(["one", "two"], given=SET),
            "output_features[set].preprocessing.max_sequence_length": Flip(3, given=SET, part="bodies"),
            "output_features[category].decoder.match.type": Flip("exact", given=MATCH),
            "output_features[category].decoder.match.value": Flip("two", given=MATCH),
        },
    ),
    Group(
        "pace",
        asking,
        SERVED | {"backend": {"type": "endpoint", "url": "URL", "concurrency": 4}},
        "most_active",
        {
            "backend[endpoint].requests_per_minute": Flip(60, given={"prompt": {"task": "slow"}}),
            "backend[endpoint].tokens_per_minute": Flip(20000, given={"prompt": {"task": "slow"}}),
        },
    ),
]
