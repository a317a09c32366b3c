"""`partita explain`: every value of a configuration with its origin, and the data plan."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer

from partita.cli.loading import loading_libraries
from partita.cli.options import Files, Overrides
from partita.cli.standard_streams import StdinFormat, dataset_path

COMMENT = "#   "
"""Start of a line of a plan."""

if TYPE_CHECKING:
    from partita.lm.branches.plan import BranchPlan
    from partita.lm.decoding.generation_defaults import Explanation
    from partita.training.plan import FilePlan
    from partita_schema.load import LoadedConfig


def explain(
    files: Files,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
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
    """Print the values of a run and where each is from. --all also prints the defaults."""
    from partita.runs.waiting import show_waits, waiting
    from partita_schema.load import load_config
    from partita_schema.open_values import open_values

    loaded = load_config(files, overrides=overrides)
    show_waits()
    with loading_libraries(line=False):
        from partita.backends.process_layout import process_layout
        from partita.lm.batch_generation.best_of_plan import plan_best_of
        from partita.lm.loading.chosen_formats import chosen_formats

        layout, generation, planned = process_layout(loaded.config), generation_of(loaded), None
    if data or dataset is not None:
        from partita.runs.log import show_log

        show_log(quiet=True)
        show_waits()
        with waiting("reading the rows"):
            from partita.training.plan import plan_of_file

            planned = plan_of_file(loaded.config, folder=loaded.folder, dataset=dataset_path(dataset, stdin_format))
    plans = Plans(generation, plan_best_of(loaded.config), layout, branches_of(loaded, planned))
    steps = planned.plan.steps if planned is not None else None
    with loading_libraries(line=False):  # to measure the dtype "fastest"
        chosen = chosen_formats(loaded.config) | open_values(loaded.config, steps=steps)
    if as_json:
        print_record(loaded, plans, planned, chosen=chosen)
        return
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print_yaml(loaded, files=files, everything=everything)
    print_comments(plans, planned, chosen=chosen)


class Plan(Protocol):
    """A plan of a run, shown as text or as JSON."""

    def lines(self) -> list[str]:
        """Return the plan in words."""

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON."""


class Plans(NamedTuple):
    """The plans of a run that follow from its file; None for those that do not apply."""

    generation: Plan | None
    """The generation settings, and where each comes from."""
    best_of: Plan | None
    """How several answers to a row are drawn."""
    processes: Plan | None
    """The processes that the file asks for."""
    pairs: Plan | None
    """How the answers of pairs are computed."""


TITLES = {"generation": "generation, with what the checkpoint says", "best_of": "best of n"}
"""Titles of plans whose name is not their title."""


def print_record(
    loaded: "LoadedConfig", plans: Plans, planned: "FilePlan | None", *, chosen: Mapping[str, str]
) -> None:
    """Print the configuration and the plans derived from it as JSON.

    Args:
        loaded: The configuration.
        plans: The plans of the run.
        planned: The plan of a training file's batches, if data was given.
        chosen: Values that the run chooses, by key.
    """
    shown: dict[str, Any] = {
        "file": loaded.file,
        "files": list(loaded.files),
        "config": loaded.config.model_dump(mode="json"),
        "origins": dict(loaded.origins),
        "warnings": [str(warning) for warning in loaded.warnings],
    }
    if chosen:
        shown["chosen_by_the_run"] = dict(chosen)
    shown |= {name: plan.record() for name, plan in plans._asdict().items() if plan is not None}
    if planned is not None:
        shown["data"] = {**planned.plan.record(), "assumed": planned.assumed, "bad_rows": planned.bad_rows}
    print(json.dumps(shown, indent=2, ensure_ascii=False))


def print_yaml(loaded: "LoadedConfig", *, files: Sequence[Path], everything: bool) -> None:
    """Print the configuration as YAML, with the defaults or their number."""
    from partita_schema.dump import chosen_yaml, resolved_yaml

    if everything:
        print(resolved_yaml(loaded), end="")
        return
    text, left_out = chosen_yaml(loaded)
    command = shlex.join(["partita", "explain", *map(str, files)])
    print(f"{text}# {left_out:,} more values are defaults: {command} --all")


def print_comments(plans: Plans, planned: "FilePlan | None", *, chosen: Mapping[str, str]) -> None:
    """Print the plans derived from the configuration as YAML comments, so that the whole output is a valid file.

    Args:
        plans: The plans of the run.
        planned: The plan of a training file's batches, if data was given.
        chosen: Values that the run chooses, by key.
    """
    sections = {
        "chosen by the run": lines_of_chosen(chosen),
        **{TITLES.get(name, name): plan.lines() for name, plan in plans._asdict().items() if plan is not None},
        "data": [*planned.plan.lines(), planned.assumed, planned.bad_rows] if planned is not None else [],
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n# {title}:", *(as_comment(line) for line in lines if line), sep="\n")


def as_comment(line: str) -> str:
    """Return a line as a YAML comment; on a terminal, wrapped at spaces."""
    from partita.runs.log import terminal_width, wrap

    width = max(20, terminal_width() - len(COMMENT))
    text = wrap(line, width=width) if sys.stdout.isatty() else line
    return "\n".join(COMMENT + part for part in text.splitlines())


def lines_of_chosen(chosen: Mapping[str, str]) -> list[str]:
    """Return the values that the run chooses, the keys without a known value together."""
    from partita_schema.open_values import AT_THE_START

    lines = [f"{key}: {value}" for key, value in chosen.items() if value != AT_THE_START]
    keys = ", ".join(key for key, value in chosen.items() if value == AT_THE_START)
    return [*lines, f"{AT_THE_START}: {keys}"] if keys else lines


def branches_of(loaded: "LoadedConfig", planned: "FilePlan | None") -> "BranchPlan | None":
    """Return how the answers of pairs are computed; None for other rows."""
    from partita.lm.branches.plan import plan_branches

    repeated_tokens = None if planned is None else planned.repeated_tokens
    return plan_branches(loaded.config, folder=loaded.folder, repeated_tokens=repeated_tokens)


def generation_of(loaded: "LoadedConfig") -> "Explanation | None":
    """Return the generation settings and their origins; None for a server, whose defaults are unknown, and a head."""
    if not loaded.config.backend.loads_model or loaded.config.head_output is not None:
        return None
    from partita.lm.decoding.generation_defaults import explain_generation

    return explain_generation(loaded.config, folder=loaded.folder)
