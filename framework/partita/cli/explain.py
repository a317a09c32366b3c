"""`partita explain`: every value of a configuration with its origin, and the data plan."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita.cli.standard_streams import StdinFormat, dataset_path

if TYPE_CHECKING:
    from partita.backends.process_layout import ProcessLayout
    from partita.lm.generation_defaults import Explanation
    from partita.training.plan import FilePlan
    from partita_schema.load import LoadedConfig


def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A configuration file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also read the rows, and print batches, steps and padding.")
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Rows to plan with instead of data.source, or - for standard input. Implies --data.",
            show_default=False,
        ),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    everything: Annotated[bool, typer.Option("--all", help="Also print default values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: config, origins, warnings.")] = False,
) -> None:
    """Print each value that the file sets or partita will choose, with its origin; --all also prints the defaults."""
    from partita.backends.process_layout import process_layout
    from partita_schema.load import load_config

    loaded = load_config(file, overrides=overrides or ())
    layout, generation, planned = process_layout(loaded.config), generation_of(loaded), None
    if data or dataset is not None:
        from partita.runs.log import show_log
        from partita.training.plan import plan_of_file

        show_log(quiet=True)
        planned = plan_of_file(loaded.config, folder=loaded.folder, dataset=dataset_path(dataset, stdin_format))
    if as_json:
        print_record(loaded, generation, layout, planned)
        return
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print_yaml(loaded, file=file, everything=everything)
    print_comments(generation, layout, planned)


def print_record(
    loaded: "LoadedConfig", generation: "Explanation | None", layout: "ProcessLayout | None", planned: "FilePlan | None"
) -> None:
    """Print the configuration and the plans derived from it as JSON.

    Args:
        loaded: The configuration.
        generation: The generation settings and where each comes from; None if nothing is generated.
        layout: The processes that the file asks for, if any.
        planned: The plan of a training file's batches, if data was given.
    """
    shown: dict[str, Any] = {
        "file": loaded.file,
        "config": loaded.config.model_dump(mode="json"),
        "origins": dict(loaded.origins),
        "warnings": [str(warning) for warning in loaded.warnings],
    }
    if generation is not None:
        shown["generation"] = generation.record()
    if layout is not None:
        shown["processes"] = layout.record()
    if planned is not None:
        shown["data"] = {**planned.plan.record(), "assumed": planned.assumed}
    print(json.dumps(shown, indent=2, ensure_ascii=False))


def print_yaml(loaded: "LoadedConfig", *, file: str, everything: bool) -> None:
    """Print the configuration as YAML, with the defaults or their number."""
    from partita_schema.dump import chosen_yaml, resolved_yaml

    if everything:
        print(resolved_yaml(loaded), end="")
        return
    text, left_out = chosen_yaml(loaded)
    print(f"{text}# {left_out:,} more values are defaults: partita explain {file} --all")


def print_comments(
    generation: "Explanation | None", layout: "ProcessLayout | None", planned: "FilePlan | None"
) -> None:
    """Print the plans derived from the configuration as YAML comments, so that the whole output is a valid file."""
    sections = {
        "generation, with what the checkpoint says": generation.lines() if generation is not None else [],
        "processes": layout.lines() if layout is not None else [],
        "data": [*planned.plan.lines(), planned.assumed] if planned is not None else [],
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n# {title}:", *(f"#   {line}" for line in lines if line), sep="\n")


def generation_of(loaded: "LoadedConfig") -> "Explanation | None":
    """Return the generation settings and their origins; None for a server, whose defaults are unknown."""
    if not loaded.config.backend.loads_model:
        return None
    from partita.lm.generation_defaults import explain_generation

    return explain_generation(loaded.config, folder=loaded.folder)
