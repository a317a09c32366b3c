"""The data of a run: rows used, shortened and left out, lengths, and rows with their loss tokens."""

from collections.abc import Mapping
from typing import Any

from partita.report.charts import Chart, Table, bars_chart
from partita.report.run_record import RunRecord
from partita.report.section import Charts, NamedTable, Part, Passage, Passages, Piece, PieceKind, Section

MAX_REASONS = 12
"""Reasons of rows that were left out, of each split."""
MAX_PIECE = 4000
"""Characters of a sample row."""
LEGEND = (Piece("Marked", "loss"), Piece(" tokens are in the loss; the model reads the others without learning them."))


def data_section(run: RunRecord) -> Section | None:
    """Return how many rows were used, shortened and left out with reasons, their lengths, and samples."""
    parts: list[Part] = [*row_tables(run.ledger, note=note_of(run.config)), *source_table(run.manifest.get("sources"))]
    charts = length_charts(run.manifest.get("lengths"))
    parts += [Charts(charts)] if charts else []
    samples = [passage_of(sample) for sample in run.samples]
    parts += [Passages("Rows as the model reads them", samples, folded=False, legend=LEGEND)] if samples else []
    return Section("Data", parts) if parts else None


def note_of(config: Mapping[str, Any]) -> str:
    """Return what a row is, where that is not a row of the data; else empty."""
    if any(feature.get("type") == "dialogue" for feature in config.get("input_features") or ()):
        return "A row is what the model reads at once: a dialogue, a turn, or one of several answers of a turn."
    batching = (config.get("data") or {}).get("batching") or {}
    is_chunked = batching.get("type") == "chunk"
    return "A row is a document. For training, documents are joined and cut into chunks." if is_chunked else ""


def row_tables(ledger: Mapping[str, Mapping[str, Any]], *, note: str) -> list[NamedTable]:
    """Return the tables of rows by split, and of the reasons why rows were left out.

    Args:
        ledger: Counts of rows by split.
        note: A sentence below the first table.
    """
    if not ledger:
        return []
    keys = {"rows": "rows", "used": "used", "cut": "shortened", "left_out": "left out", "loss_tokens": "loss tokens"}
    rows = [[split, *(f"{counts.get(key) or 0:,}" for key in keys)] for split, counts in ledger.items()]
    tables = [NamedTable("Rows by split", Table(["split", *keys.values()], rows), note=note)]
    reasons = [
        [split, f"{number:,}", reason]
        for split, counts in ledger.items()
        for reason, number in sorted((counts.get("reasons") or {}).items(), key=lambda item: -int(item[1]))[
            :MAX_REASONS
        ]
    ]
    if reasons:
        titles = ["split", "rows", "reason"]
        note = "The rows themselves are in quarantine.jsonl."
        tables.append(NamedTable("Why rows were left out", Table(titles, reasons), numbers=False, note=note))
    return tables


def source_table(sources: Any) -> list[NamedTable]:
    """Return the table of training rows and tokens by source; none without a mix."""
    if not isinstance(sources, Mapping) or not sources:
        return []
    total = sum(counts.get("tokens", 0) for counts in sources.values()) or 1
    rows = [
        [name, f"{counts.get('rows', 0):,}", f"{counts.get('tokens', 0):,}", f"{counts.get('tokens', 0) / total:.1%}"]
        for name, counts in sources.items()
    ]
    return [NamedTable("Training rows by source", Table(["source", "rows", "tokens", "share of tokens"], rows))]


def length_charts(lengths: Any) -> list[Chart]:
    """Return a histogram of row lengths for each split."""
    if not isinstance(lengths, Mapping):
        return []
    return [
        bars_chart(f"Lengths of {split} rows", histogram["counts"], histogram["edges"], x_label="tokens")
        for split, histogram in lengths.items()
        if histogram.get("counts") and len(histogram.get("edges", ())) == len(histogram["counts"]) + 1
    ]


def passage_of(sample: Mapping[str, Any]) -> Passage:
    """Return a sample row with its loss tokens marked; neighboring tokens of a kind are one piece."""
    pieces: list[Piece] = []
    characters = 0
    names = sample.get("names", [""] * len(sample["texts"]))
    for text, in_loss, name in zip(sample["texts"], sample["loss"], names, strict=True):
        kind: PieceKind = "loss" if in_loss else "plain"
        if name:
            pieces.append(Piece(f"\n{name}: ", "plain"))
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = Piece(pieces[-1].text + text, kind)
        else:
            pieces.append(Piece(text, kind))
        characters += len(text)
        if characters > MAX_PIECE:
            pieces.append(Piece(" ... (shortened)"))
            break
    return Passage(str(sample.get("key", "")), pieces)
