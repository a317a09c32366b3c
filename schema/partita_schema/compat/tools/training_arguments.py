"""Training options that the tools share: those of transformers' TrainingArguments, and their values."""

import math
from collections.abc import Sequence
from typing import Any

from partita_schema.compat.tools.conversion import Conversion, Missing, Unneeded, names_of
from partita_schema.rules.sharding import ELEMENTWISE

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged_adamw"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion_8bit"),
    "muon": "muon",
    "schedule_free_adamw": "schedule_free_adamw",
    "sgd": "sgd",
}
"""Optimizers of transformers and axolotl, with the name here."""

OPTIONS_OF_MUON = Missing("muon trains embeddings, biases and norms with adamw, whose betas and eps are the defaults")

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
"""Learning rate schedules of transformers, with the name here."""

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def convert_base_model(conversion: Conversion) -> None:
    """Convert the name of the model and its revision, as transformers' tools write them."""
    move_local_path(conversion, "model_name_or_path", "base_model")
    if conversion.get("model_revision") == "main":
        conversion.drop("model_revision", Unneeded("it is the default"))


def move_local_path(conversion: Conversion, key: str, path: str) -> None:
    """Convert the name of a model or an adapter if it is a local path, which becomes relative to the written file."""
    name = conversion.get(key)
    if isinstance(name, str) and (local := conversion.local(name)) is not None:
        conversion.move(key, path, local)


def convert_attention(conversion: Conversion) -> None:
    if conversion.get("attn_implementation") in ("eager", "sdpa", "flash_attention_2", "flash_attention_3"):
        conversion.move("attn_implementation", "model_parameters.attention")
    conversion.miss("attn_implementation", "write model_parameters.attention")


def convert_training(
    conversion: Conversion,
    *,
    precision: str,
    logging_steps: int,
    optimizer: str = "optim",
    schedule: str = "lr_scheduler_type",
) -> None:
    """Convert the keys of TRAINING that are converted by rules.

    Args:
        conversion: The conversion.
        precision: The data type of the tool if the file has no bf16, and no fp16 that is on.
        logging_steps: The tool's number of steps between losses that are logged, if the file has none.
        optimizer: The tool's key of the optimizer.
        schedule: The tool's key of the schedule of the learning rate.
    """
    conversion.put("trainer.type", "finetune")
    convert_max_steps(conversion)
    convert_optimizer(conversion, key=optimizer)
    convert_schedule(conversion, key=schedule)
    convert_precision(conversion, precision)
    for key in ("gradient_checkpointing",):
        if conversion.get(key) is not None:
            conversion.move(key, "trainer.gradient_checkpointing", conversion.is_on(key))
    convert_intervals(conversion, logging_steps)
    convert_tracking(conversion)
    if conversion.is_on("group_by_length"):
        conversion.move("group_by_length", "data.batching.type", "bucket")
    if conversion.is_on("auto_find_batch_size"):
        conversion.move("auto_find_batch_size", "trainer.batch_size", "auto")
        conversion.drop("per_device_train_batch_size", Unneeded("auto_find_batch_size is set"))
        conversion.drop("micro_batch_size", Unneeded("auto_find_batch_size is set"))


def convert_max_steps(conversion: Conversion) -> None:
    steps = conversion.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        conversion.move("max_steps", "trainer.max_steps")
        for key in ("num_train_epochs", "num_epochs"):  # the tools ignore the epochs then
            conversion.drop(key, Unneeded("max_steps is set, and epochs have no effect then"))
    elif steps is not None:
        conversion.drop("max_steps", Unneeded("it is below 1, so the epochs decide"))


def convert_optimizer(conversion: Conversion, *, key: str) -> None:
    """Convert the optimizer, its options and the clipping of gradients."""
    name = conversion.get(key)
    if isinstance(name, str):
        name = name.removeprefix("OptimizerNames.").lower()
        if name in OPTIMIZERS:
            conversion.move(key, "trainer.optimizer.type", OPTIMIZERS[name])
        else:
            known = ", ".join(dict.fromkeys(OPTIMIZERS.values()))
            conversion.miss(key, f"{name} is not available, and adamw is used; others are {known}")
    convert_optimizer_options(conversion, str(conversion.value("trainer.optimizer.type") or "adamw"))
    norm = conversion.get("max_grad_norm")
    if norm is not None:
        conversion.move("max_grad_norm", "trainer.gradient_clipping.clipglobalnorm", norm if norm else None)


