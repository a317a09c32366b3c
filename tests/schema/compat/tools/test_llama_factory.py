"""Tests of the conversion of LLaMA-Factory's files: files like its examples, and their dataset_info.json."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.compat.tools.conversion import Report
from partita_schema.config import Config
from partita_schema.convert import convert_file
from partita_schema.errors import ConfigError
from partita_schema.sections.adapter import LoraAdapter, OftAdapter
from partita_schema.sections.backend import TorchrunBackendConfig
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import RandomSplit
from partita_schema.sections.objectives import DpoLoss, OrpoLoss, SimpoLoss
from partita_schema.sections.trainer import FinetuneTrainer, KtoTrainer, RewardTrainer

from ....properties import examples
from .conversions import converted, missing, refusal_of, set_values

INFO: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_demo": {
        "file_name": "alpaca_demo.json",
        "columns": {"prompt": "instruction", "query": "input", "response": "output"},
    },
    "glaive": {"file_name": "glaive.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "openai": {
        "hf_hub_url": "org/openai",
        "subset": "en",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "tools": "functions_of_it"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "qa": {"hf_hub_url": "org/qa", "columns": {"prompt": "question", "query": "context", "response": "answer"}},
    "wiki": {"file_name": "wiki.txt", "columns": {"prompt": "text"}},
    "c4": {"hf_hub_url": "org/c4", "split": "train", "columns": {"prompt": "body"}},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
    "talks": {
        "file_name": "talks.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "better", "rejected": "worse"},
    },
    "liked": {"file_name": "liked.json", "columns": {"prompt": "instruction", "kto_tag": "good"}},
    "photos": {"file_name": "photos.json", "formatting": "sharegpt", "columns": {"images": "images"}},
    "odd_keys": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "what"}},
    "odd_roles": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"user_tag": "patient"}},
    "folder": {"file_name": "parts"},
}

LORA = """\
model_name_or_path: org/base
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/base/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
HEAD = "model_name_or_path: org/base\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
FULL = HEAD.replace("lora", "full") + "dataset: identity\ntemplate: qwen\n"

