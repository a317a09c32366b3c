"""Conversion of axolotl's files."""

import re
from dataclasses import replace
from typing import Any

from partita_schema.compat.tools.axolotl_datasets import convert_dataset
from partita_schema.compat.tools.axolotl_keys import TEMPLATE
from partita_schema.compat.tools.axolotl_preferences import LOSSES, METHODS, convert_preferences
from partita_schema.compat.tools.conversion import Conversion, Missing, Unneeded, names_of
from partita_schema.compat.tools.rows import (
    RowFormat,
    common_format,
    convert_validation_size,
    is_stream,
    note_repeated_turns,
    put_features,
    put_sources,
    why_no_common_format,
)
from partita_schema.compat.tools.training_arguments import (
    SHARDING_KEYS,
    convert_attention,
    convert_packed_attention,
    convert_sharding,
    convert_training,
    drop_dropout,
    move_local_path,
    write_default_length,
    write_schedule_defaults,
)
from partita_schema.compat.tools.training_arguments_keys import KERNELS


def convert_axolotl(conversion: Conversion) -> None:
    """Convert a file of axolotl.

    Raises:
        ConfigError: The file trains in a way that is not available, or its datasets cannot be read by one
            configuration.
    """
    rl = method_of(conversion)
    convert_model(conversion)
    convert_adapter(conversion, rl)
    rows = convert_datasets(conversion, rl)
    convert_lengths(conversion, rows)
    convert_batch_size(conversion)
    convert_training(conversion, precision="auto", logging_steps=10, optimizer="optimizer", schedule="lr_scheduler")
    convert_preferences(conversion, rl)
    convert_sizes(conversion)
    convert_system_message(conversion, rows)
    note_repeated_turns(conversion, rows)
    convert_trackers(conversion)
    conversion.apply_table(later=SHARDING_KEYS)
    write_defaults(conversion)
    convert_packed_attention(conversion)
    convert_sharding(conversion)


def method_of(conversion: Conversion) -> str:
    """Return how the file trains on preferences, the value of `rl`; empty without.

    Raises:
        ConfigError: It trains in a way that is not available.
    """
    for key in ("reward_model", "process_reward_model"):
        if conversion.is_on(key):
            message = "training of reward models is not converted; write trainer: {type: reward} by hand"
            raise conversion.refusal(key, f"{message}, or remove the key")
    if not conversion.is_on("rl"):
        return ""
    written = str(conversion.get("rl"))
    if written not in METHODS:
        message = f"{written} is not available; others are {', '.join(METHODS)}"
        raise conversion.refusal("rl", f"{message}, or remove the key and name datasets with correct answers")
    return written


def convert_model(conversion: Conversion) -> None:
    """Convert the base model, its kernels and its data type."""
    move_local_path(conversion, "base_model", "base_model")
    template = conversion.get("chat_template")
    if template is not None:
        entry = TEMPLATE if "tokenizer_default" not in str(template) else Unneeded("it is that of the model")
        conversion.drop("chat_template", entry)
    for key, kernel in (
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ):
        if conversion.is_on(key):
            conversion.move(key, "model_parameters.attention", kernel)
        else:
            conversion.drop(key, Unneeded("it is off"))
    convert_attention(conversion)
    convert_plugins(conversion)
    for key, dtype in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")):
        if conversion.is_on(key):
            conversion.move(key, "model_parameters.dtype", dtype)


KERNEL_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
"""Plugins that change the speed, not the result."""


def convert_plugins(conversion: Conversion) -> None:
    """Drop the plugins: those with kernels are not needed, and others have no counterpart."""
    written = conversion.get("plugins")
    paths = [str(path) for path in written] if isinstance(written, list | tuple) else names_of(written or "")
    others = [path for path in paths if path.rsplit(".", 1)[-1] not in KERNEL_PLUGINS]
    if others:
        conversion.miss("plugins", f"not used here: {', '.join(others)}; look up what each does to the training")
    conversion.drop("plugins", KERNELS)


