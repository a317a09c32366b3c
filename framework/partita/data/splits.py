"""Split rows into training, validation and test.

The split of a row depends on the number of rows, the seed and, if configured, a column; never on time, the number of
processes or a global random state. Within a split, rows keep the order of the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.column_checks import check_columns, require_column
from partita.data.rows import BadRow, Rows
from partita.data.sources.mixed import joined, open_mix
from partita.data.sources.python_datasets import SPLIT_OF_NAME, is_stream, splits_of
from partita.data.sources.sources import errors_at, open_rows
from partita.data.sources.transcripts import WantedRows
from partita_schema.cells import CellError, plain_text
from partita_schema.common.hashing import hash_to_int
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sections.data import FixedSplit, HashSplit, KFoldSplit, StratifySplit
from partita_schema.sections.sources import SimulationSource

TRAINING, VALIDATION, TEST = "training", "validation", "test"


def open_splits(config: Config, *, folder: Path, dataset: Any = None) -> dict[str, Rows]:
    """Open the rows of each split; empty splits are omitted.

    `preprocessing.sample_ratio` and `sample_size` sample the rows of the source before it is split; separate validation
    and test sources are used whole, and such a split gets no rows of the source. The source's unreadable rows are in
    `bad` of the training rows. Streamed training rows are not included.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        dataset: Replaces `data.source`; a relative path starts at the current folder.

    Raises:
        DataError: If there are no rows to train on (with `trainer: none`, no rows at all), or columns are missing.
    """
    own = {VALIDATION: config.data.validation, TEST: config.data.test}
    limit, wanted = config.data.max_row_bytes, WantedRows.by(config)
    opened = {}
    for name, source in own.items():
        if source is not None:
            with errors_at(f"data.{name}"):
                opened[name] = open_rows(source, folder=folder, name=name, max_row_bytes=limit, wanted=wanted)
    if dataset is None:
        splits = opened | configured_splits(config, folder=folder, without=frozenset(opened))
    else:
        splits = opened | passed_splits(config, dataset, without=frozenset(opened))
    makes_rows = config.simulation is not None and config.simulation.self_training is not None
    has_rows = bool(splits) if not config.trains else TRAINING in splits
    if not has_rows and not makes_rows and not is_streamed(config, dataset):
        raise DataError("there are no rows: write data.source in the file, or pass a dataset (--dataset PATH)")
    for rows in splits.values():
        check_columns(rows, config, supervised=config.trains)
    return {name: splits[name] for name in (TRAINING, VALIDATION, TEST) if name in splits and len(splits[name])}


def configured_splits(config: Config, *, folder: Path, without: frozenset[str]) -> dict[str, Rows]:
    """Open the rows of the configured source or mix and split them; nothing for streams, or without a source.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        without: Splits that get no rows.
    """
    source, limit, wanted = config.data.source, config.data.max_row_bytes, WantedRows.by(config)
    simulated = isinstance(source, SimulationSource)
    if config.data.streaming and not simulated:
        return {}
    if source is not None:
        with errors_at("data.source"):
            rows = open_rows(source, folder=folder, max_row_bytes=limit, wanted=wanted)
        return {TRAINING: rows} if simulated else divide(rows, config, without=without)
    if config.data.mix is not None:
        return divide_mix(open_mix(config.data, folder=folder, wanted=wanted), config, without=without)
    return {}


def passed_splits(config: Config, dataset: Any, *, without: frozenset[str]) -> dict[str, Rows]:
    """Open a dataset that replaces the source and split it; a dataset that has splits keeps them.

    Args:
        config: The configuration.
        dataset: A path, a Hub name or an object. Streamed training rows are not opened.
        without: Splits that get no rows.
    """
    limit, streamed = config.data.max_row_bytes, is_streamed(config, dataset)
    wanted = WantedRows.by(config)
    named = splits_of(dataset)
    if isinstance(config.split, KFoldSplit):
        check_foldable(dataset, named or {}, streamed=streamed)
    if named is None:
        if streamed:
            return {}
        rows = open_rows(dataset, folder=Path.cwd(), max_row_bytes=limit, wanted=wanted)
        return divide(rows, config, without=without)
    kind = type(dataset).__name__
    if config.trains and TRAINING not in named:
        raise DataError(f"the {kind} has no split train; it has {', '.join(dataset) or 'no splits'}")
    twice = next((name for name in named if name in without), None)
    if twice is not None:
        raise DataError(f"the {kind} has a {twice} split, and data.{twice} names another; remove one of them")
    splits = {
        name: open_rows(part, folder=Path.cwd(), name=name, max_row_bytes=limit)
        for name, part in named.items()
        if not (streamed and name == TRAINING)
    }
    if set(splits) == {TRAINING}:
        return divide(splits[TRAINING], config, without=without)
    if isinstance(config.split, KFoldSplit):
        return splits | divide(splits[TRAINING], config, without=without | {TEST})
    if TRAINING in splits:
        splits[TRAINING] = take_sample(splits[TRAINING], config)
    return splits


def check_foldable(dataset: Any, named: Mapping[str, Any], *, streamed: bool) -> None:
    """Raise DataError if the training rows of a dataset that replaces the source cannot be divided into folds.

    Args:
        dataset: A path, a Hub name or an object.
        named: Its splits, if it has any.
        streamed: Whether its training rows are streamed.
    """
    kind = type(dataset).__name__
    if streamed:
        raise DataError(f"the {kind} is a stream, which is not divided into folds; write another data.split")
    if VALIDATION in named:
        raise DataError(
            f"the {kind} has a validation split, and data.split: {{type: kfold}} validates each fold on its own rows; "
            "remove one of them"
        )


def is_streamed(config: Config, dataset: Any = None) -> bool:
    """Return whether training rows are streamed: those of the configuration, or of a `dataset` that replaces them."""
    if dataset is None or isinstance(dataset, str | Path):
        return config.data.streaming
    passed = splits_of(dataset)
    training = dataset if passed is None else passed.get(TRAINING)
    return config.trains and training is not None and is_stream(training)


def divide_mix(sources: dict[str, Rows], config: Config, *, without: frozenset[str]) -> dict[str, Rows]:
    """Split each source of a mix on its own, so that each split has a share of each; join the parts of a split.

    Transcripts of simulations are training rows only and are not split.
    """
    for rows in sources.values():
        check_columns(rows, config, supervised=config.trains)
    mix = zip(config.data.mix_names, config.data.mix or (), strict=True)
    simulated = {name for name, part in mix if isinstance(part.source, SimulationSource)}
    sizes = sample_sizes({name: len(rows) for name, rows in sources.items() if name not in simulated}, config)
    divided = {
        name: {TRAINING: rows}
        if name in simulated
        else divide(rows, config, without=without, size=sizes[name], in_mix=True)
        for name, rows in sources.items()
    }
    splits = {}
    for split in (TRAINING, VALIDATION, TEST):
        parts = {name: rows[split] for name, rows in divided.items() if len(rows.get(split, ()))}
        if parts:
            splits[split] = joined(parts)
    return splits


def sample_sizes(lengths: Mapping[str, int], config: Config) -> dict[str, int | None]:
    """Return how many rows of each source of a mix `sample_size` uses, in proportion to their numbers.

    Args:
        lengths: Number of rows of each source.
        config: The configuration.

    Raises:
        DataError: There are more sources than rows to use.
    """
    size, total = config.preprocessing.sample_size, sum(lengths.values())
    if size is None or size >= total:
        return dict.fromkeys(lengths)
    sources = [name for name, length in lengths.items() if length]
    if size < len(sources):
        raise DataError(
            f"preprocessing.sample_size is {size}, and data.mix needs a row of each of its {len(sources)} sources; "
            f"write at least {len(sources)}"
        )
    exact = {name: size * lengths[name] / total for name in sources}
    sizes = {name: max(1, int(share)) for name, share in exact.items()}
    while sum(sizes.values()) > size:
        sizes[max(sizes, key=lambda name: sizes[name] - exact[name] if sizes[name] > 1 else -1.0)] -= 1
    for name in sorted(sources, key=lambda name: sizes[name] - exact[name])[: size - sum(sizes.values())]:
        sizes[name] += 1
    return dict.fromkeys(lengths) | sizes


def divide(
    rows: Rows, config: Config, *, without: frozenset[str], size: int | None = None, in_mix: bool = False
) -> dict[str, Rows]:
    """Split a source into training, validation and test rows.

    Unreadable rows count as training rows.

    Args:
        rows: Rows of the source.
        config: The configuration.
        without: Splits that get no rows.
        size: Number of rows to use, if the source is part of a mix. Default: as configured.
        in_mix: Whether equal values of other sources have to be in the same split, with `split: {type: hash}`.
    """
    sampled = take_sample(rows, config, size=size)
    split_N = assign_splits(sampled, config, without=without, in_mix=in_mix)
    if not np.any(split_N == 0):
        raise DataError(f"no row of {rows.keys.names[0]} is a training row; see data.split")
    if isinstance(config.split, KFoldSplit) and len(sampled) < config.split.folds:
        message = f"{rows.keys.names[0]} has {len(sampled)} rows, fewer than {config.split.folds} folds; write fewer"
        raise DataError(f"{message} data.split.folds")
    if np.all(split_N == 0):
        return {TRAINING: sampled}
    names = [name for name in (TRAINING, VALIDATION, TEST) if name not in without]
    numbers = {TRAINING: 0, VALIDATION: 1, TEST: 2}
    chosen = {name: np.flatnonzero(split_N == numbers[name]) for name in names}
    splits = {name: sampled.select(chosen[name]) for name in names}
    return splits | {TRAINING: splits[TRAINING].with_bad(moved(sampled.bad, chosen[TRAINING]))}


def take_sample(rows: Rows, config: Config, *, size: int | None = None) -> Rows:
    """Return the sample of the rows that the config asks for; an unreadable row is in it if the row after it is.

    Args:
        rows: Rows of the source.
        config: The configuration.
        size: Number of rows to use, if the source is part of a mix. Default: as configured.
    """
    chosen = sample(len(rows), config, size=size)
    if chosen is None:
        return rows
    in_sample = {*chosen.tolist()}
    bad = [row for row in rows.bad if min(row.num_before, len(rows) - 1) in in_sample]
    return rows.select(chosen).with_bad(moved(bad, chosen))


def moved(bad: Sequence[BadRow], selected_N: np.ndarray) -> list[BadRow]:
    """Return unreadable rows with `num_before` counted in a selection of the source's readable rows.

    Args:
        bad: The unreadable rows.
        selected_N: Sorted indices of the selected readable rows in the source, [N].
    """
    return [replace(row, num_before=int(np.searchsorted(selected_N, row.num_before))) for row in bad]


def sample(length: int, config: Config, *, size: int | None = None) -> np.ndarray | None:
    """Return the sorted indices of the sampled rows, None for all; `size` comes before the configured number."""
    wanted = size or config.preprocessing.sample_size or max(1, round(length * config.preprocessing.sample_ratio))
    if wanted >= length:
        return None
    return np.sort(generator(config.seed, "sample").permutation(length)[:wanted])


def assign_splits(rows: Rows, config: Config, *, without: frozenset[str], in_mix: bool = False) -> np.ndarray:
    """Assign each row to a split: 0 training, 1 validation, 2 test, -1 left out.

    Args:
        rows: Rows of the source.
        config: The configuration.
        without: Splits that get no rows.
        in_mix: As for `divide`.
    """
    split = config.split
    if isinstance(split, FixedSplit):
        split_N = fixed_splits(rows, split.column)
        for number, name in ((1, VALIDATION), (2, TEST)):
            if name in without:
                split_N[split_N == number] = -1
        return split_N
    if isinstance(split, KFoldSplit):
        labels = None if split.column is None else column_of(rows, split.column, "data.split")
        fold_N = folds_of(rows.keys, split.folds, seed=config.seed, labels=labels)
        validated_N: np.ndarray = (fold_N == (split.fold or 1) - 1).astype(np.int8)
        return validated_N
    shares = (
        0.0 if VALIDATION in without else split.probabilities[1],
        0.0 if TEST in without else split.probabilities[2],
    )
    if isinstance(split, HashSplit):
        values = column_of(rows, split.column, "data.split")
        return hash_splits(values, shares, seed=config.seed, at_least_one=not in_mix)
    if isinstance(split, StratifySplit):
        return stratified_splits(column_of(rows, split.column, "data.split"), shares, seed=config.seed)
    return random_splits(len(rows), shares, seed=config.seed)


def random_splits(length: int, shares: Sequence[float], *, seed: int) -> np.ndarray:
    """Assign rows to splits at random by seed, with exact counts rounded half up and at least one training row."""
    validation, test = (int(length * share + 0.5) for share in shares)
    while length and validation + test >= length:
        validation, test = (validation - 1, test) if validation > test else (validation, test - 1)
    split_N = np.zeros(length, dtype=np.int8)
    order = generator(seed, "split").permutation(length)
    split_N[order[:validation]] = 1
    split_N[order[validation : validation + test]] = 2
    return split_N


def hash_splits(values: Sequence[str], shares: Sequence[float], *, seed: int, at_least_one: bool = True) -> np.ndarray:
    """Assign rows by a hash of each value, independent of other rows.

    Args:
        values: The value of each row.
        shares: Shares of validation and test rows.
        seed: Seed of the hash.
        at_least_one: Whether the rows with the smallest hash are training rows if no others are.
    """
    marks = np.array([hash_share(value, seed) for value in values])
    validation, test = shares
    split_N = np.zeros(len(marks), dtype=np.int8)
    split_N[marks >= 1 - validation - test] = 1
    split_N[marks >= 1 - test] = 2
    if at_least_one and len(marks) and not np.any(split_N == 0):
        split_N[marks == marks.min()] = 0
    return split_N


def folds_of(keys: Sequence[str], folds: int, *, seed: int, labels: Sequence[str] | None) -> np.ndarray:
    """Assign each row to a fold, from 0, by the order of the hashes of the row keys.

    Sizes of the folds differ by at most one row; with labels, so do the rows of each label in them.

    Args:
        keys: Row keys, [N].
        folds: Number of folds.
        seed: The seed of the run.
        labels: Label of each row, [N].
    """
    marks_N = np.array([hash_share(key, seed) for key in keys])
    codes_N = np.zeros(len(keys), dtype=np.int64)
    if labels is not None:
        codes_N = np.unique(np.asarray(labels), return_inverse=True)[1]
    fold_N = np.empty(len(keys), dtype=np.int64)
    fold_N[np.lexsort((marks_N, codes_N))] = np.arange(len(keys)) % folds
    return fold_N


def hash_share(value: str, seed: int) -> float:
    """Return a number in [0, 1) that depends only on the value and the seed."""
    return hash_to_int(f"{seed}:{value}", num_bytes=6) / 2**48


def stratified_splits(values: Sequence[str], shares: Sequence[float], *, seed: int) -> np.ndarray:
    """Assign rows so that each label has its share of rows for training to within one, and its other shares within two.

    Rows are sorted by label, in random order by seed within a label, and every 1/share-th row is selected.
    """
    places = generator(seed, "split").permutation(len(values))
    order = np.lexsort((places, np.unique(np.asarray(values), return_inverse=True)[1]))
    validation, test = shares
    split_N = np.zeros(len(values), dtype=np.int8)
    held_out = every(order, validation + test)
    if validation + test:
        split_N[held_out] = 1
        split_N[every(held_out, test / (validation + test))] = 2
    if len(split_N) and not np.any(split_N == 0):
        split_N[order[0]] = 0
    return split_N


def every(order: np.ndarray, share: float) -> np.ndarray:
    """Return a share of the elements, evenly spaced."""
    marks = np.floor(np.arange(len(order) + 1) * share + 0.5)
    chosen: np.ndarray = order[np.diff(marks) > 0]
    return chosen


def fixed_splits(rows: Rows, column: str) -> np.ndarray:
    """Assign rows to splits by the values of a column."""
    values = column_of(rows, column, "data.split")
    split_N = np.empty(len(rows), dtype=np.int8)
    for number, value in enumerate(values):
        split = SPLIT_OF_NAME.get(value.strip().lower().removesuffix(".0"))
        if split is None:
            raise DataError(
                f"{rows.key(number)}: column {column!r} holds {value!r}; write 0, 1, 2 or train, validation, test"
            )
        split_N[number] = (TRAINING, VALIDATION, TEST).index(split)
    return split_N


def column_of(rows: Rows, column: str, user: str) -> list[str]:
    """Return a column as strings. Raise DataError if it is missing."""
    require_column(rows, column, user=user)
    return [value_text(row.get(column)) for chunk in rows.iterate() for row in chunk]


def value_text(value: object) -> str:
    """Return a value as text: 1 and 1.0 are the same, since a missing value makes floats of a column of integers."""
    try:
        return plain_text(value)
    except CellError:
        return str(value)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a random generator for one purpose."""
    return np.random.default_rng([seed, *purpose.encode()])
