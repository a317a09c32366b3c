"""Tests that a notebook shows readable text: one line of progress, the log, results, and errors without frames."""

import re
from typing import Any

import pytest

from partita.runs import progress
from partita.runs.notebook import in_notebook, show_in_notebook

CELLS = (
    """
from partita import Model
rows = [{"text": f"number {n}", "label": "even" if n % 2 == 0 else "odd"} for n in range(64)]
config = {
    "base_model": {"type": "scratch", "size": "nano", "num_hidden_layers": 1, "tokenizer": "byte"},
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "label", "type": "category"}],
    "trainer": {"type": "finetune", "max_steps": 4, "batch_size": 8, "steps_per_evaluation": 2},
}
model = Model(config)
result = model.train(rows, run="run")
""",
    "result",
    "model.predict(rows[:8]).head(2)",
    "model.evaluate(rows)['label']['n']",
    'Model(config | {"trainer": {"type": "finetun"}})',
    "Model(config, quiet=True).train(rows, run='quiet');",
)


def test_outside_of_a_notebook_nothing_changes() -> None:
    assert not in_notebook()
    show_in_notebook(quiet=False)
    assert progress.ELSEWHERE == []


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Return the outputs of the cells of a notebook."""
    import nbformat
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, allow_errors=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


def streams(outputs: list[Any], name: str) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == name)


@pytest.mark.long
def test_a_training_shows_one_line_of_progress_and_the_log(outputs: list[list[Any]]) -> None:
    assert streams(outputs[0], "stderr") == ""
    lines = streams(outputs[0], "stdout").splitlines()
    assert lines[0] == "run directory: run (new)"
    assert [line.partition(":")[0] for line in lines if line.startswith("step ")] == ["step 2/4", "step 4/4"]
    shown = [output.data["text/plain"] for output in outputs[0] if output.output_type == "display_data"]
    assert re.match(r"training ━{8,16} 4/4  \d:\d\d elapsed  loss [\d.]+", shown[0])
    assert len([line for text in shown for line in text.splitlines()]) == 3  # two final evaluations


@pytest.mark.long
def test_results_are_readable(outputs: list[list[Any]]) -> None:
    (result,) = outputs[1]
    first, heads, *metrics = result.data["text/plain"].splitlines()
    assert first == "4 steps; the run is in run"
    assert heads.split() == ["validation", "test"]
    assert [line.split()[0] for line in metrics][:2] == ["loss", "label.accuracy"]
    assert "text/html" in outputs[2][-1].data
    assert outputs[3][-1].data["text/plain"] == "64.0"


@pytest.mark.long
def test_an_error_is_its_message_and_the_line_of_the_cell(outputs: list[list[Any]]) -> None:
    (error,) = outputs[4]
    assert error.ename == "ConfigError"
    assert error.traceback == [
        "ConfigError: trainer.type: got finetun; did you mean finetune?",
        '  in line 1 of the cell: Model(config | {"trainer": {"type": "finetun"}})',
    ]


@pytest.mark.long
def test_quiet_shows_nothing(outputs: list[list[Any]]) -> None:
    assert outputs[5] == []


@pytest.mark.long
def test_no_output_has_escape_codes_or_warnings(outputs: list[list[Any]]) -> None:
    text = repr(outputs)
    assert "\\x1b" not in text
    assert "Warning" not in text
