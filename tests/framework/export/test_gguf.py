"""Tests of `partita export --to gguf` and `ollama`: what llama.cpp answers with the file, and the Modelfile."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import ExportError, Model, ModelError, PartitaError
from partita.export.gguf import complete_config
from partita.export.go_template import find_message_texts
from partita.export.templates import DIALOGUES
from partita.tokenizers.vocabulary_file import copy_vocabulary

from ...classifiers import make_rows
from ...classifiers import settings as head_settings
from ...json_lines import write_json_lines
from ..conftest import Command
from .conftest import TEMPLATE, THINKS, chat_base, copy_converter, sentences, text_config

STORIES = Path(__file__).parents[4] / "shared" / "models" / "stories260k"
needs_llama_cpp = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("gguf", "sentencepiece", "xllamacpp"))
    or not Path(os.environ.get("PARTITA_LLAMA_CPP", ""), "convert_hf_to_gguf.py").is_file(),
    reason="needs pip install 'partita[gguf]' and a checkout of llama.cpp in PARTITA_LLAMA_CPP, as of `make test-long`",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_3_DATE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{{ system }}<|eot_id|>"
    "{% for m in rest %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)
FOLDED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}"
    "{% if loop.last and messages[0].role == 'system' %} ({{ messages[0].content }}){% endif %} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def write_sentencepiece_base(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a random Llama with a SentencePiece vocabulary and a chat template."""
    import sentencepiece
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

    folder.mkdir()
    text = folder.parent / "text.txt"
    text.write_text("\n".join(f"{row['text']} {row['say']}" for row in sentences(96)), encoding="utf8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=-1,
        minloglevel=2,
    )
    tokenizer = LlamaTokenizer.from_pretrained(folder, pad_token="<unk>")
    tokenizer.chat_template = template
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=330,
        max_position_embeddings=128,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@needs_llama_cpp
@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "adapter"), [("gguf", {"type": "lora", "r": 4}), ("ollama", {"type": "lora", "r": 4}), ("gguf", None)]
)
def test_llama_cpp_answers_as_the_run_does(tmp_path: Path, to: str, adapter: dict[str, Any] | None) -> None:
    base = write_sentencepiece_base(tmp_path / "base")
    config = text_config(tmp_path, base_model=str(base), adapter=adapter, prompt={"system": "Be brief."})
    Model(config, quiet=True).train(run=tmp_path / "run")
    run = Model.load(tmp_path / "run", quiet=True)
    report = run.export(to, tmp_path / "exported", gguf_type="f32")  # type: ignore[arg-type]
    assert (report.rows_equal, report.prompts_equal, report.template_equal) == (32, 32, True)
    assert report.tokens_equal == report.tokens > 32
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    more = {"Modelfile", "README.md"} if to == "ollama" else set()
    assert names == {"model-f32.gguf", "export.json", *more}
    if to == "ollama":
        modelfile = (tmp_path / "exported" / "Modelfile").read_text(encoding="utf8")
        assert modelfile.startswith(
            'FROM ./model-f32.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<system> '
        )
        assert 'SYSTEM "Be brief."\nPARAMETER stop "</s>"\nPARAMETER num_ctx 128\nPARAMETER num_predict 12' in modelfile


@needs_llama_cpp
@pytest.mark.long
def test_llama_cpp_renders_prompts_without_thinking_as_the_run_does(tmp_path: Path) -> None:
    base = write_sentencepiece_base(tmp_path / "base", THINKS)
    config = text_config(tmp_path, base_model=str(base), trainer={"type": "none"})
    report = Model(config, quiet=True).export("gguf", tmp_path / "exported", gguf_type="f32")
    assert report.template_equal is True
    assert report.notes == ("the chat template sets enable_thinking: false, as the run did",)


@pytest.mark.parametrize("adapter", [{"type": "lora", "r": 4}, None])
def test_a_saved_model_keeps_the_sentencepiece_vocabulary(tmp_path: Path, adapter: dict[str, Any] | None) -> None:
    pytest.importorskip("sentencepiece")
    base = write_sentencepiece_base(tmp_path / "base")
    config = text_config(tmp_path, base_model=str(base), adapter=adapter, trainer={"type": "finetune", "max_steps": 1})
    Model(config, quiet=True).train(run=tmp_path / "run")
    run = Model.load(tmp_path / "run", quiet=True)
    run.export("merged", tmp_path / "merged")
    run.save(tmp_path / "saved")
    wanted = (base / "tokenizer.model").read_bytes()
    for folder in ("run/model", "merged", "saved"):
        assert (tmp_path / folder / "tokenizer.model").read_bytes() == wanted
    saved = Model.load(tmp_path / "saved", quiet=True)
    assert list(run.predict(sentences(4))) == list(saved.predict(sentences(4)))


