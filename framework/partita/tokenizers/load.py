"""Tokenizers: loaded from a model, or trained for a new model.

The tokenizer of a new model depends only on texts and settings, so the same config and data give the same ids. All
tokenizers are fast, have an end token if the model has one, and a pad token that needs no new embedding.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.tokenizers.hub import check_intact, find_base, loading, short_digest
from partita_schema.common.files import replacing_folder
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.model import ENCODERS, WITH_OWN_TOKENIZER, NewModel, ScratchModel
from partita_trainers.checkpoints.file_sums import write_sums

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
BEGIN, MASK = "<s>", "<mask>"
"""Further special tokens of encoders."""
CHARACTER = r"[\s\S]"
WORD = r" ?\w+| ?[^\w\s]|\s"
"""A word or a punctuation mark with the space before it, so that decoding restores the text."""


def load_tokenizer(
    config: Config,
    *,
    folder: Path,
    texts: Callable[[], Iterable[str]],
    saved: Path | None = None,
    cache_folder: Path | None = None,
) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of `saved` or of the base model, or train one for a new model.

    Args:
        config: The config.
        folder: Folder that a relative `base_model` refers to.
        texts: Returns the training texts.
        saved: Folder of a saved model.
        cache_folder: Folder in which a trained tokenizer is saved, and later loaded from, since weights work
            with one tokenizer only.

    Raises:
        ModelError: The tokenizer cannot be loaded or trained.
    """
    if saved is not None:
        return read_tokenizer(str(saved))
    base = config.base_model
    if isinstance(base, NewModel):
        if cache_folder is None:
            return train_tokenizer(base, texts())
        if not cache_folder.exists():
            with replacing_folder(cache_folder) as temporary:
                train_tokenizer(base, texts()).save_pretrained(temporary)
                write_sums(temporary)
        return read_tokenizer(str(cache_folder))
    revision = config.model_parameters.revision
    return read_tokenizer(find_base(base, folder=folder), revision=revision, trust_remote_code=config.trust_remote_code)


