"""`partita evaluate`: metrics of a model on a dataset."""

from typing import Annotated

import typer

from partita.cli.loading import start_model
from partita.cli.options import AnswerOverrides, AsJson, BatchSize, FilesOrRun, LogJson, Quiet, TrustRemoteCode
from partita.cli.printing import print_label_tables, print_metrics
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path


def evaluate(
    sources: FilesOrRun,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Labeled rows, or - for standard input. Default: the file's test rows.",
            show_default=False,
        ),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    batch_size: BatchSize = None,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Generate answers for labeled rows and compute metrics."""
    from partita_schema.rules.features import METRICS_OF_MODEL

    model = start_model(
        sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code, one_process=dataset == STREAM
    )
    scores = model.evaluate(dataset_path(dataset, stdin_format), batch_size=batch_size)
    if as_json:
        print_metrics(scores, as_json=True, title="metrics")
        return
    named = {
        f"{output}.{name}": value
        for output, values in scores.items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    rows = {name.removeprefix(f"{METRICS_OF_MODEL}."): value for name, value in named.items()}
    print_metrics({"value": rows}, as_json=False, title="metrics")
    for output, values in scores.items():
        print_label_tables(output, values)
