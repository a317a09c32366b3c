"""Documents of language modelling: joined and cut into chunks for training, and in pieces for evaluation.

N documents, C chunks, P pieces, n chunks of a batch, L tokens in total.
"""

import numpy as np

from partita.data.batching.plan import PlannedBatch
from partita.data.rows import RowKeys
from partita.data.tokenized import TokenizedDataset, starts


def cut_chunks(
    documents: TokenizedDataset, length: int, *, isolate: bool = False, sources_N: np.ndarray | None = None
) -> TokenizedDataset:
    """Join documents in their order and cut them into chunks of `length` tokens, every token in one chunk.

    The token ids are shared with `documents`, not copied, unless sources alternate. The loss covers all tokens of a
    chunk; a chunk in which nothing can be predicted, such as a source of one token, is left out. The key of a chunk is
    the key of the document in which it begins, with a number: `train.jsonl:17#2`.

    Args:
        documents: Tokenized documents.
        length: Tokens of a chunk.
        isolate: Whether documents do not attend to each other; the loss spans are then the documents of a chunk.
        sources_N: Number of the source of each document, [N]. No chunk holds documents of two sources, so the last
            chunk of each source may be shorter. Default: one source.
    """
    if sources_N is not None and np.any(np.diff(sources_N) < 0):
        order = np.argsort(sources_N, kind="stable")
        documents, sources_N = documents.take(order), sources_N[order]
    ends = source_ends(documents, sources_N)
    starts_C = np.concatenate(
        [chunk_starts(start, end, length) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    )
    starts_C1 = np.append(starts_C, ends[-1])
    first_C = np.searchsorted(documents.starts_Nplus1, starts_C, side="right") - 1
    spans, span_starts = document_spans(documents, starts_C1) if isolate else whole_spans(starts_C1)
    chunks = TokenizedDataset(
        ids_L=documents.ids_L,
        starts_Nplus1=starts_C1,
        loss_spans_S2=spans,
        span_starts_Nplus1=span_starts,
        keys=chunk_keys(documents.keys, first_C),
        indices_N=documents.indices_N[first_C],
        fingerprint_inputs=documents.fingerprint_inputs,
        isolated=isolate,
    )
    # The first token of a span has nothing to be predicted from.
    has_loss_C = chunks.loss_tokens > np.diff(span_starts)
    return chunks if np.all(has_loss_C) else chunks.take(np.flatnonzero(has_loss_C))


def chunk_starts(start: int, end: int, length: int) -> np.ndarray:
    """Return the starts of the chunks of one source, int64.

    A last chunk of one token would have nothing to predict, so the chunk before it gives it one.
    """
    starts_C = np.arange(start, end, length, dtype=np.int64)
    if len(starts_C) > 1 and end - starts_C[-1] == 1 and length > 2:
        starts_C[-1] -= 1
    return starts_C


def source_ends(documents: TokenizedDataset, sources_N: np.ndarray | None) -> list[int]:
    """Return the number of tokens up to the end of each source, ascending."""
    if sources_N is None:
        return [int(documents.starts_Nplus1[-1])]
    last_documents = np.flatnonzero(np.append(np.diff(sources_N), 1))
    ends: list[int] = documents.starts_Nplus1[last_documents + 1].tolist()
    return ends


def whole_spans(starts_C1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one loss span for each chunk, and the start of each chunk's spans."""
    lengths_C = np.diff(starts_C1)
    spans = np.stack([np.zeros_like(lengths_C), lengths_C], axis=1).astype(np.int32)
    return spans, np.arange(len(lengths_C) + 1)


def document_spans(documents: TokenizedDataset, starts_C1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a loss span for each part of a document in a chunk, and the start of each chunk's spans."""
    cuts = np.union1d(documents.starts_Nplus1, starts_C1)
    span_starts = np.searchsorted(cuts, starts_C1)
    start_of_chunk = np.repeat(starts_C1[:-1], np.diff(span_starts))
    spans = np.stack([cuts[:-1] - start_of_chunk, cuts[1:] - start_of_chunk], axis=1).astype(np.int32)
    return spans, span_starts.astype(np.int64)


def chunk_keys(keys: RowKeys, first_C: np.ndarray) -> RowKeys:
    """Return the key of each chunk from the index of the document in which it begins, [C], ascending."""
    _, first_chunk, document = np.unique(first_C, return_index=True, return_inverse=True)
    numbers_C = np.arange(len(first_C)) - first_chunk[document] + 1
    return RowKeys(keys.names, keys.files[first_C], keys.numbers[first_C], examples=numbers_C)


def isolated_documents(chunks: TokenizedDataset, planned: PlannedBatch) -> tuple[TokenizedDataset, PlannedBatch]:
    """Return the documents in the planned chunks as packed rows: one sequence for each chunk."""
    chosen = chunks.take(planned.rows)
    counts_n = np.diff(chosen.span_starts_Nplus1)
    spans = chosen.loss_spans_S2
    start_of_chunk = np.repeat(chosen.starts_Nplus1[:-1], counts_n)
    lengths = spans[:, 1] - spans[:, 0]
    chunk_n = np.repeat(np.arange(len(counts_n)), counts_n)
    keys = RowKeys(
        [str(key) for key in chosen.keys],
        chunk_n,
        np.arange(len(chunk_n)) - chosen.span_starts_Nplus1[chunk_n] + 1,
    )
    rows = TokenizedDataset(
        ids_L=chosen.ids_L,
        starts_Nplus1=np.append(start_of_chunk + spans[:, 0], len(chosen.ids_L)),
        loss_spans_S2=np.stack([np.zeros_like(lengths), lengths], axis=1),
        span_starts_Nplus1=np.arange(len(lengths) + 1),
        keys=keys,
        indices_N=chosen.indices_N[chunk_n],
        fingerprint_inputs={},
    )
    return rows, PlannedBatch(np.arange(len(rows)), planned.sequences[chunk_n])


def cut_pieces(documents: TokenizedDataset, length: int | None, *, prefix: int | None) -> TokenizedDataset:
    """Cut each document into pieces for evaluation, so that each of its tokens is predicted exactly once.

    A piece begins with the last token of the one before, which has no loss in it. Documents are not joined, so the
    loss does not depend on their order.

    Args:
        documents: Tokenized documents.
        length: Maximum tokens of a piece, at least 2; None to keep documents whole.
        prefix: Id of a token put before each document, so that its first token is predicted too; None if documents
            already begin with the beginning-of-sequence token.
    """
    added = 0 if prefix is None else 1
    lengths_N = np.diff(documents.starts_Nplus1) + added
    step = int(lengths_N.max()) if length is None else max(1, length - 1)
    counts_N = np.maximum(1, -(-(lengths_N - 1) // step))
    document_P = np.repeat(np.arange(len(lengths_N)), counts_N)
    piece_P = np.arange(len(document_P)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
    begins_P = piece_P * step
    lengths_P = np.minimum(begins_P + step + 1, lengths_N[document_P]) - begins_P
    starts_P1 = starts([lengths_P])
    # Index of each token in its document; -1 for the prefix.
    offsets = np.arange(starts_P1[-1]) - np.repeat(starts_P1[:-1] - begins_P, lengths_P) - added
    ids = documents.ids_L[np.repeat(documents.starts_Nplus1[document_P], lengths_P) + np.maximum(offsets, 0)]
    if prefix is not None:
        ids[offsets < 0] = prefix
    spans, span_starts = whole_spans(starts_P1)
    return TokenizedDataset(
        ids_L=ids,
        starts_Nplus1=starts_P1,
        loss_spans_S2=spans,
        span_starts_Nplus1=span_starts,
        keys=chunk_keys(documents.keys, document_P),
        indices_N=documents.indices_N[document_P],
        fingerprint_inputs=documents.fingerprint_inputs,
    )
