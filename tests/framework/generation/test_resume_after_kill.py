import json
import random
from pathlib import Path

import pytest

from ...forks import Forks
from ...json_lines import read_json_lines
from ...seeds import session_seed

# Each attempt is a fork of one process, killed when its journal has reached a random size.
SCRIPT = """
import hashlib, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.formatting.formatter import Formatter
from partita.data.rows import ListStore, RowKeys, Rows
from partita.outputs.decode import Decoder
from partita.generation.oom_backoff import BatchBudget
from partita.generation.generator import LocalGenerator
from partita.generation.job import PredictionPipeline
from partita.generation.predict import PredictionFiles, predict_rows
from partita.lm.base import GenerationOptions
from partita.lm.scripted import ScriptedModel
from partita_schema.config import Config
from torch import OutOfMemoryError

ROWS = 600

class Sampled(ScriptedModel):
    '''Its answers depend on the seed and on the whole batch, as sampled ones do; greedy ones under a ceiling.'''
    def generate(self, requests, options, *, seed):
        time.sleep(0.002)
        if ceiling:
            if sum(len(request.input_ids) for request in requests) > ceiling:
                raise OutOfMemoryError("out of memory")
            return super().generate(requests, options, seed=seed)
        batch = repr((seed, [request.input_ids for request in requests]))
        drawn = hashlib.sha256(batch.encode()).hexdigest()
        return [replace(one, text=f"{drawn}-{place}")
                for place, one in enumerate(super().generate(requests, options, seed=seed))]

def answer(prompt):
    if prompt.startswith("bad"):
        raise ValueError(prompt)
    return prompt

config = Config.model_validate({
    "base_model": "scripted",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "seed": 3,
})
def question(n):
    if n % 97 == 5:
        return ""
    return ("bad " if n % 50 == 7 else "") + "x" * (n * 7 % 40 + 1)

questions = [{"question": question(n)} for n in range(ROWS)]
rows = Rows(ListStore(questions), columns=("question",), keys=RowKeys.counted("data", ROWS), fingerprint="f")
lm = Sampled(answer)

def predict(folder):
    pipeline = PredictionPipeline(
        config=config, generator=LocalGenerator(lm),
        row_tokenizer=RowTokenizer(Formatter(config, tokenizer=lm.tokenizer, labels={}, retriever=None)),
        decoder=Decoder(config, labels={}), generation=GenerationOptions({"do_sample": not ceiling}), max_new_tokens=40,
    )
    files = PredictionFiles(
        journal=folder / "journal.jsonl", output=folder / "out.jsonl", fingerprint={"model": "1"}
    )
    return predict_rows(pipeline, rows, files, budget=lambda prompts: BatchBudget(4))

folder, ceiling = Path(sys.argv[1]), int(sys.argv[2])
journal = folder / "killed" / "journal.jsonl"
for size in map(int, sys.argv[3:]):
    pid = os.fork()
    if not pid:
        predict(folder / "killed")
        os._exit(3)
    while not journal.exists() or journal.stat().st_size < size:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    print(journal.stat().st_size)
    if size % 2:
        with journal.open("ab") as file:
            file.write(b'{"key": "torn')
print(predict(folder / "killed").stats.resumed)
predict(folder / "straight")
"""


@pytest.mark.long
@pytest.mark.parametrize("ceiling", [0, 100])
def test_a_job_killed_three_times_equals_an_uninterrupted_one(forks: Forks, tmp_path: Path, ceiling: int) -> None:
    """Sampled without a memory limit, greedy with one: 4 rows of up to 44 tokens exceed 100, 2 do not."""
    seed = session_seed()
    whole = 600 * 250
    sizes = sorted(random.Random(seed).sample(range(2000, whole * 2 // 3), 3))
    done = forks.run(SCRIPT, "-c", tmp_path, ceiling, *sizes, folder=tmp_path)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    *reached, resumed = map(int, done.stdout.split())
    killed, straight = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("killed", "straight"))
    assert killed == straight, f"seed {seed}"
    statuses = [json.loads(line)["status"] for line in killed.splitlines()]
    assert (statuses.count("error"), statuses.count("skipped"), len(statuses)) == (12, 7, 600)
    assert all(size <= at for size, at in zip(sizes, reached, strict=True))
    assert 0 < resumed < 600
    journal = read_json_lines(tmp_path / "killed" / "journal.jsonl")[1:]
    assert sorted(record["row"] for record in journal) == list(range(600)), "each row was written once"