@pytest.mark.parametrize("download", [False, True])
def test_the_vocabulary_of_a_model_of_the_hub_is_that_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: bool
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, repository = "1" * 40, tmp_path / "hub" / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    assert not copy_vocabulary("a/b", tmp_path, revision=None, download=download)
    (repository / "snapshots" / commit / "tokenizer.model").write_bytes(b"pieces")
    assert copy_vocabulary("a/b", tmp_path, revision=None, download=download)
    assert (tmp_path / "tokenizer.model").read_bytes() == b"pieces"
    assert copy_vocabulary(None, tmp_path, revision=None), "a file that is there is kept"


@needs_llama_cpp
@pytest.mark.long
@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the model stories260k")
def test_a_tokenizer_that_llama_cpp_cuts_otherwise_is_found(tmp_path: Path) -> None:
    config = text_config(tmp_path, base_model=str(STORIES), trainer={"type": "none"})
    zero = Model(config, quiet=True)
    expected = "has other tokens in the export than in the model, so it would answer other prompts: row "
    rows = [{"text": f"Tom went to the park {'again ' * times}"} for times in range(8)]
    with pytest.raises(ExportError, match=expected) as error:
        zero.export("gguf", tmp_path / "strict", gguf_type="f32", dataset=rows)
    assert f"{STORIES.resolve()} has no tokenizer.model. If its tokenizer was made with SentencePiece" in str(
        error.value
    )
    report = json.loads((tmp_path / "strict" / "export.json").read_text())
    assert report["agreement"] == 1, "with the same tokens, the answers are the same"
    assert report["prompts_equal"] == 0


def test_the_converter_finds_the_context_length_of_gpt2(tmp_path: Path) -> None:
    from transformers import GPT2Config, LlamaConfig

    for config, wanted in ((GPT2Config(n_positions=48), 48), (LlamaConfig(), None)):
        config.save_pretrained(tmp_path)
        complete_config(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text(encoding="utf8")).get("n_ctx") == wanted


