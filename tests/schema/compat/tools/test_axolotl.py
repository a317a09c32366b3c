"""Tests of the conversion of axolotl's files: files in the spirit of its examples, and what becomes of their keys."""

from pathlib import Path

import pytest

from partita_schema.config import Config
from partita_schema.sections.adapter import LoraAdapter
from partita_schema.sections.backend import TorchrunBackendConfig
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import RandomSplit
from partita_schema.sections.trainer import FinetuneTrainer

from .conversions import converted, missing, refusal_of, set_values

HEAD = "base_model: org/base\ndatasets: [{path: org/rows, type: alpaca}]\n"
TAIL = "learning_rate: 2e-4\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"

FILES = {
    "full": """\
base_model: org/base-7b
model_type: LlamaForCausalLM
tokenizer_type: LlamaTokenizer
is_llama_derived_model: true
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: org/alpaca_2k
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./out
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
adapter:
lora_r:
lora_target_linear:
wandb_project:
wandb_entity:
gradient_accumulation_steps: 1
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
fp16: false
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
flash_attn_rms_norm: true
flash_attn_fuse_qkv: false
warmup_steps: 100
evals_per_epoch: 4
saves_per_epoch: 1
deepspeed:
weight_decay: 0.1
special_tokens: {bos_token: "<s>", eos_token: "</s>"}
""",
    "qlora": """\
base_model: org/base-4b-it
load_in_4bit: true
chat_template: gemma3
eot_tokens: [<end_of_turn>]
datasets:
  - path: org/orca
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
val_set_size: 0.01
unfrozen_parameters: ["^lm_head.*"]
adapter: qlora
sequence_len: 2048
lora_r: 32
lora_alpha: 16
lora_dropout: 0
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: paged_adamw_8bit
lr_scheduler: linear
learning_rate: 2e-4
bf16: true
warmup_ratio: 0.1
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
""",
    "lora in 8 bits": f"{HEAD}{TAIL}load_in_8bit: true\nadapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05\n"
    "lora_target_modules: [q_proj, v_proj]\nlora_modules_to_save: [embed_tokens, lm_head]\nlora_fan_in_fan_out:\n",
    "dora": f"{HEAD}{TAIL}adapter: lora\nlora_r: 8\nlora_alpha: 16\npeft_use_dora: true\n"
    "peft_init_lora_weights: pissa\nlora_target_linear: true\npeft_layers_to_transform: [0, 1]\n",
    "loftq": f"{HEAD}{TAIL}adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    "peft: {loftq_config: {loftq_bits: 4}}\n",
    "rslora from another adapter": f"{HEAD}{TAIL}adapter: lora\nlora_r: 8\npeft_use_rslora: true\n"
    "lora_model_dir: org/adapter\nlora_mlp_kernel: true\nlora_target_modules: '.*(q|v)_proj'\n",
    "chat": """\
base_model: org/base
chat_template: tokenizer_default
datasets:
  - path: org/chat
    type: chat_template
    split: train[:1%]
    roles_to_train: [assistant]
    train_on_eos: turn
learning_rate: 1e-5
max_steps: 200
save_steps: 50
eval_steps: 25
load_best_model_at_end: true
save_total_limit: 3
""",
    "tools and reasoning": "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n  - path: org/chat\n"
    "    type: chat_template\n    field_tools: tools\n    field_thinking: thoughts\n    split_thinking: true\n",
    "segments": "base_model: org/base\nlearning_rate: 1e-5\ndatasets: [{path: org/parts, type: input_output}]\n",
    "columns of a dialogue": "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n"
    "  - {path: org/a, type: chat_template, field_system: rules, field_tools: functions_of_it}\n",
    "sharegpt of old versions": "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n  - path: org/chat\n"
    "    type: sharegpt\n    conversation: chatml\n",
    "completion": "base_model: org/base\nlearning_rate: 1e-5\nsequence_len: 1024\nsample_packing: true\ndatasets:\n"
    "  - {path: org/books, type: completion, field: body}\n",
    "pretraining": "base_model: org/base\nlearning_rate: 1e-4\nmax_steps: 1000\npretraining_dataset:\n"
    "  - {path: org/web, name: en, type: pretrain, text_column: content, split: train}\nsequence_len: 2048\n"
    "pretrain_multipack_buffer_size: 10000\nval_set_size: 0.0\n",
    "pretraining by name": "base_model: org/base\nlearning_rate: 1e-4\nmax_steps: 1000\npretraining_dataset: org/web\n"
    "pretraining_sample_concatenation: true\n",
    "custom prompt": """\
base_model: org/base
learning_rate: 1e-5
datasets:
  - path: org/qa
    type:
      system_prompt: You answer questions.
      field_instruction: question
      field_input: context
      field_output: answer
      format: "Q: {instruction} {braces}\\nC: {input}\\nA:"
      no_input_format: "Q: {instruction}\\nA:"
""",
    "several datasets": "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n  - {path: org/a, type: alpaca}\n"
    "  - {path: org/b, type: alpaca, split: test}\nshuffle_merged_datasets: true\nval_set_size: 0.1\n",
    "chats in several columns": "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n"
    "  - {path: org/a, type: chat_template}\n  - {path: org/b, type: chat_template, field_messages: conversations}\n",
    "test datasets": "base_model: org/base\nlearning_rate: 1e-5\ndatasets: [{path: org/a, type: alpaca}]\n"
    "test_datasets:\n  - {path: org/a, type: alpaca, split: test}\n  - {path: org/b, type: alpaca}\n",
    "zero 3": f"{HEAD}{TAIL}deepspeed: deepspeed_configs/zero3_bf16.json\noptimizer: adamw_torch_fused\nbf16: true\n",
    "zero 2 with qlora": f"{HEAD}{TAIL}deepspeed: deepspeed_configs/zero2.json\nadapter: qlora\nload_in_4bit: true\n"
    "lora_r: 8\nlora_target_linear: true\n",
    "fsdp with qlora": f"{HEAD}{TAIL}adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_target_linear: true\n"
    "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n",
    "gptq": f"{HEAD}{TAIL}gptq: true\ngptq_disable_exllama: true\nadapter: lora\nlora_r: 8\n"
    "lora_target_modules: [k_proj]\n",
    "relora": f"{HEAD}{TAIL}adapter: lora\nlora_r: 8\nlora_target_linear: true\nrelora: true\nrelora_steps: 150\n",
    "liger": f"{HEAD}{TAIL}plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\nliger_rms_norm: true\n"
    "tokens: [<|im_start|>]\nseed: 7\nneftune_noise_alpha: 5\n",
    "trackers": f"{HEAD}{TAIL}wandb_project: demo\nwandb_name: one\nuse_mlflow: true\nmlflow_experiment_name: x\n",
    "other optimizer and schedule": f"{HEAD}{TAIL}optimizer: galore_adamw\nlr_scheduler: one_cycle\nlr_div_factor: 3\n"
    "adam_beta1: 0.8\nadam_beta2: 0.95\nadam_epsilon: 1e-6\nmax_grad_norm: 0.0\n",
    "batch size as a total": "base_model: org/base\nlearning_rate: 1e-5\nbatch_size: 64\nmicro_batch_size: 8\n"
    "datasets: [{path: org/rows, type: gpteacher}]\nearly_stopping_patience: 3\ngroup_by_length: true\n",
    "muon from random weights": """\
base_model: org/base
reinit_weights: true
pretraining_dataset: [{path: org/web, name: en, type: pretrain, split: train}]
sample_packing: true
max_steps: 305
micro_batch_size: 4
optimizer: muon
learning_rate: 0.02
lr_scheduler_kwargs:
train_on_inputs: true
evals_per_epoch: 0
evaluation_strategy:
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_version: 2}
""",
    "another loss": f"{HEAD}{TAIL}use_eaft: true\neaft_alpha: 1.0\nevaluation_strategy: 'no'\nval_set_size: 0\n"
    "attn_implementation: flash_attention_2\ncls_model_config: X\n",
    "modules by pattern": f"{HEAD}{TAIL}adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\nlora_r: 8\n"
    "lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'\nxformers_attention: true\n",
    "unknown keys": f"{HEAD}{TAIL}brand_new_option: 3\ndataset_exact_deduplication: true\n"
    "sequence_parallel_degree: 2\n",
}


