"""Tests of the backend section."""

import pytest
from pydantic import TypeAdapter, ValidationError

from partita_schema.sections.backend import Backend, RayBackendConfig

BACKEND: TypeAdapter[Backend] = TypeAdapter(Backend)


def test_ray_needs_only_its_type() -> None:
    assert BACKEND.validate_python({"type": "ray"}) == RayBackendConfig(type="ray", workers="auto", address=None)


@pytest.mark.parametrize("address", ["auto", "ray-head:6379", "10.0.0.7:6379", "[::1]:6379"])
def test_a_cluster_is_given_by_the_address_of_its_head(address: str) -> None:
    assert BACKEND.validate_python({"type": "ray", "address": address}).address == address  # type: ignore[union-attr]


@pytest.mark.parametrize("address", ["ray-head", "ray://ray-head:10001", "http://ray-head:8265"])
def test_other_addresses_of_a_cluster_are_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="write HOST:PORT of the cluster's head, such as ray-head:6379, or auto"):
        BACKEND.validate_python({"type": "ray", "address": address})
