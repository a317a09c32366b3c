"""Seeded damage to configurations and data files: each number gives the same mutation in every run."""

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

BYTES = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"\r", b"\n", b"\t", b" ", b'"', b"'",
    b",", b":", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"- ", b"#", b"|", b">",
    b"%", b"@", b"`", b"\\", b"\\ud800", b"\\u0000", b"1e999", b"-0", b"9" * 400, b"NaN", b"Infinity", b"\xe2\x80\xa8",
]  # fmt: skip


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, remove, double, swap or insert bytes, one to eight times."""
    result = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(result) + 1)
        length = min(draw.choice([1, 1, 2, 5, 40, 400]), len(result) - at)
        kind = draw.randrange(6)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del result[at : at + length]
        elif kind == 2:
            result[at:at] = result[at : at + length] * draw.choice([1, 1, 3, 100])
        elif kind == 3:
            result[at : at + length] = draw.randbytes(length)
        elif kind == 4:
            del result[at:]
        else:
            result[at:at] = draw.choice(BYTES) * draw.choice([1, 1, 1, 2, 50, 3000])
    return bytes(result)


# Configurations

CONFIG = {
    "base_model": {"type": "scratch", "size": "nano"},
    "input_features": [{"name": "text", "type": "text", "preprocessing": {"max_sequence_length": 64}}],
    "output_features": [
        {"name": "label", "type": "category", "decoder": {"labels": ["a", "b"], "fallback_label": "a"}},
        {"name": "fields", "type": "json", "decoder": {"json_schema": {"type": "object", "properties": {"x": {}}}}},
    ],
    "prompt": {"task": "Say it.", "examples": [{"text": "x", "label": "a", "fields": "{}"}], "system": "Be kind."},
    "generation": {"max_new_tokens": 8, "do_sample": True, "temperature": 0.5},
    "adapter": {"type": "lora", "r": 4, "target_modules": ["q_proj"]},
    "preprocessing": {"global_max_sequence_length": 128, "sample_ratio": 0.5},
    "data": {
        "mix": [{"source": "a.csv", "weight": 2}, {"source": {"type": "jsonl", "path": "b.jsonl"}}],
        "validation": "c.jsonl",
        "batching": {"type": "bucket", "window": 64},
        "loader": {"workers": 0},
        "max_bad_rows": 0.1,
    },
    "trainer": {
        "type": "finetune",
        "epochs": 1,
        "batch_size": 4,
        "learning_rate": 0.001,
        "optimizer": {"type": "adamw"},
        "learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.1},
    },
    "backend": {"type": "local"},
    "seed": 7,
}

DEEP: Any = "x"
for _ in range(90):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(10**30), 0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "x", "auto", "none", "null", "1e4", "${HOME}", "\u202e", "\ud83d\ude00",
    "../../etc", "/dev/null", "x" * 100_000, "{text}" * 2000, "{" * 50, "a.b.c", "module:Class", [], {}, [[]], [None],
    [{}], {"type": None}, {"type": []}, {"type": "lora"}, {"type": "x" * 5000}, {"": ""}, {"a": {"b": {"c": 1}}}, DEEP,
    list(range(3000)), [{"name": "a", "type": "text"}] * 300, {f"key{i}": i for i in range(3000)}, [1, "a", None, {}],
    {"$ref": "#"}, {"$ref": "http://localhost/x"}, {"pattern": "(a+)+$", "type": "string"}, {"$id": 3},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def schema_places() -> list[tuple[str, ...]]:
    """Return every key of the schema as a path from the top."""
    from partita_schema.config import Config
    from partita_schema.problems.unknown_key import walk

    return [(*section.rstrip(".").replace("[]", "").split("."),) for section, _ in walk(Config, "") if section]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Write a value at a path; missing mappings on the way are created."""
    for part in path[:-1]:
        if isinstance(tree, list):
            tree = tree[part if isinstance(part, int) and part < len(tree) else 0] if tree else {}
        elif isinstance(tree, dict):
            if not isinstance(tree.get(part), dict | list):
                tree[part] = {}
            tree = tree[part]
    if isinstance(tree, list) and tree:
        tree[path[-1] if isinstance(path[-1], int) and path[-1] < len(tree) else 0] = value
    elif isinstance(tree, dict):
        tree[path[-1]] = value


