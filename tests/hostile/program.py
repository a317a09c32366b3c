"""Reads mutated files, each in a process of its own, and says what became of it: a line of JSON each.

Arguments: `configs` or `data`, the folder of this file, the seed, and the first and last number of the mutations.
"""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 20
"""CPU seconds after which a process is ended by the system."""


def main() -> None:
    kind, home, seed, first, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    sys.path.insert(0, home)
    import mutations

    check: Callable[[Any], dict[str, Any]] = check_config if kind == "configs" else check_data
    if kind == "data":
        warm_up()
    idle = measured(dict)["kilobytes"]
    for number in range(first, last):
        made = mutations.mutated_config(number, seed) if kind == "configs" else mutations.mutated_data(number, seed)
        found = measured(lambda made=made: check(made))  # type: ignore[misc]
        found |= {"number": number, "megabytes": (found.pop("kilobytes") - idle) / 1000}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a fork, and the seconds and memory that it took."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS))
        try:
            found = work()
        except BaseException:
            found = {"traceback": traceback.format_exc()[-3000:]}
        os.write(writer, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    found = (
        json.loads(said) if said else {"traceback": f"ended with {signal.Signals(-code).name if code < 0 else code}"}
    )
    return {**found, "seconds": usage.ru_utime + usage.ru_stime, "kilobytes": usage.ru_maxrss}


def check_config(text: bytes) -> dict[str, Any]:
    """Validate a configuration as the command does."""
    from partita_schema.errors import ConfigError
    from partita_schema.load import load_config
    from partita_schema.summary import summary

    path = Path("run.yaml")
    path.write_bytes(text)
    try:
        loaded = load_config(str(path))
    except ConfigError as error:
        return {"outcome": "refused", "said": len(str(error)), "first": str(error)[:200]}
    return {"outcome": "good", "said": len(summary(loaded.config))}


def check_data(made: tuple[str, bytes]) -> dict[str, Any]:
    """Predict the rows of a file, and read it as a stream."""
    from partita_schema.errors import DataError

    name, data = made
    for old in Path().iterdir():
        old.unlink()
    Path(name).write_bytes(data)
    found: dict[str, Any] = {"file": name}
    try:
        found |= predicted(name)
    except DataError as error:
        found |= {"outcome": "refused", "first": str(error)[:300], "said": len(str(error))}
    try:
        found["streamed"] = streamed(name)
    except DataError as error:
        found["stream_refused"] = str(error)[:300]
    return found


def config() -> Any:
    from partita_schema.config import Config

    inputs, outputs = [{"name": "question", "type": "text"}], [{"name": "reply", "type": "text"}]
    return Config.model_validate({"base_model": "scripted", "input_features": inputs, "output_features": outputs})


def predicted(name: str) -> dict[str, Any]:
    """Rows that were read, and lines of the output by status."""
    from collections import Counter

    from partita.data.reading.sources import open_rows
    from partita.data.shaping.encoder import Encoder
    from partita.data.shaping.prompt import Shaper
    from partita.data.splits import check_columns
    from partita.inference.decode import Decoder
    from partita.inference.halving import BatchLimit, Capacity
    from partita.inference.predict import predict_rows
    from partita.lm.base import GenerationOptions
    from partita.lm.scripted import ScriptedModel
    from partita_schema.rows import row_schema

    lm, plan = ScriptedModel(lambda prompt: prompt[:20]), config()
    rows = open_rows(name, folder=Path())
    check_columns(rows, plan, supervised=False)
    predict_rows(
        lm=lm,
        rows=rows,
        encoder=Encoder(Shaper(plan, tokenizer=lm.tokenizer, labels={}, retriever=None)),
        schema=row_schema(plan, supervised=False),
        decoder=Decoder(plan, labels={}),
        config=plan,
        generation=GenerationOptions({}),
        max_new_tokens=20,
        capacity=lambda lengths: Capacity(32, limit=BatchLimit(32), written=True),
        seed=1,
        journal_path=Path("journal.jsonl"),
        output=Path("out.jsonl"),
        bad=rows.bad,
        fingerprint={"model": "scripted", "data": "rows"},
    )
    with Path("out.jsonl").open(encoding="utf8") as lines:
        statuses = Counter(json.loads(line)["status"] for line in lines)
    return {"outcome": "answered", "rows": len(rows), "bad": len(rows.bad), "statuses": statuses, "said": 0}


def streamed(name: str) -> dict[str, int]:
    """Rows of the file as a stream, good and bad."""
    from partita.data.chunks import Unreadable, parsed
    from partita.data.reading.sources import format_of
    from partita.data.reading.text_files import MOSTLY_BROKEN
    from partita.data.streams.open import open_stream
    from partita_schema.errors import DataError
    from partita_schema.sources import FileSource

    stream = open_stream(FileSource(type=format_of(name), path=name), folder=Path(), least_shards=1)
    good = bad = 0
    for shard in range(len(stream.shards)):
        for row, _ in stream.read(shard, None):
            read, _ = parsed([Unreadable(row.reason, row.raw) if row.reason else row.row])
            good, bad = good + len(read), bad + 1 - len(read)
            if bad >= MOSTLY_BROKEN and bad > good:  # as a run ends above data.max_bad_rows
                raise DataError(f"{name}: too many rows are broken")
    return {"good": good, "bad": bad}


def warm_up() -> None:
    """Import what every process needs before there are any."""
    Path("warm.jsonl").write_text('{"question": "a"}\n', encoding="utf8")
    predicted("warm.jsonl")
    for old in Path().iterdir():
        old.unlink()


if __name__ == "__main__":
    main()
