"""Training, validation and test rows of a run.

Which row goes where depends on the number of rows, the seed and, where the file says so, a column: never on time,
processes or a global random state. Inside a split, rows keep the order of the source.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.rows import Rows
from partita.data.sources import open_rows
from partita_schema.config import Config
from partita_schema.data import FixedSplit, HashSplit, StratifySplit
from partita_schema.errors import DataError
from partita_schema.nearest import nearest

TRAINING, VALIDATION, TEST = "training", "validation", "test"
SPLIT_NAMES = {
    "0": 0, "train": 0, "training": 0,
    "1": 1, "valid": 1, "validation": 1, "val": 1, "dev": 1,
    "2": 2, "test": 2, "testing": 2,
}  # fmt: skip
"""What a column of a fixed split may hold."""


def open_splits(config: Config, *, folder: Path, dataset: Any = None) -> dict[str, Rows]:
    """Rows by split, those splits that have any; `dataset` takes the place of `data.source`.

    Relative paths of the file start at `folder`, one given as `dataset` at the current folder.

    `preprocessing.sample_ratio` and `sample_size` choose among the rows of the source, before it is divided; the
    sources of validation and test rows are taken whole. A split with a source of its own gets no share of the source.
    The source's unreadable rows are in `bad` of the training rows. Raises DataError where there are no rows to train
    on (with `trainer: none`, no rows at all), or columns are missing.
    """
    own = {VALIDATION: config.data.validation, TEST: config.data.test}
    opened = {name: open_rows(place, folder=folder, name=name) for name, place in own.items() if place is not None}
    supervised = config.trainer.type != "none"
    splits = dict(opened)
    if dataset is not None:
        splits |= divide(open_rows(dataset, folder=Path.cwd()), config, without=frozenset(opened))
    elif config.data.source is not None:
        splits |= divide(open_rows(config.data.source, folder=folder), config, without=frozenset(opened))
    elif supervised or not opened:
        raise DataError("there are no rows: write data.source in the file, or give a dataset (--dataset PATH)")
    for rows in splits.values():
        check_columns(rows, config, supervised=supervised)
    return {name: splits[name] for name in (TRAINING, VALIDATION, TEST) if name in splits and len(splits[name])}


def check_columns(rows: Rows, config: Config, *, supervised: bool) -> None:
    """Raise DataError when a column is not there that prompts show or, with `supervised`, answers are learned from."""
    inputs = {feature.name: feature for feature in config.input_features}
    needed = {}
    for name in config.shown_columns:
        feature = inputs.get(name)
        if feature is None:
            needed[name] = "prompt.template"
        elif feature.preprocessing.missing_value_strategy == "drop_row":
            needed[feature.source_column] = f"input {name}"
    for output in config.output_features if supervised else ():
        if output.preprocessing.missing_value_strategy == "drop_row":
            needed[output.source_column] = f"output {output.name}"
    for column, user in needed.items():
        require_column(rows, column, user=user)


def require_column(rows: Rows, column: str, *, user: str) -> None:
    if column not in rows.columns:
        near = nearest(column, rows.columns)
        raise DataError(
            f"{rows.keys.names[0]} has no column {column!r}, which {user} needs; its columns are "
            f"{', '.join(rows.columns)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )


def divide(rows: Rows, config: Config, *, without: frozenset[str]) -> dict[str, Rows]:
    """A source as training, validation and test rows."""
    chosen = sample(len(rows), config)
    kept = rows if chosen is None else rows.select(chosen)
    places = deal(kept, config, without=without)
    if not np.any(places == 0):
        raise DataError(f"no row of {rows.keys.names[0]} is a training row; see data.split")
    if np.all(places == 0):
        return {TRAINING: kept.with_bad(rows.bad)}
    names = [name for name in (TRAINING, VALIDATION, TEST) if name not in without]
    numbers = {TRAINING: 0, VALIDATION: 1, TEST: 2}
    splits = {name: kept.select(np.flatnonzero(places == numbers[name])) for name in names}
    return splits | {TRAINING: splits[TRAINING].with_bad(rows.bad)}


def sample(length: int, config: Config) -> np.ndarray | None:
    """Places of the rows that are used, in order; None for all."""
    wanted = config.preprocessing.sample_size or max(1, round(length * config.preprocessing.sample_ratio))
    if wanted >= length:
        return None
    return np.sort(generator(config.seed, "sample").permutation(length)[:wanted])


def deal(rows: Rows, config: Config, *, without: frozenset[str]) -> np.ndarray:
    """0, 1 or 2 for each row: training, validation, test; -1 for rows that are left out."""
    split = config.split
    if isinstance(split, FixedSplit):
        places = fixed_places(rows, split.column)
        for number, name in ((1, VALIDATION), (2, TEST)):
            if name in without:
                places[places == number] = -1
        return places
    shares = (
        0.0 if VALIDATION in without else split.probabilities[1],
        0.0 if TEST in without else split.probabilities[2],
    )
    if isinstance(split, HashSplit):
        return hash_places(column_of(rows, split.column, "data.split"), shares, seed=config.seed)
    if isinstance(split, StratifySplit):
        return stratified_places(column_of(rows, split.column, "data.split"), shares, seed=config.seed)
    return random_places(len(rows), shares, seed=config.seed)


def random_places(length: int, shares: Sequence[float], *, seed: int) -> np.ndarray:
    """A seeded deal with exact numbers, each rounded half up; at least one row is for training."""
    validation, test = (int(length * share + 0.5) for share in shares)
    while length and validation + test >= length:
        validation, test = (validation - 1, test) if validation > test else (validation, test - 1)
    places = np.zeros(length, dtype=np.int8)
    order = generator(seed, "split").permutation(length)
    places[order[:validation]] = 1
    places[order[validation : validation + test]] = 2
    return places


def hash_places(values: Sequence[str], shares: Sequence[float], *, seed: int) -> np.ndarray:
    """A deal by a hash of each value, so that other rows do not matter; at least one row is for training."""
    marks = np.array([hash_share(value, seed) for value in values])
    validation, test = shares
    places = np.zeros(len(marks), dtype=np.int8)
    places[marks >= 1 - validation - test] = 1
    places[marks >= 1 - test] = 2
    if len(marks) and not np.any(places == 0):
        places[marks == marks.min()] = 0
    return places


def hash_share(value: str, seed: int) -> float:
    """A number from 0 to below 1 that only the value and the seed decide."""
    return int.from_bytes(blake2b(f"{seed}:{value}".encode("utf-8", "replace"), digest_size=6).digest(), "big") / 2**48


def stratified_places(values: Sequence[str], shares: Sequence[float], *, seed: int) -> np.ndarray:
    """A deal in which each label has its shares to within one row, and so has the whole.

    Rows stand in a seeded order by label, and every 1/share-th is taken.
    """
    chance = generator(seed, "split").permutation(len(values))
    order = np.lexsort((chance, np.unique(np.asarray(values), return_inverse=True)[1]))
    validation, test = shares
    places = np.zeros(len(values), dtype=np.int8)
    held_out = every(order, validation + test)
    if validation + test:
        places[held_out] = 1
        places[every(held_out, test / (validation + test))] = 2
    if len(places) and not np.any(places == 0):
        places[order[0]] = 0
    return places


def every(order: np.ndarray, share: float) -> np.ndarray:
    """Elements at even distances, a share of them."""
    marks = np.floor(np.arange(len(order) + 1) * share + 0.5)
    chosen: np.ndarray = order[np.diff(marks) > 0]
    return chosen


def fixed_places(rows: Rows, column: str) -> np.ndarray:
    """The deal that a column gives."""
    values = column_of(rows, column, "data.split")
    places = np.empty(len(rows), dtype=np.int8)
    for number, value in enumerate(values):
        place = SPLIT_NAMES.get(value.strip().lower().removesuffix(".0"))
        if place is None:
            raise DataError(
                f"{rows.key(number)}: column {column!r} holds {value!r}; write 0, 1, 2 or train, validation, test"
            )
        places[number] = place
    return places


def column_of(rows: Rows, column: str, user: str) -> list[str]:
    """A column as texts. Raises DataError where the rows do not have it."""
    require_column(rows, column, user=user)
    return [str(row.get(column)) for chunk in rows.iterate() for row in chunk]


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose."""
    return np.random.default_rng([seed, *purpose.encode()])