FILES = {
    "lora": LORA,
    "full with zero 3": FULL
    + "deepspeed: examples/deepspeed/ds_z3_config.json\nper_device_train_batch_size: 1\nbf16: true\n",
    "qlora": HEAD
    + "quantization_bit: 4\nquantization_method: bnb\ndouble_quantization: false\nlora_target: q_proj,v_proj\n"
    "dataset: identity\nadditional_target: embed_tokens, lm_head\nuse_rslora: true\nuse_dora: true\n",
    "gptq": HEAD + "quantization_bit: 3\nquantization_method: gptq\ndataset: identity\n",
    "pissa": HEAD + "pissa_init: true\npissa_iter: 16\npissa_convert: true\ndataset: identity\nlora_rank: 16\n",
    "pissa with all steps": HEAD + "pissa_init: true\npissa_iter: -1\ndataset: identity\n",
    "lora+": HEAD + "loraplus_lr_ratio: 16.0\ndataset: identity\n",
    "oft": HEAD.replace("type: lora", "type: oft") + "oft_block_size: 32\noft_target: all\ndataset: identity\n",
    "pretraining": HEAD.replace("sft", "pt") + "dataset: wiki\npacking: true\ncutoff_len: 512\n",
    "streamed pretraining": HEAD.replace("sft", "pt")
    + "dataset: c4\nstreaming: true\nmax_steps: 500\nbuffer_size: 128\n",
    "mix with probabilities": FULL.replace("identity", "identity,alpaca_demo")
    + "mix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n",
    "neat packing": FULL + "packing: true\nneat_packing: true\nflash_attn: fa2\nval_size: 0.1\neval_strategy: steps\n",
    "sharegpt": FULL.replace("identity", "glaive") + "mask_history: true\ndefault_system: Be kind.\n"
    "enable_thinking: false\n",
    "openai messages": FULL.replace("identity", "openai") + "eval_dataset: openai\neval_strategy: epoch\n",
    "other columns": FULL.replace("identity", "qa") + "train_on_prompt: true\n",
    "dpo": HEAD.replace("sft", "dpo") + "dataset: pairs\npref_beta: 0.2\npref_loss: ipo\npref_ftx: 0.5\n"
    "ref_model: org/other\n",
    "smoothed dpo": HEAD.replace("sft", "dpo") + "dataset: talks\ndpo_label_smoothing: 0.1\n",
    "orpo": HEAD.replace("sft", "dpo") + "dataset: pairs\npref_loss: orpo\npref_ftx: 0.1\n",
    "simpo": HEAD.replace("sft", "dpo") + "dataset: pairs\npref_beta: 2.0\npref_loss: simpo\nsimpo_gamma: 0.8\n",
    "an unknown loss": HEAD.replace("sft", "dpo") + "dataset: mine\npref_loss: kto_pair\n",
    "kto": HEAD.replace("sft", "kto") + "dataset: liked\npref_beta: 0.2\nkto_chosen_weight: 2.0\npref_ftx: 0.1\n",
    "reward": HEAD.replace("sft", "rm") + "dataset: pairs\nlearning_rate: 1.0e-4\n",
    "galore": FULL + "use_galore: true\ngalore_layerwise: true\ngalore_rank: 128\npure_bf16: true\nflash_attn: sdpa\n",
    "badam": FULL + "use_badam: true\nbadam_mode: layer\nuse_adam_mini: true\n",
    "muon": FULL + "use_muon: true\noptim: adamw_torch\n",
    "kernels": FULL + "enable_liger_kernel: true\nuse_unsloth: true\nuse_unsloth_gc: true\nupcast_layernorm: true\n"
    "disable_gradient_checkpointing: true\nneftune_noise_alpha: 5\nshift_attn: false\n",
    "ray": LORA + "ray_run_name: x\nray_num_workers: 4\nresources_per_worker: {GPU: 1}\nplacement_strategy: PACK\n",
    "swanlab": FULL
    + "use_swanlab: true\nswanlab_run_name: x\nreport_to: [tensorboard]\nload_best_model_at_end: true\n",
    "predict": """\
model_name_or_path: org/base
adapter_name_or_path: org/adapter
stage: sft
do_predict: true
finetuning_type: lora
eval_dataset: identity
template: llama3
per_device_eval_batch_size: 1
predict_with_generate: true
max_new_tokens: 64
temperature: 0.7
top_p: 0.9
""",
    "chat": "model_name_or_path: org/base\ntemplate: llama3\ninfer_backend: huggingface\ntrust_remote_code: true\n",
    "server": "model_name_or_path: org/base\ntemplate: llama3\ninfer_backend: vllm\nvllm_enforce_eager: true\n",
    "undescribed": FULL.replace("dataset: identity", "dataset: mine") + "fp16: true\nwarmup_steps: 20\n",
    "quantization in training": LORA + "enable_qat: true\nqat_weight_dtype: int8\nfake_quant_after_n_steps: 100\n"
    "save_total_limit: 2\nuse_liger_kernel: true\nflash_attn: auto\n",
    "predict on two datasets": HEAD.replace("do_train", "do_predict")
    + "eval_dataset: identity,alpaca_demo\nadapter_name_or_path: saves/a\n"
    "predict_with_generate: true\nmax_samples: 50\n",
    "new tokens": FULL + "add_special_tokens: <a>,<b>\nresize_vocab: true\nnew_special_tokens_config: x.yaml\n",
}