def config_of(text: str, folder: Path) -> Config:
    return converted(text, "axolotl", folder)[0]


def finetune(config: Config) -> FinetuneTrainer:
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer


def lora(config: Config) -> LoraAdapter:
    assert isinstance(config.adapter, LoraAdapter)
    return config.adapter


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_becomes_valid_and_each_of_its_keys_is_reported_once(text: str, tmp_path: Path) -> None:
    converted(text, "axolotl", tmp_path)


def test_there_are_at_least_twenty_files() -> None:
    assert len(FILES) >= 20


def test_a_full_fine_tune_keeps_prompt_sizes_and_schedule(tmp_path: Path) -> None:
    config, report = converted(FILES["full"], "axolotl", tmp_path)
    trainer = finetune(config)
    assert config.adapter is None
    assert [(one.name, one.preprocessing.missing_value_strategy) for one in config.input_features] == [  # type: ignore[union-attr]
        ("instruction", "drop_row"),
        ("input", "fill_with_const"),
    ]
    assert config.output_features[0].name == "output"
    assert str(config.prompt.template).endswith(
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
    )
    assert config.prompt.chat is False
    assert (trainer.batch_size, trainer.gradient_accumulation_steps, trainer.epochs) == (1, 1, 1)
    assert (trainer.optimizer.type, trainer.optimizer.weight_decay) == ("adamw_8bit", 0.1)
    schedule = trainer.learning_rate_scheduler
    assert (schedule.decay, schedule.warmup_steps, schedule.min_ratio) == ("cosine", 100, 0)
    assert (trainer.evaluations_per_epoch, trainer.checkpoints_per_epoch) == (4, 1)
    assert (trainer.mixed_precision, trainer.gradient_checkpointing) == ("auto", True)
    assert (config.data.batching.type, config.preprocessing.global_max_sequence_length) == ("pack", 4096)
    assert isinstance(config.split, RandomSplit)
    assert config.split.probabilities == (0.95, 0.05, 0)
    assert config.model_parameters.attention == "sdpa"
    assert "packed rows are separated by sdpa attention, not by flash_attention_2" in report.notes
    assert list(missing(report)) == ["special_tokens"]
    assert {"adapter", "wandb_project", "load_in_8bit", "group_by_length"} <= set(report.unset)