def convert_adapter(conversion: Conversion, rl: str) -> None:
    """Convert the adapter and its quantization.

    Args:
        conversion: The conversion.
        rl: How preferences are trained on; empty without.
    """
    kind = conversion.get("adapter")
    if kind in ("lora", "qlora"):
        conversion.move("adapter", "adapter.type", "lora")
        move_local_path(conversion, "lora_model_dir", "adapter.pretrained_adapter_weights")
        if rl:
            drop_dropout(conversion)
        convert_targets(conversion)
        if conversion.get("lora_model_dir"):
            for key in ("peft_init_lora_weights", "peft"):
                conversion.drop(key, Unneeded("a trained adapter is loaded"))
        init = conversion.get("peft_init_lora_weights")
        if init is not None and init is not False:
            conversion.move("peft_init_lora_weights", "adapter.init", "default" if init is True else init)
        loftq = conversion.get("peft")
        if isinstance(loftq, dict) and set(loftq) == {"loftq_config"}:
            node = conversion.take("peft", "adapter.init")
            conversion.put("adapter.init", "loftq", at=node)
            options = loftq["loftq_config"]
            bits = options.get("loftq_bits", 4) if isinstance(options, dict) else 4
            conversion.put("adapter.loftq_bits", bits, at=node)
        conversion.default("lora_dropout", "adapter.dropout", 0)
    elif kind is not None:
        conversion.miss("adapter", f"{kind} is converted by hand; write adapter: {{type: peft, peft_type: ...}}")
    else:
        for key in [key for key in conversion.left if key.startswith(("lora_", "peft", "qlora_"))]:
            conversion.drop(key, Unneeded("there is no adapter"))
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if conversion.is_on(key) and not conversion.has("quantization"):
            conversion.move(key, "quantization.bits", bits)
        else:
            conversion.drop(key, Unneeded("it is off"))
    if kind == "qlora" and not conversion.has("quantization"):
        conversion.put("quantization.bits", 4)


def convert_targets(conversion: Conversion) -> None:
    if conversion.is_on("lora_target_linear"):
        conversion.move("lora_target_linear", "adapter.target_modules", "all-linear")
        conversion.drop("lora_target_modules", Unneeded("lora_target_linear is set"))
        return
    modules = conversion.get("lora_target_modules")
    if modules is None:
        conversion.note(
            "without lora_target_linear, axolotl adapts the modules that peft chooses for the architecture; here all "
            "linear layers are adapted"
        )
        return
    value = modules if isinstance(modules, list) or re.search(r"[*.\\|^$()\[\]]", str(modules)) else names_of(modules)
    conversion.move("lora_target_modules", "adapter.target_modules", value)


def convert_datasets(conversion: Conversion, rl: str) -> RowFormat:
    """Convert the datasets, and return the format of their rows.

    Args:
        conversion: The conversion.
        rl: How preferences are trained on; empty without.
    """
    key = next((key for key in ("datasets", "pretraining_dataset") if key in conversion.left), None)
    if key is None:
        conversion.note("the file names no datasets; write data.source, or train with --dataset")
        rows = RowFormat("dialogue", label="label" if rl == "kto" else "")
        rows = replace(rows, chosen="chosen", rejected="rejected") if rl in LOSSES else rows
        put_features(conversion, rows)
        convert_validation_size(conversion, "val_set_size")
        return rows
    entries = read_entries(conversion, key, rl=rl)
    rows = one_format(conversion, key, [entry[1] for entry in entries])
    node = conversion.take(key, "data.source" if len(entries) == 1 else "data.mix")
    put_sources(conversion, [entry[0] for entry in entries])
    put_features(conversion, rows, at=node)
    conversion.drop("pretraining_dataset", Missing("there are datasets as well; write one of the two"))
    if "test_datasets" in conversion.left:
        tests = read_entries(conversion, "test_datasets", rl=rl)
        if common_format([rows, tests[0][1]]) is None:
            raise conversion.refusal(
                "test_datasets", "its rows have another format than those of datasets; bring them into the same one"
            )
        node = conversion.take("test_datasets", "data.validation")
        conversion.put("data.validation", tests[0][0].value, at=node)
        if len(tests) > 1:
            conversion.note("only the first of test_datasets is used; join the others into one file")
    if key == "datasets":
        convert_validation_size(conversion, "val_set_size")
    conversion.drop("val_set_size", Unneeded("a stream is not divided"))
    return rows


