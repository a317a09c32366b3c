"""Test that an encoder-decoder takes the same steps and gives the same answers on one process and on two."""

from pathlib import Path
from typing import Any

import pytest

from ..encoder_decoders import save_encoder_decoder


@pytest.mark.long
def test_steps_and_answers_equal_those_of_one_process(processes: Any, tmp_path: Path) -> None:
    base = save_encoder_decoder(tmp_path / "base", "t5", sharp=2.0)
    config = processes.settings(max_steps=4) | {"base_model": str(base)}
    del config["model_parameters"]
    results = {}
    for ranks in (1, 2):
        folder = processes.prepare(tmp_path / str(ranks), config)
        results[ranks] = processes.start(ranks, folder, "train:4", "predict:more", "evaluate:more")
    one, two = (processes.log(tmp_path / str(ranks)) for ranks in (1, 2))
    for key in ("step", "batch_hash", "rows", "tokens", "loss_tokens"):
        assert [line[key] for line in two] == [line[key] for line in one]
    for key in ("loss", "gradient_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=2e-4)
    assert results[1]["predict:more"] == results[2]["predict:more"]
    assert results[1]["evaluate:more"]["model"] == pytest.approx(results[2]["evaluate:more"]["model"], rel=1e-3)