def test_without_a_checkout_of_llama_cpp_the_error_says_where_it_is(
    lora_run: Path, tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTITA_LLAMA_CPP", raising=False)
    assert command("export", lora_run, "--to", "gguf", "-o", tmp_path / "out", "--quiet") == 2
    assert (
        "no checkout of llama.cpp is named; the converter of GGUF files is convert_hf_to_gguf.py in the "
        "repository of llama.cpp: run `git clone --depth 1 https://github.com/ggml-org/llama.cpp`, or unpack "
        "vendor/llama.cpp from `pip download --no-deps --no-binary :all: llama-cpp-python`, and name the folder with "
        "--llama-cpp or the environment variable PARTITA_LLAMA_CPP"
    ) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(PartitaError, match=r"has no convert_hf_to_gguf\.py; the converter of GGUF files is"):
        Model.load(lora_run, quiet=True).export("ollama", tmp_path / "out", llama_cpp=tmp_path)


def test_a_converter_that_fails_is_named_with_its_last_lines(lora_run: Path, tmp_path: Path) -> None:
    converter = "import sys\nprint('reading')\nraise NotImplementedError('Architecture X not supported!')\n"
    (tmp_path / "convert_hf_to_gguf.py").write_text(converter, encoding="utf8")
    expected = (
        r"convert_hf_to_gguf\.py failed: .*NotImplementedError: Architecture X not supported!; a newer checkout may "
        "support the model"
    )
    with pytest.raises(ExportError, match=expected):
        Model.load(lora_run, quiet=True).export("gguf", tmp_path / "out", llama_cpp=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["convert_hf_to_gguf.py"]
    (tmp_path / "convert_hf_to_gguf.py").write_text("import gguf_of_another_planet", encoding="utf8")
    with pytest.raises(ExportError, match=r"; install what it needs with pip install 'partita\[gguf\]'"):
        Model.load(lora_run, quiet=True).export("gguf", tmp_path / "out", llama_cpp=tmp_path)


def test_without_a_binding_the_export_says_that_it_was_not_compared(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.export.llama_cpp.BINDING", "a_package_that_is_missing")
    writes = "import sys\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('GGUF')\n"
    (tmp_path / "convert_hf_to_gguf.py").write_text(writes, encoding="utf8")
    run = Model.load(lora_run, quiet=True)
    not_compared = (
        "the answers of the GGUF file were not compared, because no binding of llama.cpp is installed; run pip install "
        "'partita[gguf]' and export again"
    )
    with pytest.raises(ExportError, match=re.escape(f"out is written, but {not_compared}. --min-agreement 0 accepts")):
        run.export("gguf", tmp_path / "out", llama_cpp=tmp_path)
    assert (tmp_path / "out" / "model-f16.gguf").exists()
    report = run.export("ollama", tmp_path / "accepted", llama_cpp=tmp_path, min_agreement=0, gguf_type="q8_0")
    assert not report.compared
    assert report.lines()[1] == "answers: not compared"
    assert report.reasons == (not_compared,)
    assert report.notes == ("create it with `ollama create accepted -f Modelfile`; ollama itself was not run",)
    assert report.lines()[2:] == [*report.reasons, *report.notes]
    assert (tmp_path / "accepted" / "Modelfile").read_text(encoding="utf8") == (
        "FROM ./model-q8_0.gguf\n"
        'TEMPLATE "{{ .Prompt }}"\n'
        'PARAMETER stop "</s>"\n'
        "PARAMETER num_ctx 64\n"
        "PARAMETER num_predict 12\n"
        "PARAMETER temperature 0\n"
        "PARAMETER repeat_penalty 1.0\n"
    )
    page = (tmp_path / "accepted" / "README.md").read_text(encoding="utf8")
    assert "    ollama create accepted -f Modelfile\n    ollama run accepted\n" in page
    assert "ollama itself was not run." in page


def test_a_modelfile_names_each_setting_of_sampling(lora_run: Path, tmp_path: Path) -> None:
    writes = "import sys\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('GGUF')\n"
    (tmp_path / "convert_hf_to_gguf.py").write_text(writes, encoding="utf8")
    run = Model.load(lora_run, overrides=["generation.do_sample=true", "generation.top_p=0.95"], quiet=True)
    with pytest.raises(ExportError) as error:
        run.export("ollama", tmp_path / "out", llama_cpp=tmp_path)
    assert "ollama create" not in str(error.value)
    assert (
        "PARAMETER temperature 1.0\nPARAMETER top_k 0\nPARAMETER top_p 0.95\nPARAMETER min_p 0.0\n"
        "PARAMETER repeat_penalty 1.0\n"
    ) in (tmp_path / "out" / "Modelfile").read_text(encoding="utf8")


def test_a_head_has_no_place_in_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(20, longest=12))
    (tmp_path / "convert_hf_to_gguf.py").touch()
    config = head_settings("distilbert", "category")
    model = Model(config | {"trainer": config["trainer"] | {"max_steps": 1}}, quiet=True)
    model.train(run=tmp_path / "run")
    with pytest.raises(ModelError, match="has no place for the head of the model; export it with --to onnx or merged"):
        model.export("gguf", tmp_path / "out", llama_cpp=tmp_path)


class Tokenizer:
    """Renders a chat template as transformers does."""

    bos_token, eos_token = "<s>", "</s>"

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **special,
        )
        return str(texts[0])

    def apply(self, messages: Any, *, prompt: bool) -> str:
        """Render a dialogue as a run does."""
        return self.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def run_go(template: str, messages: list[dict[str, str]]) -> str:
    """Evaluate the actions that templates of this package have."""
    system = any(message["role"] == "system" for message in messages)
    template = re.sub(
        r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}", "" if system else r"\1", template, flags=re.DOTALL
    )
    before, loop, after = re.split(r"\{\{ range \.Messages \}\}|\{\{ end \}\}\{\{ end \}\}", template)
    written = [before]
    branches = dict(re.findall(r'if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', loop, re.DOTALL))
    for message in messages:
        written.append(branches[message["role"]].replace("{{ .Content }}", message["content"]))
    return "".join([*written, after])


