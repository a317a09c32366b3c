"""The model card: the page README.md of a model on the Hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from partita.export.repository import Repository
from partita.export.shared_paths import replaced, shared_name
from partita.report.charts import Table
from partita.report.measures import measures_of
from partita.report.run_record import RunRecord
from partita.report.section import NamedTable
from partita.report.sections.cost import costs_of
from partita.report.sections.data import row_tables
from partita.report.sections.headline import headline
from partita.report.sections.metrics import NOTE, is_of_field, row_of, titles_of

TRAINED = ("parameters", "trained parameters", "rows trained on", "tokens trained on", "total time")
"""Rows of the card on the cost of training."""


@dataclass(frozen=True)
class CardFacts:
    """Facts that a model card shows."""

    name: str
    """Name of the repository, such as `somebody/tickets`."""
    repository: Repository
    """Description of the files in the folder."""
    config: Mapping[str, Any]
    """The configuration."""
    config_text: str
    """The configuration as YAML, with variables as they were written."""
    run: RunRecord | None
    """The run; None for a model without one."""
    license: str | None
    """License of the base model; None if it is not known."""
    origin: Path
    """Folder that relative paths of the configuration are resolved against, which is not shown."""


def model_card(facts: CardFacts) -> str:
    """Return the model card as Markdown. It has no path of this machine, except relative ones of the configuration."""
    sections = [
        f"# {facts.name.rpartition('/')[2]}",
        introduction(facts),
        *use(facts),
        *results(facts.run),
        *data(facts.run),
        *training(facts.run),
        "## Configuration",
        f"````yaml\n{facts.config_text.rstrip()}\n````",
    ]
    text = without_local_paths("\n\n".join(sections), facts)
    return f"---\n{metadata(facts)}---\n\n{text}\n"


def metadata(facts: CardFacts) -> str:
    """Return the metadata of the Hub as YAML."""
    repository = facts.repository
    trainer = (facts.config.get("trainer") or {}).get("type")
    tags = ["partita", *([repository.method.lower()] if repository.method else [])]
    tags += [str(trainer)] if trainer not in (None, "none", "finetune") else []
    values: dict[str, Any] = {
        "library_name": repository.library,
        "pipeline_tag": repository.tag,
        "tags": tags,
        "base_model": repository.base,
        "base_model_relation": ("adapter" if repository.method else "finetune") if repository.base else None,
        "license": facts.license,
    }
    return str(yaml.safe_dump({key: value for key, value in values.items() if value}, sort_keys=False))


def introduction(facts: CardFacts) -> str:
    """Describe the model in a few sentences."""
    repository, trainer = facts.repository, (facts.config.get("trainer") or {}).get("type")
    what = f"An adapter (`{repository.method.lower()}`)" if repository.method else "A model"
    if repository.base is not None:
        base = f"[{repository.base}](https://huggingface.co/{repository.base})"
    elif repository.local_base is not None:
        base = f"a model in a local folder, `{repository.local_base}`, which is not in this repository"
    else:
        base = "a model with random weights" + (", which is in the folder `base`" if repository.has_base else "")
    how = f"trained with `{trainer}`" if trainer not in (None, "none") else "not trained further"
    outputs = ", ".join(f"`{one['name']}` ({one.get('type', 'text')})" for one in facts.config["output_features"])
    inputs = ", ".join(f"`{one['name']}`" for one in facts.config.get("input_features") or ())
    reads = f"It reads {inputs} and predicts {outputs}." if inputs else f"It continues {outputs}."
    if scores_answers(facts):
        answer = facts.config["output_features"][0]["name"]
        reads = f"It reads {', '.join(filter(None, (inputs, f'`{answer}`')))}, and predicts the score of the answer."
    licensed = f"The license of the base model is `{facts.license}`." if facts.license else ""
    made = "Made with [partita](https://github.com/partita-framework/partita)."
    relation = "for" if repository.method else "made from"
    return " ".join(filter(None, (f"{what} {relation} {base}, {how}.", reads, licensed, made)))


def scores_answers(facts: CardFacts) -> bool:
    """Return whether it is a reward model, which reads an answer and predicts its score."""
    return (facts.config.get("trainer") or {}).get("type") == "reward"


def use(facts: CardFacts) -> Iterator[str]:
    """Yield how the model is loaded with partita, and with the library of its files."""
    inputs = [str(one["name"]) for one in facts.config.get("input_features") or ()]
    if scores_answers(facts):
        inputs.append(str(facts.config["output_features"][0]["name"]))
    row = ", ".join(f'"{name}": ...' for name in inputs)
    call = f"model.predict([{{{row}}}])" if inputs else 'model.generate("...")'
    yield "## Use"
    base = facts.repository.local_base if facts.repository.method else None
    if base is not None:
        yield (
            f"The adapter was trained on a model in a local folder, `{base}`. It can only be used with the same model: "
            f"put its folder next to your program, or write its path or Hub id in place of `{base}`."
        )
    override = "" if base is None else f', overrides=["base_model={base}"]'
    yield (
        "With partita, which renders the prompt and reads the answer as in training:\n\n```python\n"
        "from huggingface_hub import snapshot_download\n\nfrom partita import Model\n\n"
        f'model = Model.load(snapshot_download("{facts.name}"){override})\n{call}\n```'
    )
    code = loading_code(facts)
    if code:
        yield f"With {facts.repository.library}:\n\n```python\n{code}\n```"


def loading_code(facts: CardFacts) -> str:
    """Return the lines that load the model with the library of its files; empty if only partita reads them."""
    repository, name = facts.repository, facts.name
    if repository.task is None:
        return ""
    if repository.library == "sentence-transformers":
        return f'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("{name}")'
    auto = repository.model_class
    imports = f"from transformers import {auto}, AutoTokenizer"
    tokenizer = f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    if repository.method is None:
        return f'{imports}\n\nmodel = {auto}.from_pretrained("{name}")\n{tokenizer}'
    if repository.has_base:
        return (
            f"from huggingface_hub import snapshot_download\nfrom peft import PeftModel\n{imports}\n\n"
            f'folder = snapshot_download("{name}")\nbase = {auto}.from_pretrained(f"{{folder}}/base")\n'
            "model = PeftModel.from_pretrained(base, folder)\ntokenizer = AutoTokenizer.from_pretrained(folder)"
        )
    labels = f", num_labels={repository.num_labels}" if repository.num_labels else ""
    local = "  # a local folder" if repository.local_base else ""
    return (
        f"from peft import PeftModel\n{imports}\n\n"
        f'base = {auto}.from_pretrained("{repository.base or repository.local_base}"{labels}){local}\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n{tokenizer}'
    )


def results(run: RunRecord | None) -> Iterator[str]:
    """Yield the metrics with their intervals, of rows that the model was not trained on."""
    if run is None or not (run.results or run.metrics):
        return
    yield "## Results"
    may_have_base = not (run.is_new_model or run.is_untrained)
    splits = [measures_of(one, is_plain_text=run.is_plain_text, may_have_base=may_have_base) for one in run.results]
    if splits:
        yield headline(run, splits[0])
    for split in splits:
        rows = [
            row_of(measure, has_base=split.has_base) for measure in split.measures if not is_of_field(measure.metric)
        ]
        yield f"**{split.split}**, {split.rows:,} rows\n\n{markdown_table(Table(titles_of(split), rows))}"
    if splits:
        yield NOTE
    shown = {split.split for split in splits}
    for name, values in run.metrics.items():
        if name not in shown and values:
            rows = [[metric, f"{value:.4g}"] for metric, value in values.items()]
            yield f"**{name}**\n\n{markdown_table(Table(['metric', 'value'], rows))}"


def data(run: RunRecord | None) -> Iterator[str]:
    """Yield the numbers of rows by split."""
    if run is None:
        return
    tables: Sequence[NamedTable] = row_tables(run.ledger, note="")[:1]
    if not tables and (counts := run.manifest.get("data")):
        rows = [[split, f"{values.get('rows', 0):,}"] for split, values in counts.items()]
        tables = [NamedTable("Rows by split", Table(["split", "rows"], rows))]
    for table in tables:
        yield "## Data"
        yield markdown_table(table.table)


def training(run: RunRecord | None) -> Iterator[str]:
    """Yield the steps, the seed, the cost and the versions of a training."""
    if run is None or run.is_untrained:
        return
    manifest, costs = run.manifest, costs_of(run)
    rows = [[key, str(manifest[key])] for key in ("steps", "seed", "device") if manifest.get(key) is not None]
    rows += [["learning rate", f"{manifest['learning_rate']:.3g}"]] if manifest.get("learning_rate") else []
    rows += [[name, costs[name]] for name in TRAINED if name in costs]
    versions: Mapping[str, str] = manifest.get("versions") or {}
    named = ("partita", "torch", "transformers", "peft")
    rows += [["versions", ", ".join(f"{name} {versions[name]}" for name in named if name in versions)]]
    yield "## Training"
    yield markdown_table(Table(["", ""], rows))


def markdown_table(table: Table) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    lines = [table.titles, ["---", *["---:"] * (len(table.titles) - 1)], *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def without_local_paths(text: str, facts: CardFacts) -> str:
    """Replace absolute paths of this machine by the names of their files, or Hub ids.

    These are the absolute paths of the configuration, and all paths in the folder of the file, the current folder and
    the home folder.
    """
    paths = set[str]()

    def note(path: str) -> str:
        paths.add(path)
        return path

    for config in (yaml.safe_load(facts.config_text), facts.config):
        replaced(config, note)
    for path in sorted(paths, key=len, reverse=True):
        text = text.replace(path, shared_name(path))
    roots = {str(folder) for folder in (facts.origin.absolute(), Path.cwd(), Path.home()) if len(folder.parts) > 1}
    for root in sorted(roots, key=len, reverse=True):
        text = re.sub(rf"{re.escape(root)}(?:/[^\s'\"/,\]}}]*)*", lambda found: Path(found[0]).name, text)
    return text