TEMPLATE = (
    "the chat template of the model's tokenizer is used, and without one messages are joined without their roles; save "
    "this template with the tokenizer, or compare both with partita preview"
)
ENTRY_KEYS = ["file_name", "hf_hub_url", "formatting", "columns", "tags", "subset", "split", "ranking", "num_samples"]
DESCRIBED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a.json", "sharegpt", "alpaca", "", "role", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["prompt", "messages", "role_tag", "user_tag", "system", "images"]), inner)
    ),
    max_leaves=4,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "data"
    (data / "parts").mkdir(parents=True)
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    for entry in INFO.values():
        if "." in entry.get("file_name", ""):
            (data / entry["file_name"]).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(text: str, folder: Path) -> Config:
    return converted(text, "llama_factory", folder)[0]


def unneeded(report: Report) -> list[str]:
    return [f"{problem.path}: {problem.message}" for problem in report.unneeded]


def finetune(config: Config) -> FinetuneTrainer:
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_becomes_valid_and_each_of_its_keys_is_reported_once(text: str, folder: Path) -> None:
    converted(text, "llama_factory", folder)


def test_there_are_at_least_twenty_files() -> None:
    assert len(FILES) >= 20


def test_lora_keeps_adapter_data_and_training(folder: Path) -> None:
    config, report = converted(LORA, "llama_factory", folder)
    trainer = finetune(config)
    assert isinstance(config.adapter, LoraAdapter)
    assert (config.adapter.r, config.adapter.alpha, config.adapter.target_modules) == (8, 16, "all-linear")
    assert set_values(config)["data"]["mix"] == [{"source": "data/identity.json"}, {"source": "data/alpaca_demo.json"}]
    assert (config.data.stop, config.data.dialogue.format) == ("all_once", "alpaca")
    assert (trainer.batch_size, trainer.gradient_accumulation_steps, trainer.epochs) == (1, 8, 3)
    assert (trainer.learning_rate, trainer.learning_rate_scheduler.warmup_fraction) == (1e-4, 0.1)
    assert (trainer.steps_per_checkpoint, trainer.gradient_checkpointing) == (500, True)
    assert (config.preprocessing.sample_size, config.preprocessing.global_max_sequence_length) == (1000, 2048)
    assert config.trust_remote_code
    assert config.data.loader.workers == 4
    assert isinstance(config.split, RandomSplit)
    assert config.split.probabilities == (1, 0, 0)
    assert missing(report) == {"template": TEMPLATE}
    assert ("lora_alpha", "adapter.alpha", 16) in report.defaults
    assert report.unset == ["resume_from_checkpoint", "save_only_model"]


def test_a_number_of_rows_is_not_the_first_ones(folder: Path) -> None:
    first = "max_samples takes the first rows of a dataset, preprocessing.sample_size random ones"
    each = "max_samples counts the rows of each dataset, preprocessing.sample_size those of all together"
    for text, notes in ((LORA, [first, each]), (f"{FULL}max_samples: 10\n", [first]), (FULL, [])):
        found = converted(text, "llama_factory", folder)[1].notes
        assert [note for note in found if note.startswith("max_samples")] == notes


def test_quantization_and_options_of_lora_have_their_counterparts(folder: Path) -> None:
    config = config_of(FILES["qlora"], folder)
    assert config.quantization is not None
    assert (config.quantization.bits, config.quantization.bnb_4bit_use_double_quant) == (4, False)
    assert isinstance(config.adapter, LoraAdapter)
    assert config.adapter.target_modules == ("q_proj", "v_proj")
    assert config.adapter.modules_to_save == ("embed_tokens", "lm_head")
    assert config.adapter.use_rslora
    inits = [config_of(FILES[name], folder).adapter for name in ("pissa", "pissa with all steps")]
    assert [adapter.init for adapter in inits if isinstance(adapter, LoraAdapter)] == ["pissa_niter_16", "pissa"]
    assert isinstance(config_of(FILES["oft"], folder).adapter, OftAdapter)
    _, report = converted(FILES["gptq"], "llama_factory", folder)
    assert set(missing(report)) == {"quantization_bit", "quantization_method"}


