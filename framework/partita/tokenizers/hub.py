"""Where base models and adapters are, in a folder or on the Hub; their fingerprints, and what went wrong in loading."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_schema.common.checksums import DamagedError
from partita_schema.common.hashing import json_digest
from partita_schema.common.text import nearest
from partita_schema.errors import ModelError, PartitaError
from partita_trainers.checkpoints.file_sums import FILE as SUMS
from partita_trainers.checkpoints.file_sums import check_sums, file_sum

if TYPE_CHECKING:
    import torch

BASE = "base"
"""Folder inside a saved model with a new base model under an adapter, which exists nowhere else."""
NOT_NEEDED = (
    "passing in an `attention_mask` since your input_ids may be padded",
    "A custom stopping criteria of type <class 'transformers.generation.stopping_criteria.EosTokenCriteria'>",
)
"""Messages of transformers that do not apply here."""


def check_intact(source: str, *, key: str = "base_model", weights: bool = True) -> None:
    """Raise ModelError if a model file written by partita does not match its checksum.

    Hub ids and folders without checksums are not checked. Without `weights` only small files are read.
    """
    if not Path(source).is_dir():
        return
    try:
        check_sums(Path(source), weights=weights)
    except DamagedError as error:
        raise ModelError(
            f"{key}: {error}; restore it from a copy, train with --run on the run that it is the result of, or remove "
            f"{SUMS} next to it if you changed it yourself"
        ) from None


def find_base(base_model: str, *, folder: Path) -> str:
    """Return the absolute folder of `base_model` relative to `folder`, or the Hub id.

    Raises:
        ModelError: The name can only be a path, and there is no such folder.
    """
    path = folder / Path(base_model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"base_model: {path} holds no config.json; write the folder that holds the model's files")
        return str(path.resolve())
    if path.exists():
        raise ModelError(f"base_model: {path} is a file; write the folder that holds the model's files")
    if can_only_be_a_path(base_model):
        raise ModelError(f"base_model: there is no folder {path}{near(path)}")
    return base_model


def find_adapter(source: str, *, folder: Path) -> str:
    """Return the absolute folder of `pretrained_adapter_weights`, or the Hub id. Raise ModelError."""
    path = folder / Path(source).expanduser()
    if path.is_dir():
        if not (path / "adapter_config.json").exists():
            raise ModelError(f"adapter.pretrained_adapter_weights: {path} holds no adapter_config.json")
        return str(path.resolve())
    if can_only_be_a_path(source):
        raise ModelError(f"adapter.pretrained_adapter_weights: there is no folder {path}{near(path)}")
    return source


def hub_commit(source: str, *, revision: str | None) -> str | None:
    """Return the commit that a revision of a Hub model is at in the local cache; None if it is not cached.

    Loading the model has recorded it there, so the Hub is not asked.
    """
    from huggingface_hub import resolve_revision
    from huggingface_hub.errors import RevisionResolutionError

    try:
        return str(resolve_revision(source, revision=revision, local_files_only=True).resolved)
    except RevisionResolutionError:
        return None


def can_only_be_a_path(name: str) -> bool:
    """Return whether a name is not a valid Hub id: an id has one slash and does not start with a dot or tilde."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def near(path: Path) -> str:
    """Return `; did you mean NAME?` for similar folders next to `path`, else what is there."""
    parent = path.parent
    if not parent.is_dir():
        return f"; {parent} does not exist either"
    names = sorted(child.name for child in parent.iterdir() if child.is_dir())
    close = nearest(path.name, names)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; {parent} holds {', '.join(names[:8]) or 'no folders'}"


@contextmanager
def loading(source: str, *, part: str, key: str = "base_model") -> Iterator[None]:
    """Convert exceptions raised while `part` is loaded into a ModelError.

    Damaged or malicious files can raise any exception, from any of the libraries involved.
    """
    try:
        yield
    except PartitaError:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which this module does not import
            raise
        raise ModelError(explain(error, source=source, part=part, key=key)) from error