def convert_optimizer_options(conversion: Conversion, optimizer: str) -> None:
    """Convert the options of Adam, which the tools also pass to other optimizers, but not to all."""
    if "adam" in optimizer or "lion" in optimizer:
        betas = [conversion.get("adam_beta1", 0.9), conversion.get("adam_beta2", 0.999)]
        for beta in ("adam_beta1", "adam_beta2"):
            conversion.move(beta, "trainer.optimizer.betas", betas)
    if "lion" in optimizer:  # whose default here is that of bitsandbytes
        conversion.default("adam_beta1 and adam_beta2", "trainer.optimizer.betas", [0.9, 0.999])
    if "adam" in optimizer:
        conversion.move("adam_epsilon", "trainer.optimizer.eps")
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        conversion.drop(key, OPTIONS_OF_MUON if optimizer == "muon" else Unneeded(f"{optimizer} does not use it"))


def convert_schedule(conversion: Conversion, *, key: str) -> None:
    """Convert the schedule of the learning rate, its warmup and its lowest rate."""
    name = conversion.get(key)
    section = "trainer.learning_rate_scheduler"
    if isinstance(name, str):
        name = name.removeprefix("SchedulerType.").lower()
        convert_decay(conversion, key=key, name=name)
    convert_lowest_rate(conversion, name)
    if name == "constant":  # of transformers, which has no warmup
        for warmup in ("warmup_steps", "warmup_ratio"):
            conversion.drop(warmup, Unneeded(f"{key}: constant has no warmup"))
        conversion.default("warmup_steps", f"{section}.warmup_steps", 0)
    lowest = lowest_share(conversion)
    if lowest is not None:
        conversion.move("lr_scheduler_kwargs", f"{section}.min_ratio", lowest)
    else:
        conversion.miss("lr_scheduler_kwargs", f"write the keys of {section}")
    steps, ratio = conversion.get("warmup_steps"), conversion.get("warmup_ratio")
    if isinstance(steps, float) and 0 < steps < 1:
        conversion.move("warmup_steps", f"{section}.warmup_fraction")
        conversion.drop("warmup_ratio", Unneeded("warmup_steps is set"))
    elif steps:
        conversion.move("warmup_steps", f"{section}.warmup_steps", whole_number(steps))
        conversion.drop("warmup_ratio", Unneeded("warmup_steps is set"))
    elif ratio is not None:
        conversion.move("warmup_ratio", f"{section}.warmup_fraction")
        conversion.drop("warmup_steps", Unneeded("warmup_ratio is set"))
    elif steps is not None:
        conversion.move("warmup_steps", f"{section}.warmup_steps", 0)


def lowest_share(conversion: Conversion) -> float | None:
    """Return the share of the highest learning rate at which a cosine ends; None if the options say no such."""
    options = conversion.get("lr_scheduler_kwargs")
    highest = conversion.get("learning_rate", conversion.value("trainer.learning_rate"))
    if not isinstance(options, dict):
        return None
    if set(options) == {"min_lr_rate"}:
        return number_of(options["min_lr_rate"])
    lowest, rate = number_of(options.get("min_lr")), number_of(highest)
    if set(options) != {"min_lr"} or lowest is None or not rate:
        return None
    return float(f"{lowest / rate:.6g}")


def number_of(value: object) -> float | None:
    """Return a number, also of text such as 2e-5, which YAML reads as text; None for anything else."""
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return None