@pytest.mark.parametrize(
    ("kind", "more", "dropped"),
    [
        (
            "oft",
            "oft_block_size: 16\nlora_rank: 8\nlora_alpha: 16\nlora_dropout: 0.1\nlora_target: all\nuse_dora: false\n",
            ["lora_alpha", "lora_dropout", "lora_rank", "lora_target"],
        ),
        (
            "lora",
            "lora_rank: 4\noft_rank: 2\noft_block_size: 16\noft_target: all\n",
            ["oft_block_size", "oft_rank", "oft_target"],
        ),
    ],
)
def test_options_of_another_kind_of_adapter_are_not_needed(
    kind: str, more: str, dropped: list[str], folder: Path
) -> None:
    text = FILES["oft"].replace("oft_block_size: 32\noft_target: all\n", more).replace("type: oft", f"type: {kind}")
    config, report = converted(text, "llama_factory", folder)
    reason = f"finetuning_type is {kind}"
    assert sorted(one for one in unneeded(report) if one.endswith(reason)) == [f"{key}: {reason}" for key in dropped]
    if kind == "oft":
        assert config.adapter == OftAdapter(type="oft", oft_block_size=16, target_modules="all-linear")
    else:
        assert config.adapter == LoraAdapter(type="lora", r=4, alpha=8, target_modules="all-linear")


def test_a_file_that_names_a_dataset_trains_an_adapter_without_do_train(folder: Path) -> None:
    written = HEAD.replace("do_train: true\n", "") + "dataset: identity\nlora_rank: 4\n"
    config = config_of(written, folder)
    assert isinstance(config.adapter, LoraAdapter)
    assert (config.trainer.type, config.adapter.r) == ("finetune", 4)
    config, report = converted("model_name_or_path: org/base\ndataset: identity\n", "llama_factory", folder)
    assert config.adapter == LoraAdapter(type="lora", r=8, alpha=16)
    assert ("finetuning_type", "adapter.type", "lora") in report.defaults
    assert config_of(f"{written}do_predict: true\n", folder).adapter is None


def test_pretraining_becomes_language_modelling_in_chunks(folder: Path) -> None:
    config = config_of(FILES["pretraining"], folder)
    assert config.plain_text
    assert config.data.batching == ChunkBatching(type="chunk", context_length=512)
    assert (config.data.source, config.output_features[0].name) == ("data/wiki.txt", "text")
    stream = config_of(FILES["streamed pretraining"], folder)
    assert set_values(stream)["data"]["source"] == {"type": "hub", "name": "org/c4", "streaming": True}
    assert stream.output_features[0].name == "body"


@pytest.mark.parametrize(
    ("keys", "joins"),
    [
        ("group_by_length: true\n", True),
        ("neat_packing: true\npacking: false\n", True),
        ("packing: false\n", False),
        ("packing: false\ngroup_by_length: true\n", False),
    ],
)
def test_pretraining_without_packing_has_a_row_for_each_document(keys: str, joins: bool, folder: Path) -> None:
    text = HEAD.replace("sft", "pt") + f"dataset: wiki\ncutoff_len: 512\n{keys}"
    config, report = converted(text, "llama_factory", folder)
    assert missing(report) == {}
    if joins:
        assert config.data.batching == ChunkBatching(type="chunk", context_length=512)
    else:
        assert config.data.batching.type == ("bucket" if "group_by_length" in keys else "auto")
        assert config.preprocessing.global_max_sequence_length == 512


def test_documents_have_no_chat_template(folder: Path) -> None:
    keys = "template: llama3\ndefault_system: Be kind.\nenable_thinking: false\ntool_format: qwen\n"
    config, report = converted(f"{FILES['pretraining']}{keys}", "llama_factory", folder)
    assert config.prompt.system is None
    assert missing(report) == {}
    assert {f"{key}: documents have no chat template" for key in ("template", "default_system", "tool_format")} <= {
        *unneeded(report)
    }


