"""Reads mutated files, each in a separate process, and prints the outcome of each as a line of JSON.

Arguments: `configs` or `data`, the folder of this file, the seed, and the first and last number of the mutations.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
"""CPU seconds after which the system ends a process."""
LIMIT_WAITED = 300
"""Wall-clock seconds after which a process is ended."""
IMPORTS = (
    "datasets",
    "pandas",
    "partita.cli.main",
    "partita.data.preview",
    "partita.lm.decoding.generation_defaults",
    "partita.tokenizers.load",
    "partita_schema.load",
    "partita_schema.problems.explain",
    "partita_schema.problems.repair",
    "partita_schema.problems.wrong_value",
    "partita_schema.yaml.syntax_errors",
    "partita_trainers.finetune",
    "rich.console",
    "tokenizers",
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
)
"""Modules that each process would otherwise import in its first seconds."""


def main() -> None:
    kind, home, seed, first, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    sys.path.insert(0, home)
    import mutations

    check: Callable[[Any], dict[str, Any]] = check_config if kind == "configs" else check_data
    if kind == "data":
        warm_up()
    else:
        import_all()
    gc.freeze()  # a garbage collection in a fork would visit and copy all these objects
    idle = measured(dict)["kilobytes"]
    for number in range(first, last):
        made = mutations.mutated_config(number, seed) if kind == "configs" else mutations.mutated_data(number, seed)
        result = measured(lambda made=made: check(made))  # type: ignore[misc]
        result |= {"number": number, "megabytes": (result.pop("kilobytes") - idle) / 1000}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a function in a fork, and the seconds and memory that it used."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS))
        signal.alarm(LIMIT_WAITED)
        try:
            result = work()
        except BaseException:
            result = {"traceback": traceback.format_exc()[-3000:]}
        os.write(writer, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    result = (
        json.loads(said) if said else {"traceback": f"ended with {signal.Signals(-code).name if code < 0 else code}"}
    )
    return {**result, "seconds": usage.ru_utime + usage.ru_stime, "kilobytes": usage.ru_maxrss}


def check_config(text: bytes) -> dict[str, Any]:
    """Run `validate` on a configuration, and also `explain` and `preview` if it is valid."""
    Path("run.yaml").write_bytes(text)
    for name in ("a.csv", "b.jsonl", "c.jsonl"):
        rows = [{"text": f"row {number}", "label": "ab"[number % 2], "fields": '{"x": 1}'} for number in range(8)]
        lines = ["text,label,fields\n", *(f'{row["text"]},{row["label"]},"{{}}"\n' for row in rows)]
        Path(name).write_text("".join(lines if name == "a.csv" else (json.dumps(row) + "\n" for row in rows)))
    status, said = command("validate", "run.yaml")
    results = {"outcome": "refused" if status else "good", "said": len(said), "first": said[:200]}
    if status:
        return results | wrong_end("validate", status, said)
    statuses = {}
    for words in (("explain", "run.yaml", "--all"), ("preview", "run.yaml", "--rows", "1")):
        status, said = command(*words)
        results |= wrong_end(words[0], status, said)
        statuses[words[0]] = status
    return results | {"statuses": statuses}


def wrong_end(name: str, status: int, said: str) -> dict[str, str]:
    """Return evidence that a command ended with neither a result nor a user error; empty otherwise."""
    if status in (0, 2) and "Traceback" not in said and (said or not status):
        return {}
    return {"traceback": f"{name} ended with {status}: {said[-3000:]}"}


def command(*words: str) -> tuple[int, str]:
    """Return exit status and output of a command."""
    from partita.cli.main import run

    sys.argv = ["partita", *words]
    said = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return status, said.getvalue()


def check_data(made: tuple[str, bytes]) -> dict[str, Any]:
    """Predict the rows of a file, and read them as a stream."""
    from partita_schema.errors import DataError

    name, data = made
    for old in Path().iterdir():
        old.unlink()
    Path(name).write_bytes(data)
    results: dict[str, Any] = {"file": name}
    try:
        results |= predicted(name)
    except DataError as error:
        results |= {"outcome": "refused", "first": str(error)[:300], "said": len(str(error))}
    try:
        results["streamed"] = streamed(name)
    except DataError as error:
        results["stream_refused"] = str(error)[:300]
    return results | {"unaccounted": unaccounted(results)}


def unaccounted(found: dict[str, Any]) -> int:
    """Return the number of rows that were read but are neither in the output nor counted as bad."""
    if found["outcome"] != "answered":
        return 0
    num_rows = found["rows"] + found["bad"]
    missing = abs(sum(found["statuses"].values()) - num_rows)
    return missing + (abs(sum(found["streamed"].values()) - num_rows) if "streamed" in found else 0)


def config() -> Any:
    from partita_schema.config import Config

    inputs, outputs = [{"name": "question", "type": "text"}], [{"name": "reply", "type": "text"}]
    return Config.model_validate({"base_model": "scripted", "input_features": inputs, "output_features": outputs})


def predicted(name: str) -> dict[str, Any]:
    """Return the number of rows that were read, and of lines of the output by status."""
    from collections import Counter

    from partita.data.column_checks import check_columns
    from partita.data.formatting.formatter import Formatter
    from partita.data.formatting.row_tokenizer import RowTokenizer
    from partita.data.sources.sources import open_rows
    from partita.generation.generator import LocalGenerator
    from partita.generation.job import PredictionPipeline
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.predict import PredictionFiles, predict_rows
    from partita.lm.base import GenerationOptions
    from partita.lm.scripted import ScriptedModel
    from partita.outputs.decode import Decoder

    lm, plan = ScriptedModel(lambda prompt: prompt[:20]), config()
    rows = open_rows(name, folder=Path())
    check_columns(rows, plan, supervised=False)
    pipeline = PredictionPipeline(
        config=plan,
        generator=LocalGenerator(lm),
        row_tokenizer=RowTokenizer(Formatter(plan, tokenizer=lm.tokenizer, labels={}, retriever=None)),
        decoder=Decoder(plan, labels={}),
        generation=GenerationOptions({}),
        max_new_tokens=20,
    )
    fingerprint = {"model": "scripted", "data": "rows"}
    files = PredictionFiles(journal=Path("journal.jsonl"), output=Path("out.jsonl"), fingerprint=fingerprint)
    predict_rows(pipeline, rows, files, budget=lambda prompts: BatchBudget(32), bad=rows.bad)
    with Path("out.jsonl").open(encoding="utf8") as lines:
        statuses = Counter(json.loads(line)["status"] for line in lines)
    return {"outcome": "answered", "rows": len(rows), "bad": len(rows.bad), "statuses": statuses, "said": 0}


def streamed(name: str) -> dict[str, int]:
    """Return the numbers of good and bad rows of the file as a stream."""
    from partita.data.chunks import Unreadable, parsed
    from partita.data.formats import format_of
    from partita.data.formats.text_files import is_mostly_broken
    from partita.data.run_data import open_stream
    from partita_schema.errors import DataError
    from partita_schema.sections.sources import FileSource

    stream = open_stream(FileSource(type=format_of(name), path=name), folder=Path(), least_shards=1)
    good = bad = 0
    for shard in range(len(stream.shards)):
        for row, _ in stream.read(shard, None):
            read, _ = parsed([Unreadable(row.reason, row.raw) if row.reason else row.row])
            good, bad = good + len(read), bad + 1 - len(read)
            if is_mostly_broken(bad, good):  # as at the end of a run
                raise DataError(f"{name}: too many rows are broken")
    return {"good": good, "bad": bad}


def import_all() -> None:
    """Import the modules of the commands, and explain an error, before any process is started."""
    for name in IMPORTS:
        importlib.import_module(name)
    feature = "[{name: text, type: text}]"
    good = f"base_model: {{type: scratch, size: nano}}\ninput_features: {feature}\noutput_features: {feature}\n"
    for text in (good, good + "trainer: {epoch: two}\n"):
        check_config(text.encode())


def warm_up() -> None:
    """Import the modules that every process needs before any is started."""
    import pandas as pd

    importlib.import_module("datasets")
    rows = pd.DataFrame({"question": ["a"]})
    rows.to_json("warm.jsonl", orient="records", lines=True)
    rows.to_parquet("warm.parquet")
    for name in ("warm.jsonl", "warm.parquet"):
        predicted(name)
        streamed(name)
    for old in Path().iterdir():
        old.unlink()


if __name__ == "__main__":
    main()
