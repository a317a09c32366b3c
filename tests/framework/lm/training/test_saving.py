import json
from pathlib import Path

import pytest
import torch

from partita.lm.base import GenerationOptions
from partita_schema.errors import ModelError, ResumeError

from ....properties import ends

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
PISSA = {"type": "lora", "init": "pissa", "r": 4}


def test_a_fully_trained_model_resumes_bit_for_bit_and_is_a_plain_model(small, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = small.config()
    lm = small.load(config)
    small.take_steps(lm, steps=2)
    lm.save_checkpoint(tmp_path / "checkpoint")
    straight = small.take_steps(lm, steps=2, first=3)
    resumed = small.load(config)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert small.take_steps(resumed, steps=2, first=3) == straight
    lm.save(tmp_path / "model")
    read = small.load(config, saved=tmp_path / "model", trainable=False)
    assert read.fingerprint == lm.fingerprint
    library = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = small.batch().input_ids_BT
    with torch.no_grad():
        assert torch.equal(library(ids).logits, lm.base(ids).logits)


def test_a_checkpoint_restores_the_parameters_in_place(small, tmp_path: Path) -> None:
    lm = small.load(small.config(adapter={"type": "lora"}))
    held = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    lm.save_checkpoint(tmp_path)
    small.take_steps(lm, steps=1)
    lm.load_checkpoint(tmp_path)
    assert [id(p) for p in lm.module.parameters() if p.requires_grad] == [id(p) for p in held]
    assert not any(p.any() for n, p in lm.module.named_parameters() if "lora_B" in n)


def test_a_checkpoint_contains_only_trained_parameters(small, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    lm = small.load(small.config(adapter={"type": "lora"}))
    lm.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    assert all(".lora_" in name for name in load_file(tmp_path / "model.safetensors"))


def test_an_incomplete_or_unknown_checkpoint_is_refused(small, tmp_path: Path) -> None:
    lm = small.load(small.config(adapter={"type": "lora"}))
    lm.save_checkpoint(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ResumeError, match=r"model\.json: format 99 is not known here; update partita"):
        lm.load_checkpoint(tmp_path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(ResumeError, match=r"model\.json is missing; the checkpoint is not complete, remove "):
        lm.load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(small, tmp_path: Path) -> None:
    small.load(small.config(adapter={"type": "lora", "r": 4})).save_checkpoint(tmp_path / "four")
    small.load(small.config()).save_checkpoint(tmp_path / "full")
    lm = small.load(small.config(adapter={"type": "lora", "r": 8}))
    before = lm.fingerprint
    with pytest.raises(ResumeError, match=r"is \[4, 64\] torch\.float32 there and \[8, 64\] torch\.float32 here"):
        lm.load_checkpoint(tmp_path / "four")
    with pytest.raises(
        ResumeError, match=r"holds other parameters than this model trains: 28 \(.*missing, 20 \(.*not known"
    ):
        lm.load_checkpoint(tmp_path / "full")
    assert lm.fingerprint == before


def test_a_checkpoint_of_another_init_is_refused(small, tmp_path: Path) -> None:
    small.load(small.config(adapter=PISSA)).save_checkpoint(tmp_path)
    default = small.load(small.config(adapter=PISSA | {"init": "default"}))
    with pytest.raises(ResumeError, match=r"started from another adapter\.init; write the one that the run began with"):
        default.load_checkpoint(tmp_path)
    other_base = small.load(small.config(adapter=PISSA, seed=7))
    with pytest.raises(ResumeError, match=r"lora_A.*was initialised to other values than now"):
        other_base.load_checkpoint(tmp_path)


def test_a_run_whose_svd_has_other_signs_resumes_with_a_warning(
    small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small.config(adapter=PISSA)
    lm, resumed = small.load(config), small.load(config)
    small.take_steps(lm, steps=2)
    lm.save_checkpoint(tmp_path / "checkpoint")
    for name, first in resumed.initial_adapter_tensors.items():
        first.neg_()
        resumed.module.get_parameter(name).data.neg_()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert "initial values differ in the last digits; the run continues, but not bit for bit" in caplog.text
    resumed.save(tmp_path / "model")
    read = small.load(config, saved=tmp_path / "model", trainable=False)
    assert small.held_out_loss(read) == pytest.approx(small.held_out_loss(lm), abs=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_that_changed_base_weights_is_saved_for_the_original_base(small, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    small.load(small.config()).save(tmp_path / "base")
    lm = small.load(small.config(base_model=str(tmp_path / "base"), adapter=PISSA | {"use_rslora": True, "alpha": 6}))
    small.take_steps(lm, steps=3)
    lm.save(tmp_path / "model")
    assert not (tmp_path / "model" / "base").exists()
    settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (settings["r"], settings["init_lora_weights"]) == (8, True)
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    library = PeftModel.from_pretrained(base, tmp_path / "model")
    ids = small.batch().input_ids_BT
    with torch.no_grad():
        torch.testing.assert_close(library(input_ids=ids).logits, lm.module(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "adapter",
    ends(
        [
            {"type": "lora", "init": "gaussian"},
            {"type": "lora", "target_modules": ["q_proj", "lm_head"]},
            {"type": "lora", "modules_to_save": ["lm_head"]},
            PISSA,
            {"type": "adalora"},
            {"type": "ia3"},
            {"type": "vera", "r": 8},
            {"type": "loha"},
            {"type": "lokr"},
            {"type": "boft"},
            {"type": "oft"},
            {"type": "fourierft", "n_frequency": 50},
            {"type": "ln_tuning"},
            {"type": "vblora", "vector_length": 16},
        ]
    ),
    ids=lambda adapter: "-".join(str(value) for value in adapter.values()),
)
def test_a_merged_adapter_is_a_plain_model_that_answers_the_same(small, adapter: dict, tmp_path: Path) -> None:
    config = small.config(adapter=adapter | {"postprocessor": {"merge_adapter_into_base_model": True}})
    lm = small.load(config)
    lm.prepare_training(4)
    start = small.held_out_loss(lm)
    small.take_steps(lm, steps=3)
    learned, fingerprint = small.held_out_loss(lm), lm.fingerprint
    lm.save(tmp_path)
    assert (small.held_out_loss(lm), lm.fingerprint) == (learned, fingerprint)
    read = small.load(config, saved=tmp_path, trainable=False)
    assert read.adapted is None
    assert abs(small.held_out_loss(read) - learned) < 0.02 * abs(learned - start) + 2e-5


def test_adapters_of_all_weights_of_experts_are_merged(small, tmp_path: Path) -> None:
    adapter = {"type": "lora", "r": 4, "postprocessor": {"merge_adapter_into_base_model": True}}
    config = small.config(architecture="mixtral", adapter=adapter)
    lm = small.load(config)
    adapted = {name.split(".lora_")[0] for name, one in lm.module.named_parameters() if one.requires_grad}
    assert any(name.endswith("experts.base_layer") for name in adapted), "two weights of a layer have an adapter"
    with torch.no_grad():
        for parameter in lm.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.sign(torch.randn_like(parameter)))
    lm.save(tmp_path)
    read = small.load(config, saved=tmp_path, trainable=False)
    assert small.held_out_loss(read) == pytest.approx(small.held_out_loss(lm), abs=1e-4)


def test_a_saved_new_model_with_an_adapter_can_be_moved(small, tmp_path: Path) -> None:
    config = small.config(adapter={"type": "lora"})
    lm = small.load(config)
    small.take_steps(lm, steps=2)
    lm.save(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    read = small.load(config, saved=tmp_path / "there", trainable=False)
    requests = small.requests((3, 8), (7, 5))
    assert read.generate(requests, GREEDY, seed=0) == lm.generate(requests, GREEDY, seed=0)
    read.save(tmp_path / "copy")
    again = small.load(config, saved=tmp_path / "copy", trainable=False)
    assert again.fingerprint == read.fingerprint == lm.fingerprint


def test_a_folder_without_a_model_is_refused(small, tmp_path: Path) -> None:
    small.load(small.config()).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no model; name a folder that `save` wrote"):
        small.load(small.config(), saved=tmp_path, trainable=False)


def test_the_fingerprint_changes_with_anything_that_changes_outputs(small, base_folder: Path, tmp_path: Path) -> None:
    def found(**sections) -> str:
        none = {"base_model": str(base_folder), "trainer": {"type": "none"}}
        return small.load(small.config(**(none | sections)), trainable=False).fingerprint

    assert found() == found()
    assert found(generation={"max_new_tokens": 5}) == found()
    copy = tmp_path / "copy"
    small.load(small.config(base_model=str(base_folder))).save(copy)
    same = found(base_model=str(copy))
    other = small.load(small.config(base_model=str(base_folder)))
    with torch.no_grad():
        next(other.module.parameters())[5, 5] += 0.5
    other.save(tmp_path / "other")
    assert same != found(base_model=str(tmp_path / "other"))
    assert found() != found(model_parameters={"dtype": "bfloat16"})
    assert found() != found(model_parameters={"attention": "eager"})


def test_the_fingerprint_of_a_new_model_changes_with_its_seed_and_shape(small) -> None:
    none = {"trainer": {"type": "none"}}
    found = {
        small.load(small.config(**none, **sections), trainable=False).fingerprint
        for sections in ({}, {"seed": 1}, {"architecture": "gpt2"})
    }
    assert len(found) == 3


def test_training_changes_the_fingerprint(small) -> None:
    lm = small.load(small.config(adapter={"type": "lora"}))
    before = lm.fingerprint
    small.take_steps(lm, steps=1)
    assert lm.fingerprint != before