def test_qlora_on_dialogues_keeps_the_adapter_the_quantization_and_the_column(tmp_path: Path) -> None:
    config, report = converted(FILES["qlora"], "axolotl", tmp_path)
    assert config.quantization is not None
    assert config.quantization.bits == 4
    adapter = lora(config)
    assert (adapter.r, adapter.alpha, adapter.dropout, adapter.target_modules) == (32, 16, 0, "all-linear")
    assert config.dialogue_input is not None
    assert (config.dialogue_input.name, config.data.dialogue.format) == ("conversations", "sharegpt")
    assert finetune(config).learning_rate_scheduler.warmup_fraction == 0.1
    assert set(missing(report)) == {"chat_template", "eot_tokens", "unfrozen_parameters"}
    assert ("num_epochs", "trainer.epochs", 1) in report.defaults


def test_options_of_lora_have_their_counterparts(tmp_path: Path) -> None:
    eight = config_of(FILES["lora in 8 bits"], tmp_path)
    assert eight.quantization is not None
    assert eight.quantization.bits == 8
    assert lora(eight).target_modules == ("q_proj", "v_proj")
    assert lora(eight).modules_to_save == ("embed_tokens", "lm_head")
    dora = lora(config_of(FILES["dora"], tmp_path))
    assert (dora.use_dora, dora.init, dora.layers_to_transform) == (True, "pissa", (0, 1))
    assert lora(config_of(FILES["loftq"], tmp_path)).init == "loftq"
    again = lora(config_of(FILES["rslora from another adapter"], tmp_path))
    assert (again.use_rslora, again.pretrained_adapter_weights, again.target_modules) == (
        True,
        "org/adapter",
        ".*(q|v)_proj",
    )