def test_several_streams_are_not_divided(folder: Path) -> None:
    text = HEAD.replace("sft", "pt") + "dataset: c4,c4\nstreaming: true\nmax_steps: 5\n"
    config, report = converted(f"{text}val_size: 100\n", "llama_factory", folder)
    assert config.data.split is None
    assert missing(report) == {"val_size": "a stream is not divided; write data.validation"}


def test_formats_of_datasets_follow_their_description(folder: Path) -> None:
    glaive = config_of(FILES["sharegpt"], folder)
    assert glaive.dialogue_input is not None
    assert (glaive.dialogue_input.name, glaive.data.dialogue.format) == ("conversations", "sharegpt")
    assert (glaive.data.dialogue.mode, glaive.prompt.system) == ("last_turn", "Be kind.")
    assert glaive.prompt.chat_template_kwargs == {"enable_thinking": False}
    openai, _ = converted(FILES["openai messages"].replace("eval_dataset: openai\n", ""), "llama_factory", folder)
    assert openai.data.dialogue.format == "messages"
    assert set_values(openai)["data"]["source"] == {"type": "hub", "name": "org/openai", "subset": "en"}
    assert openai.data.dialogue.columns == {"tools": "functions_of_it"}
    other = config_of(FILES["other columns"], folder)
    assert other.data.dialogue.format == "alpaca"
    assert other.data.dialogue.columns == {"instruction": "question", "input": "context", "output": "answer"}
    assert finetune(other).completion_only_loss is False
    assert config_of(FULL.replace("identity", "folder"), folder).data.source == "data/parts/*.json*"


def test_stages_of_preferences_become_their_trainers(folder: Path) -> None:
    found = {name: config_of(FILES[name], folder) for name in ("dpo", "smoothed dpo", "orpo", "simpo", "kto", "reward")}
    trainers = {name: config.trainer for name, config in found.items()}
    losses = {name: getattr(trainer, "loss", None) for name, trainer in trainers.items()}

    assert losses["dpo"] == DpoLoss(type="dpo", beta=0.2, variant="ipo", rpo_alpha=0.5)
    assert losses["smoothed dpo"] == DpoLoss(type="dpo", label_smoothing=0.1)
    assert losses["orpo"] == OrpoLoss(type="orpo", beta=0.1)
    assert losses["simpo"] == SimpoLoss(type="simpo", beta=2.0, gamma=0.8)
    assert isinstance(trainers["kto"], KtoTrainer)
    assert (trainers["kto"].beta, trainers["kto"].desirable_weight) == (0.2, 2.0)
    assert isinstance(trainers["reward"], RewardTrainer)
    assert found["dpo"].data.dialogue.format == "alpaca"
    assert [config.output_features[0].more_columns for config in found.values()] == [
        ("rejected",),
        ("worse",),
        ("rejected",),
        ("rejected",),
        ("good",),
        ("rejected",),
    ]
    assert found["smoothed dpo"].output_features[0].source_column == "better"
    assert found["smoothed dpo"].input_features[0].name == "conversations"


@pytest.mark.parametrize(
    ("stage", "data", "more", "dropout"),
    [
        ("dpo", "pairs", "", 0),
        ("dpo", "pairs", "pref_loss: orpo\n", 0),
        ("dpo", "pairs", "pref_loss: simpo\n", 0),
        ("kto", "liked", "", 0),
        ("rm", "pairs", "", 0.1),
        ("sft", "identity", "", 0.1),
    ],
)
def test_dropout_is_off_in_the_stages_that_switch_it_off(
    stage: str, data: str, more: str, dropout: float, folder: Path
) -> None:
    text = HEAD.replace("sft", stage) + f"dataset: {data}\nlora_dropout: 0.1\n{more}"
    config, report = converted(text, "llama_factory", folder)
    assert isinstance(config.adapter, LoraAdapter)
    assert config.adapter.dropout == dropout
    assert ("lora_dropout: dropout is off in training on preferences" in unneeded(report)) == (dropout == 0)
    assert (("disable_dropout: true", "adapter.dropout", 0) in report.defaults) == (dropout == 0)