def read_entries(conversion: Conversion, key: str, *, rl: str) -> list[tuple[Any, RowFormat]]:
    """Return the source and the format of each dataset of a list."""
    node = conversion.left[key]
    items = node.value if isinstance(node.value, list) else [node]
    streaming = key == "pretraining_dataset"
    return [
        convert_dataset(conversion, item, prefix=f"{key}[{index}]", streaming=streaming, rl=rl)
        for index, item in enumerate(items)
    ]


def one_format(conversion: Conversion, key: str, formats: list[RowFormat]) -> RowFormat:
    rows = common_format(formats)
    if rows is None:
        raise conversion.refusal(key, why_no_common_format(formats))
    return rows


def convert_lengths(conversion: Conversion, rows: RowFormat) -> None:
    """Convert the maximum length, and whether rows are packed or documents joined."""
    if rows.kind == "document":
        convert_documents(conversion)
        return
    convert_long_rows(conversion)
    convert_length(conversion, "preprocessing.global_max_sequence_length")
    if conversion.is_on("sample_packing"):
        conversion.move("sample_packing", "data.batching.type", "pack")
        conversion.drop("group_by_length", Unneeded("rows are packed"))
    else:
        conversion.drop("sample_packing", Unneeded("it is off"))


def convert_length(conversion: Conversion, path: str) -> None:
    conversion.move("sequence_len", path)
    write_default_length(conversion, key="sequence_len", path=path, length=512, tool="axolotl")


def convert_documents(conversion: Conversion) -> None:
    """Convert the length of documents, and whether they are joined; without sample_packing, each is a row."""
    streams = is_stream(conversion)  # pretraining_dataset
    packing = conversion.is_on("sample_packing")
    joined = streams and not packing and conversion.is_on("pretraining_sample_concatenation")
    conversion.drop("excess_length_strategy", Unneeded("it is not for documents"))
    if packing or joined:
        conversion.put("data.batching.type", "chunk")
        convert_length(conversion, "data.batching.context_length")
        if packing and (not streams or conversion.get("pretrain_multipack_attn", True)):
            conversion.put("data.batching.isolate_documents", True)
        key = "sample_packing" if packing else "pretraining_sample_concatenation"
        conversion.take(key, "data.batching: {type: chunk}")
        conversion.drop("group_by_length", Unneeded("documents are joined"))
    else:
        convert_length(conversion, "preprocessing.global_max_sequence_length")
        if not streams:
            conversion.note(
                "documents longer than sequence_len are cut, and counted in the ledger; axolotl makes several rows of "
                "them: to learn all of them, write data.batching: {type: chunk, context_length: ...}, which joins "
                "documents, instead of preprocessing.global_max_sequence_length"
            )
    conversion.drop("sample_packing", Unneeded("it is off"))
    reason = "sample_packing is set" if packing else "it is for pretraining_dataset"
    conversion.drop("pretraining_sample_concatenation", Unneeded(reason))


def convert_long_rows(conversion: Conversion) -> None:
    """Convert what becomes of rows that are too long; axolotl leaves them out."""
    strategy = conversion.get("excess_length_strategy", "drop")
    if strategy == "truncate":
        conversion.drop("excess_length_strategy", Unneeded("rows that are too long are cut"))
        return
    reason = "rows longer than sequence_len are cut, and counted in the ledger; axolotl leaves them out"
    if "excess_length_strategy" not in conversion.left:
        conversion.note(reason)
    conversion.miss("excess_length_strategy", f"{reason}; remove them from the data")


