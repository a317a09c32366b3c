"""Cache of tokenized rows, shared by runs with the same rows, tokenizer and prompt: `data.encode: cache`.

One process tokenizes while others that need the same rows wait for it. A folder of tokens is written under a temporary
name, fsynced and renamed, so it appears complete or not at all. Its name is a hash of everything that decides the
tokens. A damaged folder is discarded and written again.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import NUMBERS, Ledger
from partita.data.rows import Rows, digest
from partita.data.token_files import DamagedTokens, TokenWriter, read_tokens
from partita.data.tokenized import IN_THIS_PROCESS, TokenizedDataset, encoded_chunks, note_chunk, save_checked
from partita.runs.files import WRITE_ERRORS
from partita.runs.locks import not_inherited, try_lock
from partita_schema.common.files import sync_folder, user_cache_folder
from partita_schema.errors import WriteError
from partita_schema.sections.data import LoaderOptions

logger = logging.getLogger(__name__)

PACKAGES = ("partita", "transformers", "tokenizers")
"""Packages whose versions decide the tokens."""
SILENCE = 600.0
"""Seconds without a heartbeat after which a tokenizing process counts as hung."""
BEATS = 10
"""Number of heartbeats in that time while the disk is busy."""
LOOK_EVERY = 0.2
"""Seconds between attempts to take a lock."""
FIRST_NOTE_SECONDS = 1.0
"""Seconds of waiting before the first log message."""
NOTE_SECONDS = 10.0
"""Seconds between further log messages while waiting."""


@dataclass(frozen=True)
class CacheUse:
    """How the cache was used for a split."""

    path: str
    rows: int
    bytes: int
    hit: bool
    """Whether the tokens were cached already."""


class TokenCache:
    """A folder of tokens, shared by runs and processes."""

    def __init__(self, folder: Path, *, silence: float = SILENCE, lasting: bool = True) -> None:
        """Use `folder`; unless `lasting`, it serves the processes of one job and is logged at debug level."""
        self.folder = folder
        self._level = logging.INFO if lasting else logging.DEBUG
        self.uses: dict[str, CacheUse] = {}
        """Cache use by split."""
        self._silence = silence

    @classmethod
    def of_user(cls) -> "TokenCache":
        """Return the token cache of the user: the folder `tokens` in `user_cache_folder()`."""
        return cls(user_cache_folder() / "tokens")

    def encode(
        self,
        rows: Rows,
        row_tokenizer: RowTokenizer,
        *,
        ledger: Ledger,
        split: str = "training",
        options: LoaderOptions = IN_THIS_PROCESS,
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
    ) -> TokenizedDataset:
        """Return what `TokenizedDataset.build` returns, from disk if it was cached before.

        Args:
            rows: Rows of one split.
            row_tokenizer: Tokenizes the rows.
            ledger: Records used and bad rows.
            split: Name of the split in the ledger and in `uses`.
            options: Worker processes and prefetching.
            chunk: Rows per chunk.
            progress: Called with the number of rows processed since the last call.

        Raises:
            DataError: If there are too many bad rows, or no row is left.
            WriteError: If tokens cannot be written, or another process that tokenizes the same rows hangs.
        """
        made_from = cache_key_inputs(rows, row_tokenizer, split=split)
        folder = self.folder / digest(*(text for pair in sorted(made_from.items()) for text in pair))

        def make(temporary: Path, alive: Callable[[], None]) -> None:
            with TokenWriter(temporary) as writer, closing(Ledger(temporary, max_bad_rows=1.0)) as counted:
                counted.leave_out_unreadable(rows.bad, split=split)
                for start, tokenized in encoded_chunks(rows, row_tokenizer, options=options, chunk=chunk):
                    note_chunk(rows, start, tokenized, counted, split=split)
                    writer.add(tokenized, start, rows.keys)
                    alive()
                    if progress is not None:
                        progress(min(chunk, len(rows) - start))
                inputs = {"files": rows.fingerprint} | row_tokenizer.fingerprint_inputs()
                with self._beating(alive):
                    counted.save()
                    writer.finish(names=rows.keys.names, made_from=made_from, fingerprint_inputs=inputs)

        encoded, hit = self._open_or_make(folder, made_from, make)
        size = sum(file.stat().st_size for file in folder.iterdir())
        self.uses[split] = CacheUse(str(folder), len(encoded), size, hit)
        origin = "from the cache" if hit else "kept for the next run"
        words = (f"{len(encoded):,}", split, origin, folder, f"{size / 1e6:,.1f}")
        logger.log(self._level, "tokens of %s %s rows %s: %s (%s MB)", *words)
        ledger.adopt(folder, split=split)
        save_checked(ledger, split=split, used=len(encoded) > 0)
        return encoded

    def record(self) -> dict[str, dict[str, Any]]:
        """Return the cache use by split, as JSON for the manifest."""
        return {split: asdict(use) for split, use in self.uses.items()}

    def _open_or_make(
        self, folder: Path, made_from: Mapping[str, str], make: Callable[[Path, Callable[[], None]], None]
    ) -> tuple[TokenizedDataset, bool]:
        """Return the rows of a folder, and whether this process found them in the cache."""
        try:
            return read_tokens(folder, made_from=made_from), True
        except FileNotFoundError:
            pass
        except DamagedTokens as error:
            logger.warning("the tokens in %s are computed again: %s", folder, error)
        with writing_tokens(self.folder), self._locked(folder) as alive:
            with self._beating(alive):
                with suppress(FileNotFoundError, DamagedTokens):
                    return read_tokens(folder, made_from=made_from), True  # another process finished them meanwhile
                for left in self.folder.glob(f".{folder.name}.*"):
                    shutil.rmtree(left, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=self.folder))
            try:
                make(temporary, alive)
                if folder.exists():
                    folder.replace(temporary.with_name(f"{temporary.name}.old"))
                temporary.replace(folder)
                with self._beating(alive):
                    sync_folder(self.folder)
                    return read_tokens(folder, made_from=made_from), False
            finally:
                for left in self.folder.glob(f".{folder.name}.*"):
                    shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _beating(self, alive: Callable[[], None]) -> Iterator[None]:
        """Give heartbeats from a thread while in this context.

        Use it for slow disk work, such as syncing gigabytes; never for work on rows, which may hang.
        """
        done = threading.Event()

        def beat() -> None:
            alive()
            while not done.wait(self._silence / BEATS):
                alive()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[Callable[[], None]]:
        """Hold the lock for these tokens while in this context; yield the function that gives a heartbeat.

        The operating system releases the lock when the process ends, however it ends.
        """
        path = self.folder / f"{folder.name}.lock"
        with path.open("a") as file, not_inherited(file):
            self._wait_for(file, path)
            yield lambda: os.utime(path)

    def _wait_for(self, file: TextIO, path: Path) -> None:
        began = last_message = time.monotonic()
        while True:
            if try_lock(file.fileno(), path):
                os.utime(path)
                return
            silent = time.time() - path.stat().st_mtime
            if silent > self._silence:
                raise WriteError(
                    f"another process holds {path} and has written no tokens for {silent:,.0f} seconds; end it, or "
                    "write data.encode: online"
                )
            if time.monotonic() - last_message > (FIRST_NOTE_SECONDS if last_message == began else NOTE_SECONDS):
                last_message = time.monotonic()
                logger.info("another process computes the same tokens; waiting for %.0f seconds", last_message - began)
            time.sleep(LOOK_EVERY)


def cache_key_inputs(rows: Rows, row_tokenizer: RowTokenizer, *, split: str) -> dict[str, str]:
    """Return everything that decides a split's tokens, the ledger's counts and its quarantined rows, by name."""
    config = row_tokenizer.formatter.config
    sections = {"prompt", "input_features", "output_features", "defaults", "preprocessing"}
    settings = config.model_dump_json(include=sections) + config.data.model_dump_json(include={"dialogue", "formatter"})
    bad = [f"{row.key} {row.number} {row.reason} {row.raw}" for row in rows.bad]
    packages = [f"{name} {version(name)}" for name in PACKAGES]
    return {
        "split": split,
        "files": rows.fingerprint,
        "keys": digest(rows.keys.digest()),
        "unreadable rows": digest(*bad),
        "settings": digest(settings, str(config.seed)),
        "packages": ", ".join(packages),
        "counted": ", ".join(NUMBERS),
        "examples": getattr(row_tokenizer.formatter, "examples_from", ""),
        **{f"row tokenizer's {name}": value for name, value in row_tokenizer.fingerprint_inputs().items()},
    }


@contextmanager
def writing_tokens(folder: Path) -> Iterator[None]:
    """Create the folder, and raise WriteError on a full disk or missing permission while in this context."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        raise WriteError(
            f"tokens cannot be stored in {folder}: {error.strerror}; free space there, name another folder in the "
            "environment variable PARTITA_CACHE, or write data.encode: online"
        ) from error