def test_documents_become_language_modelling_in_chunks(tmp_path: Path) -> None:
    completion = config_of(FILES["completion"], tmp_path)
    assert completion.plain_text
    assert completion.output_features[0].name == "body"
    assert completion.data.batching == ChunkBatching(type="chunk", context_length=1024, isolate_documents=True)
    assert completion.preprocessing.global_max_sequence_length is None
    stream = config_of(FILES["pretraining"], tmp_path)
    assert stream.data.streaming
    assert set_values(stream)["data"]["source"] == {"type": "hub", "name": "org/web", "subset": "en", "streaming": True}
    assert (stream.output_features[0].name, finetune(stream).max_steps) == ("content", 1000)
    joined = config_of(FILES["pretraining by name"], tmp_path)
    assert joined.data.batching == ChunkBatching(type="chunk", context_length=512)


LONG_DOCUMENTS = (
    "documents longer than sequence_len are cut, and counted in the ledger; axolotl makes several rows of them: to "
    "learn all of them, write data.batching: {type: chunk, context_length: ...}, which joins documents, instead of "
    "preprocessing.global_max_sequence_length"
)


@pytest.mark.parametrize(
    ("data", "keys", "isolated"),
    [
        ("datasets", "", None),
        ("datasets", "sample_packing: false\ngroup_by_length: true\n", None),
        ("datasets", "pretraining_sample_concatenation: true\n", None),
        ("datasets", "sample_packing: true\ngroup_by_length: true\n", True),
        ("datasets", "sample_packing: true\npretrain_multipack_attn: false\n", True),
        ("pretraining_dataset", "max_steps: 5\n", None),
        ("pretraining_dataset", "max_steps: 5\nsample_packing: true\n", True),
        ("pretraining_dataset", "max_steps: 5\nsample_packing: true\npretrain_multipack_attn: false\n", False),
        ("pretraining_dataset", "max_steps: 5\npretraining_sample_concatenation: true\n", False),
        (
            "pretraining_dataset",
            "max_steps: 5\nsample_packing: true\npretraining_sample_concatenation: true\n",
            True,
        ),
    ],
)
def test_documents_are_joined_only_where_axolotl_joins_them(
    data: str, keys: str, isolated: bool | None, tmp_path: Path
) -> None:
    """Where they are not joined, each is a row, so that an epoch has as many steps as in axolotl."""
    text = f"base_model: org/base\nsequence_len: 64\nlearning_rate: 1e-5\n{data}: [{{path: org/a, type: completion}}]\n"
    config, report = converted(f"{text}excess_length_strategy: drop\n{keys}", "axolotl", tmp_path)
    assert missing(report) == {}
    if isolated is None:
        assert config.data.batching.type == ("bucket" if "group_by_length" in keys else "auto")
        assert config.preprocessing.global_max_sequence_length == 64
    else:
        assert config.data.batching == ChunkBatching(type="chunk", context_length=64, isolate_documents=isolated)
    assert (LONG_DOCUMENTS in report.notes) == (data == "datasets" and isolated is None)


def test_a_custom_prompt_becomes_a_template_with_the_columns(tmp_path: Path) -> None:
    config, report = converted(FILES["custom prompt"], "axolotl", tmp_path)
    assert config.prompt.template == "Q: {question} {{braces}}\nC: {context}\nA:"
    assert config.prompt.system == "You answer questions."
    assert [one.name for one in (*config.input_features, *config.output_features)] == ["question", "context", "answer"]
    assert "no_input_format is not used; rows without an input have the prompt of format" in report.notes


def test_several_datasets_become_a_mix_in_which_each_row_occurs_once(tmp_path: Path) -> None:
    config = config_of(FILES["several datasets"], tmp_path)
    assert [part["source"] for part in set_values(config)["data"]["mix"]] == [
        "org/a",
        {"type": "hub", "name": "org/b", "split": "test"},
    ]
    assert config.data.stop == "all_once"
    streamed = "base_model: b\npretraining_dataset:\n- {path: org/a}\n- {path: org/b}\nmax_steps: 10\n"
    alternate = "the rows of the streams alternate until the shorter ones end"
    assert any(note.startswith(alternate) for note in converted(streamed, "axolotl", tmp_path)[1].notes)
    tested, report = converted(FILES["test datasets"], "axolotl", tmp_path)
    assert set_values(tested)["data"]["validation"] == {"type": "hub", "name": "org/a", "split": "test"}
    assert "only the first of test_datasets is used; join the others into one file" in report.notes


