import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from partita.cli.main import app
from partita.cli.preview import print_preview
from partita.data.preview import PreviewSpan, histogram, preview
from partita_schema.load import load_config

from ...json_lines import write_json_lines

Make = Callable[..., Any]
SCRATCH = {"type": "scratch", "tokenizer": "byte", "context_length": 20}
ROWS = [
    {"question": "why?", "answer": "so"},
    {"question": " ", "answer": "x"},
    {"question": "q" * 17, "answer": "long!"},
]


def printed(found: Any, *, terminal: bool) -> str:
    colours: Any = "standard" if terminal else None
    console = Console(
        file=io.StringIO(), force_terminal=terminal, color_system=colours, width=60, soft_wrap=True, highlight=False
    )
    print_preview(found, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_what_is_found_about_files_is_shown(make_config: Make, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("question;answer\nZo\u00eb?;yes\nwhy?;no\n".encode("cp1252"))
    (tmp_path / "b.csv").write_text("question,answer\nwhere?,there\n")
    glob = preview(make_config(base_model=SCRATCH, data={"source": "*.csv"}), folder=tmp_path)
    said = {"type": "csv", "path": "a.csv", "delimiter": ";", "encoding": "cp1252"}

    assert glob.files == ("a.csv: delimiter ';', encoding cp1252",)
    assert preview(make_config(base_model=SCRATCH, data={"source": said}), folder=tmp_path).files == ()
    assert preview(make_config(base_model=SCRATCH), folder=tmp_path, dataset=str(tmp_path / "b.csv")).files == ()


def test_rows_are_shown_from_the_training_tokens(make_config: Make) -> None:
    result = preview(make_config(base_model=SCRATCH), folder=Path(), dataset=ROWS, count=3)

    first, bad, cut = result.rows
    assert first.pieces == (PreviewSpan("why?", False), PreviewSpan("so</s>", True))
    assert (first.tokens, first.loss_tokens, first.cut_tokens) == (7, 3, 0)
    assert bad.reasons == ("column question is missing or empty",)
    assert cut.pieces[1] == PreviewSpan("lon", True)
    assert (cut.tokens, cut.loss_tokens, cut.cut_tokens) == (20, 3, 3)
    assert (result.num_rows, result.left_out.total(), result.limit, result.chat) == (3, 1, 20, False)
    assert result.lengths.tolist() == [7, 20]


def test_the_limit_is_the_context_of_the_model_and_not_that_of_its_tokenizer(
    make_config: Make, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(max_position_embeddings=20).save_pretrained(tmp_path)
    result = preview(make_config(base_model=str(tmp_path)), folder=tmp_path, dataset=ROWS)

    assert result.limit == 20
    assert (result.rows[2].tokens, result.rows[2].cut_tokens) == (20, 3)


def test_loss_tokens_are_green_on_a_terminal_and_otherwise_marked(make_config: Make) -> None:
    result = preview(make_config(base_model=SCRATCH), folder=Path(), dataset=ROWS, count=3)

    text = printed(result, terminal=False)
    assert "dataset:1: 7 tokens, 3 in the loss" in text
    assert "why?⟦so</s>⟧" in text
    assert re.search(r"dataset:2: left out ─+\ncolumn question is missing or empty\n", text)
    assert "dataset:3: 20 tokens, 3 in the loss, 3 cut" in text
    assert "3 rows, without a chat template, loss tokens between ⟦ and ⟧" in text
    assert "1 of 3 measured rows cannot be used" in text
    assert "tokens of 2 rows, at most 20 fit:" in text
    coloured = printed(result, terminal=True)
    assert "\x1b[1;31mcolumn question is missing or empty\x1b[0m" in coloured
    assert "\x1b[1;31m1 of 3 measured rows cannot be used:\x1b[0m" in coloured
    assert "\x1b[2mwhy?\x1b[0m\x1b[1;32mso</s>\x1b[0m" in coloured
    assert "⟦" not in coloured


def test_rows_of_a_head_show_what_it_learns_and_rows_of_one_length_are_one_line() -> None:
    config = load_config(
        {
            "base_model": {"type": "scratch", "architecture": "bert", "tokenizer": "word"},
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "category"}],
            "trainer": {"type": "finetune"},
        }
    ).config
    rows = [{"question": f"{word} now", "answer": word} for word in ("here", "there", "where")] * 20
    lines = printed(preview(config, folder=Path(), dataset=rows, count=1), terminal=False).splitlines()

    assert re.match(r"dataset:\d+: 4 tokens ─", lines[0])
    assert re.fullmatch(r"<s>(\w+) now</s>⟦\1⟧", lines[1])
    assert lines[3].endswith(" rows, the category between ⟦ and ⟧")
    assert re.fullmatch(r"  4 █{40} \d+", lines[-1])


def pairs(make_config: Make, **sections: Any) -> Any:
    sections = {
        "output_features": [{"name": "answer", "type": "preference"}],
        "trainer": {"type": "preference"},
    } | sections
    return make_config(base_model=SCRATCH, **sections)


def test_both_answers_of_a_pair_are_shown(make_config: Make) -> None:
    rows = [{"question": "why?", "chosen": "so", "rejected": "no"}, {"question": "q", "chosen": "a", "rejected": "a"}]
    result = preview(pairs(make_config), folder=Path(), dataset=rows, count=2)
    lines = printed(result, terminal=False).splitlines()

    assert result.rows[0].pieces == (
        PreviewSpan("why?", False),
        PreviewSpan("so</s>", True, "chosen"),
        PreviewSpan("no</s>", True, "rejected"),
    )
    assert lines[0].startswith("dataset:1: 10 tokens, 6 in the loss ─")
    assert lines[1:4] == ["why?", "chosen: ⟦so</s>⟧", "rejected: ⟦no</s>⟧"]
    assert "the answers in the columns chosen and rejected are equal" in lines
    assert "tokens of 1 row:" in lines
    assert "rejected: no</s>" in re.sub(r"\x1b\[[\d;]*m", "", printed(result, terminal=True))


def test_pairs_of_dialogues_are_shown_with_their_format(make_config: Make) -> None:
    config = pairs(make_config, input_features=[{"name": "messages", "type": "dialogue"}])
    rows = [{"prompt": "why?", "chosen": "so", "rejected": "no"}]
    result = preview(config, folder=Path(), dataset=rows)

    assert (result.formats, result.mode) == (("chosen_rejected",), "last_turn")
    assert "rejected: ⟦no</s>⟧" in printed(result, terminal=False)


def test_labelled_answers_are_shown_with_their_label(make_config: Make) -> None:
    output = {"name": "answer", "type": "text", "label": "liked"}
    config = pairs(make_config, output_features=[output], trainer={"type": "kto"})
    rows = [{"question": "why?", "answer": "so", "liked": 1}, {"question": "why?", "answer": "no", "liked": 0}]
    text = printed(preview(config, folder=Path(), dataset=rows, count=2), terminal=False)

    assert "\nwhy?\ngood: ⟦so</s>⟧\n" in text
    assert "\nwhy?\nbad: ⟦no</s>⟧\n" in text


def test_a_long_summary_takes_two_lines(make_config: Make) -> None:
    config = make_config(
        base_model=SCRATCH | {"context_length": 200}, input_features=[{"name": "messages", "type": "dialogue"}]
    )
    messages = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    lines = printed(preview(config, folder=Path(), dataset=[{"messages": messages}]), terminal=False).splitlines()

    start = lines.index("1 dialogues (messages, squash), without a chat template,")
    assert lines[start + 1] == "loss tokens between ⟦ and ⟧"


def test_the_reasons_why_rows_cannot_be_used_are_counted_unreadable_lines_included(
    make_config: Make, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\nwhy?,so\n,b\n,c\na,b,c,d\n", encoding="utf-8")
    split = {"type": "random", "probabilities": [1, 0, 0]}
    config = make_config(base_model=SCRATCH, data={"source": "rows.csv", "split": split})

    text = printed(preview(config, folder=tmp_path, count=1), terminal=False)

    assert "\n2 of 3 measured rows cannot be used:\n  2: column question is missing or empty\n" in text
    assert "\n1 row cannot be read:\n  1: 4 cells, the header has 2\n" in text
    assert "\ndata.max_bad_rows accepts 0.01 of all rows, and train stops at more\n" in text
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_bad_rows": 3})})
    assert "data.max_bad_rows" not in printed(preview(config, folder=tmp_path, count=1), terminal=False)


def test_unreadable_rows_are_compared_with_all_rows_and_not_with_the_measured_ones(
    make_config: Make, tmp_path: Path
) -> None:
    good = '{"question": "why?", "answer": "so"}\n'
    (tmp_path / "rows.jsonl").write_text(good * 3000 + "broken\n" * 20, encoding="utf-8")
    config = make_config(base_model=SCRATCH, data={"source": "rows.jsonl"})

    text = printed(preview(config, folder=tmp_path, count=1), terminal=False)

    assert "\n20 rows cannot be read:\n" in text
    assert "data.max_bad_rows" not in text, "0.7 % of all rows, 2 % of those that are measured"
    (tmp_path / "rows.jsonl").write_text(good * 1000 + "broken\n" * 10, encoding="utf-8")
    text = printed(preview(config, folder=tmp_path, count=1), terminal=False)
    assert "data.max_bad_rows" not in text, "0.99 % of all rows, 1.1 % of those for training"


def test_rows_without_loss_tokens_are_refused_as_in_training_even_if_no_row_has_any(make_config: Make) -> None:
    said = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "weight": 0}]
    dialogue: dict[str, Any] = {
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
    }

    result = preview(make_config(base_model=SCRATCH, **dialogue), folder=Path(), dataset=[{"messages": said}] * 3)

    assert result.formats == ("messages",)
    reason = "column messages: the dialogue has no answer to learn: all have weight: 0"
    assert [row.reasons for row in result.rows] == [(reason,)] * len(result.rows)
    assert result.left_out.total() == result.num_rows
    assert f"left out {'─' * 3}" in printed(result, terminal=False)
    assert reason in printed(result, terminal=False)


