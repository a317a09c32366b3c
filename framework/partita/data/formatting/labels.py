"""Labels of category outputs."""

from partita.data.rows import Rows
from partita_schema.config import Config
from partita_schema.rows import check_rows, row_schema


def find_labels(config: Config, rows: Rows | None) -> dict[str, tuple[str, ...]]:
    """Return the labels of each category output by name: the configured ones, else those of the good rows, sorted.

    Labels are empty if there are neither.
    """
    outputs = {feature.name: feature.labels for feature in config.output_features if feature.type == "category"}
    unknown = [name for name, labels in outputs.items() if labels is None]
    seen: dict[str, set[str]] = {name: set() for name in unknown}
    if unknown and rows is not None:
        schema = row_schema(config, supervised=True)
        for chunk in rows.iterate():
            for row in check_rows(schema, chunk).clean.values():
                for name in unknown:
                    seen[name].add(row[name])
    return {name: tuple(sorted(seen[name])) if labels is None else labels for name, labels in outputs.items()}
