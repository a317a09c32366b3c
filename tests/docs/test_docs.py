"""Tests of the pages: files load, errors are as shown, commands and links exist, answers are read as written.

An HTML comment before a block says what it is, if it is not a complete configuration:

- `not a whole file`: merged into a small configuration, it must load;
- `wrong file: NAME`: it must fail with exactly the messages that the page shows for NAME;
- `warns: NAME`: it must load with exactly the warnings that the page shows for NAME;
- `file: NAME`, `run with NAME`: a Python file, and a configuration that is trained with it in the same folder;
- `answers read by: OUTPUTS`: a table of answers, and the values that these output features read from them.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from partita.cli.main import app
from partita.data.formats import FORMATS
from partita.outputs.decode import Decoder
from partita_schema.dialogues.formats import READERS
from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.sections.adapter import Adapter, LoraAdapter
from partita_schema.sections.optimization import Optimizer

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
)
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>.*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
ANSWERS = re.compile(r"^<!-- answers read by: (?P<outputs>.*?) -->\n(?P<table>(?:^\|.*\n)+)", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
SMALL: dict[str, Any] = {
    "base_model": "some/model",
    "input_features": [{"name": "message", "type": "text"}],
    "output_features": [{"name": "team", "type": "category"}],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    comment: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def find_blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Block(page, line, match["language"], match["comment"] or "", match["text"])


BLOCKS = list(find_blocks())


def chosen(language: str, comment: str = "") -> Any:
    """Parametrize over the blocks of a language whose comment starts with `comment`, or that have no comment."""
    same_language = [block for block in BLOCKS if block.language == language]
    blocks = [block for block in same_language if (block.comment.startswith(comment) if comment else not block.comment)]
    return pytest.mark.parametrize("block", blocks, ids=str)


def shown_lines(page: Path, start: str) -> list[str]:
    return [line for line in page.read_text(encoding="utf8").splitlines() if line.startswith(start)]


@chosen("yaml")
def test_every_configuration_in_the_pages_loads(block: Block) -> None:
    load_config(block.text)


@chosen("yaml", "not a whole file")
def test_every_fragment_in_the_pages_loads_in_a_small_configuration(block: Block) -> None:
    load_config(SMALL | yaml.safe_load(block.text))


@chosen("yaml", "over a small file: ")
def test_files_in_the_pages_that_extend_another_load(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = SMALL | {"trainer": {"type": "finetune"}}
    monkeypatch.chdir(tmp_path)
    Path(block.comment.removeprefix("over a small file: ")).write_text(yaml.safe_dump(base), encoding="utf8")
    load_config(block.text)


@chosen("yaml", "wrong file: ")
def test_wrong_configurations_in_the_pages_are_reported_as_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = block.comment.removeprefix("wrong file: ")
    (tmp_path / name).write_text(block.text, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(Path(name))
    assert str(caught.value).splitlines() == shown_lines(block.page, f"{name}:")


@chosen("yaml", "warns: ")
def test_warnings_in_the_pages_are_given_as_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = block.comment.removeprefix("warns: ")
    (tmp_path / name).write_text(block.text, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    warnings = [f"warning: {warning}" for warning in load_config(Path(name)).warnings]
    assert warnings == shown_lines(block.page, f"warning: {name}:")


@chosen("python")
def test_every_python_block_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@chosen("yaml", "run with ")
def test_configurations_with_python_code_of_the_pages_are_trained(block: Block, tmp_path: Path) -> None:
    name = block.comment.removeprefix("run with ")
    (module,) = (other for other in BLOCKS if other.page == block.page and other.comment == f"file: {name}")
    (tmp_path / name).write_text(module.text, encoding="utf8")
    (tmp_path / "run.yaml").write_text(block.text, encoding="utf8")
    from partita import Model

    result = Model(tmp_path / "run.yaml", quiet=True).train(run=tmp_path / "run")
    assert result.steps == load_config(block.text).config.trainer.max_steps


@chosen("json")
def test_every_json_block_is_json_lines(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


@chosen("console")
def test_every_command_in_the_pages_exists_with_its_flags(block: Block) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z]+=\S*", word)]
        if words[0] != "partita" or words[1:] == ["--help"]:
            continue
        assert words[1] in commands, f"{line}: there is no command {words[1]}"
        # Raises for flags that the command does not have, and for arguments that it needs.
        context = commands[words[1]].make_context(words[1], words[2:])
        if hasattr(context.command, "commands"):  # a group, such as `partita runs`
            name, *rest = context._protected_args + context.args
            context.command.commands[name].make_context(name, rest)


def test_torchrun_passes_the_commands_of_the_pages_on() -> None:
    from torch.distributed.run import parse_args

    lines = [line for block in BLOCKS for line in block.text.splitlines() if line.startswith("$ torchrun ")]
    assert lines
    for line in lines:
        words = shlex.split(line)[2:]
        parsed = parse_args(words)
        assert [parsed.training_script, *parsed.training_script_args] == words[words.index("partita") :], line


def test_a_flag_that_does_not_exist_is_detected() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="No such option: --datasett"):
        commands["predict"].make_context("predict", ["run.yaml", "--datasett", "x.csv", "--output", "y.csv"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_in_the_pages_has_a_target(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
    for link in LINK.finditer(text):
        target, _, place = link["target"].partition("#")
        if "://" in target:
            continue
        results = (page.parent / target).resolve() if target else page
        assert results.exists(), f"{page.relative_to(ROOT)} links to {target}, which does not exist"
        if place:
            assert place in headings(results), f"{page.relative_to(ROOT)} links to {link['target']}: no such heading"


def headings(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf8"), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]


def find_answers() -> Iterator[Any]:
    for page in PAGES:
        for match in ANSWERS.finditer(page.read_text(encoding="utf8")):
            for row in match["table"].splitlines()[2:]:
                answer, shown = (cell.strip() for cell in row.strip("|").split("|"))
                yield pytest.param(yaml.safe_load(match["outputs"]), answer.strip("`"), shown, id=answer)


@pytest.mark.parametrize(("outputs", "answer", "expected"), list(find_answers()))
def test_answers_in_the_pages_are_read_as_shown(outputs: Any, answer: str, expected: str) -> None:
    features = outputs if isinstance(outputs, list) else [outputs]
    config = load_config(SMALL | {"output_features": features}).config
    decoded = Decoder(config, labels={}).decode(answer)
    if expected.startswith("none: "):
        assert decoded.errors == {features[0]["name"]: expected.removeprefix("none: ")}
        assert decoded.values == {features[0]["name"]: None}
    else:
        value = json.loads(expected.strip("`"))
        assert decoded.values == (value if isinstance(outputs, list) else {features[0]["name"]: value})


def table_names(page: Path, heading: str) -> set[str]:
    """Return the names in backquotes in the first column of the table under a heading."""
    part = page.read_text(encoding="utf8").split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    first = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def test_the_training_guide_lists_every_adapter_and_every_lora_initialization() -> None:
    guide = ROOT / "docs" / "guides" / "training.md"
    union = get_args(get_args(Adapter)[0])
    assert table_names(guide, "### Adapters") == {get_args(kind.model_fields["type"].annotation)[0] for kind in union}
    assert table_names(guide, "### LoRA initialization") == set(get_args(LoraAdapter.model_fields["init"].annotation))


def test_the_guides_list_every_file_format_and_every_dialogue_format() -> None:
    guides = ROOT / "docs" / "guides"
    [listed] = re.findall(r"^The formats are ([^.]+)\.", (guides / "data.md").read_text(encoding="utf8"), re.MULTILINE)
    assert set(re.sub(r" \(.*?\)", "", listed).replace(" and ", ", ").split(", ")) == set(FORMATS)
    assert table_names(guides / "dialogues.md", "## Data formats") == set(READERS)


def test_the_training_guide_lists_every_optimizer() -> None:
    guide = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf8")
    sentence = guide.split("\n### Optimizers\n", 1)[1].split(". ", 1)[0]
    listed = set(re.findall(r"`(\w+)`", sentence))
    assert listed == set(get_args(Optimizer.model_fields["type"].annotation))


def test_the_index_of_decisions_lists_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    linked = {link["target"] for link in LINK.finditer((folder / "README.md").read_text(encoding="utf8"))}
    assert linked == {page.name for page in folder.glob("0*.md")}


def test_the_benchmark_page_is_up_to_date_with_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from page import page  # type: ignore[import-not-found]

    wanted = page(ROOT / "benchmarks" / "results")
    assert (ROOT / "docs" / "benchmarks.md").read_text("utf8") == wanted, "run make docs"


def test_the_benchmark_page_has_a_reason_for_each_limit_that_does_not_hold_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness import read_records  # type: ignore[import-not-found]
    from page import REASONS

    records = [record for path in (ROOT / "benchmarks" / "results").glob("*.json") for record in read_records(path)]
    failing = {(one["name"], limit["name"]) for one in records for limit in one["limits"] if not limit["holds"]}
    assert set(REASONS) == failing


def test_tables_of_the_benchmark_page_say_whether_seconds_are_cpu_or_wall_seconds() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf8").splitlines()
    headings = [line for line, below in pairwise(page) if below.startswith("| ---")]
    columns = {column.strip() for line in headings for column in line.strip("|").split("|")}
    seconds = {column for column in columns if re.search(r"(?<!['/])\bs\b|/wall s|second", column)}
    assert len(seconds) > 10
    assert {column for column in seconds if not re.search("CPU|wall", column)} <= {"per second", "rows/model s"}