def convert_decay(conversion: Conversion, *, key: str, name: str) -> None:
    """Convert the shape of a schedule; one without a counterpart becomes the most similar."""
    section = "trainer.learning_rate_scheduler"
    if name == "cosine_with_restarts" and conversion.get("lr_scheduler_kwargs") in (None, {"num_cycles": 1}):
        conversion.move(key, f"{section}.decay", "cosine")
        conversion.drop("lr_scheduler_kwargs", Unneeded("a schedule with one cycle has no restart"))
    elif name in SCHEDULES:
        conversion.move(key, f"{section}.decay", SCHEDULES[name])
    else:
        similar = "linear" if name == "polynomial" else "cosine"
        conversion.put(f"{section}.decay", similar, at=conversion.left[key], written=conversion.name(key))
        known = ", ".join(dict.fromkeys(SCHEDULES.values()))
        conversion.miss(key, f"{name} is not available, and {similar} is used; others are {known}")


def convert_lowest_rate(conversion: Conversion, schedule: object) -> None:
    """Convert axolotl's share of the highest rate at which a cosine ends; other schedules do not have it."""
    if schedule in (None, "cosine"):
        conversion.move("cosine_min_lr_ratio", "trainer.learning_rate_scheduler.min_ratio")
    conversion.drop("cosine_min_lr_ratio", Unneeded("the schedule is no cosine"))


def write_schedule_defaults(conversion: Conversion, *, key: str, decay: str, warmup: int | None) -> None:
    """Write out the schedule of a tool: its decay, its warmup, and that its rate falls to zero.

    Args:
        conversion: The conversion.
        key: The tool's key of the schedule.
        decay: Its default.
        warmup: Its default number of warmup steps; None if it is that of partita.
    """
    section = "trainer.learning_rate_scheduler"
    conversion.default(key, f"{section}.decay", decay)
    if warmup is not None and not conversion.has(f"{section}.warmup_fraction"):
        conversion.default("warmup_steps", f"{section}.warmup_steps", warmup)
    used = conversion.value(f"{section}.decay")
    if used == "inverse_sqrt" and conversion.value(f"{section}.warmup_steps") == 0:
        conversion.note(
            "inverse_sqrt without warmup falls from the first step on; in transformers it falls as if there had been "
            "10,000 steps of warmup, so that it is almost constant in short runs: write decay: constant for that"
        )
    if used == "cosine":
        conversion.default("lowest learning rate", f"{section}.min_ratio", 0)


def write_training_defaults(conversion: Conversion, *, learning_rate: float, checkpointing_key: str) -> None:
    """Write out the defaults of TrainingArguments, with gradient checkpointing, that differ from those of partita.

    Args:
        conversion: The conversion.
        learning_rate: The tool's default.
        checkpointing_key: The tool's key of gradient checkpointing.
    """
    conversion.default("per_device_train_batch_size", "trainer.batch_size", 8)
    conversion.default("gradient_accumulation_steps", "trainer.gradient_accumulation_steps", 1)
    conversion.default("learning_rate", "trainer.learning_rate", learning_rate)
    if not conversion.has("trainer.max_steps"):
        conversion.default("num_train_epochs", "trainer.epochs", 3)
    write_schedule_defaults(conversion, key="lr_scheduler_type", decay="linear", warmup=0)
    conversion.default(checkpointing_key, "trainer.gradient_checkpointing", True)
    conversion.default("load_best_model_at_end", "trainer.restore_best", False)


def convert_precision(conversion: Conversion, precision: str) -> None:
    """Convert the flags of the data types; bf16 wins, as in the tools.

    Without it, and with fp16 off, `precision` is used, as by default.
    """
    bf16 = conversion.get("bf16")
    if bf16 == "auto":
        conversion.move("bf16", "trainer.mixed_precision", "auto")
        conversion.drop("fp16", Unneeded("bf16 is set"))
    elif conversion.is_on("bf16"):
        conversion.move("bf16", "trainer.mixed_precision", "bf16")
        conversion.drop("fp16", Unneeded("bf16 is set"))
    elif conversion.is_on("fp16"):
        conversion.move("fp16", "trainer.mixed_precision", "fp16")
        conversion.move("bf16", "trainer.mixed_precision", "fp16")
    for key in ("bf16", "fp16"):
        conversion.move(key, "trainer.mixed_precision", precision if bf16 is None else "no")


