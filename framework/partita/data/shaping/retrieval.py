"""Worked examples for each row: drawn at random, or the nearest in meaning."""

import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.reading.sources import open_rows
from partita.data.rows import Rows
from partita.data.shaping.formatter import Retriever, Row, sample_text, text_inputs
from partita.data.splits import check_columns
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError
from partita_schema.prompt import SemanticRetrieval
from partita_schema.rows import check_rows, row_schema


def build_retriever(config: Config, *, training: Rows | None, folder: Path) -> Retriever | None:
    """The retriever of a run; None where the file has no prompt.retrieval.

    Examples come from `prompt.retrieval.dataset`, else from the training rows. Raises DataError where there are none,
    ModelError where the embedding model cannot be loaded.
    """
    options = config.prompt.retrieval
    if options is None:
        return None
    pool = training
    if options.dataset:
        limit = config.data.max_row_bytes
        pool = open_rows(options.dataset, folder=folder, name="examples", max_row_bytes=limit)
    if pool is None or not len(pool):
        raise DataError("prompt.retrieval has no rows to choose from; write prompt.retrieval.dataset")
    check_columns(pool, config, supervised=True)
    if isinstance(options, SemanticRetrieval):
        return SemanticRetriever(config, pool, k=options.k, model_name=options.model_name)
    return RandomRetriever(config, pool, k=options.k, seed=config.seed)


class Pool:
    """Rows that may serve as examples; bad ones among them are passed over."""

    def __init__(self, config: Config, rows: Rows) -> None:
        self._config = config
        self.rows = rows
        self._schema = row_schema(config, supervised=True)

    def __reduce__(self) -> tuple[type["Pool"], tuple[Config, Rows]]:
        """A copy in another process makes its own schema; schemas cannot be pickled."""
        return Pool, (self._config, self.rows)

    def clean(self, indices: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """Index and values of the good ones."""
        clean = check_rows(self._schema, self.rows.get(indices)).clean
        for place, row in clean.items():
            yield indices[place], row


class RandomRetriever:
    """Examples drawn at random; the seed and the row's key alone decide which."""

    def __init__(self, config: Config, rows: Rows, *, k: int, seed: int) -> None:
        self._pool = Pool(config, rows)
        self._k = k
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """A hash of the rows that it chooses from."""
        return self._pool.rows.fingerprint

    def choose(self, rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
        """`k` examples for each row, fewer where there are not so many."""
        return [self._draw(key) for key in keys]

    def _draw(self, key: str) -> list[Row]:
        pool = self._pool.rows
        mark = blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest()
        chance = random.Random(int.from_bytes(mark, "big"))
        found: list[Row] = []
        seen: set[int] = set()
        while len(found) < self._k and len(seen) < len(pool):
            left = self._k - len(found)
            wanted = [i for i in chance.sample(range(len(pool)), min(len(pool), 2 * left + len(seen))) if i not in seen]
            seen.update(wanted)
            good = [row for index, row in self._pool.clean(wanted) if pool.key(index) != key]
            found += good[:left]
        return found


class SemanticRetriever:
    """Examples whose inputs are nearest by cosine of sentence embeddings, the nearest last."""

    def __init__(self, config: Config, rows: Rows, *, k: int, model_name: str, chunk: int = 1000) -> None:
        """Embeds all rows once: 4 bytes a row and dimension."""
        self._config = config
        self._pool = Pool(config, rows)
        self._k = k
        self._model = load_embedder(model_name)
        places: list[int] = []
        vectors: list[np.ndarray] = []
        for start in range(0, len(rows), chunk):
            good = list(self._pool.clean(range(start, min(start + chunk, len(rows)))))
            if good:
                places += [index for index, _ in good]
                vectors.append(self._embed([row for _, row in good]))
        if not vectors:
            raise DataError(f"no row of {rows.keys.names[0]} can serve as an example; see prompt.retrieval")
        self._places = np.array(places)
        self._vectors_ND = np.concatenate(vectors)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows that it chooses from."""
        return self._pool.rows.fingerprint

    def choose(self, rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
        """`k` examples for each row, fewer where there are not so many."""
        if not rows:
            return []
        likeness_BN = self._embed(rows) @ self._vectors_ND.T
        return [self._nearest(likeness_N, key) for likeness_N, key in zip(likeness_BN, keys, strict=True)]

    def _nearest(self, likeness_N: np.ndarray, key: str) -> list[Row]:
        # One more than needed, since the row itself may be among them; ties go to the earlier row.
        order = np.argsort(-likeness_N, kind="stable")[: self._k + 1]
        chosen = [int(place) for place in self._places[order] if self._pool.rows.key(int(place)) != key]
        return [row for _, row in self._pool.clean(chosen[: self._k])][::-1]

    def _embed(self, rows: Sequence[Row]) -> np.ndarray:
        texts = [sample_text(text_inputs(self._config), row) for row in rows]
        vectors_BD = np.asarray(self._model.encode(texts, show_progress_bar=False), dtype=np.float32)
        norms_B1 = np.linalg.norm(vectors_BD, axis=1, keepdims=True)
        directions_BD: np.ndarray = vectors_BD / np.maximum(norms_B1, 1e-12)
        return directions_BD


def load_embedder(name: str) -> Any:
    """A sentence-transformers model. Code that a model brings is not run (in local folders, from version 6 on).

    Raises ModelError where the package or the model is missing, or cannot be loaded.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ModelError(
            "prompt.retrieval of type semantic needs sentence-transformers; run: pip install 'partita[retrieval]'"
        ) from None
    try:
        return SentenceTransformer(name, device="cpu")
    except Exception as error:  # damaged files raise anything
        said = " ".join(str(error).split())[:300]
        raise ModelError(f"prompt.retrieval.model_name: {name} cannot be loaded: {said}") from error
