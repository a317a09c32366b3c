"""Tests of the conversion of TRL's files for `trl sft`: files in the spirit of its examples."""

import json
from pathlib import Path

import pytest

from partita_schema.config import Config
from partita_schema.sections.adapter import LoraAdapter
from partita_schema.sections.backend import TorchrunBackendConfig
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import RandomSplit
from partita_schema.sections.trainer import FinetuneTrainer

from .conversions import converted, missing, refusal_of, set_values

HEAD = "model_name_or_path: org/base\ndataset_name: org/rows\n"

FILES = {
    "smallest": "model_name_or_path:\n  org/base\ndataset_name:\n  org/rows\nreport_to:\n  none\n"
    "learning_rate:\n  0.0001\nlr_scheduler_type:\n  cosine\n",
    "full": HEAD + "learning_rate: 2.0e-5\nnum_train_epochs: 1\npacking: true\nper_device_train_batch_size: 2\n"
    "gradient_accumulation_steps: 8\ngradient_checkpointing: true\neos_token: '<|im_end|>'\neval_strategy: steps\n"
    "eval_steps: 100\noutput_dir: out\npush_to_hub: true\n",
    "lora": HEAD + "learning_rate: 2.0e-4\nuse_peft: true\nlora_r: 32\nlora_alpha: 16\nlora_task_type: CAUSAL_LM\n"
    "assistant_only_loss: true\n",
    "lora with modules": HEAD
    + "use_peft: true\nlora_target_modules: [q_proj, k_proj]\nlora_modules_to_save: [lm_head]\n"
    "use_rslora: true\nuse_dora: true\nlora_dropout: 0\n",
    "all linear layers": HEAD + "use_peft: true\nlora_target_modules: all-linear\n",
    "qlora": HEAD + "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\nuse_bnb_nested_quant: true\n"
    "bnb_4bit_quant_storage: uint8\n",
    "8 bits": HEAD + "use_peft: true\nload_in_8bit: true\noptim: paged_adamw_8bit\n",
    "plain text": HEAD + "dataset_text_field: body\nmax_length: 512\npacking: true\n",
    "wrapped text": HEAD + "dataset_text_field: body\npacking: true\npacking_strategy: wrapped\nmax_seq_length: 256\n",
    "packed rows": HEAD + "packing: true\npacking_strategy: bfd\neval_packing: false\npadding_free: true\n",
    "wrapped rows": HEAD + "packing: true\npacking_strategy: wrapped\n",
    "completions": HEAD + "completion_only_loss: true\ndataset_config: en\ndataset_train_split: train_sft\n"
    "dataset_test_split: test_sft\neval_strategy: epoch\n",
    "stream": HEAD + "dataset_streaming: true\nmax_steps: 100\n",
    "two datasets": "model_name_or_path: org/base\ndatasets:\n  - {path: org/a, split: train}\n"
    "  - {path: org/b, name: en, columns: [messages]}\ntest_split_size: 0.1\n",
    "files": "model_name_or_path: org/base\ndatasets:\n  - path: json\n    data_files: rows.jsonl\n",
    "attention": HEAD + "attn_implementation: flash_attention_2\ndtype: bfloat16\nmodel_revision: main\nbf16: true\n"
    "tf32: true\nuse_liger_kernel: true\n",
    "hub kernels": HEAD + "attn_implementation: kernels-community/flash-attn\ntorch_dtype: auto\nmodel_revision: v2\n",
    "old flash attention": HEAD + "use_flash_attention_2: true\nmodel_init_kwargs: {use_cache: false}\n",
    "environment": HEAD + "env: {CUDA_VISIBLE_DEVICES: 0}\naccelerate_config: zero3\nnum_processes: 4\n",
    "zero 3": HEAD + "deepspeed: zero3.json\noptim: adamw_torch\nper_device_train_batch_size: 1\n",
    "fsdp": HEAD + "fsdp: full_shard auto_wrap\nfsdp_config: {limit_all_gathers: true}\nfp16: true\n",
    "dynamic fine-tuning": HEAD + "loss_type: dft\nactivation_offloading: true\nchat_template_path: org/template\n",
    "schedule": HEAD + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    "warmup_ratio: 0.03\nweight_decay: 0.01\nadam_beta2: 0.95\nmax_grad_norm: 0.2\nseed: 3\n",
    "restarts": HEAD + "lr_scheduler_type: cosine_with_restarts\nwarmup_steps: 10\nsave_strategy: epoch\n"
    "save_total_limit: 1\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n",
    "cut at the front": HEAD + "truncation_mode: keep_end\ntrain_from: x\nreport_to: [wandb, tensorboard]\n",
    "old names": HEAD + "train_split: train\nmax_train_samples: 100\nevaluation_strategy: steps\neval_steps: 500\n"
    "save_strategy: steps\ngreater_is_better: false\nremove_unused_columns: false\nper_device_eval_batch_size: 4\n",
    "no evaluation": HEAD
    + "eval_strategy: 'no'\nsave_strategy: 'no'\nlogging_first_step: true\nneftune_noise_alpha: 5\n",
}