def test_chats_in_several_columns_are_read_by_one_input(tmp_path: Path) -> None:
    config = config_of(FILES["chats in several columns"], tmp_path)
    assert config.dialogue_input is not None
    assert (config.dialogue_input.name, config.data.dialogue.format) == ("messages", "auto")


def test_deepspeed_and_fsdp_become_processes_that_share_weights_where_that_is_possible(tmp_path: Path) -> None:
    three = config_of(FILES["zero 3"], tmp_path).backend
    assert three == TorchrunBackendConfig(type="torchrun", sharding="full")
    two, report = converted(FILES["zero 2 with qlora"], "axolotl", tmp_path)
    assert two.backend == TorchrunBackendConfig(type="torchrun")
    assert report.notes[-1] == "deepspeed is not used: each process holds the whole model (backend.sharding: none)"
    quantized, report = converted(FILES["fsdp with qlora"], "axolotl", tmp_path)
    assert quantized.backend == TorchrunBackendConfig(type="torchrun")
    assert report.notes[-1] == "weights are not sharded, because backend.sharding: full excludes quantization"


def test_what_has_no_counterpart_is_listed_with_its_line_and_what_to_do(tmp_path: Path) -> None:
    _, report = converted(FILES["gptq"], "axolotl", tmp_path)
    assert [str(problem).replace(f"{tmp_path}/", "") for problem in report.missing] == [
        (
            "original.yaml:6:1: gptq: weights are quantized by bitsandbytes; name the model before its quantization, "
            "and load_in_4bit"
        ),
        "original.yaml:7:1: gptq_disable_exllama: weights are quantized by bitsandbytes",
    ]
    _, report = converted(FILES["unknown keys"], "axolotl", tmp_path)
    assert missing(report)["brand_new_option"] == "the conversion does not know this key; look up what it does"
    _, report = converted(FILES["other optimizer and schedule"], "axolotl", tmp_path)
    assert missing(report)["optimizer"].startswith(
        "galore_adamw is not available, and adamw is used; others are adamw, "
    )
    assert missing(report)["lr_scheduler"].startswith("one_cycle is not available, and cosine is used")


@pytest.mark.parametrize(
    ("written", "others"),
    [
        ("[axolotl.integrations.liger.LigerPlugin]", None),
        ("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", None),
        ("[axolotl.integrations.spectrum.SpectrumPlugin]", "axolotl.integrations.spectrum.SpectrumPlugin"),
        (
            "[axolotl.integrations.kd.KDPlugin, axolotl.integrations.liger.LigerPlugin, mine.Other]",
            "axolotl.integrations.kd.KDPlugin, mine.Other",
        ),
    ],
)
def test_only_plugins_with_kernels_are_not_needed(written: str, others: str | None, tmp_path: Path) -> None:
    _, report = converted(f"{HEAD}{TAIL}plugins: {written}\n", "axolotl", tmp_path)
    reason = f"not used here: {others}; look up what each does to the training"
    assert missing(report) == ({"plugins": reason} if others else {})
    assert ("plugins" in [problem.path for problem in report.unneeded]) == (others is None)


@pytest.mark.parametrize(
    ("keys", "steps", "named"),
    [
        ("", None, True),
        ("max_steps: 3000\n", None, False),
        ("max_steps: 4000\n", 100, False),
        ("warmup_steps: 20\n", 20, False),
        ("warmup_ratio: 0.1\n", None, False),
        ("lr_scheduler: constant\n", 0, False),
    ],
)
def test_a_warmup_that_no_key_sets_has_at_most_100_steps(
    keys: str, steps: int | None, named: bool, tmp_path: Path
) -> None:
    config, report = converted(f"{HEAD}{TAIL}{keys}", "axolotl", tmp_path)
    assert finetune(config).learning_rate_scheduler.warmup_steps == steps
    note = (
        "without warmup_steps and warmup_ratio, axolotl's warmup has 3 % of the steps, but at most 100; here it has "
        "3 % also in runs of more than 3,333 steps: write trainer.learning_rate_scheduler.warmup_steps: 100 for them"
    )
    assert (note in report.notes) == named