def explain(error: Exception, *, source: str, part: str, key: str) -> str:
    """Return one line: what failed, for which source, and what to do.

    Args:
        error: What the library raised.
        source: Folder or Hub id.
        part: What was being loaded, such as weights.
        key: Config key to name in the message.
    """
    text = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
    for marks, hint in HINTS:
        if any(mark in text for mark in marks):
            return f"{key}: {source}: cannot load its {part}: {hint}"
    return f"{key}: {source}: cannot load its {part}: {type(error).__name__}: {text[:300]}"


HINTS = (
    (
        ("gated repo", "restricted", "awaiting a review"),
        "access to it is granted on the Hub's page; ask for it there, then log in with `hf auth login`",
    ),
    (
        ("weights_only", "Weights only load failed"),
        "its pickle is damaged, or holds more than numbers, which could be code; use a copy in safetensors",
    ),
    (
        ("no file named model.safetensors", "not appear to have a file named model.safetensors"),
        (
            "it has no safetensors; write model_parameters: {pickled_weights: true} to load a pickle file from a "
            "source you trust"
        ),
    ),
    (
        ("deserializing header", "header too", "incomplete metadata", "InvalidHeader", "MetadataIncompleteBuffer"),
        "a safetensors file is damaged or not complete; copy or download it again",
    ),
    (
        ("ignore_mismatched_sizes",),
        "its weights have other shapes than its config.json says; the files do not belong together, or one is damaged",
    ),
    (
        ("nested too deeply",),
        "one of its JSON files is nested too deeply to be read; it is damaged, or not meant to be loaded",
    ),
    (
        ("is not a valid git identifier", "RevisionNotFound", "Revision Not Found"),
        "the Hub has no such revision; check model_parameters.revision",
    ),
    (
        (
            "not a local folder and is not a valid model identifier",
            "Repository Not Found",
            "Incorrect path_or_model_id",
        ),
        "there is no folder of that name and no such model on the Hub; check the spelling, or log in if it is private",
    ),
    (
        ("couldn't connect", "offline mode", "Cannot find an appropriate cached", "Can't load the", "cached files"),
        (
            "it is not a folder and not cached, and the Hub cannot be reached; write its folder (for a trained run "
            "with --set base_model=FOLDER), or go online once"
        ),
    ),
    (
        ("trust_remote_code", "custom code"),
        "it brings its own code; read that code, then write trust_remote_code: true",
    ),
    (
        ("does not recognize this architecture", "Unrecognized model", "model type"),
        "its config.json names no model type that transformers knows; update transformers, or check the file",
    ),
    (
        ("this kind of AutoModel: AutoModelForSequenceClassification",),
        (
            "transformers has no AutoModelForSequenceClassification of its architecture, which reward models and "
            "outputs with head: linear need; choose a model of another architecture, such as Llama, Qwen or BERT, or "
            "remove the head, so that the model writes its answers"
        ),
    ),
    (
        ("this kind of AutoModel: AutoModelForTokenClassification",),
        (
            "transformers has no AutoModelForTokenClassification of its architecture, which outputs of type tags need; "
            "choose a model of another architecture, such as BERT or ModernBERT"
        ),
    ),
    (
        ("Unrecognized configuration class",),
        "it is neither a causal language model nor an encoder-decoder, nor an encoder of text; choose one of these",
    ),
)


def quiet_libraries() -> None:
    """Filter log messages of libraries that do not apply here.

    bitsandbytes logs at every 8-bit forward pass, and about kernels that it could download. transformers suggests an
    attention mask for any padding, even on the right where it has no effect, and warns about the stopping criterion
    used for memory probes.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for name in ("modeling_utils", "generation.utils"):
        library = logging.getLogger(f"transformers.{name}")
        if drop_advice not in library.filters:
            library.addFilter(drop_advice)


def drop_advice(record: logging.LogRecord) -> bool:
    """Return whether to keep a log record, as a logging filter."""
    message = record.getMessage()
    return not any(part in message for part in NOT_NEEDED)


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


def short_digest(*values: Any) -> str:
    """Return 16 hexadecimal digits of the hash of JSON-serializable values."""
    return json_digest(values, default=str)[:16]


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
    return short_digest(parts)


def tensors_digest(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> str:
    """Return a hash of named tensors, bit for bit."""
    import torch

    checksum = hashlib.sha256()
    for name, tensor in tensors:
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()[:16]