def misspelt(key: str, draw: random.Random) -> str:
    at = draw.randrange(len(key) + 1)
    return draw.choice(
        [key + "s", key[:at] + key[at + 1 :], key[:at] + "_" + key[at:], key.upper(), key + ":", key * 40]
    )


def structural_config(draw: random.Random) -> str:
    """Return a configuration with wrong types, keys and sections as YAML."""
    tree = json.loads(json.dumps(CONFIG))
    known = schema_places()
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        path = draw.choice(places(tree)[1:]) if draw.random() < 0.5 else draw.choice(known)
        if draw.random() < 0.2:
            path = (*path[:-1], misspelt(str(path[-1]), draw))
        value = draw.choice(VALUES) if draw.random() < 0.95 else tree
        put(tree, path, json.loads(json.dumps(value)))
    if draw.random() < 0.1:
        tree["model_type"] = "llm"
    return yaml.safe_dump(tree, allow_unicode=True)


def laughs(levels: int, width: int) -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE_YAML: list[Callable[[random.Random], str]] = [
    lambda draw: laughs(draw.randint(3, 30), draw.randint(2, 9)),
    lambda draw: "a: &a\n  <<: [*a, *a]\n" + yaml.safe_dump(CONFIG),
    lambda draw: "x: &x {a: 1}\ny: {<<: *x, <<: *x, a: 2}\n" + yaml.safe_dump(CONFIG),
    lambda draw: "x: &x\n" + "".join(f"  k{i}: 1\n" for i in range(900)) + "y:\n" + "  <<: *x\n" * 90,
    lambda draw: draw.choice("[{(") * draw.choice([10, 100, 100_000]),
    lambda draw: "a:\n" + "".join(" " * n + "- \n" for n in range(1, 300)),
    lambda draw: "- " * draw.choice([50, 5000, 100_000]),
    lambda draw: "? " * draw.choice([50, 5000]) + "a",
    lambda draw: "base_model: !!python/object/apply:os.system ['true']\n",
    lambda draw: "base_model: !!binary " + "A" * 1000,
    lambda draw: "%YAML 9.9\n---\na: 1\n--- \nb: 2\n",
    lambda draw: "".join(f"key{i}: {i}\n" for i in range(draw.choice([10, 1000, 12_000]))),
    lambda draw: "seed: 1\n" * draw.choice([2, 2000]),
    lambda draw: "seed: " + "1" * draw.choice([10, 5000, 900_000]),
    lambda draw: "base_model: '" + "x" * 900_000,
    lambda draw: 'base_model: "' + "\\x41" * 100_000 + '"\n',
    lambda draw: "base_model: |\n" + "  line\n" * 50_000,
    lambda draw: "a: " * draw.choice([2, 5000]),
    lambda draw: "\ta: 1\n" * draw.choice([1, 5000]),
    lambda draw: "input_features: [" + "{name: a, type: text}, " * 20_000 + "]\n",
    lambda draw: yaml.safe_dump({**CONFIG, "data": {"mix": [{"source": "a.csv"}] * 5000}}),
    lambda draw: yaml.safe_dump({**CONFIG, "prompt": {"examples": [{"text": "a"}] * 5000}}),
    lambda draw: yaml.safe_dump({**CONFIG, "prompt": {"template": "{text}" * 20_000}}),
    lambda draw: "base_model: m\n" * 2 + "a" * 900_000 + ": 1\n",
    lambda draw: "{" + ", ".join(f"a{i}: [" for i in range(60)),
]


def mutated_config(number: int, seed: int) -> bytes:
    """Return one configuration file."""
    draw = random.Random(f"config {seed} {number}")
    kind = draw.random()
    if kind < 0.55:
        text = structural_config(draw).encode("utf-8", "surrogatepass")
    elif kind < 0.7:
        text = draw.choice(HOSTILE_YAML)(draw).encode()
    else:
        text = yaml.safe_dump(CONFIG).encode()
    return mutated_bytes(text, draw) if kind >= 0.7 or draw.random() < 0.15 else text


# Data

ROWS = [
    {"id": i, "question": f"why {i}? " + "é😀" * (i % 3), "answer": f'because, "{i}"\nso', "n": i / 7}
    for i in range(40)
]
KINDS = ["csv", "tsv", "json", "jsonl", "parquet", "arrow"]
NUMBERS = [0, 1, 10**14, 3, 2**62]