def read_tokenizer(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerFast":
    """Load the fast tokenizer of a folder or Hub id, with a pad token. Raise ModelError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_intact(source, weights=False)
    # AutoTokenizer replaces this class by that of some architectures, with other splitting rules.
    reader = PreTrainedTokenizerFast if declared_class(source) == "TokenizersBackend" else AutoTokenizer
    with loading(source, part="tokenizer"):
        tokenizer = reader.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{source}: its tokenizer has no fast form; save one with tokenizer.json next to the model")
    return with_pad_token(tokenizer, source=source)


def declared_class(source: str) -> str | None:
    """Return the tokenizer class named in a local folder; None if there is none or the file is damaged."""
    try:
        settings = json.loads((Path(source) / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return settings.get("tokenizer_class") if isinstance(settings, dict) else None


def with_pad_token(tokenizer: "PreTrainedTokenizerFast", *, source: str) -> "PreTrainedTokenizerFast":
    """Set the end or unknown token as pad token if there is none; the vocabulary stays unchanged."""
    if tokenizer.pad_token_id is None:
        pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
        if pad_token is None:
            raise ModelError(f"{source}: its tokenizer has no pad, end or unknown token; set pad_token in its files")
        tokenizer.pad_token = pad_token
    return tokenizer


def train_tokenizer(base: NewModel, texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Create a tokenizer of the configured type, with at most `vocab_size` tokens.

    That of an encoder puts special tokens around a text, as BERT does.
    """
    longest = base.context_length if isinstance(base, ScratchModel) else None
    architecture = base.architecture if isinstance(base, ScratchModel) else None
    encodes = architecture in ENCODERS
    vocab_size = base.vocab_size - (2 if encodes else 0)
    as_qwen2 = architecture in WITH_OWN_TOKENIZER
    if base.tokenizer == "byte":
        tokenizer = byte_tokenizer(max_length=longest, as_qwen2=as_qwen2)
    elif base.tokenizer == "bpe":
        backend = byte_pair_backend(texts, vocab_size=vocab_size, as_qwen2=as_qwen2)
        tokenizer = wrap(backend, max_length=longest, unknown=END if as_qwen2 else None)
    else:
        pattern = CHARACTER if base.tokenizer == "char" else WORD
        backend = piece_backend(texts, pattern=pattern, vocab_size=vocab_size)
        tokenizer = wrap(backend, max_length=longest, unknown=UNKNOWN)
    return for_encoder(tokenizer) if encodes else tokenizer


def for_encoder(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedTokenizerFast":
    """Add the special tokens of encoders, and put them around a text and between two texts."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"cls_token": BEGIN, "sep_token": END, "mask_token": MASK})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        pair=f"{BEGIN} $A {END} $B:1 {END}:1",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in (BEGIN, END)],
    )
    return tokenizer


def byte_tokenizer(*, max_length: int | None = None, as_qwen2: bool = False) -> "PreTrainedTokenizerFast":
    """Create a tokenizer with one token per UTF-8 byte, `<pad>` and `</s>`.

    Args:
        max_length: Maximum number of tokens of a text; None for no maximum.
        as_qwen2: Whether it is that of a Qwen2 model (`byte_level`).
    """
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [PAD, END, *sorted(ByteLevel.alphabet())]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = byte_level(BPE(vocab=vocabulary, merges=[]), as_qwen2=as_qwen2)
    return wrap(backend, max_length=max_length, unknown=END if as_qwen2 else None)


def byte_pair_backend(texts: Iterable[str], *, vocab_size: int, as_qwen2: bool = False) -> "Backend":
    """Train byte-level byte-pair encoding (Radford et al. 2019, section 2.2).

    Args:
        texts: The training texts.
        vocab_size: Maximum number of tokens.
        as_qwen2: Whether it is that of a Qwen2 model (`byte_level`).

    Raises:
        ModelError: The vocabulary is too small.
    """
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    alphabet = sorted(ByteLevel.alphabet())
    least = len(alphabet) + 2
    if vocab_size < least:
        raise ModelError(
            f"base_model.vocab_size: {vocab_size} holds no byte-level vocabulary; "
            f"write at least {least}, or tokenizer: char"
        )
    backend = byte_level(BPE(), as_qwen2=as_qwen2)
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def byte_level(model: Any, *, as_qwen2: bool = False) -> "Backend":
    """Wrap a model of the tokenizers library with byte-level splitting and decoding.

    Args:
        model: The model.
        as_qwen2: Whether texts are normalized and split as by Qwen2's tokenizer. AutoTokenizer of transformers reads
            the tokenizer of a Qwen2 model with these rules, whatever its files say.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if as_qwen2:
        from transformers import Qwen2Tokenizer

        rules = Qwen2Tokenizer().backend_tokenizer
        backend.normalizer, backend.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    return backend


def piece_backend(texts: Iterable[str], *, pattern: str, vocab_size: int) -> "Backend":
    """Create one token for each of the most frequent pieces of `pattern`; ties in alphabetical order."""
    from tokenizers import Regex, decoders
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    splitter = Split(Regex(pattern), behavior="isolated")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    special = [PAD, END, UNKNOWN]
    max_pieces = vocab_size - len(special)
    if not counts or max_pieces < 1:
        raise ModelError(
            f"base_model.tokenizer: {len(counts)} different pieces in the training texts and a vocab_size of "
            f"{vocab_size}; a tokenizer needs texts, and a vocab_size of at least {len(special) + 1}"
        )
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))[:max_pieces]
    vocabulary = {piece: number for number, piece in enumerate([*special, *pieces])}
    backend = Backend(WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.Fuse()
    return backend


def wrap(backend: "Backend", *, max_length: int | None, unknown: str | None = None) -> "PreTrainedTokenizerFast":
    """Wrap a backend, whose vocabulary contains the special tokens, in a transformers tokenizer.

    Args:
        backend: The backend.
        max_length: Maximum number of tokens of a text; None for no maximum.
        unknown: The unknown token; None for none. Qwen2Tokenizer adds `<|endoftext|>` to a vocabulary without one.
    """
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": PAD, "eos_token": END} | ({"unk_token": unknown} if unknown else {})
    backend.add_special_tokens(list(names.values()))
    limit = {"model_max_length": max_length} if max_length else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="right", **names, **limit
    )


def tokenizer_digest(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a hash of everything that affects token ids: vocabulary, rules, special tokens, chat template."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two are settings of the last call, not of the tokenizer.
    rules = {key: value for key, value in backend.items() if key not in ("padding", "truncation")}
    return short_digest(rules, tokenizer.special_tokens_map, str(tokenizer.chat_template or ""))
