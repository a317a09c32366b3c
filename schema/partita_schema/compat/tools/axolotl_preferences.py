"""Conversion of axolotl's files with `rl`: the trainer, its loss, and the rows of its datasets."""

from dataclasses import replace

from partita_schema.compat.tools.conversion import Conversion, Missing, Unneeded
from partita_schema.compat.tools.rows import RowFormat, text_prompt
from partita_schema.compat.tools.training_arguments import convert_simpo

LOSSES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo"}
"""The type of loss of `rl` that learns from pairs."""
METHODS = (*LOSSES, "kto")
PROMPT_LENGTH = Missing(
    "write preprocessing.max_sequence_length at the input, or data.dialogue: {context_tokens: ...} for dialogues"
)
OTHER_LOSS = Unneeded("this loss does not have it")
QUESTIONS = {
    "intel": "question",
    "icr": "input",
    "prompt_pairs": "prompt",
    "argilla": "instruction",
    "default": "prompt",
}
"""Column of the question, by the part of a dataset's type after the dot."""
WORDINGS = ("chatml", "llama3", "zephyr", "mistral")
"""Parts of a type before the dot that stand for a wording of the prompt."""
LOSS_KEYS = (
    "rl_beta",
    "orpo_alpha",
    "rpo_alpha",
    "simpo_gamma",
    "cpo_alpha",
    "dpo_label_smoothing",
    "dpo_use_weighting",
)
KTO_KEYS = ("kto_desirable_weight", "kto_undesirable_weight")


def convert_preferences(conversion: Conversion, rl: str) -> None:
    """Convert the trainer of `rl` and the options of its loss.

    Args:
        conversion: The conversion.
        rl: The value of `rl`; empty without one.
    """
    if not rl:
        return
    conversion.move("rl", "trainer.type", "kto" if rl == "kto" else "preference")
    if rl == "kto":
        convert_beta(conversion, "trainer.beta")
        conversion.move("kto_desirable_weight", "trainer.desirable_weight")
        conversion.move("kto_undesirable_weight", "trainer.undesirable_weight")
    else:
        convert_pair_loss(conversion, rl)
    for key in (*LOSS_KEYS, *KTO_KEYS):
        conversion.drop(key, OTHER_LOSS)
    if conversion.is_on("precompute_ref_log_probs"):
        conversion.move("precompute_ref_log_probs", "trainer.references", "before")
    conversion.drop("train_on_inputs", Unneeded("answers are compared, not prompts"))


def convert_beta(conversion: Conversion, path: str) -> None:
    """Convert the strength of the tie to the reference, which has two names; that in `trl` is the stronger one."""
    options = conversion.get("trl")
    if isinstance(options, dict) and set(options) == {"beta"}:
        node = conversion.take("trl", path)
        conversion.put(path, options["beta"], at=node, written="trl.beta")
        conversion.drop("rl_beta", Unneeded("trl.beta is set"))
    conversion.move("rl_beta", path)


def convert_pair_loss(conversion: Conversion, rl: str) -> None:
    """Convert the loss on pairs and its options."""
    kind = LOSSES[rl]
    conversion.put("trainer.loss.type", kind)
    if rl == "ipo":
        conversion.put("trainer.loss.variant", "ipo")
    convert_beta(conversion, "trainer.loss.beta")
    if kind == "orpo" and not conversion.has("trainer.loss.beta"):
        conversion.move("orpo_alpha", "trainer.loss.beta")
    if kind == "dpo":
        conversion.move("rpo_alpha", "trainer.loss.rpo_alpha")
        if rl == "dpo":
            conversion.move("dpo_label_smoothing", "trainer.loss.label_smoothing")
        if conversion.is_on("dpo_use_weighting"):
            conversion.miss("dpo_use_weighting", "pairs are not weighted by their likelihood")
    if kind == "simpo":
        convert_simpo(conversion, tool="axolotl", beta="rl_beta")


# Datasets


