"""Conversion of Ludwig's adapters (0.8 to 0.17): LoRA initializations, and PEFT methods.

Runs before other keys are renamed or removed. Yields the path and reason of each key to remove with a warning.
"""

from collections.abc import Iterator

from partita_schema.yaml.tree import Node, Path

PEFT_TYPES = {"tinylora": "TINYLORA", "c3a": "C3A", "hra": "HRA", "waveft": "WAVEFT"}
"""Ludwig types that are `type: peft` here, with their name in peft."""
OF_EVERY_ADAPTER = ("type", "pretrained_adapter_weights", "postprocessor")
LORA_KEYS = (
    "r",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "eva_config",
    "loftq_config",
    "rank_pattern",
    "alpha_pattern",
)
"""Keys that Ludwig accepts for adalora, although adalora does not use them."""


def convert_adapter(section: dict[str, Node]) -> Iterator[tuple[Path, str]]:
    """Convert a Ludwig adapter in place."""
    for key in [key for key, node in section.items() if node.value is None]:
        del section[key]
    kind = section["type"].value if "type" in section else None
    if kind == "adalora":
        yield from ((("adapter", key), "it belongs to type: lora") for key in LORA_KEYS)
    elif kind == "lora":
        yield from lora_start(section)
    elif isinstance(kind, str) and kind in PEFT_TYPES:
        as_peft(section, PEFT_TYPES[kind])


def lora_start(section: dict[str, Node]) -> Iterator[tuple[Path, str]]:
    """Convert `init_lora_weights`, and drop options of other initializations."""
    node = section.get("init_lora_weights")
    if node is not None and node.value is True:
        node.value, node.text = "default", None
    elif node is not None and node.value is False:
        yield ("adapter", "init_lora_weights"), "an adapter starts without changing the model"
    elif node is not None and "pretrained_adapter_weights" in section:
        yield ("adapter", "init_lora_weights"), "a trained adapter is loaded"
        node = None
    for key, init in (("eva_config", "eva"), ("loftq_config", "loftq")):
        if node is None or node.value != init:
            yield ("adapter", key), f"it is for init_lora_weights: {init}"


def as_peft(section: dict[str, Node], peft_type: str) -> None:
    """Move the keys of a method into `parameters` of `type: peft`."""
    parameters = {key: section.pop(key) for key in list(section) if key not in OF_EVERY_ADAPTER}
    if "bias_type" in parameters:
        parameters["bias"] = parameters.pop("bias_type")
    kind = section["type"]
    origin = f"ludwig: adapter.type ({kind.position})" if kind.position else "ludwig: adapter.type"
    section["peft_type"] = Node(peft_type, kind.position, kind.key_position, origin=origin)
    section["parameters"] = Node(dict(parameters), kind.position, kind.key_position)
    kind.value, kind.text = "peft", None
