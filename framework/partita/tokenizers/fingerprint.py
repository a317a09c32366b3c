"""Fingerprints of models: short hashes of everything that affects outputs."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_trainers.file_sums import file_sum

if TYPE_CHECKING:
    import torch

FULL_HASH_BYTES = 2 * 2**30
"""Above this total, weight files are hashed by size and modification time, not by content."""
WEIGHTS = (".safetensors", ".bin")
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def digest(*parts: Any) -> str:
    """Return 16 hexadecimal digits of the hash of JSON-serializable values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def folder_digest(folder: Path) -> str:
    """Return a hash of the weights and descriptions in a model's folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    weights = [path for path in files if path.suffix in WEIGHTS]
    total = sum(path.stat().st_size for path in weights)
    read = [path for path in files if path.name in DESCRIPTIONS] + (weights if total <= FULL_HASH_BYTES else [])
    parts: list[Any] = [(str(path.relative_to(folder)), file_sum(path)) for path in read]
    for path in weights if total > FULL_HASH_BYTES else []:
        status = path.stat()
        parts.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return digest(parts)


def tensors_digest(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> str:
    """Return a hash of named tensors, bit for bit."""
    import torch

    checksum = hashlib.sha256()
    for name, tensor in tensors:
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()[:16]