def text_of(kind: str) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    if kind == "json":
        return json.dumps(ROWS, indent=1).encode()
    mark = "," if kind == "csv" else "\t"
    lines = [mark.join('"' + str(value).replace('"', '""') + '"' for value in row.values()) for row in ROWS]
    return "\r\n".join([mark.join(ROWS[0]), *lines]).encode()


def nested(levels: int, draw: random.Random) -> str:
    opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
    return opening * levels + "1" + closing * levels


def hostile_text(kind: str, draw: random.Random) -> bytes:
    """Return a text that is hard to parse in its format."""
    mark = "\t" if kind == "tsv" else ","
    if kind in ("csv", "tsv"):
        head = f"question{mark}answer\n"
        return draw.choice(
            [
                lambda: head + f'x"{mark}"y"\n"' * draw.choice([1000, 100_000]),
                lambda: head + '"x\n' * draw.choice([500, 50_000]),
                lambda: head + '"' * draw.choice([999, 1_000_000]),
                lambda: head + mark * 1_500_000,
                lambda: head + "x" * draw.choice([10_000, 200_000]) + f"{mark}a\n",
                lambda: mark.join(["a"] * 50) + "\n1\n",
                lambda: mark.join(f"c{i}" for i in range(3000)) + "\n" + mark * 2999 + "\n",
                lambda: head + f"a{mark}b\r" * 3000,
                lambda: "\ufeff\ufeff" + head + "\0" * 1000,
                lambda: head + f"=1+1{mark}@x\n" * 20,
                lambda: head + "\n" * 100_000,
                lambda: mark * 5 + "\n" + mark * 5 + "\n",
            ]
        )().encode()
    row = draw.choice(
        [
            lambda: '{"question": ' + nested(draw.choice([50, 99, 150, 900, 5000, 100_000]), draw) + "}",
            lambda: '{"question": "a", "deep": ' + nested(draw.choice([90, 300, 940]), draw) + "}",
            lambda: '{"question": 1e999, "answer": ' + "9" * draw.choice([300, 400, 5000]) + "}",
            lambda: '{"question": NaN, "n": -Infinity}',
            lambda: '{"question": "a", "question": "b", "question": ["c"]}',
            lambda: '{"question": "\\ud800", "answer": "\\ud83d"}',
            lambda: "{" + ", ".join(f'"k{i}": {i}' for i in range(20_000)) + "}",
            lambda: '{"question": "' + "x" * draw.choice([10_000, 100_000]) + '"}',
            lambda: '{"": {}, "question": [], "answer": {"a": [null]}}',
            lambda: '{"question": "\\u0000\\u001b[31m\\u202e"}',
            lambda: '{"question": [' + "{}," * 400_000 + "{}]}",
            lambda: '{"question": true, "__proto__": 1, "question_raw": 2, "status": 3, "answer": null}',
        ]
    )()
    good = json.dumps(ROWS[0])
    if kind == "jsonl":
        return "\n".join([good, row, good, "", "[]", "1", row]).encode("utf-8", "surrogatepass")
    return draw.choice(
        [
            lambda: f"[{good}, {row}, {good}]",
            lambda: row,
            lambda: json.dumps({"question": ["a"] * 50, "answer": ["b"] * 50}),
            lambda: json.dumps({"question": ["a"] * 50, "answer": ["b"] * 49}),
            lambda: "[" * draw.choice([5, 500, 200_000]),
            lambda: "[" + "1," * draw.choice([5, 50_000]) + "1]",
            lambda: " " * 3_000_000 + f"[{good}]",
            lambda: f'{{"rows": [{good}, {row}]}}',
            lambda: f"{good}\n{row}\n{good}\n",
            lambda: "[]" + good,
        ]
    )().encode("utf-8", "surrogatepass")


