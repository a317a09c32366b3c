"""Tests of section defaults: created without validation, equal to validated ones, and without building validators."""

import subprocess
import sys

from pydantic import BaseModel

import partita_schema.config  # noqa: F401
from partita_schema.base import ConfigModel


def sections(found: type[BaseModel]) -> list[type[BaseModel]]:
    return [found, *(inner for child in found.__subclasses__() for inner in sections(child))]


def test_the_default_of_each_section_equals_the_validated_one() -> None:
    defaults = [field.default for model in sections(ConfigModel) for field in model.model_fields.values()]
    made = [default for default in defaults if isinstance(default, ConfigModel)]
    assert len(made) > 30
    for default in made:
        written = default.model_dump(exclude_unset=True)
        validated = type(default).model_validate(written)
        assert default == validated
        assert default.model_fields_set == validated.model_fields_set


def test_importing_the_schema_builds_no_validator() -> None:
    code = """
import partita_schema.config  # noqa: F401
from partita_schema.base import ConfigModel
import partita_schema.config
def sections(found):
    return [found, *(inner for child in found.__subclasses__() for inner in sections(child))]
print([model.__name__ for model in sections(ConfigModel) if model.__pydantic_complete__])
"""
    built = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert built.strip() == "[]"
