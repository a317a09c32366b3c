"""Keys that have one value, where another one must be refused, and keys that this machine shows no effect of."""

from .bases import PROBE
from .effects import Flip, Group
from .observers import loading


def output(type: str) -> dict[str, object]:
    return {"output_features": [{"name": "answer", "type": type, "decoder": {}}]}


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
            "simulation.seats.agent.type": Flip(
                "scripted",
                given={
                    "input_features": [{"name": "messages", "type": "dialogue"}],
                    "simulation": {
                        "world": {"type": "replay"},
                        "tasks": {"source": "talks.jsonl"},
                        "seats": {"agent": {"type": "model"}},
                    },
                },
            ),
            "simulation.seats.agent": Flip(
                "gold",
                given={
                    "input_features": [{"name": "messages", "type": "dialogue"}],
                    "simulation": {
                        "world": {"type": "replay"},
                        "tasks": {"source": "talks.jsonl"},
                        "seats": {"agent": "model"},
                    },
                },
            ),
            **{
                f"output_features[{type}].decoder.type": Flip("other", given=output(type))
                for type in ("text", "category", "number", "json")
            },
        },
    ),
]

NETWORK = "names a version of a repository on the Hub, which is not reached from a test"
RAY = "starts a Ray cluster, tests/distributed/test_ray.py and test_ray_train.py do"
NO_WORLD = "every world refuses it"
NOT_OBSERVED = {
    "model_parameters.revision": NETWORK,
    "data.source[hub].revision": NETWORK,
    "data.mix.source[hub].revision": NETWORK,
    "data.validation[hub].revision": NETWORK,
    "data.test[hub].revision": NETWORK,
    "quantization.llm_int8_threshold": "needs a GPU: on a CPU bitsandbytes does not look at activations",
    "adapter[boft].boft_n_butterfly_factor": "needs a GPU: above 1 peft uses a CUDA extension",
    "data.loader.prefetch": "shows only how far ahead of the training workers read",
    "backend[torchrun].nodes": "needs several machines",
    "backend[torchrun].address": "needs several machines",
    "backend[torchrun].timeout_seconds": "shows only how long a process waits for one that hangs",
    "backend[ray].type": RAY,
    "backend[ray].workers": RAY,
    "backend[ray].max_failures": RAY,
    "backend[ray].address": RAY,
    "backend[ray].sharding": RAY,
    "backend[ray].timeout_seconds": RAY,
    "simulation.seats.partner[environment].type": NO_WORLD,
    "simulation.seats.others[environment].type": NO_WORLD,
}
"""Keys that no test here flips, and why."""