@pytest.mark.parametrize(
    "template", [TEMPLATE, CHATML, DEFAULT_SYSTEM, LLAMA_3, LLAMA_3_DATE, GEMMA, MISTRAL], ids=range(7)
)
def test_a_template_of_ollama_renders_what_the_chat_template_does(template: str) -> None:
    tokenizer = Tokenizer(template)
    found = find_message_texts(tokenizer.apply, bos_token=tokenizer.bos_token)
    assert found is not None
    compared = 0
    for messages in DIALOGUES:
        stripped = [{**message, "content": message["content"].strip()} for message in messages]
        if any(message["role"] not in found.around for message in stripped):
            continue
        with_default = stripped
        if found.default_system and stripped[0]["role"] != "system":
            with_default = [{"role": "system", "content": found.default_system}, *stripped]
        expected = tokenizer.apply_chat_template(stripped, tokenize=False, add_generation_prompt=True)
        assert run_go(found.go(with_beginning=True), with_default) == expected
        compared += 1
    assert compared >= 2


def test_a_template_that_folds_messages_has_no_template_of_ollama() -> None:
    for template in (FOLDED, "{{ messages[0].content }}{{ messages[0].content }}"):
        assert find_message_texts(Tokenizer(template).apply, bos_token="<s>") is None


def modelfile_of(folder: Path, template: str, **sections: Any) -> tuple[str, str, tuple[str, ...]]:
    """Export an untrained chat model to ollama; return the Modelfile, the page, and the notes."""
    config = text_config(folder, base_model=str(chat_base(folder / "base", template)), trainer={"type": "none"})
    config = {key: value for key, value in (config | sections).items() if value is not None}
    model = Model(config, quiet=True)
    report = model.export("ollama", folder / "out", llama_cpp=copy_converter(folder), min_agreement=0)
    return *((folder / "out" / name).read_text(encoding="utf8") for name in ("Modelfile", "README.md")), report.notes


def test_a_template_of_ollama_renders_the_prompts_of_the_run(tmp_path: Path) -> None:
    modelfile, page, notes = modelfile_of(tmp_path, THINKS)
    assert "{{ end }}{{ end }}<assistant><think></think>" in modelfile, "the run does not think"
    assert "The Modelfile has the chat template of the model as TEMPLATE.\n" in page
    assert notes[-1] == "the chat template sets enable_thinking: false, as the run did"


def test_a_modelfile_writes_the_instructions_of_a_run(tmp_path: Path) -> None:
    prompt = {"system": "Be brief.", "task": "Shorten this.", "examples": [{"text": "a b c", "say": "a"}]}
    modelfile, page, _ = modelfile_of(tmp_path, TEMPLATE, prompt=prompt)
    [template] = re.findall(r'TEMPLATE """(.*?)"""', modelfile, re.DOTALL)
    assert template.startswith("<system> Be brief.\n<user> Shorten this.")
    assert "<assistant> a\n<user> Shorten this." in template, "the example"
    assert template.endswith("{{ .Prompt }}\n<assistant>")
    assert "SYSTEM" not in modelfile
    assert "The Modelfile writes the prompt of the training around your text, the input `text` of a row." in page


def test_a_run_with_several_inputs_shows_the_message_to_write(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [])
    inputs = [{"name": "text", "type": "text"}, {"name": "say", "type": "text"}]
    outputs = [{"name": "answer", "type": "text"}]
    modelfile, page, _ = modelfile_of(
        tmp_path,
        TEMPLATE,
        input_features=inputs,
        output_features=outputs,
        prompt={"template": "Is {text} like {say}?"},
        data=None,
    )
    assert "{{ range .Messages }}" in modelfile
    assert "as TEMPLATE. Write messages as in training, such as:\n\n    Is (text) like (say)?\n" in page


def test_settings_that_ollama_does_not_have_are_named(tmp_path: Path) -> None:
    generation = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "num_beams": 2}
    modelfile, _, notes = modelfile_of(tmp_path, TEMPLATE, generation=generation)
    assert modelfile.endswith("PARAMETER repeat_penalty 1.3\nPARAMETER repeat_last_n -1\n")
    assert "a Modelfile has no parameter for generation.num_beams: 2, generation.no_repeat_ngram_size: 3" in notes


def test_the_converter_reads_a_folder_with_the_name_of_the_export(tmp_path: Path) -> None:
    writes = (
        "import sys, os\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'w').write(os.path.basename(sys.argv[1]))\n"
    )
    (tmp_path / "convert_hf_to_gguf.py").write_text(writes, encoding="utf8")
    model = Model(text_config(tmp_path, trainer={"type": "none"}), quiet=True)
    model.export("gguf", tmp_path / "stories", llama_cpp=tmp_path, min_agreement=0)
    assert (tmp_path / "stories" / "model-f16.gguf").read_text() == "stories"
