"""Tests of int8 weights in whole runs: a trained run answers with them, and its files keep their precision."""

from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.lm.loading import number_formats
from partita.lm.loading.number_formats import Int8Speed
from partita.lm.products.int8_linear import FBGEMM, ONEDNN, available_libraries, int8_layers
from partita_schema.errors import PartitaError, ResumeError

pytestmark = pytest.mark.skipif(
    not (FBGEMM.is_available() or ONEDNN.is_available()), reason="this build of torch has no int8 products"
)

INT8 = "quantization.type=int8_dynamic_activation_int8_weight"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.mark.long
def test_a_finished_run_answers_in_int8_and_keeps_its_weights(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Int8Speed(available_libraries()[0], 2.0)
    monkeypatch.setattr(number_formats, "int8_speeds", lambda shapes, dtype: dict.fromkeys(shapes, speed))
    rows, run = colours.rows(8), tmp_path / "run"
    Model(colours.config(), quiet=True).train(rows, run=run)
    saved = contents(run / "model")
    exact = Model.load(run, quiet=True)
    exact.predict(rows, tmp_path / "answers.jsonl")
    int8 = Model.load(run, overrides=[INT8], quiet=True)
    assert len(list(int8.predict(rows, tmp_path / "other.jsonl"))) == 8
    pipelines = [model._backend.pipeline() for model in (exact, int8)]  # type: ignore[attr-defined]
    assert [bool(int8_layers(pipeline.lm.module)) for pipeline in pipelines] == [False, True]
    with pytest.raises(ResumeError, match="holds answers of another job: model changed"):  # another number format
        int8.predict(rows, tmp_path / "answers.jsonl")
    with pytest.raises(PartitaError, match="are not saved; remove quantization, or add --set quantization"):
        int8.save(tmp_path / "copy")
    assert contents(run / "model") == saved


def test_an_evaluation_in_another_number_format_is_not_that_of_the_run(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, run = colours.rows(8), tmp_path / "run"
    Model(colours.config(), quiet=True).train(rows, run=run)
    Model.load(run, quiet=True).evaluate(rows)
    recorded = contents(run / "evaluations")
    assert recorded
    with caplog.at_level("INFO"):
        Model.load(run, overrides=["model_parameters.dtype=bfloat16"], quiet=True).evaluate(rows)
    assert contents(run / "evaluations") == recorded
    assert "not recorded in the run: the number format is not that of training" in caplog.text
