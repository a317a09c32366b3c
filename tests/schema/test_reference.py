"""Tests that the JSON schema and the reference page are up to date and describe every key."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from partita_schema.reference import all_models, anchor, field_docs, json_schema, json_schema_text, markdown
from partita_schema.schema_tree import keys_of

DOCS = Path(__file__).parents[2] / "docs"
GOOD = Path(__file__).parent / "wrong" / "good.yaml"


def test_the_published_json_schema_is_up_to_date() -> None:
    assert (DOCS / "partita.schema.json").read_text(encoding="utf-8") == json_schema_text(), (
        "run partita schema > docs/partita.schema.json"
    )


def test_the_published_reference_is_up_to_date() -> None:
    assert (DOCS / "config-reference.md").read_text(encoding="utf-8") == markdown(), (
        "run partita schema --markdown > docs/config-reference.md"
    )


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_every_section_and_every_key_has_a_description(model: type) -> None:
    assert model.__doc__
    for name in keys_of(model):
        assert field_docs(model)[name].endswith("."), (model.__name__, name)


def test_the_json_schema_accepts_a_valid_configuration_and_refuses_a_typo() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    raw = yaml.safe_load(GOOD.read_text())
    assert not list(validator.iter_errors(raw))
    assert list(validator.iter_errors({**raw, "sede": 1}))


def test_every_key_of_the_json_schema_is_described() -> None:
    schema = json.loads(json_schema_text())
    for section in (schema, *schema["$defs"].values()):
        for name, entry in section.get("properties", {}).items():
            assert entry.get("description"), name


def test_links_in_the_reference_have_existing_headings() -> None:
    page = markdown()
    headings = {anchor(line.lstrip("# ")) for line in page.splitlines() if line.startswith("#")}
    links = {part.partition(")")[0] for part in page.split("](#")[1:]}
    assert links
    assert links <= headings
