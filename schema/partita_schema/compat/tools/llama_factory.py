"""Conversion of LLaMA-Factory's files."""

from partita_schema.compat.tools.conversion import Conversion, Missing, To, Unneeded, names_of
from partita_schema.compat.tools.llama_factory_datasets import convert_datasets
from partita_schema.compat.tools.llama_factory_keys import LLAMA_FACTORY_KEYS
from partita_schema.compat.tools.llama_factory_preferences import TRAINERS, convert_preferences
from partita_schema.compat.tools.rows import RowFormat, convert_validation_size, is_stream, note_repeated_turns
from partita_schema.compat.tools.training_arguments import (
    SHARDING_KEYS,
    convert_base_model,
    convert_packed_attention,
    convert_sharding,
    convert_training,
    write_default_length,
    write_training_defaults,
)
from partita_schema.compat.tools.training_arguments_keys import TRAINING

STAGES = {"ppo": "PPO"}
"""Stages that are not available, with their names."""


def convert_llama_factory(conversion: Conversion) -> None:
    """Convert a file of LLaMA-Factory.

    Raises:
        ConfigError: The file trains by PPO, exports a model, or its datasets cannot be read.
    """
    refuse_stages(conversion)
    stage = str(conversion.get("stage", "sft"))
    named = conversion.get("dataset") is not None
    trains = conversion.is_on("do_train") or (named and not conversion.is_on("do_predict"))
    convert_model(conversion)
    convert_method(conversion, trains=trains)
    rows = convert_datasets(conversion)
    convert_lengths(conversion, rows)
    convert_template(conversion, rows)
    if trains:
        convert_muon(conversion)
        convert_training(conversion, precision="no", logging_steps=500)
        convert_preferences(conversion, stage)
        convert_flags(conversion)
        note_repeated_turns(conversion, rows)
        convert_validation(conversion)
    else:
        conversion.put("trainer.type", "none")
        drop_training(conversion)
    convert_generation(conversion, generates=stage == "sft" and (not trains or conversion.is_on("do_predict")))
    conversion.apply_table(later=SHARDING_KEYS)
    if trains:
        write_training_defaults(conversion, learning_rate=5e-5, checkpointing_key="disable_gradient_checkpointing")
    convert_packed_attention(conversion)
    convert_sharding(conversion)


def refuse_stages(conversion: Conversion) -> None:
    """Raise ConfigError for stages and files that have no counterpart."""
    stage = conversion.get("stage", "sft")
    if stage not in ("sft", "pt", *TRAINERS):
        what = STAGES.get(str(stage), str(stage))
        message = (
            f"{what} is not available yet, so there is nothing to convert; write stage: sft for supervised training "
            "on correct answers"
        )
        raise conversion.refusal("stage", message)
    if "export_dir" in conversion.left:
        message = (
            "the file exports a model and trains nothing; write adapter.postprocessor.merge_adapter_into_base_model: "
            "true in the configuration that trains, or use Model.save"
        )
        raise conversion.refusal("export_dir", message)
    if conversion.get("finetuning_type") == "freeze":
        message = (
            "the layers to train are not chosen by number here; write finetuning_type: full, and "
            "trainer.layers_to_freeze_regex in the converted file"
        )
        raise conversion.refusal("finetuning_type", message)


def convert_model(conversion: Conversion) -> None:
    """Convert the base model, its kernels and its data type."""
    convert_base_model(conversion)
    kernel = {"disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa"}
    written = conversion.get("flash_attn")
    if written in (False, True):  # `off` and `on` in YAML
        written = "fa2" if written else "disabled"
    if str(written) in kernel:
        conversion.move("flash_attn", "model_parameters.attention", kernel[str(written)])
    conversion.drop("flash_attn", Unneeded("it is chosen by auto"))
    if conversion.is_on("pure_bf16"):
        conversion.move("pure_bf16", "model_parameters.dtype", "bfloat16")
    engine = conversion.get("infer_backend")
    conversion.drop(
        "infer_backend",
        Unneeded("it is the default")
        if engine in ("hf", "huggingface")
        else Missing("write backend: {type: endpoint, url: ...} for a model on a server"),
    )


