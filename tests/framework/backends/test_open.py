"""Tests of opening the backend that a configuration names."""

from typing import get_args

from partita.backends.base import Backend
from partita.backends.open import BACKENDS
from partita_schema.sections.backend import Backend as BackendSection


def test_every_backend_of_the_schema_has_a_class() -> None:
    sections = get_args(get_args(BackendSection)[0])
    assert {get_args(section.model_fields["type"].annotation)[0] for section in sections} == BACKENDS.keys()
    assert all(issubclass(kind, Backend) and not kind.__abstractmethods__ for kind in BACKENDS.values())
