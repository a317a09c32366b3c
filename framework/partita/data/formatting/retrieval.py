"""Select worked examples for each row: at random, or the most similar ones.

Shapes: N rows to select from, B rows that need examples, D numbers of a vector.
"""

import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.column_checks import check_columns
from partita.data.formatting.base import Retriever, Row
from partita.data.formatting.formatter import sample_text, text_inputs
from partita.data.rows import Rows
from partita.data.sources.sources import errors_at, open_rows
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError
from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.prompt import SemanticRetrieval


def build_retriever(config: Config, *, training: Rows | None, folder: Path) -> Retriever | None:
    """Return the retriever of a run; None without prompt.retrieval.

    Examples come from `prompt.retrieval.dataset`, else from the training rows.

    Raises:
        DataError: If there are no rows to select from.
        ModelError: If the embedding model cannot be loaded.
    """
    options = config.prompt.retrieval
    if options is None:
        return None
    pool = training
    if options.dataset:
        limit = config.data.max_row_bytes
        with errors_at("prompt.retrieval.dataset"):
            pool = open_rows(options.dataset, folder=folder, name="examples", max_row_bytes=limit)
    if pool is None or not len(pool):
        raise DataError("prompt.retrieval has no rows to choose from; write prompt.retrieval.dataset")
    check_columns(pool, config, supervised=True)
    if isinstance(options, SemanticRetrieval):
        return SemanticRetriever(config, pool, k=options.k, model_name=options.model_name)
    return RandomRetriever(config, pool, k=options.k, seed=config.seed)