def convert_method(conversion: Conversion, *, trains: bool) -> None:
    """Convert the adapter and the quantization."""
    bits, method = conversion.get("quantization_bit"), str(conversion.get("quantization_method", "bnb")).lower()
    if bits in (4, 8) and method in ("bnb", "bitsandbytes"):
        conversion.move("quantization_bit", "quantization.bits")
        if "quantization_method" in conversion.left:
            conversion.take("quantization_method", "quantization")
    else:
        reason = "weights are quantized to 4 or 8 bits by bitsandbytes; name the model before its quantization"
        for key in ("quantization_bit", "quantization_method"):
            conversion.miss(key, reason)
    if bits != 4 or not conversion.has("quantization"):
        for key in ("quantization_type", "double_quantization"):
            conversion.drop(key, Unneeded("there is no quantization to 4 bits"))
    kind = conversion.get("finetuning_type", "lora")
    trained = names_of(conversion.get("adapter_name_or_path", ""))
    if kind == "full" or (not trains and not trained):
        if "finetuning_type" in conversion.left:
            conversion.take("finetuning_type", "adapter: none")
        for key in [key for key in conversion.left if key.startswith(("lora_", "oft_", "pissa_"))]:
            conversion.drop(key, Unneeded("there is no adapter"))
        for key in ("additional_target", "use_dora", "use_rslora"):
            conversion.drop(key, Unneeded("there is no adapter"))
    else:
        convert_adapter(conversion, str(kind), trained)


OF_NEW_ADAPTERS = ("lora_", "oft_", "pissa_", "use_dora", "use_rslora", "additional_target")
"""Prefixes of keys that LLaMA-Factory ignores when it loads a trained adapter."""


def convert_adapter(conversion: Conversion, kind: str, trained: list[str]) -> None:
    """Convert an adapter.

    Args:
        conversion: The conversion.
        kind: lora or oft.
        trained: Adapters to start from.
    """
    if "finetuning_type" in conversion.left:
        conversion.move("finetuning_type", "adapter.type")
    else:
        conversion.default("finetuning_type", "adapter.type", "lora")
    if trained:
        conversion.move("adapter_name_or_path", "adapter.pretrained_adapter_weights", trained[0])
        local = conversion.local(trained[0])
        if local is not None:
            conversion.put("adapter.pretrained_adapter_weights", local)
        if len(trained) > 1:
            conversion.note("only the first adapter is loaded; merge the others into the base model")
        for key in [key for key in conversion.left if key.startswith(OF_NEW_ADAPTERS)]:
            conversion.drop(key, Unneeded("a trained adapter is loaded"))
        return
    others = ("lora_", "pissa_", "use_dora", "use_rslora") if kind == "oft" else ("oft_",)
    for key in [key for key in conversion.left if key.startswith(others)]:
        conversion.drop(key, Unneeded(f"finetuning_type is {kind}"))
    key = "oft_target" if kind == "oft" else "lora_target"
    names = names_of(conversion.get(key, "all"))
    conversion.move(key, "adapter.target_modules", "all-linear" if names == ["all"] else names)
    extra = conversion.get("additional_target")
    if extra is not None:
        conversion.move("additional_target", "adapter.modules_to_save", names_of(extra))
    if kind == "oft":
        return
    if conversion.is_on("pissa_init"):
        steps = conversion.get("pissa_iter", 16)
        init = f"pissa_niter_{steps}" if steps in (4, 16) else "pissa"
        conversion.move("pissa_init", "adapter.init", init)
        conversion.move("pissa_iter", "adapter.init", init)
    conversion.default("lora_rank", "adapter.r", 8)
    rank = conversion.get("lora_rank", 8)
    if conversion.get("lora_alpha") is None and isinstance(rank, int):
        conversion.default("lora_alpha", "adapter.alpha", 2 * rank)


def convert_lengths(conversion: Conversion, rows: RowFormat) -> None:
    """Convert the maximum length, and whether rows are packed or documents joined."""
    document = rows.kind == "document"
    packs = conversion.is_on("packing") or conversion.is_on("neat_packing")
    joins = document and (packs or "packing" not in conversion.left)  # packing is the default of stage: pt
    path = "data.batching.context_length" if joins else "preprocessing.global_max_sequence_length"
    if joins:
        conversion.put("data.batching.type", "chunk")
    conversion.move("cutoff_len", path)
    write_default_length(conversion, key="cutoff_len", path=path, length=2048, tool="LLaMA-Factory")
    if joins or packs:
        if not document and not conversion.is_on("neat_packing"):
            conversion.note("packed rows do not attend to each other, as with neat_packing")
        for key in ("packing", "neat_packing"):
            conversion.move(key, "data.batching.type", "chunk" if document else "pack")
        conversion.drop("group_by_length", Unneeded("documents are joined" if document else "rows are packed"))


