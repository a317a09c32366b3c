import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
from pathlib import Path
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.formatting.formatter import Formatter
from partita.outputs.decode import Decoder
from partita.generation.oom_backoff import BatchBudget
from partita.generation.generator import LocalGenerator
from partita.generation.job import PredictionPipeline
from partita.generation.predict import PredictionFiles, predict_rows
from partita.lm.base import GenerationOptions
from partita.lm.scripted import ScriptedModel
from partita_schema.config import Config

class Counted:
    '''Rows that are made when they are asked for.'''
    columns = ("question", "note")
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return self.rows
    def get(self, indices):
        return [{"question": f"{index} " + "word " * (index % 9 + 2), "note": "." * 1000} for index in indices]
    def key(self, index):
        return f"data:{index + 1}"

config = Config.model_validate({
    "base_model": "scripted",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
})
lm = ScriptedModel(lambda prompt: prompt)
pipeline = PredictionPipeline(
    config=config, generator=LocalGenerator(lm),
    row_tokenizer=RowTokenizer(Formatter(config, tokenizer=lm.tokenizer, labels={}, retriever=None)),
    decoder=Decoder(config, labels={}), generation=GenerationOptions({}), max_new_tokens=128,
)
for rows in (5000, 50000):
    predict_rows(
        pipeline, Counted(rows),
        PredictionFiles(
            journal=Path(sys.argv[1]) / f"{rows}.jsonl", output=Path(sys.argv[1]) / f"out{rows}.jsonl", fingerprint={}
        ),
        budget=lambda prompts: BatchBudget(256),
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.long
def test_fifty_thousand_rows_need_the_memory_of_five_thousand(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    few, many = map(int, done.stdout.split())
    output = (tmp_path / "out50000.jsonl").stat().st_size >> 20
    assert output > 50, "the rows must be large compared with the limit"
    assert many - few < 16, f"{few} MB for 5,000 rows, {many} MB for 50,000"
