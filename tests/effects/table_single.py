"""Keys with a single value, for which other values must be refused, and keys without an effect on this machine."""

from .bases import FINETUNE, PROBE
from .effects import Flip, Group
from .observers import Config, explaining, loading


def output(type: str) -> dict[str, object]:
    answer: Config = {"output_features": [{"name": "answer", "type": type, "decoder": {}}]}
    if type == "score":
        answer["input_features"] = [{"name": "text"}, {"name": "label"}]
    if type == "preference":
        answer["trainer"] = {"type": "preference"}
    return answer | ({"generation": {"max_new_tokens": None}} if type in ("tags", "embedding", "score") else {})


PANEL: Config = {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "simulation": {
        "world": {"type": "custom", "target": "talkers_of_effects:Panel"},
        "tasks": {"source": "talks.jsonl"},
    },
}
"""A world without an environment."""

SINGLE = [
    Group(
        "single values",
        loading,
        PROBE,
        "refusal",
        {
            "version": 2,
            "model_type": "ecd",
            "input_features[text].type": "number",
            "simulation.agents.agent.type": Flip(
                "scripted",
                given={
                    "input_features": [{"name": "messages", "type": "dialogue"}],
                    "simulation": {
                        "world": {"type": "replay"},
                        "tasks": {"source": "talks.jsonl"},
                        "agents": {"agent": {"type": "model"}},
                    },
                },
            ),
            "simulation.agents.partner[environment].type": Flip("environment", given=PANEL),
            "simulation.agents.others[environment].type": Flip("environment", given=PANEL),
            "simulation.agents.agent": Flip(
                "gold",
                given={
                    "input_features": [{"name": "messages", "type": "dialogue"}],
                    "simulation": {
                        "world": {"type": "replay"},
                        "tasks": {"source": "talks.jsonl"},
                        "agents": {"agent": "model"},
                    },
                },
            ),
            **{
                f"output_features[{type}].decoder.type": Flip("other", given=output(type))
                for type in ("text", "category", "number", "json", "set", "tags", "score", "embedding", "preference")
            },
            "output_features[tags].head": Flip("other", given=output("tags")),
            "output_features[score].head": Flip("other", given=output("score")),
        },
    ),
    Group(
        "workers of Ray",
        explaining,
        FINETUNE | {"backend": {"type": "ray", "workers": 2}},
        "processes",
        {
            "backend[ray].type": {"type": "local"},
            "backend[ray].workers": 4,
            "backend[ray].sharding": "full",
        },
    ),
]

NOT_OBSERVED = {
    "adapter[boft].boft_n_butterfly_factor": "refused where peft cannot compile its CUDA extension, for which it needs "
    "nvcc and ninja",
    "backend[ray].max_failures": "needs a Ray cluster whose workers die; tests/distributed/test_rank_monitor.py counts "
    "them",
    "backend[ray].address": "needs a Ray cluster to connect to; tests/distributed/test_ray.py starts one",
    "backend[ray].timeout_seconds": "needs a Ray cluster whose workers do not start or answer; "
    "tests/distributed/test_rank_monitor.py waits for such workers",
    "extends": "names files that are merged before the schema is checked; tests/schema/test_layers.py merges them",
}
"""Keys that are not tested here, with the reasons."""
