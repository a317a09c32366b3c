"""Tests of `partita export --to merged` and `partita merge`: plain models that answer as the run does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from partita import DataError, ExportError, Model, ModelError, PartitaError, WriteError
from partita.lm.huggingface import HuggingFaceModel
from partita.tokenizers.load import read_tokenizer

from ...classifiers import settings as head_settings
from ...encoder_decoders import save_encoder_decoder
from ...json_lines import write_json_lines
from ..conftest import Command
from .conftest import TEMPLATE, THINKS, chat_base, sentences, text_config, train_encoder, train_reward_model


def test_a_merged_adapter_answers_all_rows_as_the_run_does(lora_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = Model.load(lora_run, quiet=True)
    report = run.export("merged", tmp_path / "merged")
    assert (report.rows, report.rows_equal, report.prompts) == (32, 32, "32 rows of the test split")
    assert report.tokens_equal == report.tokens > 32
    assert report.compared
    assert report.passed
    assert report.dtype == "float32"
    assert json.loads((tmp_path / "merged" / "export.json").read_text()) == {
        **report.content(),
        "folder": ".",
        "notes": [],
        "reasons": [],
    }
    assert not any("adapter" in path.name for path in (tmp_path / "merged").iterdir())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    prompt = "Lily is at sea with a dog"
    ids = tokenizer(prompt, return_tensors="pt")
    answer = plain.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    [expected] = run.generate([prompt], max_new_tokens=8)
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == expected.strip()


def test_a_merged_folder_is_a_model_for_partita_as_well(lora_run: Path, tmp_path: Path) -> None:
    rows = sentences(6)
    expected = [row["say"] for row in Model.load(lora_run, quiet=True).predict(rows)]
    Model.load(lora_run, quiet=True).export("merged", tmp_path / "merged")
    assert [row["say"] for row in Model.load(tmp_path / "merged", quiet=True).predict(rows)] == expected
    assert str(lora_run.parent) not in json.loads((tmp_path / "merged" / "partita.json").read_text())["folder"]


@pytest.mark.parametrize("backend", [{"type": "torchrun", "processes": 2}, {"type": "ray", "workers": 2}])
def test_a_run_of_several_processes_is_merged_in_one_and_does_not_ask_for_more(
    lora_run: Path, tmp_path: Path, command: Command, backend: dict[str, Any]
) -> None:
    run, merged = tmp_path / "run", tmp_path / "merged"
    shutil.copytree(lora_run, run)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["backend"] = backend
    del manifest["checksum"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert command("merge", run, "--output", merged, "--quiet") == 0
    assert "backend" not in json.loads((merged / "partita.json").read_text())["config"]


def test_workers_that_hold_the_model_do_not_merge_it(lora_run: Path, tmp_path: Path) -> None:
    model = Model.load(lora_run, overrides=["backend.type=ray"], quiet=True)
    with pytest.raises(PartitaError) as caught:
        model.export("merged", tmp_path / "merged")
    assert str(caught.value) == (
        "backend: {type: ray} does not export: this process does not hold the model; remove backend, or add --set "
        "'backend={type: local}'"
    )


def test_the_command_prints_the_agreement(lora_run: Path, tmp_path: Path, command: Command, capsys: Any) -> None:
    assert command("merge", lora_run, "--output", tmp_path / "short", "--quiet") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{tmp_path / 'short'}: merged, float32"
    assert printed[1].startswith("answers: 32 of 32 rows equal, ")
    assert printed[1].endswith(" equal up to the first difference (32 rows of the test split)")
    named = ("export", lora_run, "--to", "merged", "-o", tmp_path / "long", "--quiet", "--json")
    assert command(*named) == 0
    assert json.loads(capsys.readouterr().out)["rows_equal"] == 32
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("short", "long"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_have_the_wanted_dtype_and_end_tokens_are_those_of_the_run(lora_run: Path, tmp_path: Path) -> None:
    run = Model.load(lora_run, quiet=True, overrides=["generation.stop_token_ids=[5]", "generation.stop=['<unk>']"])
    report = run.export("merged", tmp_path / "half", dtype="bfloat16", min_agreement=0)
    assert report.dtype == "bfloat16"
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    settings = json.loads((tmp_path / "half" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 2, 5], "<unk> is token 2"
    assert not settings.get("_from_model_config"), "transformers would read the end tokens of config.json"
    assert json.loads((tmp_path / "half" / "tokenizer_config.json").read_text())["eos_token"]


def test_special_tokens_of_the_checkpoint_s_stop_texts_end_answers_of_the_export(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HuggingFaceModel, "checkpoint_generation", {"stop_strings": ["<unk>", "."]})
    Model.load(lora_run, quiet=True).export("merged", tmp_path / "merged", min_agreement=0)
    settings = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 2], "<unk> is token 2"


def test_an_export_that_answers_otherwise_fails_and_names_the_token(
    lora_run: Path, tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def damage(model: Any, *arguments: Any, **named: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight.neg_()
        save(model, *arguments, **named)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", damage)
    assert command("merge", lora_run, "-o", tmp_path / "bad", "--quiet") == 1
    message = capsys.readouterr().err
    assert "% of the tokens equal those of the model, and --min-agreement is 90.0%; the first" in message
    assert "difference is row rows.jsonl:" in message
    assert ", token 1: " in message
    assert "or lower --min-agreement if the answers are good enough" in message
    report = json.loads((tmp_path / "bad" / "export.json").read_text())
    assert report["passed"] is False
    assert report["agreement"] < 0.9
    with pytest.raises(DataError, match="bad exists and is not an empty folder; name another folder for the export"):
        Model.load(lora_run, quiet=True).export("merged", tmp_path / "bad")


def test_a_chat_template_is_compared_byte_for_byte(lora_run: Path, tmp_path: Path) -> None:
    run = Model.load(lora_run, quiet=True)
    run._backend.pipeline().lm.tokenizer.chat_template = TEMPLATE
    report = run.export("merged", tmp_path / "same")
    assert report.template_equal is True
    assert report.lines()[-1] == "chat template: renders the same bytes"
    tokenizer: Any = type(run._backend.pipeline().lm.tokenizer)
    save = tokenizer.save_pretrained

    def lose_a_space(self: Any, folder: Path, *arguments: Any, **named: Any) -> Any:
        self.chat_template = TEMPLATE.replace("> {{", ">{{")
        try:
            return save(self, folder, *arguments, **named)
        finally:
            self.chat_template = TEMPLATE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", lose_a_space)
        with pytest.raises(ExportError, match="its chat template renders other text than that of the model; do not"):
            run.export("merged", tmp_path / "other")


def test_a_model_without_adapter_is_copied_and_the_report_says_so(tmp_path: Path) -> None:
    config = text_config(tmp_path, trainer={"type": "none"})
    report = Model(config, quiet=True).export("merged", tmp_path / "copy", dtype="bfloat16", min_agreement=0)
    assert report.notes == ("the model has no adapter and no quantization: the export is a copy in the chosen dtype",)
    assert {tensor.dtype for tensor in load_file(tmp_path / "copy" / "model.safetensors").values()} == {torch.bfloat16}


def test_prompts_are_the_rows_of_a_dataset_or_generic_ones(lora_run: Path, tmp_path: Path) -> None:
    run = Model.load(lora_run, quiet=True)
    write_json_lines(tmp_path / "other.jsonl", sentences(5))
    named = run.export("merged", tmp_path / "named", dataset=tmp_path / "other.jsonl")
    assert (named.prompts, named.rows, named.passed) == ("5 rows of other", 5, True)
    moved = Model.load(lora_run, quiet=True, overrides=["data.source=gone.jsonl"])
    generic = moved.export("merged", tmp_path / "generic")
    assert (generic.prompts, generic.rows, generic.rows_equal) == ("32 generic prompts", 32, 32)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        run.export("merged", tmp_path / "none", dataset="gone.jsonl")
    write_json_lines(tmp_path / "long.jsonl", [{"text": "Lily " * 99}])
    with pytest.raises(DataError, match="long has no row with a usable prompt"):
        run.export("merged", tmp_path / "none", dataset=tmp_path / "long.jsonl")


@pytest.mark.parametrize("kind", ["category", "number"])
def test_a_merged_head_has_the_same_outputs(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSequenceClassification

    from ...classifiers import make_rows

    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60, longest=12))
    config = head_settings("distilbert", kind, adapter={"type": "lora", "r": 2})
    config = config | {"trainer": config["trainer"] | {"max_steps": 2}}
    model = Model(config, quiet=True)
    model.train(run=tmp_path / "run")
    report = model.export("merged", tmp_path / "merged", dataset=make_rows(40, longest=12, seed=3))
    assert (report.rows, report.rows_equal, report.tokens) == (32, 32, 0)
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-5
    assert report.lines()[1].startswith("outputs: 32 of 32 rows equal, largest difference ")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert plain.config.num_labels == (3 if kind == "category" else 1)


def test_a_merged_reward_model_has_the_same_scores(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    report = train_reward_model(tmp_path).export("merged", tmp_path / "merged")
    assert report.prompts == f"{report.rows} rows of the test split"
    assert report.rows_equal == report.rows > 4
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-5
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").config.num_labels == 1


@pytest.mark.parametrize("kind", ["tags", "embedding"])
def test_a_merged_encoder_has_the_same_outputs_for_all_tokens(tmp_path: Path, kind: str) -> None:
    report = train_encoder(tmp_path, kind).export("merged", tmp_path / "merged")
    assert report.rows_equal == report.rows > 4
    assert report.largest_difference is not None
    assert report.largest_difference < 1e-5
    assert (tmp_path / "merged" / "modules.json").exists() == (kind == "embedding")


def test_a_merged_encoder_decoder_answers_the_same(tmp_path: Path) -> None:
    base = save_encoder_decoder(tmp_path / "base", "t5")
    config = text_config(tmp_path, base_model=str(base), adapter={"type": "lora", "r": 2})
    config = config | {"trainer": config["trainer"] | {"max_steps": 1}}
    model = Model(config, quiet=True)
    model.train(run=tmp_path / "run")
    report = model.export("merged", tmp_path / "merged")
    assert report.rows_equal == 32
    assert report.tokens_equal == report.tokens > 0


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    config = text_config(tmp_path, adapter={"type": "prompt_tuning", "num_virtual_tokens": 2})
    config = config | {"trainer": config["trainer"] | {"max_steps": 1}}
    virtual = Model(config, quiet=True)
    virtual.train(run=tmp_path / "run")
    with pytest.raises(
        ModelError,
        match="prompt_tuning learns virtual tokens, which are not weights and cannot be merged; use the adapter in the "
        "run's folder with peft",
    ):
        virtual.export("merged", tmp_path / "virtual")
    assert not (tmp_path / "virtual").exists()
    server = {
        "base_model": "m",
        "backend": {"type": "endpoint", "url": "http://127.0.0.1:9/v1"},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "say", "type": "text"}],
        "trainer": {"type": "none"},
    }
    with pytest.raises(PartitaError, match=r"nothing to export with backend: \{type: endpoint\}: the model is the ser"):
        Model(server, quiet=True).export("merged", tmp_path / "server")
    for name, value, advice in (
        ("dtype", "int8", "dtype is 'int8'; write one of auto, float32, bfloat16, float16"),
        ("to", "zip", "to is 'zip'; write one of merged, gguf, ollama, onnx"),
        ("gguf_type", "q9", "gguf_type is 'q9'; write one of f32, f16, bf16, q8_0"),
        ("gguf_type", "f16", r"gguf_type \(--quantize\) has no effect on merged; it is for gguf and ollama"),
        ("min_agreement", 2, "min_agreement is 2; write a number from 0 to 1"),
    ):
        with pytest.raises(PartitaError, match=advice):
            virtual.export(**{"to": "merged", "output": tmp_path / "x", name: value})
    with pytest.raises(PartitaError, match="dtype has no effect on onnx; it is for merged"):
        virtual.export("onnx", tmp_path / "x", dtype="bfloat16")


def test_weights_beyond_float16_are_refused(lora_run: Path, tmp_path: Path) -> None:
    run = Model.load(lora_run, quiet=True)
    with torch.no_grad():
        run._backend.pipeline().lm.base.get_input_embeddings().weight[3] = 1e6
    advice = "embed_tokens.weight has values that are not finite numbers in float16; write --dtype bfloat16 or float32"
    with pytest.raises(ModelError, match=advice):
        run.export("merged", tmp_path / "half", dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_cannot_be_loaded_stays_with_a_report_that_says_why(
    lora_run: Path, tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def damage(model: Any, folder: str, **named: Any) -> None:
        save(model, folder, **named)
        (Path(folder) / "config.json").write_text("{", encoding="utf8")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", damage)
    assert command("merge", lora_run, "-o", tmp_path / "bad", "--quiet") == 1
    reason = "its answers could not be compared: "
    assert f"bad is written, but {reason}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    report = json.loads((tmp_path / "bad" / "export.json").read_text())
    assert (report["compared"], report["passed"]) == (False, False)
    assert report["reasons"][-1].startswith(reason)
    assert "config.json" in report["reasons"][-1]
    assert (tmp_path / "bad" / "model.safetensors").exists()
    assert command("merge", lora_run, "-o", tmp_path / "any", "--quiet", "--min-agreement", 0) == 0
    assert reason in capsys.readouterr().out


def test_an_export_that_is_interrupted_leaves_nothing(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "merged"
    seen = list[str]()

    def interrupt(*_: Any) -> None:
        seen.extend(path.name for path in output.parent.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr("partita.export.merged.merged_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Model.load(lora_run, quiet=True).export("merged", output)
    assert len(seen) == 1
    assert seen[0].startswith("merged.partial-"), "the folder has its name only once it is complete"
    assert list(output.parent.iterdir()) == []


def test_the_working_directory_is_filled_if_it_is_empty(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Model.load(lora_run, quiet=True)
    monkeypatch.chdir(tmp_path)
    assert run.export("merged", ".").passed
    assert {"export.json", "model.safetensors", "partita.json"} <= {path.name for path in Path().iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    with pytest.raises(
        WriteError, match=r"the folder [^ ]*/merged cannot be created: Not a directory; name another one"
    ):
        run.export("merged", tmp_path / "export.json" / "merged")


@pytest.mark.long
def test_a_4_bit_base_is_merged_in_full_precision(lora_run: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    Model.load(lora_run, quiet=True).export("merged", base)
    config = text_config(tmp_path, base_model=str(base), adapter={"type": "lora", "r": 4}, quantization={"bits": 4})
    model = Model(config, quiet=True)
    model.train(run=tmp_path / "run")
    report = Model.load(tmp_path / "run", quiet=True).export("merged", tmp_path / "merged")
    assert report.rows_equal == 32
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in described
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    layer = weights["model.layers.0.mlp.gate_proj.weight"]
    assert len(layer.unique()) > layer.numel() / 2, "a re-quantised layer has few values"


def test_generation_settings_of_an_export_are_those_of_the_run(tmp_path: Path) -> None:
    base = chat_base(tmp_path / "base", TEMPLATE)
    # Sampling settings without do_sample: transformers refuses to save them.
    shipped = {"temperature": 0.9, "top_p": 0.6, "repetition_penalty": 1.1, "max_length": 50}
    (base / "generation_config.json").write_text(json.dumps(shipped), encoding="utf8")
    config = text_config(tmp_path, base_model=str(base), trainer={"type": "none"})

    def exported(name: str, **generation: Any) -> dict[str, Any]:
        model = Model(config | {"generation": {"max_new_tokens": 12, **generation}}, quiet=True)
        model.export("merged", tmp_path / name, min_agreement=0)
        return dict(json.loads((tmp_path / name / "generation_config.json").read_text(encoding="utf8")))

    settings = exported("greedy")
    assert (settings["do_sample"], settings["repetition_penalty"], settings["max_length"]) == (False, 1.1, 50)
    assert not {"temperature", "top_p"} & settings.keys()
    settings = exported("sampled", do_sample=True, temperature=0.3, repetition_penalty=1.0)
    assert (settings["do_sample"], settings["temperature"], settings["top_p"]) == (True, 0.3, 0.6)
    assert "repetition_penalty" not in settings


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False, "names": ["a", None], "note": "it's"}])
def test_an_exported_chat_template_renders_the_prompts_of_the_run(tmp_path: Path, arguments: dict[str, Any]) -> None:
    base = chat_base(tmp_path / "base", THINKS)
    prompt = {"chat_template_kwargs": arguments}
    model = Model(text_config(tmp_path, base_model=str(base), trainer={"type": "none"}, prompt=prompt), quiet=True)
    report = model.export("merged", tmp_path / "merged", min_agreement=0)
    assert report.template_equal is True
    assert report.notes[-1].startswith("the chat template sets enable_thinking: false")
    assert report.notes[-1].endswith(", as the run did; programs may pass other values as chat_template_kwargs")
    tokenizer = read_tokenizer(str(tmp_path / "merged"))

    def render(**values: Any) -> str:
        asked = [{"role": "user", "content": "hi"}]
        return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **values))

    assert render() == "<user> hi\n<assistant><think></think>"
    assert render(enable_thinking=True) == "<user> hi\n<assistant>"


def test_prompts_that_no_assignment_makes_are_named(tmp_path: Path) -> None:
    opens = THINKS.replace(
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}", "<think>\n"
    )
    base = chat_base(tmp_path / "base", opens.replace("<think></think>", ""))
    model = Model(text_config(tmp_path, base_model=str(base), trainer={"type": "none"}), quiet=True)
    report = model.export("merged", tmp_path / "merged", min_agreement=0)
    assert report.notes[-1] == (
        "prompts of the exported chat template end '\\n<assistant><think>\\n', and those of the run ' "
        '"true"?\\n<assistant>\'; write prompts like those of the run in the program that uses the export'
    )
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