def config_of(text: str, folder: Path) -> Config:
    return converted(text, "trl", folder)[0]


def finetune(config: Config) -> FinetuneTrainer:
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_becomes_valid_and_each_of_its_keys_is_reported_once(text: str, tmp_path: Path) -> None:
    converted(text, "trl", tmp_path)


def test_there_are_at_least_twenty_files() -> None:
    assert len(FILES) >= 20


def test_the_defaults_of_trl_are_written_out(tmp_path: Path) -> None:
    config, report = converted(FILES["smallest"], "trl", tmp_path)
    trainer = finetune(config)
    assert (trainer.learning_rate, trainer.batch_size, trainer.epochs, trainer.gradient_accumulation_steps) == (
        1e-4,
        8,
        3,
        1,
    )
    schedule = trainer.learning_rate_scheduler
    assert (schedule.decay, schedule.warmup_steps, schedule.min_ratio) == ("cosine", 0, 0)
    assert (trainer.gradient_checkpointing, trainer.completion_only_loss, trainer.restore_best) == (True, False, False)
    assert config.preprocessing.global_max_sequence_length == 1024
    assert isinstance(config.split, RandomSplit)
    assert config.split.probabilities == (1, 0, 0)
    assert config.tracking == ()
    assert ("max_length", "preprocessing.global_max_sequence_length", 1024) in report.defaults
    assert report.notes[0].startswith("the columns of the dataset are unknown: ")


def test_lora_has_the_defaults_of_trl(tmp_path: Path) -> None:
    config, report = converted(FILES["lora"], "trl", tmp_path)
    assert isinstance(config.adapter, LoraAdapter)
    assert (config.adapter.r, config.adapter.alpha, config.adapter.dropout) == (32, 16, 0.05)
    assert finetune(config).completion_only_loss is True
    assert any("peft chooses" in note for note in report.notes)
    modules = config_of(FILES["lora with modules"], tmp_path).adapter
    assert isinstance(modules, LoraAdapter)
    assert (modules.target_modules, modules.modules_to_save) == (("q_proj", "k_proj"), ("lm_head",))
    assert (modules.use_rslora, modules.use_dora, modules.dropout) == (True, True, 0)
    linear = config_of(FILES["all linear layers"], tmp_path).adapter
    assert isinstance(linear, LoraAdapter)
    assert linear.target_modules == "all-linear"