def preference_rows(inner: Conversion, kind: object, *, rl: str) -> RowFormat | None:
    """Return the format of a dataset of `rl`; None if it is not known.

    Args:
        inner: The conversion of the dataset.
        kind: Its type: a name, or a mapping with columns.
        rl: The value of `rl`.
    """
    if isinstance(kind, dict):
        return own_columns(inner, kind, rl=rl)
    name, _, part = str(kind).replace(":", ".").partition(".")
    part = part or "default"
    if name not in (*WORDINGS, "chat_template", "passthrough"):
        return None
    if name == "passthrough":
        inner.take("type", "prompt.chat")
        return text_prompt("prompt", label="label" if rl == "kto" else "", answer="completion")
    if name != "chat_template":
        inner.note(f"the wording of {name} is replaced by the chat template of the model")
    rows = labelled_rows(name, part) if rl == "kto" else pair_rows(inner, name, part)
    if rows is not None:
        inner.take("type", "the features")
    return rows


def pair_rows(inner: Conversion, name: str, part: str) -> RowFormat | None:
    """Return the format of pairs of a type."""
    chosen, rejected = str(inner.get("field_chosen", "chosen")), str(inner.get("field_rejected", "rejected"))
    for key in ("field_chosen", "field_rejected"):
        if key in inner.left:
            inner.take(key, f"output_features[0].{key.removeprefix('field_')}")
    if name == "chat_template" and part == "default":
        column = str(inner.get("field_messages", "messages"))
        return RowFormat("dialogue", column=column, form="messages", chosen=chosen, rejected=rejected)
    if part in ("argilla_chat", "ultra") or (name == "chat_template" and part == "argilla"):
        return RowFormat("dialogue", column="messages", chosen=chosen, rejected=rejected)
    if part not in QUESTIONS:
        return None
    if part == "argilla":
        chosen, rejected = "chosen_response", "rejected_response"
    return replace(question_of(part), chosen=chosen, rejected=rejected)


def labelled_rows(name: str, part: str) -> RowFormat | None:
    """Return the format of labelled answers of a type."""
    if part == "argilla_chat":
        return RowFormat("dialogue", column="completion", form="messages", label="label")
    question = QUESTIONS.get({"ultra": "prompt_pairs"}.get(part, part))
    if question is None or name == "chat_template":
        return None
    columns = (*((("instruction", question),) if question != "instruction" else ()), ("output", "completion"))
    return RowFormat("dialogue", form="alpaca", columns=columns, label="label")


def question_of(part: str) -> RowFormat:
    """Return how a question in a separate column is read, with the column `system` next to it."""
    question = QUESTIONS[part]
    if question == "input":  # alpaca has a column of this name, with another meaning
        return RowFormat("dialogue", columns=(("prompt", "input"),))
    return RowFormat("dialogue", form="alpaca", columns=(("instruction", question),) if part != "argilla" else ())


def own_columns(inner: Conversion, kind: dict[str, object], *, rl: str) -> RowFormat:
    """Return the format of a dataset whose type is a mapping with columns and the wording of the prompt."""
    inner.take("type", "prompt.template")
    question = str(kind.get("field_prompt") or "prompt")
    wording = str(kind.get("prompt_format") or "{prompt}")
    if "{system}" in wording:
        inner.note(f"the column {kind.get('field_system') or 'system'} is not part of the prompt; write prompt.system")
        wording = wording.replace("{system}", "")
    wording = (
        "\0".join(wording.split("{prompt}")).replace("{", "{{").replace("}", "}}").replace("\0", f"{{{question}}}")
    )
    for name in ("chosen", "rejected", "completion"):
        if str(kind.get(f"{name}_format") or f"{{{name}}}") != f"{{{name}}}":
            inner.note(f"{name}_format is not used: the answer is the value of its column")
    template = None if wording == f"{{{question}}}" else wording
    answer = str(kind.get("field_completion") or "completion")
    label = str(kind.get("field_label") or "label") if rl == "kto" else ""
    chosen, rejected = (str(kind.get(f"field_{name}") or name) for name in ("chosen", "rejected"))
    return text_prompt(question, template=template, label=label, answer=answer, chosen=chosen, rejected=rejected)