def test_tools_and_reasoning_are_read_under_the_usual_names(tmp_path: Path) -> None:
    _, report = converted(FILES["tools and reasoning"], "axolotl", tmp_path)
    assert missing(report) == {
        "datasets[0].field_thinking": "thoughts is not read; rename it to reasoning_content",
        "datasets[0].split_thinking": "reasoning is a key of the message, reasoning_content; move it there",
    }


def test_segments_and_columns_with_other_names_are_read(tmp_path: Path) -> None:
    assert config_of(FILES["segments"], tmp_path).data.dialogue.format == "segments"
    columns = config_of(FILES["columns of a dialogue"], tmp_path).data.dialogue.columns
    assert columns == {"system": "rules", "tools": "functions_of_it"}


def test_the_options_of_the_optimizer_are_kept(tmp_path: Path) -> None:
    trainer = finetune(config_of(FILES["other optimizer and schedule"], tmp_path))
    assert (trainer.optimizer.betas, trainer.optimizer.eps) == ((0.8, 0.95), 1e-6)
    assert trainer.gradient_clipping.clipglobalnorm is None
    assert finetune(config_of(FILES["batch size as a total"], tmp_path)).early_stop == 3


@pytest.mark.parametrize(
    ("keys", "rows", "steps"),
    [
        ("micro_batch_size: 8\nbatch_size: 64\n", 8, 8),
        ("micro_batch_size: 8\nbatch_size: 20\n", 8, 2),
        ("batch_size: 4\n", 1, 4),
        ("micro_batch_size: 8\nbatch_size: 64\ngradient_accumulation_steps: 2\n", 8, 2),
        ("micro_batch_size: 8\nbatch_size: 64\nauto_find_batch_size: true\n", "auto", 8),
        ("micro_batch_size: 8\nbatch_size: 64\ndeepspeed: deepspeed_configs/zero1.json\n", 8, 8),
    ],
)
def test_the_batch_size_is_that_of_a_process(keys: str, rows: object, steps: int, tmp_path: Path) -> None:
    config, report = converted(f"{HEAD}{keys}", "axolotl", tmp_path)
    trainer = finetune(config)
    assert (trainer.batch_size, trainer.gradient_accumulation_steps) == (rows, steps)
    note = (
        "gradient_accumulation_steps is batch_size divided by micro_batch_size; versions of axolotl in which it is 1 "
        "by default do not read batch_size: write 1 for what they train"
    )
    assert (note in report.notes) == ("gradient_accumulation_steps" not in keys)
    assert "effective_batch_size" not in trainer.model_fields_set


def test_a_batch_size_below_that_of_a_micro_batch_is_an_error(tmp_path: Path) -> None:
    text = "base_model: org/base\nmicro_batch_size: 8\nbatch_size: 4\n"
    assert refusal_of(text, "axolotl", tmp_path).startswith(
        "original.yaml:3:13: trainer.gradient_accumulation_steps: write an integer of at least 1"
    )


@pytest.mark.parametrize(("written", "compiles"), [("auto", True), ("true", True), ("false", False)])
def test_torch_compile_may_be_auto(written: str, compiles: bool, tmp_path: Path) -> None:
    assert finetune(config_of(f"{HEAD}{TAIL}torch_compile: {written}\n", tmp_path)).compile is compiles


