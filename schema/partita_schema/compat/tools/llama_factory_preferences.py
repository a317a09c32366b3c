"""Conversion of LLaMA-Factory's stages dpo, kto and rm."""

from partita_schema.compat.tools.conversion import Conversion, Missing, Unneeded
from partita_schema.compat.tools.rows import RowFormat
from partita_schema.compat.tools.training_arguments import drop_dropout
from partita_schema.compat.tools.training_arguments_keys import NO_REFERENCE

TRAINERS = {"dpo": "preference", "kto": "kto", "rm": "reward"}
"""The trainer of a stage."""
LOSSES = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo"}
"""The type of loss of `pref_loss`."""


def unfit_rows(stage: str, rows: RowFormat) -> str:
    """Return why a stage cannot learn from rows; empty if it can."""
    if stage in ("dpo", "rm"):
        return "" if rows.chosen else f"stage: {stage} needs pairs of answers; name a dataset with ranking: true"
    if stage == "kto":
        return "" if rows.label else "stage: kto needs a column kto_tag; name a dataset with one"
    if rows.chosen or rows.label:
        fitting = "dpo" if rows.chosen else "kto"
        return f"stage: {stage} learns from single answers without a label; write stage: {fitting}, or name others"
    return ""


def convert_preferences(conversion: Conversion, stage: str) -> None:
    """Convert the trainer of a stage and the options of its loss; other stages have none."""
    if stage in TRAINERS:
        conversion.put("trainer.type", TRAINERS[stage])
    if stage in ("dpo", "kto") and conversion.value("adapter.type") == "lora":  # not in stage: rm
        drop_dropout(conversion)
    if stage == "dpo":
        convert_pair_loss(conversion)
    elif stage == "kto":
        conversion.move("pref_beta", "trainer.beta")
        conversion.move("kto_chosen_weight", "trainer.desirable_weight")
        conversion.move("kto_rejected_weight", "trainer.undesirable_weight")
        drop_cross_entropy(conversion, "the loss of kto has no cross-entropy of the good answers next to it")
    for key in ("ref_model", "ref_model_adapters", "ref_model_quantization_bit"):
        conversion.drop(key, NO_REFERENCE)
    if stage in TRAINERS:
        for key in ("pref_ftx", "pref_beta", "pref_loss", "dpo_label_smoothing", "simpo_gamma", "kto_chosen_weight"):
            conversion.drop(key, Unneeded("this loss does not have it"))
        conversion.drop("kto_rejected_weight", Unneeded("this loss does not have it"))


def convert_pair_loss(conversion: Conversion) -> None:
    """Convert the loss on pairs and its options."""
    written = str(conversion.get("pref_loss", "sigmoid"))
    kind = LOSSES.get(written)
    if kind is None:
        conversion.miss("pref_loss", f"{written} is not offered; write a variant of trainer.loss")
        kind = "dpo"
    conversion.put("trainer.loss.type", kind)
    if kind == "dpo" and written in LOSSES:
        conversion.move("pref_loss", "trainer.loss.variant")
    elif "pref_loss" in conversion.left:
        conversion.take("pref_loss", "trainer.loss.type")
    conversion.move("pref_beta", "trainer.loss.beta")
    conversion.default("pref_beta", "trainer.loss.beta", 0.1)
    if kind == "simpo":
        conversion.move("simpo_gamma", "trainer.loss.gamma")
        conversion.default("simpo_gamma", "trainer.loss.gamma", 0.5)
    if kind == "dpo":
        conversion.move("pref_ftx", "trainer.loss.rpo_alpha")
        if written == "sigmoid":
            conversion.move("dpo_label_smoothing", "trainer.loss.label_smoothing")
    drop_cross_entropy(conversion, f"the loss of {kind} has no further cross-entropy of the chosen answers next to it")


def drop_cross_entropy(conversion: Conversion, reason: str) -> None:
    """Drop the weight of a cross-entropy that a loss does not have here; LLaMA-Factory adds it to every loss."""
    entry = Missing(reason) if conversion.get("pref_ftx") else Unneeded("it is 0")
    conversion.drop("pref_ftx", entry)
