"""Tests of the import of bitsandbytes: it does not load torch's compiler, whose functions are compiled when called."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from partita_trainers.libraries.bitsandbytes_import import compiling_at_first_call

IMPORT = """
import sys
from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes
import torch
before = torch.compile
import_bitsandbytes()
import peft, bitsandbytes
assert torch.compile is before
print("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize(("code", "compiler"), [(IMPORT, False), ("import sys\nimport peft\n" + IMPORT, True)])
def test_the_compiler_is_not_imported_if_bitsandbytes_is_imported_before_peft(code: str, compiler: bool) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{compiler}\n"


def test_functions_are_compiled_once_when_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def compile_now(function: Any, **options: Any) -> Any:
        calls.append(options)
        return lambda number: (function(number), "compiled")

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiling_at_first_call():

        @torch.compile
        def double(number: int) -> int:
            return 2 * number

        @torch.compile(dynamic=False)
        def triple(number: int) -> int:
            return 3 * number

    assert torch.compile is compile_now
    assert calls == []
    assert [double(1), double(2)] == [(2, "compiled"), (4, "compiled")]
    assert triple(1) == (3, "compiled")
    assert calls == [{}, {"dynamic": False}]
    assert double.__name__ == "double"
