"""Conversion of TRL's files for `trl dpo` and `trl kto`, and of those for ORPO and SimPO (CPOConfig).

A file does not name its trainer, so the keys decide, and then the columns of a local file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partita_schema.compat.tools.conversion import By, Conversion, Missing, Table, To, Unneeded
from partita_schema.compat.tools.rows import RowFormat, text_prompt
from partita_schema.compat.tools.training_arguments import convert_simpo
from partita_schema.compat.tools.training_arguments_keys import CACHE, KERNELS, NO_REFERENCE
from partita_schema.sections.objectives import DPO_VARIANTS

OTHER_VARIANTS = ("exo_pair", "aot", "aot_pair", "aot_unpaired", "discopop", "sft")
"""Values of `loss_type` of DPOConfig that are not."""
PROMPT_LENGTH = Missing(
    "write preprocessing.max_sequence_length at the input, or data.dialogue: {context_tokens: ...} for dialogues"
)
WITHOUT_TEMPLATE = "for texts without a chat template write text inputs and prompt.chat: false"
"""What to write if rows are texts, to which TRL applies no chat template."""
OTHER_LOSS = Unneeded("this loss does not have it")

PREFERENCE_TABLE: Table = {
    "beta": By("trainer.loss.beta or trainer.beta"),
    "label_smoothing": By("trainer.loss.label_smoothing"),
    "loss_weights": By("trainer.loss.rpo_alpha"),
    "rpo_alpha": By("trainer.loss.rpo_alpha"),
    "cpo_alpha": By("nothing: simpo has no cross-entropy"),
    "simpo_gamma": By("trainer.loss.gamma"),
    "desirable_weight": To("trainer.desirable_weight"),
    "undesirable_weight": To("trainer.undesirable_weight"),
    "precompute_ref_log_probs": By("trainer.references"),
    "precompute_ref_batch_size": Unneeded("the batches are those of training"),
    "disable_dropout": By("adapter.dropout"),
    "max_prompt_length": PROMPT_LENGTH,
    "max_completion_length": Missing("write preprocessing.max_sequence_length at the output"),
    "max_target_length": Missing("encoder-decoders do not learn from preferences"),
    "is_encoder_decoder": Unneeded("it is known from the model"),
    "label_pad_token_id": Unneeded("padding is not in the loss"),
    "padding_value": Unneeded("padding is not in the loss"),
    "generate_during_eval": Unneeded("write trainer.evaluate_generated: true"),
    "use_logits_to_keep": Unneeded("only the logits of answers are computed"),
    "use_liger_loss": KERNELS,
    "use_weighting": Missing("pairs are not weighted by their likelihood"),
    "ld_alpha": Missing("answers are not weighted by their length; write trainer.loss: {type: simpo}"),
    "f_divergence_type": Missing("the divergence is the reverse KL"),
    "f_alpha_divergence_coef": Missing("the divergence is the reverse KL"),
    "discopop_tau": OTHER_LOSS,
    "reference_free": Missing("write trainer.loss: {type: simpo} for a loss without a reference"),
    "force_use_ref_model": NO_REFERENCE,
    "ref_model_init_kwargs": NO_REFERENCE,
    "ref_adapter_name": NO_REFERENCE,
    "model_adapter_name": NO_REFERENCE,
    "sync_ref_model": Missing("the reference stays the same"),
    "ref_model_mixup_alpha": Unneeded("the reference stays the same"),
    "ref_model_sync_steps": Unneeded("the reference stays the same"),
    "dataset_keep_in_memory": CACHE,
}
"""Keys of DPOConfig, KTOConfig, ORPOConfig and CPOConfig."""
DECIDING = (
    *("beta", "label_smoothing", "precompute_ref_log_probs", "rpo_alpha", "reference_free", "f_divergence_type"),
    *("sync_ref_model", "ref_model_init_kwargs", "ref_adapter_name", "max_prompt_length", "use_weighting"),
)
"""Keys that only files for trainers on preferences have."""
KTO_LOSSES = ("kto", "apo_zero_unpaired")
"""Values of `loss_type` of KTOConfig, of which the first is available and the default."""
OWN_OF_KTO = ("desirable_weight", "undesirable_weight")
OWN_OF_CPO = ("cpo_alpha", "simpo_gamma")


def method_of(conversion: Conversion, row: Mapping[str, Any] | None) -> str:
    """Return dpo, kto or simpo for a file of these trainers; empty for any other.

    Args:
        conversion: The conversion.
        row: The first row of the first dataset, if it is a local file.
    """
    losses = losses_of(conversion)
    if any(key in conversion.left for key in OWN_OF_KTO) or set(losses) & {*KTO_LOSSES}:
        return "kto"
    if any(key in conversion.left for key in OWN_OF_CPO) or losses == ["simpo"]:
        return "simpo"
    if losses and set(losses) <= {*DPO_VARIANTS, *OTHER_VARIANTS}:
        return "dpo"
    if losses:
        return ""
    if row is not None and {"chosen", "rejected"} <= set(row):
        return "dpo"
    if row is not None and {"completion", "label"} <= set(row):
        return "kto"
    return "dpo" if any(key in conversion.left for key in DECIDING) else ""


def losses_of(conversion: Conversion) -> list[str]:
    """Return the values of `loss_type`, one or several."""
    written = conversion.get("loss_type")
    items = written if isinstance(written, list) else [] if written is None else [written]
    return [str(item) for item in items]


def unfit_loss(conversion: Conversion, method: str) -> str:
    """Return why the loss of a file is not available; empty if it is."""
    if method == "simpo" and losses_of(conversion) != ["simpo"]:
        return "of the losses of CPOConfig only simpo is available; write loss_type: simpo"
    if method == "kto" and losses_of(conversion) not in ([], ["kto"]):
        return "of the losses of KTOConfig only kto is available; write loss_type: kto"
    return ""


def convert_preferences(conversion: Conversion, method: str) -> None:
    """Convert the trainer and the options of its loss.

    Args:
        conversion: The conversion.
        method: Result of `method_of`.
    """
    conversion.put("trainer.type", "kto" if method == "kto" else "preference")
    if method == "kto":
        conversion.move("beta", "trainer.beta")
        if "loss_type" in conversion.left:
            conversion.take("loss_type", "trainer.type")
    elif method == "simpo":
        conversion.move("loss_type", "trainer.loss.type", "simpo")
        convert_simpo(conversion, tool="TRL", beta="beta")
    else:
        convert_dpo(conversion)
    if conversion.is_on("precompute_ref_log_probs") and method != "simpo":
        conversion.move("precompute_ref_log_probs", "trainer.references", "before")
    conversion.drop("precompute_ref_log_probs", OTHER_LOSS)
    for key in ("rpo_alpha", "loss_weights", "label_smoothing", "cpo_alpha", "simpo_gamma", *OWN_OF_KTO):
        if not (method == "kto" and key in OWN_OF_KTO):
            conversion.drop(key, OTHER_LOSS)
    for key in ("completion_only_loss", "assistant_only_loss"):
        conversion.drop(key, Unneeded("answers are compared, not prompts"))


def convert_dpo(conversion: Conversion) -> None:
    """Convert the losses of DPOConfig: one of them, also with the cross-entropy of the chosen answer."""
    conversion.put("trainer.loss.type", "dpo")
    losses, weights = losses_of(conversion), conversion.get("loss_weights")
    variants = [loss for loss in losses if loss != "sft"]
    if len(variants) == 1 and variants[0] in DPO_VARIANTS:
        conversion.move("loss_type", "trainer.loss.variant", variants[0])
        if len(losses) == 2:
            weight = dict(zip(losses, weights, strict=False)) if isinstance(weights, list) else {}
            share = ratio(weight.get("sft", 1.0), weight.get(variants[0], 1.0))
            conversion.put("trainer.loss.rpo_alpha", share)
            if "loss_weights" in conversion.left:
                conversion.take("loss_weights", "trainer.loss.rpo_alpha")
        if variants == ["bco_pair"]:
            conversion.note(
                "the loss bco_pair of TRL compares rewards with their running mean over all steps; here it compares "
                "them with 0"
            )
    elif losses:
        conversion.miss("loss_type", f"{', '.join(losses)} is not offered; write a variant of trainer.loss")
        conversion.miss("loss_weights", "losses are not combined")
    conversion.move("beta", "trainer.loss.beta")
    conversion.move("rpo_alpha", "trainer.loss.rpo_alpha")
    if not variants or variants[0] in ("sigmoid", "robust"):
        conversion.move("label_smoothing", "trainer.loss.label_smoothing")
    if not losses:
        conversion.note(
            "the keys are those of trl dpo; for a file of ORPO write trainer.loss: {type: orpo}, for one of trl kto "
            "write a desirable_weight into the original and convert it again"
        )


def ratio(one: object, other: object) -> float:
    """Return the ratio of two weights; 1 if they are no positive numbers."""
    if not all(isinstance(weight, int | float) and not isinstance(weight, bool) for weight in (one, other)):
        return 1.0
    assert isinstance(one, int | float)
    assert isinstance(other, int | float)
    return one / other if one >= 0 and other > 0 else 1.0


def convert_dropout(conversion: Conversion) -> None:
    """Switch off the dropout of an adapter, as TRL's trainers on preferences do unless disable_dropout is false."""
    if conversion.get("disable_dropout") is False:
        conversion.drop("disable_dropout", Unneeded("dropout is used"))
        return
    if conversion.is_on("use_peft"):
        conversion.drop("lora_dropout", Unneeded("disable_dropout is set, which is the default"))
        conversion.put("adapter.dropout", 0.0)
        conversion.report.defaults.append(("disable_dropout: true", "adapter.dropout", 0))
    if "disable_dropout" in conversion.left:
        conversion.take("disable_dropout", "adapter.dropout")


def row_format_of(conversion: Conversion, method: str, row: Mapping[str, Any] | None) -> RowFormat:
    """Return the format of the rows: texts stay as they are, and messages go through the chat template.

    Args:
        conversion: The conversion.
        method: Result of `method_of`.
        row: The first row of the first dataset, if it is a local file.
    """
    if row is None:
        conversion.note(
            "the columns of the dataset are unknown: the file is for messages, and texts become messages as well; "
            f"{WITHOUT_TEMPLATE}"
        )
    answer = "completion" if method == "kto" else "chosen"
    if row is not None and isinstance(row.get(answer), str):
        pair = text_prompt("prompt", label="label" if method == "kto" else "", answer="completion")
        return pair if "prompt" in row else replace(pair, inputs=())
    if method == "kto":
        return RowFormat("dialogue", form="prompt_completion", label="label")
    return RowFormat("dialogue", chosen="chosen", rejected="rejected")
