"""The texts that the tokenizer of a new model is trained on: those that the model reads and writes."""

from collections.abc import Iterator

from partita.data.dialogue import expanded
from partita.data.formatting.base import Row
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.preferences import rejected_row
from partita.data.formatting.texts_tokenizer import compared_texts, pair_of
from partita.data.rows import Rows
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_schema.sections.outputs.score import ScoreOutput


def tokenizer_texts(rows: Rows, config: Config, *, supervised: bool) -> Iterator[str]:
    """Yield the texts of each good row, without chat template or retrieval.

    Dialogues are expanded into their training rows: each may contain text that no other row shows or learns.

    Args:
        rows: The rows.
        config: The configuration.
        supervised: Whether rows have answers; otherwise only prompts are yielded.

    Raises:
        DataError: No row is good.
    """
    formatter = Formatter(config, tokenizer=None)
    schema = row_schema(config, supervised=supervised)
    training_rows = expanded(rows, formatter.expander if supervised else None)
    good, reason = 0, ""
    for chunk in training_rows.iterate():
        checked = check_rows(schema, chunk)
        good += len(checked.clean)
        if checked.bad and not reason:
            reason = f"; such as {training_rows.key(min(checked.bad))}: {checked.bad[min(checked.bad)][0]}"
        for row in checked.clean.values():
            yield from texts_of_row(row, formatter, supervised=supervised)
    if not good:
        raise DataError(f"no row for the tokenizer of the new model can be used, of {len(training_rows):,}{reason}")


def texts_of_row(row: Row, formatter: Formatter, *, supervised: bool) -> Iterator[str]:
    """Yield the texts of a row as they are tokenized: prompt and answer, or each text that a head reads by itself."""
    config = formatter.config
    output = config.output_features[0]
    if isinstance(output, ScoreOutput):
        yield from pair_of(row, config, separated=config.is_new_encoder)
        return
    shows_answer = supervised and config.has_answer_texts
    formatted = formatter.format(row) if shows_answer else formatter.format_prompt(row)
    yield from (segment.text for segment in formatted.segments)
    if shows_answer and output.has_pairs:
        yield from (part.text for part in formatter.format(rejected_row(row, config)).segments)
    if supervised and isinstance(output, EmbeddingOutput):
        yield from compared_texts(row, output)