def test_quantization_is_kept(tmp_path: Path) -> None:
    four = config_of(FILES["qlora"], tmp_path).quantization
    assert four is not None
    assert (four.bits, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (4, "fp4", True)
    eight = config_of(FILES["8 bits"], tmp_path)
    assert eight.quantization is not None
    assert (eight.quantization.bits, finetune(eight).optimizer.type) == (8, "paged_adamw_8bit")


def test_text_becomes_language_modelling_and_packing_joins_documents(tmp_path: Path) -> None:
    text = config_of(FILES["plain text"], tmp_path)
    assert text.plain_text
    assert text.output_features[0].name == "body"
    assert text.data.batching == ChunkBatching(type="chunk", context_length=512, isolate_documents=True)
    wrapped = config_of(FILES["wrapped text"], tmp_path)
    assert wrapped.data.batching == ChunkBatching(type="chunk", context_length=256)
    assert config_of(FILES["packed rows"], tmp_path).data.batching.type == "pack"
    _, report = converted(FILES["wrapped rows"], "trl", tmp_path)
    assert missing(report) == {"packing_strategy": "rows are packed whole; a row is not cut between two sequences"}


def test_splits_of_the_hub_are_kept(tmp_path: Path) -> None:
    config = config_of(FILES["completions"], tmp_path)
    data = set_values(config)["data"]
    assert data["source"] == {"type": "hub", "name": "org/rows", "subset": "en", "split": "train_sft"}
    assert data["validation"] == {"type": "hub", "name": "org/rows", "subset": "en", "split": "test_sft"}
    assert config.data.dialogue.format == "prompt_completion"
    stream = config_of(FILES["stream"], tmp_path)
    assert stream.data.streaming
    assert stream.data.split is None
    two = config_of(FILES["two datasets"], tmp_path)
    assert [part["source"] for part in set_values(two)["data"]["mix"]] == [
        "org/a",
        {"type": "hub", "name": "org/b", "subset": "en"},
    ]
    assert isinstance(two.split, RandomSplit)
    assert two.split.probabilities == (0.9, 0.1, 0)


def test_several_streams_are_not_divided(tmp_path: Path) -> None:
    text = "model_name_or_path: org/base\ndatasets: [{path: org/a}, {path: org/b}]\nstreaming: true\nmax_steps: 5\n"
    config, report = converted(f"{text}test_split_size: 0.1\n", "trl", tmp_path)
    assert config.data.split is None
    assert "test_split_size: a stream is not divided" in [f"{one.path}: {one.message}" for one in report.unneeded]


@pytest.mark.parametrize(
    ("row", "inputs", "form"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ["messages"], "auto"),
        ({"prompt": "a", "completion": "b"}, ["prompt"], "auto"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            ["messages"],
            "prompt_completion",
        ),
        ({"text": "a"}, [], "auto"),
    ],
)
def test_columns_of_a_local_file_decide_as_they_do_in_trl(
    row: dict[str, object], inputs: list[str], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config, report = converted(FILES["files"], "trl", tmp_path)
    assert [one.name for one in config.input_features] == inputs
    assert config.data.dialogue.format == form
    assert config.data.source == {"type": "jsonl", "path": "rows.jsonl"} or set_values(config)["data"]["source"]
    assert not any("unknown" in note for note in report.notes)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_prompts_and_completions_that_are_texts_get_no_chat_template(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    config, report = converted(f"model_name_or_path: org/base\ndataset_name: {name}\n", "trl", tmp_path)
    assert config.prompt.chat is False
    assert [one.name for one in (*config.input_features, *config.output_features)] == ["prompt", "completion"]
    assert finetune(config).completion_only_loss is True
    assert not [note for note in report.notes if "columns" in note or "dialogue" in note]


def test_texts_in_a_dataset_that_is_not_read_are_named(tmp_path: Path) -> None:
    head = "model_name_or_path: org/base\ndataset_name: org/rows\n"
    instead = "for texts without a chat template write text inputs and prompt.chat: false"
    assert converted(f"{head}completion_only_loss: true\n", "trl", tmp_path)[1].notes[0] == (
        f"the columns of the dataset are unknown: prompts and completions become messages; {instead}"
    )
    assert converted(head, "trl", tmp_path)[1].notes[0] == (
        "the columns of the dataset are unknown: the file is for dialogues, or prompts with completions, which become "
        f"messages; {instead}, and for a column of plain text write dataset_text_field into the original and convert "
        "it again"
    )


def test_processes_and_shards_are_kept_where_that_is_possible(tmp_path: Path) -> None:
    config, report = converted(FILES["environment"], "trl", tmp_path)
    assert config.backend == TorchrunBackendConfig(type="torchrun", processes=4)
    assert set(missing(report)) == {"env", "accelerate_config"}
    assert config_of(FILES["zero 3"], tmp_path).backend == TorchrunBackendConfig(type="torchrun", sharding="full")
    _, report = converted(FILES["fsdp"], "trl", tmp_path)
    assert report.notes[-1] == "weights are not sharded, because backend.sharding: full excludes fp16"


def test_what_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    _, report = converted(FILES["dynamic fine-tuning"], "trl", tmp_path)
    assert set(missing(report)) == {"loss_type", "activation_offloading", "chat_template_path"}
    _, report = converted(FILES["cut at the front"], "trl", tmp_path)
    assert set(missing(report)) == {"truncation_mode", "train_from"}
    _, report = converted(FILES["hub kernels"], "trl", tmp_path)
    assert missing(report) == {"attn_implementation": "write model_parameters.attention"}


def test_schedule_and_intervals_are_kept(tmp_path: Path) -> None:
    trainer = finetune(config_of(FILES["schedule"], tmp_path))
    assert (trainer.learning_rate_scheduler.decay, trainer.learning_rate_scheduler.min_ratio) == ("cosine", 0.1)
    assert (trainer.optimizer.betas, trainer.gradient_clipping.clipglobalnorm) == ((0.9, 0.95), 0.2)
    never = finetune(config_of(FILES["no evaluation"], tmp_path))
    assert (never.skip_all_evaluation, never.checkpoints_per_epoch, never.minutes_per_checkpoint) == (True, 0, None)


@pytest.mark.parametrize("key", ["loss_type: dapo", "num_generations: 8", "center_rewards_coefficient: 0.1"])
def test_files_of_other_trainers_are_refused(key: str, tmp_path: Path) -> None:
    assert refusal_of(f"{HEAD}{key}\nbeta: 0.1\n", "trl", tmp_path) == (
        f"original.yaml:3:1: {key.partition(':')[0]}: this key is of a trainer that is not converted (trl grpo, "
        "reward, ...); files of trl sft, dpo and kto are, and those of ORPO and SimPO"
    )


def test_a_wrong_value_is_reported_at_its_line_with_the_key_of_the_file(tmp_path: Path) -> None:
    assert refusal_of(f"{HEAD}use_peft: true\nlora_r: many\n", "trl", tmp_path) == (
        "original.yaml:4:9: adapter.r: write an integer of at least 1; got many (written as lora_r)"
    )
