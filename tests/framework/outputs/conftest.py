from collections.abc import Callable, Mapping
from typing import Any

import pytest

from partita_schema.config import Config

MakeConfig = Callable[..., Config]


def config_of(*outputs: Mapping[str, Any], **sections: Any) -> Config:
    """Return a configuration with one input, `question`, and these outputs; without any, one text output, `answer`."""
    inputs = [{"name": "question", "type": "text"}]
    outputs = outputs or ({"name": "answer", "type": "text"},)
    return Config.model_validate(
        {"base_model": "scripted", "input_features": inputs, "output_features": list(outputs), **sections}
    )


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """Return `config_of`."""
    return config_of
