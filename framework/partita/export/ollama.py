"""The format ollama: a GGUF file, and a Modelfile with template, stop texts, context length and system prompt."""

import json
from functools import cached_property

from partita.export.answers import ends_of_run
from partita.export.gguf import GgufExporter
from partita.export.go_template import MessageTexts, find_message_texts, literal
from partita.export.templates import chat_template_of_run, render_as_run
from partita.lm.huggingface import HuggingFaceModel

MARK = "\N{BLACK SQUARE}row\N{BLACK SQUARE}"
"""Stands for the input of a row while its prompt is taken apart."""
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values of settings that have no effect. ollama has other defaults."""
PAGE = """# {name}

A model for ollama, exported by partita. Create it in this folder, and ask it:

    ollama create {name} -f Modelfile
    ollama run {name}

{prompt}

`export.json` says how the answers of the GGUF file were compared with those of the model. ollama itself was not run.
"""
CHAT = "The Modelfile has the chat template of the model as TEMPLATE."
USER_MESSAGE = CHAT + " Write messages as in training, such as:\n\n{example}"
WITHOUT_PARAMETER = "a Modelfile has no parameter for {}"
WITH_PARAMETER = {"do_sample", "num_beams", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
"""Settings of a run with a parameter of a Modelfile; num_beams: 1 needs none."""
NO_TEMPLATE = (
    "The chat template does not write messages one after another, so the Modelfile has no TEMPLATE. ollama chooses one "
    "from the GGUF file: compare what `ollama show --template` prints with the chat template."
)
ROW = "The Modelfile writes the prompt of the training around your text, the input `{name}` of a row."
PLAIN = "The Modelfile passes your prompt unchanged. Write it as in training, such as:\n\n{example}"


class OllamaExporter(GgufExporter):
    """Writes a GGUF file and a Modelfile. Only the GGUF file is run."""

    def write(self) -> None:
        """Write the GGUF file, the Modelfile, and a page on how to use them."""
        super().write()
        (self.folder / "Modelfile").write_text(self.modelfile(), encoding="utf8")
        name = self.options.output.resolve().name
        page = PAGE.format(name=name, prompt=self.about_prompts())
        (self.folder / "README.md").write_text(page, encoding="utf8")
        self.notes.append(f"create it with `ollama create {name} -f Modelfile`; ollama itself was not run")
        if self.uses_chat and self.row_prompt is None and self.messages is None:
            self.notes.append(NO_TEMPLATE)
        arguments, beams = self.pipeline.generation.arguments, self.pipeline.generation.beams
        missing = {
            key: value
            for key, value in arguments.items()
            if key not in WITH_PARAMETER or (key == "num_beams" and beams > 1)
        }
        if missing:
            named = ", ".join(f"generation.{key}: {json.dumps(value)}" for key, value in missing.items())
            self.notes.append(WITHOUT_PARAMETER.format(named))

    @property
    def uses_chat(self) -> bool:
        """Whether prompts are rendered by the chat template of the model."""
        return self.pipeline.row_tokenizer.formatter.chat

    @cached_property
    def messages(self) -> MessageTexts | None:
        """The texts that the chat template writes around messages; None if it does not write them in this form."""
        template = chat_template_of_run(self.lm.tokenizer, self.pipeline)
        return find_message_texts(template.apply, bos_token=self.lm.tokenizer.bos_token)

    @cached_property
    def row_prompt(self) -> tuple[str, str] | None:
        """The texts before and after the only input of a row.

        None if rows have several inputs or a dialogue, and if a chat template writes the input as it is: then the
        Modelfile can have the template.
        """
        inputs = self.pipeline.config.input_features
        if len(inputs) != 1 or inputs[0].type != "text":
            return None
        prompt = self.pipeline.row_tokenizer.encode_prompt({inputs[0].name: MARK}, key="example").text
        system = self.pipeline.config.prompt.system
        if self.uses_chat:
            messages = [{"role": "system", "content": system}] if system else []
            template = chat_template_of_run(self.lm.tokenizer, self.pipeline)
            if prompt == render_as_run(template, [*messages, {"role": "user", "content": MARK}]):
                return None
            prompt = prompt.removeprefix(self.lm.tokenizer.bos_token or "") if self.adds_bos else prompt
        before, found, after = prompt.partition(MARK)
        return (before, after) if found and MARK not in after else None

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer begins each text with the beginning-of-sequence token."""
        tokenizer = self.lm.tokenizer
        return bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])

    def template(self) -> str | None:
        """Return the template of ollama; None to leave it to ollama."""
        if self.uses_chat and self.row_prompt is None:
            return None if self.messages is None else self.messages.go(with_beginning=not self.adds_bos)
        before, after = self.row_prompt or ("", "")
        return f"{literal(before)}{{{{ .Prompt }}}}{literal(after)}"

    def modelfile(self) -> str:
        """Return the Modelfile."""
        assert isinstance(self.lm, HuggingFaceModel)
        generation, prompt = self.pipeline.generation, self.pipeline.config.prompt
        lines = [f"FROM ./{self.path.name}"]
        template = self.template()
        lines += [f"TEMPLATE {quoted(template)}"] if template is not None else []
        system = None
        if self.uses_chat and self.row_prompt is None:
            system = prompt.system or (self.messages.default_system if self.messages is not None else None)
        lines += [f"SYSTEM {quoted(system)}"] if system else []
        texts = [self.lm.tokenizer.decode([token]) for token in ends_of_run(self.lm, self.pipeline.generation)]
        lines += [f"PARAMETER stop {quoted(text)}" for text in dict.fromkeys([*texts, *generation.stop])]
        lines += [f"PARAMETER num_ctx {self.lm.context_length}"] if self.lm.context_length else []
        lines.append(f"PARAMETER num_predict {self.pipeline.max_new_tokens}")
        if not generation.do_sample:
            lines.append("PARAMETER temperature 0")
        else:
            values = {key: generation.arguments.get(key) for key in NEUTRAL}
            lines += [f"PARAMETER {key} {NEUTRAL[key] if value is None else value}" for key, value in values.items()]
        penalty = generation.arguments.get("repetition_penalty") or 1.0
        lines.append(f"PARAMETER repeat_penalty {penalty}")
        lines += ["PARAMETER repeat_last_n -1"] if penalty != 1 else []  # ollama looks at the last 64 tokens otherwise
        return "\n".join(lines) + "\n"

    def about_prompts(self) -> str:
        """Return what to write as a prompt."""
        if self.row_prompt is not None:
            return ROW.format(name=self.pipeline.config.input_features[0].name)
        if self.uses_chat and self.messages is None:
            return NO_TEMPLATE
        features = self.pipeline.config.input_features
        if self.uses_chat and len(features) == 1:
            return CHAT
        inputs = {feature.name: f"({feature.name})" for feature in features}
        text = self.pipeline.row_tokenizer.encode_prompt(inputs, key="example").text if inputs else "Once upon a time"
        if self.uses_chat and self.messages is not None:
            text = self.messages.last_user_message(text)
        example = "\n".join(f"    {line}" for line in text.splitlines())
        return (USER_MESSAGE if self.uses_chat else PLAIN).format(example=example)


def quoted(text: str) -> str:
    """Return a text in quotes, as a Modelfile has it."""
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'