class Pool:
    """Rows that may serve as examples; bad ones are skipped."""

    def __init__(self, config: Config, rows: Rows) -> None:
        """Start without reading rows."""
        self._config = config
        self.rows = rows
        self._schema = row_schema(config, supervised=True, single=True)
        places = _place(rows.keys.files, rows.keys.numbers)
        self._by_place = np.argsort(places, kind="stable")
        self._places = places[self._by_place]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the schema, which cannot be pickled; the copy builds its own."""
        return Pool, (self._config, self.rows)

    def clean(self, indices: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """Yield index and values of the good rows."""
        clean = check_rows(self._schema, self.rows.get(indices)).clean
        for number, row in clean.items():
            yield indices[number], row

    def examples(self, indices: Sequence[int], row: Row, key: str) -> list[Row]:
        """Return the good rows for a row, without the row itself.

        A row that has another key here, because it was read from another source, is recognized by its values.
        """
        own = self._index(key)
        read = [*indices] if own is None or own in indices else [own, *indices]
        found = dict(self.clean(read))
        if own is not None and own in found and self._is_same(found[own], row):
            return [example for index, example in found.items() if index != own]
        return [found[index] for index in indices if index in found and not self._is_same(found[index], row)]

    def _index(self, key: str) -> int | None:
        """Return the index of the row with a key, if there is one."""
        name, _, number = key.rpartition(":")
        if name not in self.rows.keys.names or not number.isdecimal():
            return None
        place = _place(self.rows.keys.names.index(name), int(number))
        at = int(np.searchsorted(self._places, place))
        return int(self._by_place[at]) if at < len(self._places) and self._places[at] == place else None

    def _is_same(self, example: Row, row: Row) -> bool:
        """Return whether an example has the inputs of a row, and its answers as far as they are known."""
        features = (*self._config.input_features, *self._config.output_features)
        return all(example.get(feature.name) == row[feature.name] for feature in features if feature.name in row)


def _place(files: Any, numbers: Any) -> Any:
    """Return one number for file and number of each row."""
    return np.asarray(files, dtype=np.int64) << 40 | np.asarray(numbers, dtype=np.int64)


class RandomRetriever:
    """Select examples at random; the result depends only on the seed and the row's key."""

    def __init__(self, config: Config, rows: Rows, *, k: int, seed: int) -> None:
        """Check the rows to select from.

        Args:
            config: The configuration.
            rows: Rows to select examples from.
            k: Number of examples for each row.
            seed: Seed of the selection.
        """
        self._pool = Pool(config, rows)
        self._k = k
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """A hash of the rows to select from."""
        return self._pool.rows.fingerprint

    def choose(self, rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
        """Return up to `k` examples for each row."""
        return [self._draw(row, key) for row, key in zip(rows, keys, strict=True)]

    def _draw(self, row: Row, key: str) -> list[Row]:
        pool = self._pool.rows
        mark = blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest()
        rng = random.Random(int.from_bytes(mark, "big"))
        examples: list[Row] = []
        seen: set[int] = set()
        while len(examples) < self._k and len(seen) < len(pool):
            left = self._k - len(examples)
            wanted = [i for i in rng.sample(range(len(pool)), min(len(pool), 2 * left + len(seen))) if i not in seen]
            seen.update(wanted)
            examples += self._pool.examples(wanted, row, key)[:left]
        return examples


class SemanticRetriever:
    """Select examples by cosine similarity of sentence embeddings of their inputs, the most similar last."""

    def __init__(self, config: Config, rows: Rows, *, k: int, model_name: str, chunk: int = 1000) -> None:
        """Embed all rows once; the embeddings take 4 bytes per row and dimension.

        Args:
            config: The configuration.
            rows: The rows to select from.
            k: Maximum number of examples for each row.
            model_name: A sentence-transformers model.
            chunk: Rows that are embedded at a time.

        Raises:
            DataError: If no row can serve as an example.
            ModelError: If the embedding model cannot be loaded.
        """
        self._config = config
        self._pool = Pool(config, rows)
        self._k = k
        self._model = load_embedder(model_name)
        indices: list[int] = []
        vectors: list[np.ndarray] = []
        for start in range(0, len(rows), chunk):
            good = list(self._pool.clean(range(start, min(start + chunk, len(rows)))))
            if good:
                indices += [index for index, _ in good]
                vectors.append(self._embed([row for _, row in good]))
        if not vectors:
            raise DataError(f"no row of {rows.keys.names[0]} can serve as an example; see prompt.retrieval")
        self._indices = np.array(indices)
        self._vectors_ND = np.concatenate(vectors)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows to select from."""
        return self._pool.rows.fingerprint

    def choose(self, rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
        """Return up to `k` examples for each row."""
        if not rows:
            return []
        likeness_BN = self._embed(rows) @ self._vectors_ND.T
        return [
            self._nearest(likeness_N, row, key) for likeness_N, row, key in zip(likeness_BN, rows, keys, strict=True)
        ]

    def _nearest(self, likeness_N: np.ndarray, row: Row, key: str) -> list[Row]:
        order_N = np.argsort(-likeness_N, kind="stable")  # of equal rows the earlier one first
        examples: list[Row] = []
        place, more = 0, self._k + 1  # the row itself may be among them
        while len(examples) < self._k and place < len(order_N):
            examples += self._pool.examples(self._indices[order_N[place : place + more]].tolist(), row, key)
            place += more
        return examples[: self._k][::-1]

    def _embed(self, rows: Sequence[Row]) -> np.ndarray:
        texts = [sample_text(text_inputs(self._config), row) for row in rows]
        vectors_BD = np.asarray(self._model.encode(texts, show_progress_bar=False), dtype=np.float32)
        norms_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
        directions_BD: np.ndarray = vectors_BD / np.maximum(norms_B1, 1e-12)
        return directions_BD


def load_embedder(name: str) -> Any:
    """Load a sentence-transformers model without running code from its repository (local folders: from version 6 on).

    Raises:
        ModelError: If the package or the model is missing, or the model cannot be loaded.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ModelError(
            "prompt.retrieval of type semantic needs sentence-transformers; run: pip install 'partita[retrieval]'"
        ) from None
    try:
        return SentenceTransformer(name, device="cpu")
    except Exception as error:  # damaged files raise any exception
        said = " ".join(str(error).split())[:300]
        raise ModelError(f"prompt.retrieval.model_name: {name} cannot be loaded: {said}") from error
