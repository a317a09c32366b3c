"""A cache of tuned batch sizes: one JSON file each, under a key of everything that determines the size."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita_schema.common.checksums import sealed, unsealed
from partita_schema.common.files import user_cache_folder
from partita_schema.common.hashing import json_digest
from partita_trainers.batch_size.probe import BatchSize

logger = logging.getLogger(__name__)

FORMAT = 1
"""Increased when the meaning of a field changes."""


class BatchSizeCache:
    """A folder of batch sizes. Files that cannot be read or written are ignored, because the cache only saves time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> "BatchSizeCache":
        """Return the cache of the user: the folder `batch_sizes` in `user_cache_folder()`."""
        return cls(user_cache_folder() / "batch_sizes")

    def load(self, key: Mapping[str, Any]) -> BatchSize | None:
        """Return the result saved under the same key, or None."""
        try:
            saved = unsealed(self.file(key).read_bytes(), required=True)
            return BatchSize.from_record(saved["found"]) if saved["key"] == complete(key) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("the cached batch size in %s is not used: %s", self.file(key), error)
            return None

    def save(self, key: Mapping[str, Any], size: BatchSize) -> None:
        """Save a result; the last of concurrent writers wins."""
        text = json.dumps(sealed({"key": complete(key), "found": size.record()}), indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder)
            with os.fdopen(descriptor, "w", encoding="utf8") as file:
                file.write(text)
            Path(temporary).replace(self.file(key))
        except OSError as error:
            logger.info("the batch size is not cached for the next run: %s", error)
            with suppress(OSError, UnboundLocalError):
                Path(temporary).unlink()

    def file(self, key: Mapping[str, Any]) -> Path:
        """Return the path of the result for a key."""
        return self.folder / f"{json_digest(complete(key))[:24]}.json"


def complete(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key as it is after a JSON round trip."""
    key_json: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **key}, sort_keys=True))
    return key_json


def bucket(tokens: int) -> int:
    """Round a length up, so that lengths up to an eighth apart share a key."""
    step = 1 << max(0, tokens.bit_length() - 4)
    return -(-tokens // step) * step
