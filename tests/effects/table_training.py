"""Fine-tuning: steps, rates, optimizers, evaluations and checkpoints."""

from .bases import FINETUNE, PROBE, trainer
from .effects import GENERIC, Flip, Group
from .observers import launching, training

WILD = {"steps_per_evaluation": 1, "learning_rate": 5.0, "learning_rate_scheduler": {"warmup_steps": 4}}
"""Makes the model worse in each step."""
SGD = {"optimizer": {"type": "sgd", "momentum": 0.5}}
AUTO = {"batch_size": "auto"}
NOTING_CHECKPOINTS = {"callbacks": [{"type": "custom", "target": "programs_of_effects:NotingCheckpoints"}]}
EXPONENTIAL = {"learning_rate_scheduler": {"decay": "exponential"}}

TRAINING = [
    Group(
        "finetune",
        training,
        FINETUNE,
        "losses",
        {
            "seed": 7,
            "trainer[finetune].batch_size": Flip(2, part="batch_sizes"),
            "trainer[finetune].eval_batch_size": Flip(2, part="batch_sizes"),
            "trainer[finetune].max_batch_size": Flip(2, given=trainer(**AUTO), part="batch_sizes"),
            "trainer[finetune].memory_budget": Flip("1MB", given=trainer(**AUTO), part="refusal"),
            "trainer[finetune].type": Flip({"type": "none", "batch_size": 4}, part="steps"),
            "trainer[finetune].epochs": Flip(0.5, part="steps"),
            "trainer[finetune].max_steps": Flip(2, part="steps"),
            "trainer[finetune].learning_rate": Flip(0.02, part="rates"),
            "trainer[finetune].learning_rate_scheduler.decay": Flip("linear", part="rates"),
            "trainer[finetune].learning_rate_scheduler.warmup_fraction": Flip(0.5, part="rates"),
            "trainer[finetune].learning_rate_scheduler.warmup_steps": Flip(2, part="rates"),
            "trainer[finetune].learning_rate_scheduler.min_ratio": Flip(0.5, part="rates"),
            "trainer[finetune].learning_rate_scheduler.decay_rate": Flip(
                0.5, given=trainer(**EXPONENTIAL), part="rates"
            ),
            "trainer[finetune].learning_rate_scheduler.decay_steps": Flip(
                2, given=trainer(**EXPONENTIAL), part="rates"
            ),
            "trainer[finetune].optimizer.type": "lion",
            "trainer[finetune].optimizer.betas": [0.5, 0.6],
            "trainer[finetune].optimizer.eps": 0.01,
            "trainer[finetune].optimizer.weight_decay": 0.5,
            "trainer[finetune].optimizer.momentum": Flip(0.9, given=trainer(**SGD)),
            "trainer[finetune].optimizer.nesterov": Flip(True, given=trainer(**SGD)),
            "trainer[finetune].optimizer.fused": Flip(False, part="saved"),
            "trainer[finetune].gradient_accumulation_steps": Flip(
                2, given=trainer(effective_batch_size=None), part="plan"
            ),
            "trainer[finetune].effective_batch_size": Flip(8, part="plan"),
            "trainer[finetune].gradient_clipping.clipglobalnorm": 0.01,
            "trainer[finetune].gradient_clipping.clipvalue": 0.001,
            "trainer[finetune].mixed_precision": "bf16",
            "trainer[finetune].gradient_checkpointing": Flip(True, part="passes"),
            "trainer[finetune].completion_only_loss": GENERIC,
            "trainer[finetune].early_stop": Flip(1, given=trainer(**WILD), part="stopped_early"),
            "trainer[finetune].validation_metric": Flip(
                "rouge_l", given=trainer(evaluate_generated="auto"), part="best"
            ),
            "trainer[finetune].evaluate_generated": Flip(True, part="evaluations"),
            "trainer[finetune].max_generated_rows": Flip(1, given=trainer(evaluate_generated=True), part="evaluations"),
            "trainer[finetune].evaluations_per_epoch": Flip(2, part="evaluations"),
            "trainer[finetune].steps_per_evaluation": Flip(1, part="evaluations"),
            "trainer[finetune].skip_all_evaluation": Flip(True, part="evaluations"),
            "trainer[finetune].checkpoints_per_epoch": Flip(2, part="files"),
            "trainer[finetune].steps_per_checkpoint": Flip(2, part="files"),
            "trainer[finetune].minutes_per_checkpoint": Flip(1e-9, given=NOTING_CHECKPOINTS, part="files"),
            "trainer[finetune].keep_checkpoints": Flip(1, given=trainer(steps_per_checkpoint=1), part="files"),
            "trainer[finetune].restore_best": Flip(False, given=trainer(**WILD), part="saved"),
            "trainer[finetune].layers_to_freeze_regex": Flip(r"layers\.0\.", part="trained_parameters"),
            "trainer[finetune].evaluate_test": Flip(True, part="evaluations"),
            "trainer[finetune].evaluate_base": Flip(False, part="files"),
            "tracking": Flip(["tensorboard"], part="files"),
        },
        long=True,
    ),
    Group(
        "compile",
        training,
        FINETUNE,
        "compiled",
        {"trainer[finetune].compile": Flip(True, given=trainer(max_steps=1, skip_all_evaluation=True))},
        long=True,
    ),
    Group(
        "callbacks",
        training,
        FINETUNE
        | {"callbacks": [{"type": "custom", "target": "programs_of_effects:Noting"}]}
        | trainer(**{**FINETUNE["trainer"], "max_steps": 1, "skip_all_evaluation": True}),
        "files",
        {
            "callbacks.type": Flip("mine", part="refusal"),
            "callbacks.target": "programs_of_effects:NotingElsewhere",
            "callbacks.options": {"name": "other.txt"},
        },
    ),
    Group(
        "custom trainer",
        training,
        PROBE,
        "batches",
        {
            "trainer[custom].batch_size": 2,
            "trainer[custom].eval_batch_size": Flip(2, part="batch_sizes"),
            "trainer[custom].max_batch_size": Flip(1, given=trainer(eval_batch_size="auto"), part="batch_sizes"),
            "trainer[custom].memory_budget": Flip("1MB", given=trainer(eval_batch_size="auto"), part="refusal"),
            "trainer[custom].type": {"type": "none", "batch_size": 4},
            "trainer[custom].target": "programs_of_effects:OtherProbe",
            "trainer[custom].options": {"steps": 2},
        },
        long=True,
    ),
    Group(
        "hogwild",
        training,
        {
            "base_model": {"type": "embedding_bag", "embedding_dim": 8, "buckets": 64},
            "input_features": [{"name": "text"}],
            "output_features": [{"name": "colour", "type": "category"}],
            "data": {"source": "colours.jsonl"},
            "trainer": {"type": "hogwild", "workers": 1, "epochs": 1},
        },
        "saved",
        {
            "base_model[embedding_bag].type": Flip({"type": "scratch"}, part="refusal"),
            "base_model[embedding_bag].embedding_dim": 4,
            "base_model[embedding_bag].ngrams": 1,
            "base_model[embedding_bag].buckets": 16,
            "base_model[embedding_bag].tokenizer": "char",
            "base_model[embedding_bag].vocab_size": Flip(
                260, given={"base_model": {"tokenizer": "bpe", "vocab_size": 300}}
            ),
            "trainer[hogwild].batch_size": 4,
            "trainer[hogwild].eval_batch_size": Flip(2, part="batch_sizes"),
            "trainer[hogwild].max_batch_size": Flip(2, part="refusal"),
            "trainer[hogwild].memory_budget": Flip("1GB", part="refusal"),
            "trainer[hogwild].type": Flip({"type": "finetune"}, part="refusal"),
            "trainer[hogwild].workers": Flip(2, part="workers"),
            "trainer[hogwild].epochs": 2,
            "trainer[hogwild].learning_rate": 0.5,
            "trainer[hogwild].optimizer.type": GENERIC,
            "trainer[hogwild].evaluate_test": Flip(False, part="evaluations"),
        },
        long=True,
    ),
    Group(
        "new model",
        training,
        PROBE
        | {
            "base_model": {
                "type": "scratch",
                "size": "nano",
                "num_hidden_layers": 1,
                "intermediate_size": 32,
                "tokenizer": "byte",
                "context_length": 64,
            }
        },
        "losses",
        {
            "base_model": Flip("base"),
            "base_model[scratch].type": Flip({"type": "embedding_bag"}, part="refusal"),
            "base_model[scratch].architecture": "gpt2",
            "base_model[scratch].size": Flip("tiny", part="trained"),
            "base_model[scratch].hidden_size": Flip(32, part="trained"),
            "base_model[scratch].num_hidden_layers": Flip(2, part="trained"),
            "base_model[scratch].num_attention_heads": 4,
            "base_model[scratch].num_key_value_heads": Flip(1, part="trained"),
            "base_model[scratch].intermediate_size": Flip(64, part="trained"),
            "base_model[scratch].context_length": Flip(40, given={"data": {"max_bad_rows": 20}}, part="batches"),
            "base_model[scratch].tie_word_embeddings": Flip(False, part="trained"),
            "base_model[scratch].tokenizer": Flip("char", part="batches"),
            "base_model[scratch].vocab_size": Flip(
                260, given={"base_model": {"tokenizer": "bpe", "vocab_size": 300}}, part="batches"
            ),
        },
        long=True,
    ),
    Group(
        "processes",
        launching,
        FINETUNE
        | {
            "backend": {"type": "torchrun", "processes": 2},
            "data": FINETUNE["data"] | {"formatter": "programs_of_effects:Met"},
            "trainer": FINETUNE["trainer"] | {"max_steps": 1, "batch_size": 2, "skip_all_evaluation": True},
        },
        "processes",
        {
            "backend[torchrun].type": {"type": "local"},
            "backend[torchrun].processes": 1,
            "backend[torchrun].sharding": Flip("full", part="held"),
            "backend[torchrun].nodes": Flip(
                2, also={"backend": {"address": "localhost:PORT", "timeout_seconds": 2}}, part="refusal"
            ),
            "backend[torchrun].address": Flip("localhost:PORT", part="met"),
            "backend[torchrun].timeout_seconds": Flip(0.01, part="refusal"),  # less than loading the model takes
        },
        long=True,
    ),
]
