"""`partita explain`: every value of a configuration, where it comes from, and what would be done with its data."""

import json
import sys
from typing import Annotated

import typer

from partita.cli.standard_streams import StdinFormat, dataset_path


def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A configuration file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read the rows as well, and tell batches, steps and padding.")
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Rows to plan with, over data.source; - for standard input; as with --data.", show_default=False
        ),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    everything: Annotated[bool, typer.Option("--all", help="Print the defaults as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: config, origins, warnings.")] = False,
) -> None:
    """Print what is written or will be chosen, with the origin of every value; with --all the whole configuration."""
    from partita.distributed.layout import layout_of
    from partita_schema.backend import EndpointBackend
    from partita_schema.dump import chosen_yaml, resolved_yaml
    from partita_schema.load import load_config

    loaded = load_config(file, overrides=overrides or ())
    layout, planned = layout_of(loaded.config), None
    generation = None
    if not isinstance(loaded.config.backend, EndpointBackend):
        from partita.lm.generation_defaults import explain_generation

        generation = explain_generation(loaded.config, folder=loaded.folder)
    if data or dataset is not None:
        from partita.data_plan import plan_of_file
        from partita.logs import show_log

        show_log(quiet=True)
        planned = plan_of_file(loaded.config, folder=loaded.folder, dataset=dataset_path(dataset, stdin_format))
    if as_json:
        shown = {
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
        return
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if everything:
        print(resolved_yaml(loaded), end="")
    else:
        text, left_out = chosen_yaml(loaded)
        print(f"{text}# {left_out:,} more values are defaults: partita explain {file} --all")
    if generation is not None:
        print(
            "\n# generation, with what the checkpoint says:", *(f"#   {line}" for line in generation.lines()), sep="\n"
        )
    if layout is not None:
        print("\n# processes:", *(f"#   {line}" for line in layout.lines()), sep="\n")
    if planned is not None:  # as comments, so that what is printed is still a file
        told = [*planned.plan.lines(), planned.assumed]
        print("\n# data:", *(f"#   {line}" for line in told if line), sep="\n")