def test_options_of_preferences_without_a_counterpart_are_listed(folder: Path) -> None:
    reference = "the reference is the model before training, with its adapter if one is loaded"

    assert missing(converted(FILES["dpo"], "llama_factory", folder)[1])["ref_model"] == reference
    ftx = "the loss of kto has no cross-entropy of the good answers next to it"
    assert missing(converted(FILES["kto"], "llama_factory", folder)[1])["pref_ftx"] == ftx
    ftx = "the loss of orpo has no further cross-entropy of the chosen answers next to it"
    assert missing(converted(FILES["orpo"], "llama_factory", folder)[1])["pref_ftx"] == ftx
    report = converted(f"{FILES['simpo']}pref_ftx: 0.1\n", "llama_factory", folder)[1]
    assert missing(report)["pref_ftx"] == ftx.replace("orpo", "simpo")
    for name in ("orpo", "kto"):
        _, report = converted(FILES[name].replace("pref_ftx: 0.1", "pref_ftx: 0.0"), "llama_factory", folder)
        assert "pref_ftx: it is 0" in unneeded(report)
    config, report = converted(FILES["an unknown loss"], "llama_factory", folder)
    assert missing(report)["pref_loss"] == "kto_pair is not offered; write a variant of trainer.loss"
    assert config.output_features[0].more_columns == ("rejected",)


def test_probabilities_become_weights(folder: Path) -> None:
    config = config_of(FILES["mix with probabilities"], folder)
    assert [part.weight for part in config.data.mix or ()] == [0.7, 0.3]
    assert config.data.stop == "all"


TWO = FULL.replace("identity", "identity,alpaca_demo")


@pytest.mark.parametrize(
    ("keys", "stop", "weights"),
    [
        ("", "all_once", [None, None]),
        ("mix_strategy: concat\n", "all_once", [None, None]),
        ("mix_strategy: interleave_once\n", "all_once", [1.0, 1.0]),
        ("mix_strategy: interleave_once\ninterleave_probs: 0.7,0.3\n", "all_once", [0.7, 0.3]),
        ("mix_strategy: interleave_under\n", "first", [None, None]),
    ],
)
def test_the_strategy_of_a_mix_decides_its_end_and_weights(
    folder: Path, keys: str, stop: str, weights: list[float | None]
) -> None:
    config, report = converted(TWO + keys, "llama_factory", folder)
    assert (config.data.stop, [part.weight for part in config.data.mix or ()]) == (stop, weights)
    assert "mix_strategy" not in missing(report)


def test_keys_of_a_mix_without_a_counterpart_are_listed(folder: Path) -> None:
    _, report = converted(TWO + "interleave_probs: 0.7,0.3\n", "llama_factory", folder)
    assert "interleave_probs: it is for datasets that are interleaved" in unneeded(report)
    config, report = converted(TWO + "mix_strategy: shuffle\n", "llama_factory", folder)
    assert missing(report)["mix_strategy"] == (
        "shuffle is none of concat, interleave_once, interleave_under, interleave_over; write data.stop and "
        "data.mix[].weight"
    )
    assert config.data.stop == "all_once"


def test_a_dataset_that_is_not_described_is_listed_and_the_rest_is_converted(folder: Path) -> None:
    config, report = converted(FILES["undescribed"], "llama_factory", folder)
    assert config.data.source is None
    assert missing(report) == {
        "dataset": "no dataset_info.json describes mine; write their files or Hub ids as data.source or data.mix",
        "template": TEMPLATE,
    }
    (folder / "data/dataset_info.json").write_text("{broken")
    _, report = converted(FULL, "llama_factory", folder)
    assert report.notes[0].startswith("data/dataset_info.json cannot be read (")


def test_the_description_is_found_above_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = folder / "examples/train"
    examples.mkdir(parents=True)
    monkeypatch.chdir(examples)
    assert config_of(FULL, examples).data.source == "../../data/identity.json"


