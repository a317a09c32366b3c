"""What a run records about its training rows: their lengths, and some of them as the model reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.batching.collate import evenly
from partita.data.formatting.row_tokenizer import Example
from partita.data.preview import PreviewRow, names_of_answers, preview_rows, supervised_row
from partita.data.run_data import RunData
from partita.data.tokenized import TokenizedDataset
from partita.pipeline.build import LocalPipeline
from partita.runs.files import strict_json
from partita.training.datasets import TrainingDatasets
from partita_schema.common.files import write_atomically
from partita_schema.rows import row_schema

SAMPLES = "samples.json"
NUM_SAMPLES = 3
MAX_SAMPLE_TOKENS = 2000
"""Tokens of a sample that are recorded."""
MAX_BINS = 40
"""Bins of a histogram."""


def length_histograms(datasets: TrainingDatasets) -> dict[str, dict[str, list[int]]]:
    """Return histograms of the lengths in tokens of the training rows and of the rows of each evaluated split.

    Of a stream, the first rows are counted, and of documents that are cut into chunks, the chunks.
    """
    lengths = {} if datasets.training is None else {"training": datasets.training.encoded.lengths}
    lengths |= {split: dataset.encoded.lengths for split, dataset in datasets.eval_datasets.items()}
    return {split: histogram(lengths_N) for split, lengths_N in lengths.items() if len(lengths_N)}


def histogram(lengths_N: np.ndarray) -> dict[str, list[int]]:
    """Return `counts` of at most 40 bins of equal width, and their `edges`; a bin includes its first edge."""
    first, last = int(lengths_N.min()), int(lengths_N.max())
    width = -(-(last - first + 1) // MAX_BINS)
    counts_B = np.bincount((lengths_N - first) // width)
    edges = range(first, first + width * len(counts_B) + 1, width)
    return {"counts": counts_B.tolist(), "edges": list(edges)}


def write_samples(folder: Path, pipeline: LocalPipeline, data: RunData, encoded: TokenizedDataset) -> None:
    """Write `samples.json`: three evenly spaced training rows as pieces of text, and which of these are in the loss.

    Args:
        folder: The run directory.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        encoded: The tokenized training rows, or chunks of them; of a stream, the first ones.
    """
    chosen = evenly(len(encoded), NUM_SAMPLES)
    if not pipeline.config.has_answer_texts and data.training is not None:
        schema = row_schema(pipeline.config, supervised=True)
        selected = data.training.select(encoded.indices_N[chosen])
        samples = preview_rows(selected, pipeline.row_tokenizer, schema, supervised=True)
    else:
        samples = [sample_of(encoded, int(index), pipeline) for index in chosen]
    rows = [sample_record(sample, tokens=int(encoded.lengths[i])) for i, sample in zip(chosen, samples, strict=True)]
    write_atomically(folder / SAMPLES, strict_json({"rows": rows}, indent=1) + "\n")


def sample_of(encoded: TokenizedDataset, index: int, pipeline: LocalPipeline) -> PreviewRow:
    """Return a tokenized row as pieces of text."""
    values = () if encoded.row_values_NK is None else encoded.row_values_NK[index].tolist()
    names = names_of_answers(pipeline.config, values)
    return supervised_row(example_of(encoded, index), pipeline.row_tokenizer.formatter.tokenizer, names=names)


def example_of(encoded: TokenizedDataset, index: int) -> Example:
    """Return a tokenized row, cut after the tokens that are recorded."""
    spans = [
        (start, min(end, MAX_SAMPLE_TOKENS))
        for start, end in encoded.loss_spans(index).tolist()
        if start < MAX_SAMPLE_TOKENS
    ]
    ids = encoded.ids(index)[:MAX_SAMPLE_TOKENS].tolist()
    return Example(encoded.keys[index], ids, tuple(spans), 0)


def sample_record(sample: PreviewRow, *, tokens: int) -> Mapping[str, Any]:
    """Return a row as JSON: `texts`, for each of them, whether it is in the `loss`, and `names` of answers if any."""
    texts, in_loss = [piece.text for piece in sample.pieces], [piece.in_loss for piece in sample.pieces]
    names = [piece.name for piece in sample.pieces]
    record = {"key": sample.key, "tokens": tokens, "texts": texts, "loss": in_loss}
    return record | {"names": names} if any(names) else record
