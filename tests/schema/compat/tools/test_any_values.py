"""Property test: a file with any values is converted or refused with a ConfigError, and no key is lost."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.compat.tools.axolotl_datasets import TABLE as DATASETS
from partita_schema.convert import MODEL_KEYS, TOOLS, ToolName, convert_file
from partita_schema.errors import ConfigError

from ....properties import examples

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "auto", "no", "lora", "alpaca", "a,b", "all", "steps", "3", "x/y.json", "{", "\n"])
)
TYPES = ["alpaca", "chat_template", "completion", "input_output", {"field_instruction": "q", "format": "{input}"}]
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["path", "type", "split", "stage", "format"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("tool", TOOLS)
@examples(100)
@given(data=st.data())
def test_a_file_with_any_values_is_converted_or_refused(tool: ToolName, data: st.DataObject) -> None:
    keys = st.sampled_from([key.replace("*", "x") for key in TOOLS[tool].table])
    written: dict[str, Any] = data.draw(st.dictionaries(keys, VALUES, max_size=12))
    if tool == "axolotl":
        entry = st.dictionaries(st.sampled_from([*DATASETS]), VALUES | st.sampled_from(TYPES), max_size=5)
        written["datasets"] = data.draw(st.lists(entry, max_size=2))
    if tool == "trl":
        entry = st.dictionaries(st.sampled_from(["path", "name", "split", "data_files", "columns"]), VALUES, max_size=4)
        written["datasets"] = data.draw(st.lists(entry, max_size=2))
    written[MODEL_KEYS[tool][0]] = data.draw(st.just("org/base") | VALUES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "original.yaml"
        file.write_text(yaml.safe_dump(written), encoding="utf-8")
        try:
            report = convert_file(file, tool, output=Path(folder)).report
        except ConfigError:
            return
    assert sorted(key for key in report.keys if "[" not in key) == sorted(written)