def bomb(kind: str, draw: random.Random) -> bytes:
    """Return a decompression bomb: few bytes that decompress to many."""
    start = {"jsonl": b'{"question": "a"}\n', "json": b'[{"question": "a"}, '}.get(kind, b"question\nanswer\n")
    line = draw.choice([b"x", b"\n", b'"', b"[", b"x\n", b'{"a":1}\n', b"1,", b" ", b"\0"])
    size = 500_000 if b"\n" in line else draw.choice([1_000_000, 80_000_000])
    return start + line * (size // len(line))


def mutated_text(kind: str, draw: random.Random) -> tuple[bytes, str]:
    """Return the bytes of a text file and the extension of its compression."""
    text = hostile_text(kind, draw) if draw.random() < 0.4 else mutated_bytes(text_of(kind), draw)
    if draw.random() < 0.7:
        return text, ""
    ending, pack = draw.choice([(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
    if draw.random() < 0.15:
        return gzip.compress(bomb(kind, draw), 1), ".gz"
    packed = pack(text)
    damage = draw.randrange(5)
    if damage == 0:
        packed = packed[: draw.randrange(len(packed))]
    elif damage == 1:
        packed = packed + pack(text_of(kind))
    elif damage == 2:
        packed = packed + draw.randbytes(20)
    elif damage == 3:
        packed = mutated_bytes(packed, draw)
    return packed, ending


def hostile_columns(draw: random.Random) -> dict[str, Any]:
    """Return a column of a type that is hard to convert to Python values."""
    count = 5
    made: list[Callable[[], Any]] = [
        lambda: pyarrow.array(NUMBERS, pyarrow.timestamp(draw.choice(["s", "ms", "us", "ns"]))),
        lambda: pyarrow.array([0, 1, 2, 3, 10**13], pyarrow.timestamp("s", tz=draw.choice(["UTC", "No/Where"]))),
        lambda: pyarrow.array([0, 1, 10**8, 3, -(10**8)], pyarrow.int32()).cast(pyarrow.date32()),
        lambda: pyarrow.array(NUMBERS, pyarrow.duration("s")),
        lambda: pyarrow.array(
            [[{"t": 0}], [{"t": 10**14}], None, [], []], pyarrow.list_(pyarrow.struct([("t", pyarrow.timestamp("s"))]))
        ),
        lambda: pyarrow.array(["a", "b", "a", None, "b"]).dictionary_encode(),
        lambda: pyarrow.nulls(count),
        lambda: pyarrow.array([1, 2, None, 4, 5]).cast(pyarrow.decimal128(30, 3)),
        lambda: pyarrow.array([b"a", b"\xff", None, b"", b"x"]),
        lambda: pyarrow.StringArray.from_buffers(
            count, pyarrow.array(list("abcde")).buffers()[1], pyarrow.py_buffer(b"a\xffcde")
        ),
        lambda: pyarrow.array([[("a", 1)]] * count, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        lambda: pyarrow.array([1, 2, 3, 4, 5], pyarrow.time64("us")),
        lambda: pyarrow.array([float("nan"), float("inf"), None, 0.1, -0.0], pyarrow.float32()),
        lambda: pyarrow.array([{"a": {"b": [1]}}, None, {"a": None}, {}, {"a": {"b": []}}]),
        lambda: pyarrow.array([[[[1]]]] * count),
        lambda: pyarrow.array([2**63 - 1, -(2**63), 0, 1, None]),
        lambda: pyarrow.array(["x" * 200_000] * count),
    ]
    return {
        "question": draw.choice([made[13], made[5], lambda: pyarrow.array(list("vwxyz"))])(),
        "odd": draw.choice(made)(),
    }


def mutated_table(kind: str, draw: random.Random) -> bytes:
    """Return the bytes of a Parquet or Arrow file."""
    table = pyarrow.Table.from_pylist(ROWS)
    if draw.random() < 0.5:
        table = pyarrow.table(hostile_columns(draw))
    if draw.random() < 0.1:
        table = table.rename_columns([table.column_names[0]] * table.num_columns)
    sink = io.BytesIO()
    if kind == "parquet":
        size = draw.choice([3, 1000])
        try:
            pyarrow.parquet.write_table(table, sink, row_group_size=size)
        except pyarrow.ArrowInvalid:  # Parquet has no seconds, and the largest values overflow as milliseconds
            sink = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, row_group_size=size)
    else:
        make = draw.choice([pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=draw.choice([3, 1000]))
    data = sink.getvalue()
    damage = draw.randrange(5)
    if damage == 0:
        return mutated_bytes(data, draw)
    if damage == 1:
        return data[: draw.randrange(len(data))]
    if damage == 2:
        return data[:-8] + draw.randbytes(4) + data[-4:]
    return data


def mutated_data(number: int, seed: int) -> tuple[str, bytes]:
    """Return name and bytes of one data file."""
    draw = random.Random(f"data {seed} {number}")
    kind = KINDS[number % len(KINDS)]
    if kind in ("parquet", "arrow"):
        return f"rows.{kind}", mutated_table(kind, draw)
    data, ending = mutated_text(kind, draw)
    return f"rows.{kind}{ending}", data
