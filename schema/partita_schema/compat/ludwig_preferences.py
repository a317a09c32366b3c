"""Conversion of Ludwig's trainers on preferences: dpo, orpo and kto, with their columns."""

from partita_schema.yaml.tree import Node

PAIRED = ("dpo", "orpo")
"""Trainers that learn from pairs."""
LOSS_KEYS = {"beta": "beta", "loss_type": "variant", "label_smoothing": "label_smoothing"}
"""Keys of a Ludwig trainer on pairs, with the key of the loss."""
DEFAULT = "ludwig default"


def convert_preferences(root: Node) -> None:
    """Convert a trainer on preferences and its outputs in place; other files are unchanged."""
    trainer, outputs = root.find(("trainer",)), root.find(("output_features",))
    section = trainer.mapping() if trainer is not None else {}
    kind = section.get("type")
    if kind is None or outputs is None or not isinstance(outputs.value, list):
        return
    if kind.value in PAIRED:
        section["loss"] = Node(loss_of(section, kind), kind.position)
        kind.value, kind.text, kind.origin = "preference", None, f"ludwig: trainer.type: {kind.value}"
        outputs.value = join_pair(outputs.value)
    elif kind.value == "kto":
        outputs.value = join_label(outputs.value)


def loss_of(section: dict[str, Node], kind: Node) -> dict[str, Node]:
    """Return the section of the loss; its keys are removed from the trainer."""
    loss = {"type": Node(kind.value, kind.position, origin=f"ludwig: trainer.type: {kind.value}")}
    for old, new in LOSS_KEYS.items():
        if old in section:
            node = section.pop(old)
            node.written, node.origin = f"trainer.{old}", f"ludwig: trainer.{old}"
            loss[new] = node
    return loss


def join_pair(outputs: list[Node]) -> list[Node]:
    """Return one output for the columns of both answers; by default they are named chosen and rejected."""
    chosen = next((output for output in outputs if "chosen" in column_of(output)), None)
    rejected = next((output for output in outputs if "rejected" in column_of(output)), None)
    kept = chosen if chosen is not None else outputs[0]
    section, column = kept.mapping(), kept.mapping().pop("column", None)
    section["type"] = Node("preference", kept.position, origin=DEFAULT)
    if chosen is not None or column is not None:
        name = column.value if column is not None else section["name"].value
        section["chosen"] = Node(name, kept.position, origin=DEFAULT)
    if rejected is not None and rejected is not kept:
        section["rejected"] = Node(column_of(rejected), rejected.position, origin=DEFAULT)
    return [output for output in outputs if output is kept or output is not rejected]


def join_label(outputs: list[Node]) -> list[Node]:
    """Return the text output with the column of its label, which Ludwig expects in the column label."""
    text = next((output for output in outputs if "label" not in column_of(output)), outputs[0])
    label = next((output for output in outputs if output is not text and "label" in column_of(output)), None)
    if "label" not in text.mapping():
        name = "label" if label is None else column_of(label)
        text.mapping()["label"] = Node(name, text.position, origin=DEFAULT)
    return [output for output in outputs if output is not label]


def column_of(output: Node) -> str:
    """Return the column of an output; empty if it has none."""
    section = output.mapping()
    node = section.get("column") or section.get("name")
    return str(node.value) if node is not None else ""