def convert_template(conversion: Conversion, rows: RowFormat) -> None:
    """Drop the options of chat templates from a file for documents, which have none."""
    if rows.kind == "document":
        for key in ("template", "default_system", "enable_thinking", "reasoning_effort", "tool_format"):
            conversion.drop(key, Unneeded("documents have no chat template"))


def convert_muon(conversion: Conversion) -> None:
    """Convert the flag of Muon, which replaces the optimizer. Called before the options of the optimizer."""
    if conversion.is_on("use_muon"):
        conversion.move("use_muon", "trainer.optimizer.type", "muon")
        conversion.drop("optim", Unneeded("use_muon is set"))


def convert_flags(conversion: Conversion) -> None:
    """Convert the flags of training that LLaMA-Factory adds to those of TrainingArguments."""
    off = conversion.is_on("disable_gradient_checkpointing")
    if "disable_gradient_checkpointing" in conversion.left:
        conversion.move("disable_gradient_checkpointing", "trainer.gradient_checkpointing", not off)
    if conversion.is_on("train_on_prompt"):
        conversion.move("train_on_prompt", "trainer.completion_only_loss", False)
    if conversion.is_on("mask_history") and conversion.has("input_features"):
        conversion.move("mask_history", "data.dialogue.mode", "last_turn")
    if conversion.is_on("use_swanlab"):
        node = conversion.root.find(("tracking",))
        others = names_of(node.plain()) if node is not None else []
        conversion.move("use_swanlab", "tracking", [*(name for name in others if name != "swanlab"), "swanlab"])
    else:
        for key in [key for key in conversion.left if key.startswith("swanlab_")]:
            conversion.drop(key, Unneeded("swanlab is not used"))


def convert_validation(conversion: Conversion) -> None:
    if is_stream(conversion):
        conversion.drop("val_size", Missing("a stream is not divided; write data.validation"))
    else:
        convert_validation_size(conversion, "val_size")


def drop_training(conversion: Conversion) -> None:
    """Drop the keys of training from a file that only generates answers."""
    kept = ("per_device_eval_batch_size", "seed", "output_dir")
    for key in [key for key in conversion.left if key not in kept]:
        entry = LLAMA_FACTORY_KEYS.get(key)
        if key in TRAINING or (isinstance(entry, To) and entry.path.startswith("trainer.")):
            conversion.drop(key, Unneeded("the file trains nothing"))


SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Options of sampling with LLaMA-Factory's defaults."""


def convert_generation(conversion: Conversion, *, generates: bool) -> None:
    """Convert options of generation, of which those of sampling need `do_sample` here.

    Args:
        conversion: The conversion.
        generates: Whether the file generates answers, so that LLaMA-Factory's defaults decide.
    """
    beams = conversion.get("num_beams", conversion.get("eval_num_beams", 1))
    if isinstance(beams, int) and beams > 1:
        conversion.move("length_penalty", "generation.length_penalty")
    conversion.drop("length_penalty", Unneeded("there is no beam search"))
    if generates:
        conversion.drop("max_length", Unneeded("max_new_tokens decides, also with its default"))
        conversion.default("max_new_tokens", "generation.max_new_tokens", 1024)
        conversion.default("repetition_penalty", "generation.repetition_penalty", 1.0)
    sampled = [key for key in SAMPLING if generates or conversion.get(key) is not None]
    if conversion.get("do_sample") is False:
        for key in sampled:
            conversion.drop(key, Unneeded("do_sample is false"))
    elif sampled:
        conversion.move("do_sample", "generation.do_sample")
        conversion.default("do_sample", "generation.do_sample", True)
        for key in sampled:
            conversion.move(key, f"generation.{key}")
            conversion.default(key, f"generation.{key}", SAMPLING[key])
