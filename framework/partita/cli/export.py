"""`partita export`, and `partita merge` as its short form for plain models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita.cli.loading import open_model
from partita.cli.options import AnswerOverrides, AsJson, FilesOrRun, LogJson, Quiet, TrustRemoteCode
from partita.cli.standard_streams import StdinFormat, dataset_path
from partita.export.options import MIN_AGREEMENT, Dtype, ExportFormat, GgufType

if TYPE_CHECKING:
    from partita.export.report import ExportReport

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.", show_default=False)]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Type of the weights for merged; auto is the type that the model computes in.")
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="Rows whose answers are compared. Default: the file's test or validation rows.",
        show_default=False,
    ),
]
MinAgreement = Annotated[
    float,
    typer.Option(
        "--min-agreement",
        min=0,
        max=1,
        help="Fail if a smaller share of the tokens (for a head: of the rows) equals those of the model.",
    ),
]


def export(
    sources: FilesOrRun,
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.", show_default=False)],
    output: Output,
    dtype: DtypeOption = "auto",
    quantize: Annotated[
        GgufType | None,
        typer.Option("--quantize", help="Type of the weights for gguf and ollama. Default: f16.", show_default=False),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            "--llama-cpp",
            envvar="PARTITA_LLAMA_CPP",
            help="A checkout of llama.cpp, for gguf and ollama.",
            show_default=False,
        ),
    ] = None,
    dataset: Dataset = None,
    stdin_format: StdinFormat = "jsonl",
    min_agreement: MinAgreement = MIN_AGREEMENT,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Write a model for other programs, and compare the answers of both."""
    rows = dataset_path(dataset, stdin_format)
    model = open_model(sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    report = model.export(
        to,
        output,
        dtype=dtype,
        gguf_type=quantize,
        dataset=rows,
        min_agreement=min_agreement,
        llama_cpp=llama_cpp,
    )
    print_report(report, as_json=as_json)


def merge(
    sources: FilesOrRun,
    output: Output,
    dtype: DtypeOption = "auto",
    dataset: Dataset = None,
    stdin_format: StdinFormat = "jsonl",
    min_agreement: MinAgreement = MIN_AGREEMENT,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Merge the adapter of a run: export --to merged."""
    export(
        sources,
        "merged",
        output,
        dtype=dtype,
        dataset=dataset,
        stdin_format=stdin_format,
        min_agreement=min_agreement,
        trust_remote_code=trust_remote_code,
        overrides=overrides,
        quiet=quiet,
        as_json=as_json,
    )


def print_report(report: "ExportReport", *, as_json: bool) -> None:
    """Print the report of an export as lines, or as JSON."""
    from partita.runs.files import strict_json

    content: dict[str, Any] = report.content()
    print(strict_json(content, indent=2) if as_json else "\n".join(report.lines()))