def test_trackers_with_a_project_are_kept_and_their_options_are_for_the_environment(tmp_path: Path) -> None:
    config, report = converted(FILES["trackers"], "axolotl", tmp_path)
    assert config.tracking == ("wandb", "mlflow")
    assert missing(report)["wandb_name"] == "set it in the environment, such as WANDB_PROJECT"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{HEAD}rl: dpo\n",
            (
                "original.yaml:2:29: datasets[0].type: rows of type alpaca are not known for rl: dpo; write a mapping "
                "with the names of their columns, field_prompt, field_chosen and field_rejected"
            ),
        ),
        (
            f"{HEAD}rl: kto\n",
            (
                "original.yaml:2:29: datasets[0].type: rows of type alpaca are not known for rl: kto; write a mapping "
                "with the names of their columns, field_prompt, field_completion and field_label"
            ),
        ),
        (
            f"{HEAD}rl: grpo\n",
            (
                "original.yaml:3:1: rl: grpo is not available; others are dpo, ipo, orpo, simpo, kto, or remove the "
                "key and name datasets with correct answers"
            ),
        ),
        (
            f"{HEAD}reward_model: true\n",
            (
                "original.yaml:3:1: reward_model: training of reward models is not converted; write trainer: "
                "{type: reward} by hand, or remove the key"
            ),
        ),
        (
            "base_model: b\ndatasets: [{path: a, ds_type: json, type: }]\n",
            (
                "original.yaml:2:13: datasets[0].path: the dataset has no type, so it holds tokens, and rows are texts "
                "here; convert it to texts first"
            ),
        ),
        (
            "base_model: b\ndatasets:\n- {path: a, type: chat_template, message_field_role: who}\n",
            (
                "original.yaml:3:34: datasets[0].message_field_role: messages with the keys who and None cannot be "
                "read; rename them to role and content, from and value, or speaker and text"
            ),
        ),
        (
            "base_model: b\ndatasets:\n- {path: a, type: alpaca}\n- {path: b, type: completion}\n",
            (
                "original.yaml:2:1: datasets: the datasets have rows of different kinds (prompt, document), and a "
                "configuration has one list of features; convert the file with one of them, or bring the rows into one "
                "format"
            ),
        ),
        (
            "base_model: b\ndatasets:\n- {path: a, type: completion}\n- {path: b, type: completion, field: body}\n",
            (
                "original.yaml:2:1: datasets: the datasets have rows of different columns (text; body), and a "
                "configuration has one list of features; convert the file with one of them, or rename the columns of "
                "the others"
            ),
        ),
        (f"{HEAD}learning_rate: fast\n", "original.yaml:3:16: trainer.learning_rate: "),
        (f"{HEAD}lora_r: 0\nadapter: lora\n", "original.yaml:3:9: adapter.r: write an integer of at least 1; got 0"),
        (
            "model_name_or_path: m\nstage: sft\n",
            "original.yaml: is no file of axolotl: it has no base_model; it looks like a file for --from llama_factory",
        ),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_at_its_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal_of(text, "axolotl", tmp_path).startswith(message)


def test_local_files_are_found_from_the_folder_of_the_converted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "base_model: org/base\nlearning_rate: 1e-5\ndatasets:\n- {path: rows.jsonl, ds_type: json, type: alpaca}\n"
    assert config_of(text, tmp_path / "sub").data.source == "../rows.jsonl"
    files = text.replace("path: rows.jsonl, ds_type: json", "path: json, data_files: [rows.jsonl]")
    assert config_of(files, tmp_path).data.source == "rows.jsonl"


@pytest.mark.parametrize("keys", ["peft_init_lora_weights: pissa\n", "peft: {loftq_config: {loftq_bits: 4}}\n"])
def test_a_trained_adapter_is_not_initialized(tmp_path: Path, keys: str) -> None:
    text = f"{HEAD}{TAIL}adapter: lora\nlora_target_linear: true\nlora_model_dir: org/adapter\n{keys}"
    assert lora(config_of(text, tmp_path)).init == "default"
    _, report = converted(text, "axolotl", tmp_path)
    unneeded = {problem.path: problem.message for problem in report.unneeded}
    assert unneeded[keys.partition(":")[0]] == "a trained adapter is loaded"


def test_the_folder_of_an_adapter_is_found_from_that_of_the_converted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for written, expected in (("./trained", "../trained"), ("org/adapter", "org/adapter")):
        text = f"{HEAD}{TAIL}adapter: lora\nlora_target_linear: true\nlora_model_dir: {written}\n"
        adapter = config_of(text, tmp_path / "sub").adapter
        assert adapter is not None
        assert adapter.pretrained_adapter_weights == expected