def test_files_that_only_generate_keep_the_adapter_and_the_sampling(folder: Path) -> None:
    config = config_of(FILES["predict"], folder)
    assert config.trainer.type == "none"
    assert config.adapter is not None
    assert config.adapter.pretrained_adapter_weights == "org/adapter"
    generation = config.generation
    assert (generation.do_sample, generation.temperature, generation.top_p, generation.max_new_tokens) == (
        True,
        0.7,
        0.9,
        64,
    )
    _, report = converted(FILES["server"], "llama_factory", folder)
    assert set(missing(report)) == {"infer_backend", "template", "vllm_enforce_eager"}


def test_swanlab_is_added_to_the_other_trackers(folder: Path) -> None:
    assert config_of(FILES["swanlab"], folder).tracking == ("tensorboard", "swanlab")
    alone = FILES["swanlab"].replace("report_to: [tensorboard]\n", "")
    assert config_of(alone, folder).tracking == ("swanlab",)


def test_a_trained_adapter_keeps_its_rank_and_is_not_initialized(folder: Path) -> None:
    text = LORA + "adapter_name_or_path: org/adapter\npissa_init: true\npissa_iter: 4\n"
    config = config_of(text, folder)
    assert config.adapter is not None
    assert config.adapter.pretrained_adapter_weights == "org/adapter"
    assert not config.adapter.model_fields_set & {"r", "alpha", "init"}
    _, report = converted(text, "llama_factory", folder)
    unneeded = {problem.path: problem.message for problem in report.unneeded}
    assert {key: unneeded[key] for key in ("pissa_init", "pissa_iter", "lora_rank")} == dict.fromkeys(
        ("pissa_init", "pissa_iter", "lora_rank"), "a trained adapter is loaded"
    )


GENERATES = HEAD.replace("do_train", "do_predict") + "eval_dataset: identity\nadapter_name_or_path: org/adapter\n"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "",
            {"do_sample": True, "temperature": 0.95, "top_p": 0.7, "top_k": 50, "max_new_tokens": 1024},
        ),
        ("do_sample: false\ntemperature: 0.5\n", {"do_sample": False, "max_new_tokens": 1024}),
        (
            "do_sample: true\ntemperature: 0.5\nmax_length: 64\n",
            {"do_sample": True, "temperature": 0.5, "top_p": 0.7, "top_k": 50, "max_new_tokens": 1024},
        ),
        (
            "do_sample: false\nnum_beams: 4\nlength_penalty: 1.2\nmax_new_tokens: 8\n",
            {"do_sample": False, "num_beams": 4, "length_penalty": 1.2, "max_new_tokens": 8},
        ),
    ],
)
def test_files_that_generate_have_the_defaults_of_llama_factory(
    keys: str, expected: dict[str, object], folder: Path
) -> None:
    config, report = converted(f"{GENERATES}{keys}", "llama_factory", folder)
    assert config.generation.model_dump(exclude_unset=True) == {**expected, "repetition_penalty": 1.0}
    written = {path.removeprefix("generation."): value for _, path, value in report.defaults if "generation" in path}
    assert written == {
        key: value for key, value in {**expected, "repetition_penalty": 1.0}.items() if f"{key}:" not in keys
    }
    assert ("max_length: max_new_tokens decides, also with its default" in unneeded(report)) == ("max_length" in keys)


def test_files_that_only_train_have_the_options_of_generation_that_they_name(folder: Path) -> None:
    config = config_of(f"{LORA}do_sample: true\ntemperature: 0.5\n", folder)
    assert config.generation.model_dump(exclude_unset=True) == {"do_sample": True, "temperature": 0.5}
    assert config_of(LORA, folder).generation.model_fields_set == set()


def test_zero_3_shards_the_weights(folder: Path) -> None:
    assert config_of(FILES["full with zero 3"], folder).backend == TorchrunBackendConfig(
        type="torchrun", sharding="full"
    )