def convert_intervals(conversion: Conversion, logging_steps: int) -> None:
    """Convert how often evaluations and checkpoints take place."""
    for what, keys, steps_path, epoch_path in (
        ("eval", ("eval_strategy", "evaluation_strategy"), "steps_per_evaluation", "evaluations_per_epoch"),
        ("save", ("save_strategy",), "steps_per_checkpoint", "checkpoints_per_epoch"),
    ):
        strategy = next((key for key in keys if conversion.get(key) is not None), None)
        chosen = conversion.get(strategy) if strategy else None
        steps_key = f"{what}_steps"
        if strategy and chosen in ("no", False):
            for path, value in never(what).items():
                conversion.put(path, value, at=conversion.left[strategy], written=conversion.name(strategy))
            conversion.take(strategy, " and ".join(never(what)))
            conversion.drop(steps_key, Unneeded(f"{strategy} is no"))
        elif strategy and chosen in ("epoch", "best"):
            conversion.move(strategy, f"trainer.{epoch_path}", 1)
            conversion.drop(steps_key, Unneeded(f"{strategy} is {chosen}"))
        elif strategy:
            path = f"trainer.{steps_path}"
            if conversion.get(steps_key) is None:
                conversion.default(steps_key, path, 500 if what == "save" else logged_steps(conversion, logging_steps))
            conversion.report.mapped.append((conversion.name(strategy), path))
            conversion.left.pop(strategy)
        convert_steps(conversion, steps_key, f"trainer.{steps_path}")
    metric = conversion.get("metric_for_best_model")
    if metric in ("loss", "eval_loss"):
        conversion.move("metric_for_best_model", "trainer.validation_metric", "loss")
    elif metric is not None:
        conversion.miss("metric_for_best_model", "write trainer.validation_metric; metrics have other names here")


def logged_steps(conversion: Conversion, default: int) -> int:
    """Return the steps between losses that are logged, and thus between evaluations if no key sets these."""
    written = conversion.get("logging_steps")
    if isinstance(written, float) and 0 < written < 1:
        conversion.note(
            f"logging_steps is a share of all steps, which is not available, so evaluations are {default} steps apart; "
            "write trainer.steps_per_evaluation"
        )
    whole = isinstance(written, float | int) and not isinstance(written, bool) and 1 <= written < math.inf
    return int(written) if whole else default


def never(what: str) -> dict[str, object]:
    """Return the keys that switch evaluations or checkpoints off, and their values."""
    if what == "eval":
        return {"trainer.skip_all_evaluation": True}
    return {"trainer.checkpoints_per_epoch": 0, "trainer.minutes_per_checkpoint": None}


def convert_steps(conversion: Conversion, key: str, path: str) -> None:
    """Convert a number of steps between two events, if it is one."""
    steps = conversion.get(key)
    if isinstance(steps, float) and steps < 1:
        conversion.miss(key, f"a share of all steps is not available; write {path}")
    elif isinstance(steps, float | int) and not isinstance(steps, bool) and steps:
        conversion.move(key, path, whole_number(steps))
    else:
        conversion.drop(key, Unneeded("it is 0"))


def whole_number(value: Any) -> Any:
    """Return a finite float as an integer, and any other value as it is, for the error of the schema."""
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


def convert_tracking(conversion: Conversion) -> None:
    written = conversion.get("report_to")
    if written is None:
        return
    names = [name for name in names_of(written) if name != "none"]
    if set(names) <= {*TRACKERS}:
        conversion.move("report_to", "tracking", names)
    else:
        conversion.miss("report_to", f"write tracking with any of {', '.join(TRACKERS)}")


def convert_packed_attention(conversion: Conversion) -> None:
    """Replace an attention implementation that cannot separate packed rows here. Called when both are converted."""
    attention = conversion.value("model_parameters.attention")
    packs = conversion.value("data.batching.type") == "pack" or conversion.value("data.batching.isolate_documents")
    if packs and str(attention).startswith("flash"):
        conversion.put("model_parameters.attention", "sdpa")
        conversion.note(f"packed rows are separated by sdpa attention, not by {attention}")


SHARDING_KEYS = ("deepspeed", "fsdp", "fsdp_config")
"""Keys that `convert_sharding` converts."""


