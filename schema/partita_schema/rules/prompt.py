"""Rules for the prompt and the features that it shows."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.prompt import template_fields


def leaked_answers(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a template that shows an output to the model."""
    inputs = {name for feature in config.input_features for name in (feature.name, feature.source_column)}
    for feature in config.output_features:
        leaks = {feature.name, feature.source_column, *feature.more_columns} - inputs
        shown = next((name for name in template_fields(config.prompt.template or "") if name in leaks), None)
        if shown is not None:
            yield "prompt.template", f"the template shows the output {{{shown}}} and gives the answer away; remove it"


def constant_prompts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a template that shows nothing of a row."""
    template = config.prompt.template
    if template is None or not config.input_features or config.dialogue_input is not None:
        return
    if set(template_fields(template)) <= {"__task__", "__context__"}:
        name = config.input_features[0].name
        escaped = f"{{{{{name}}}}}" in template
        hint = f"; {{{{{name}}}}} means literal braces" if escaped else ""
        yield "prompt.template", f"the template shows no input, so all prompts would be equal; add {{{name}}}{hint}"


def unusable_examples(config: ConfigSections) -> Iterator[Refusal]:
    """Yield examples that the template does not show or that lack a column."""
    prompt = config.prompt
    used = [key for key, value in (("examples", prompt.examples), ("retrieval", prompt.retrieval)) if value]
    if used and prompt.template and prompt.chat is False and "__context__" not in template_fields(prompt.template):
        yield (
            f"prompt.{used[0]}",
            f"the template never shows the {used[0]}; add {{__context__}} to it or remove {used[0]}",
        )
    needed = {*config.shown_columns, *(feature.name for feature in config.output_features)}
    for index, example in enumerate(prompt.examples):
        missing = sorted(needed - set(example))
        if missing:
            yield (
                f"prompt.examples.{index}",
                f"the example has no {', '.join(missing)}; an example needs {', '.join(sorted(needed))}",
            )