def test_optimizers_without_a_counterpart_are_listed(folder: Path) -> None:
    _, report = converted(FILES["galore"], "llama_factory", folder)
    assert set(missing(report)) == {"template", "use_galore", "galore_layerwise", "galore_rank"}
    assert finetune(config_of(FILES["muon"], folder)).optimizer.type == "muon"


@examples(100)
@given(entry=st.dictionaries(st.sampled_from(ENTRY_KEYS), DESCRIBED, max_size=5))
def test_any_description_of_a_dataset_is_converted_or_refused(entry: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data/dataset_info.json").write_text(json.dumps({"mine": entry}))
        (folder / "original.yaml").write_text(FULL.replace("identity", "mine") + f"dataset_dir: {folder}/data\n")
        with suppress(ConfigError):
            convert_file(folder / "original.yaml", "llama_factory", output=folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD.replace("sft", "ppo") + "dataset: identity\n",
            (
                "original.yaml:2:1: stage: PPO is not available yet, so there is nothing to convert; write stage: sft "
                "for supervised training on correct answers"
            ),
        ),
        *[
            (
                HEAD.replace("sft", stage) + "dataset: identity\n",
                (
                    f"original.yaml:5:1: dataset: stage: {stage} needs pairs of answers; name a dataset with ranking: "
                    "true"
                ),
            )
            for stage in ("dpo", "rm")
        ],
        (
            HEAD.replace("sft", "kto") + "dataset: identity\n",
            "original.yaml:5:1: dataset: stage: kto needs a column kto_tag; name a dataset with one",
        ),
        (
            FULL.replace("identity", "liked"),
            (
                "original.yaml:5:1: dataset: stage: sft learns from single answers without a label; write stage: kto, "
                "or name others"
            ),
        ),
        (
            "model_name_or_path: m\nadapter_name_or_path: a\nexport_dir: out\n",
            (
                "original.yaml:3:1: export_dir: the file exports a model and trains nothing; write "
                "adapter.postprocessor.merge_adapter_into_base_model: true in the configuration that trains, or use "
                "Model.save"
            ),
        ),
        (
            FULL.replace("full", "freeze"),
            (
                "original.yaml:4:1: finetuning_type: the layers to train are not chosen by number here; write "
                "finetuning_type: full, and trainer.layers_to_freeze_regex in the converted file"
            ),
        ),
        (
            FULL.replace("identity", "pairs"),
            (
                "original.yaml:5:1: dataset: stage: sft learns from single answers without a label; write stage: dpo, "
                "or name others"
            ),
        ),
        (
            FULL.replace("identity", "photos"),
            "original.yaml:5:1: dataset: photos in dataset_info.json has images, and only texts are read; name others",
        ),
        (
            FULL.replace("identity", "odd_keys"),
            (
                "original.yaml:5:1: dataset: odd_keys in dataset_info.json has messages with the keys who and what, "
                "which cannot be read; rename them to role and content, from and value, or speaker and text"
            ),
        ),
        (
            FULL.replace("identity", "odd_roles"),
            (
                "original.yaml:5:1: dataset: odd_roles in dataset_info.json has the user_tag patient, which is not "
                "known; rename it to human"
            ),
        ),
        (
            FULL.replace("identity", "identity,qa"),
            (
                "original.yaml:5:1: dataset: the datasets have rows of different columns (instruction, output; "
                "question, context, answer), and a configuration has one list of features; convert the file with one "
                "of them, or rename the columns of the others"
            ),
        ),
        (FULL + "learning_rate: fast\n", "original.yaml:7:16: trainer.learning_rate: "),
        (
            "base_model: b\nsequence_len: 5\n",
            "original.yaml: is no file of LLaMA-Factory: it has no model_name_or_path",
        ),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_at_its_line(text: str, message: str, folder: Path) -> None:
    assert refusal_of(text, "llama_factory", folder).startswith(message)