def convert_sharding(conversion: Conversion) -> None:
    """Convert deepspeed and FSDP to processes of torchrun, with sharded weights where the rest of the file allows it.

    Called last, because sharding excludes other keys.
    """
    deepspeed, fsdp = conversion.get("deepspeed"), conversion.is_on("fsdp") or conversion.is_on("fsdp_config")
    if not deepspeed and not fsdp:
        for key in SHARDING_KEYS:
            conversion.drop(key, Unneeded("it is off"))
        return
    stage = deepspeed_stage(deepspeed)
    sharded = bool(fsdp) or stage == 3
    for key in SHARDING_KEYS:
        if key in conversion.left:
            conversion.move(key, "backend.type", "torchrun")
    if not sharded:
        conversion.note("deepspeed is not used: each process holds the whole model (backend.sharding: none)")
        return
    obstacles = sharding_obstacles(conversion)
    if obstacles:
        conversion.note(f"weights are not sharded, because backend.sharding: full excludes {', '.join(obstacles)}")
    else:
        conversion.put("backend.sharding", "full")


def deepspeed_stage(written: object) -> int | None:
    """Return the stage of ZeRO, from a mapping or from the name of the file; None if it is unknown."""
    if isinstance(written, dict):
        options = written.get("zero_optimization")
        stage = options.get("stage") if isinstance(options, dict) else None
        return stage if isinstance(stage, int) else None
    name = str(written).rsplit("/", 1)[-1]
    return next((stage for stage in (3, 2, 1, 0) for mark in ("zero", "z", "stage") if f"{mark}{stage}" in name), None)


def sharding_obstacles(conversion: Conversion) -> Sequence[str]:
    value = conversion.value
    obstacles = ["quantization"] if conversion.has("quantization") else []
    if value("trainer.optimizer.type") not in (None, *ELEMENTWISE):
        obstacles.append(f"the optimizer {value('trainer.optimizer.type')}")
    obstacles += ["fp16"] if value("trainer.mixed_precision") == "fp16" else []
    obstacles += ["compile"] if value("trainer.compile") else []
    obstacles += ["batch_size: auto"] if value("trainer.batch_size") in (None, "auto") else []
    return obstacles


def write_default_length(conversion: Conversion, *, key: str, path: str, length: int, tool: str) -> None:
    """Write out the maximum length of a tool, and note it: models with a shorter context do not take it.

    Args:
        conversion: The conversion.
        key: The tool's key of the length.
        path: The key of the length here.
        length: Its default.
        tool: Name of the tool.
    """
    if conversion.has(path):
        return
    conversion.default(key, path, length)
    conversion.note(
        f"{key} is not in the file, so {tool}'s default of {length:,} tokens is written out; for a model with a "
        f"shorter context remove {path}, and rows are as long as the context allows"
    )


def drop_dropout(conversion: Conversion) -> None:
    """Switch off the dropout of an adapter, which the tools do in training on preferences."""
    conversion.drop("lora_dropout", Unneeded("dropout is off in training on preferences"))
    conversion.put("adapter.dropout", 0.0)
    conversion.report.defaults.append(("disable_dropout: true", "adapter.dropout", 0))


def convert_simpo(conversion: Conversion, *, tool: str, beta: str) -> None:
    """Convert the constants of simpo, with the defaults of TRL's CPOConfig.

    Args:
        conversion: The conversion.
        tool: Name of the tool, for the report.
        beta: Its key of beta.
    """
    conversion.move(beta, "trainer.loss.beta")
    conversion.default(beta, "trainer.loss.beta", 0.1)
    conversion.move("simpo_gamma", "trainer.loss.gamma")
    conversion.default("simpo_gamma", "trainer.loss.gamma", 0.5)
    weight = conversion.get("cpo_alpha", 1.0)
    if weight:
        conversion.note(
            f"{tool} adds {weight} times the cross-entropy of the chosen answer to simpo (cpo_alpha); simpo has no "
            "such part here"
        )
        conversion.miss("cpo_alpha", "the loss of simpo has no cross-entropy of the chosen answers next to it")