def test_rows_without_answers_show_only_prompts(make_config: Make) -> None:
    config = make_config(base_model=SCRATCH, trainer={"type": "none"})

    result = preview(config, folder=Path(), dataset=[{"question": "why?"}, {"question": "q" * 20}], count=2)

    assert result.rows[0].pieces == (PreviewSpan("why?", False),)
    assert result.rows[1].reasons == ("the prompt leaves no room for an answer within 20 tokens",)
    assert "⟦" not in printed(result, terminal=False)


def test_a_histogram_counts_every_row() -> None:
    lengths = np.random.default_rng(0).integers(5, 400, 1000)

    bins = histogram(lengths)

    assert sum(number for _, _, number in bins) == 1000
    assert bins[0][0] == lengths.min()
    assert bins[-1][1] == lengths.max()
    assert len(bins) == 10
    assert histogram(np.array([7, 7])) == [(7, 7, 2)]
    assert histogram(np.array([])) == []


def write_files(folder: Path) -> None:
    config = {
        "base_model": SCRATCH,
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
        "data": {"source": "rows.jsonl"},
    }
    (folder / "run.yaml").write_text(json.dumps(config, indent=1))
    write_json_lines(folder / "rows.jsonl", ROWS)
    (folder / "more.csv").write_text("question,answer\nhow?,thus\n")


def test_the_command_shows_rows_of_the_configuration_or_of_a_dataset(
    no_log: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path.parent)

    shown = CliRunner().invoke(app, ["preview", str(tmp_path / "run.yaml"), "-n", "1"])
    assert shown.exit_code == 0, shown.output
    assert "rows.jsonl:1: 7 tokens, 3 in the loss" in shown.output
    assert "rows.jsonl:3" not in shown.output

    other = [str(tmp_path / "run.yaml"), "--dataset", f"{tmp_path.name}/more.csv", "--set", "prompt.task=Go."]
    shown = CliRunner().invoke(app, ["preview", *other])
    assert shown.exit_code == 0, shown.output
    assert "Go.\n\nhow?\n⟦thus</s>⟧" in shown.output