def convert_batch_size(conversion: Conversion) -> None:
    """Convert the rows of a step of one process to the number of micro-batches. Called before the micro-batch is."""
    if conversion.get("gradient_accumulation_steps"):
        conversion.drop("batch_size", Unneeded("gradient_accumulation_steps is set"))
    rows, micro = conversion.get("batch_size"), conversion.get("micro_batch_size", 1)
    if rows is not None:
        conversion.note(
            "gradient_accumulation_steps is batch_size divided by micro_batch_size; versions of axolotl in which it is "
            "1 by default do not read batch_size: write 1 for what they train"
        )
    whole = isinstance(rows, int) and isinstance(micro, int) and micro > 0
    conversion.move("batch_size", "trainer.gradient_accumulation_steps", rows // micro if whole else rows)


def convert_sizes(conversion: Conversion) -> None:
    if conversion.get("evals_per_epoch") == 0:
        conversion.move("evals_per_epoch", "trainer.skip_all_evaluation", True)
    conversion.move("evals_per_epoch", "trainer.evaluations_per_epoch")
    if conversion.get("train_on_inputs") is True:
        conversion.move("train_on_inputs", "trainer.completion_only_loss", False)
    else:
        conversion.drop("train_on_inputs", Unneeded("it is off"))


def convert_system_message(conversion: Conversion, rows: RowFormat) -> None:
    """Convert the default system message, which only axolotl's chat template chatml has."""
    template = conversion.source.mapping().get("chat_template")
    if template is None or template.value != "chatml":
        conversion.drop("default_system_message", Unneeded("axolotl uses it only with chat_template: chatml"))
    elif rows.kind != "dialogue" or rows.form == "segments":
        conversion.drop("default_system_message", Unneeded("axolotl uses it only in a chat template"))
    conversion.move("default_system_message", "prompt.system")


def convert_trackers(conversion: Conversion) -> None:
    """Convert the trackers that have a project, and drop their other options."""
    trackers = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "tensorboard": "tensorboard"}
    used = []
    for name, tracker in trackers.items():
        keys = [key for key in conversion.left if key.startswith((f"{name}_", f"use_{name}"))]
        switched_off = conversion.get(f"use_{name}") is False or conversion.get(f"{name}_mode") == "disabled"
        on = any(key in (f"{name}_project", f"{name}_project_name", f"use_{name}") for key in keys)
        if on and not switched_off:
            used.append(tracker)
        for key in keys:
            if key.startswith("use_") and on and not switched_off:
                conversion.take(key, "tracking")
            elif on and not switched_off:
                conversion.drop(key, Missing(f"set it in the environment, such as {name.upper()}_PROJECT"))
            else:
                conversion.drop(key, Unneeded(f"{name} is not used"))
    if used:
        conversion.put("tracking", used)


def write_defaults(conversion: Conversion) -> None:
    """Write out axolotl's defaults that differ from those of partita."""
    conversion.default("micro_batch_size", "trainer.batch_size", 1)
    conversion.default("gradient_accumulation_steps", "trainer.gradient_accumulation_steps", 1)
    if not conversion.has("trainer.max_steps"):
        conversion.default("num_epochs", "trainer.epochs", 1)
    write_schedule_defaults(conversion, key="lr_scheduler", decay="cosine", warmup=None)
    write_default_warmup(conversion)
    conversion.default("load_best_model_at_end", "trainer.restore_best", False)


def write_default_warmup(conversion: Conversion) -> None:
    """Keep axolotl's limit of 100 steps of a warmup that no key sets; partita's has none."""
    section = "trainer.learning_rate_scheduler"
    if conversion.has(f"{section}.warmup_steps") or conversion.has(f"{section}.warmup_fraction"):
        return
    steps = conversion.value("trainer.max_steps")
    if steps is None:
        conversion.note(
            "without warmup_steps and warmup_ratio, axolotl's warmup has 3 % of the steps, but at most 100; here it "
            f"has 3 % also in runs of more than 3,333 steps: write {section}.warmup_steps: 100 for them"
        )
    elif isinstance(steps, int) and steps > 3333:
        conversion.default("warmup_steps", f"{section}.warmup_steps", 100)
