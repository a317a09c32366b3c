"""Measurements of this machine that are made once and stored in the cache directory of the user.

All processes on a machine, and a run that is resumed there, then use the same measurement. If several processes measure
at the same time, the first one to write decides for all.
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from partita_schema.common.checksums import sealed, unsealed
from partita_schema.common.files import user_cache_folder
from partita_trainers.batch_size.linux import processor

logger = logging.getLogger(__name__)

Measured = TypeVar("Measured")


def cpu_description() -> dict[str, Any]:
    """Return what the speed of this process on a CPU depends on."""
    return {
        "processor": [processor(field) for field in ("vendor_id", "cpu family", "model", "model name")],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def cache_path(folder: str, key: Mapping[str, Any]) -> Path:
    """Return the path of the file with a measurement, in this folder of the cache directory of the user."""
    text = json.dumps(key, sort_keys=True)
    return user_cache_folder() / folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def cached_measurement(
    path: Path,
    key: Mapping[str, Any],
    *,
    measure: Callable[[], Any],
    read: Callable[[Any], Measured],
    fallback: str,
) -> Measured | None:
    """Return a recorded measurement; measure and record it if there is none. Return None if it cannot be recorded.

    Args:
        path: File of the measurement.
        key: Everything that it depends on.
        measure: Measures; returns seconds as JSON.
        read: Converts the JSON; raises ValueError, TypeError, KeyError or AttributeError if it is damaged.
        fallback: What is done if it cannot be recorded, for the log.
    """
    found = load(path, key, read=read)
    if found is None:
        save_first(path, {"key": key, "seconds": measure()}, fallback=fallback)
        found = load(path, key, read=read)
    return found


def load(path: Path, key: Mapping[str, Any], *, read: Callable[[Any], Measured]) -> Measured | None:
    """Return a recorded measurement; None if there is none, or its file is damaged, which is then removed."""
    try:
        saved = unsealed(path.read_bytes(), required=True)
        return read(saved["seconds"]) if saved["key"] == key else None
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("the measurement in %s cannot be read: %s", path, error)
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.info("the measurement in %s is damaged and is repeated: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def save_first(path: Path, document: Mapping[str, Any], *, fallback: str) -> None:
    """Write a document, unless another process has written one: the first of concurrent writers wins."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(sealed(document), indent=1), encoding="utf8")
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        pass
    except OSError as error:
        logger.info("%s, because the measurement cannot be recorded: %s", fallback, error)
