"""The models of other seats of a simulation: of a run, of another file, or another base model with this file."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partita.identity import model_fingerprint
from partita.runtime import ModelRuntime
from partita.served import SIMULATE, is_served
from partita.simulation.opening import section_of
from partita.simulation.seating import SeatModel, other_seats, place_of
from partita_schema.errors import ConfigError, PartitaError, Problem
from partita_schema.load import load_config
from partita_schema.seats import ModelSeat

ASKED_AS_HERE = ("version", "model_parameters", "trust_remote_code", "seed", "prompt", "generation", "preprocessing")
"""Sections that hold for another base model as well."""


def seat_models(runtime: ModelRuntime) -> dict[str, SeatModel]:
    """Other models that speak in a simulation, by seat."""
    return {name: seat_model(other) for name, other in other_models(runtime).items() if other is not runtime}


def seat_model(runtime: ModelRuntime) -> SeatModel:
    """A model for a seat of a simulation."""
    pipeline = runtime.ready()
    fingerprint = model_fingerprint(pipeline, config=runtime.config, result=runtime.result)
    return SeatModel(pipeline, runtime.sizing, fingerprint)


def other_models(model: ModelRuntime) -> dict[str, ModelRuntime]:
    """Models in other seats than the agent's, by seat; the file's own is `model` itself. Raises ConfigError."""
    found: dict[str, ModelRuntime] = {}
    named: dict[tuple[str | None, ...], ModelRuntime] = {}
    for name, seat in other_seats(section_of(model.config)).items():
        if not isinstance(seat, ModelSeat):
            continue
        place = (seat.run, seat.file, seat.base_model)
        if place not in named:  # one in several seats is in memory once
            named[place] = model if seat.is_own else other_model(model, seat, name=name)
        found[name] = named[place]
    return found


def other_model(model: ModelRuntime, seat: ModelSeat, *, name: str) -> ModelRuntime:
    """The model of the seat `name` of the file of `model`. Raises ConfigError where it cannot speak there."""
    key = "run" if seat.run is not None else "file" if seat.file is not None else "base_model"
    where = f"{place_of(section_of(model.config), name)}.{key}"
    folder = model.loaded.folder
    try:
        if seat.run is not None:
            found = ModelRuntime.load(folder / seat.run, quiet=model.quiet, trust_remote_code=model.allows_saved_code)
        elif seat.file is not None:
            found = ModelRuntime(load_config(folder / seat.file), quiet=model.quiet)
        else:
            loaded = load_config(with_base_model(model, seat))
            found = ModelRuntime(replace(loaded, folder=folder), quiet=model.quiet)
    except (PartitaError, OSError) as error:
        raise ConfigError([Problem(where, str(error))]) from error
    if found.config.dialogue_input is None:
        raise ConfigError([Problem(where, "its file has no input of type dialogue; name a model of dialogues")])
    if is_served(found.config):
        raise ConfigError([Problem(where, SIMULATE)])
    # It belongs to the same processes.
    config = found.config.model_copy(update={"backend": model.config.backend})
    found.loaded = replace(found.loaded, config=config)
    return found


def with_base_model(model: ModelRuntime, seat: ModelSeat) -> Mapping[str, Any]:
    """The file with the base model of a seat, which is only asked."""
    settings = model.config.model_dump(mode="json")
    features = ("input_features", "output_features", "defaults")
    kept = {section: settings[section] for section in (*ASKED_AS_HERE, *features)}
    dialogue = settings["data"]["dialogue"]
    asking = ("batch_size", "eval_batch_size", "max_batch_size", "memory_budget")
    trainer = {key: settings["trainer"][key] for key in asking if key in settings["trainer"]}
    return kept | {
        "base_model": seat.base_model,
        "quantization": settings["quantization"],
        "data": {"dialogue": dialogue},
        "trainer": {"type": "none", **trainer},
    }
