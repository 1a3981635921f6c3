from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "reference" / "promises.md"


def numbers_on(page: str) -> list[int]:
    return [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]


def numbers_in_tests() -> set[int]:
    sources = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    return {int(number) for text in sources for number in re.findall(r"^def test_promise_(\d+)_", text, re.MULTILINE)}


def test_every_promise_has_a_test_and_every_number_a_promise() -> None:
    numbers = numbers_on(PAGE.read_text(encoding="utf-8"))
    assert numbers == list(range(1, 23))
    assert numbers_in_tests() == set(numbers)


def test_promise_16_what_unpickles_in_a_module_of_gossamer_fails() -> None:
    """The hook of conftest.py, which watches every test."""
    loads = "import pickle\ndef loads(content):\n    return pickle.loads(content)"
    content = pickle.dumps(nn.Linear)
    for name, allowed in {"gossamer.anything": False, "gossamer.train.checkpoint.dcp": True, "elsewhere": True}.items():
        module = ModuleType(name)
        exec(loads, module.__dict__)
        if allowed:
            assert module.loads(content) is nn.Linear
        else:
            with pytest.raises(AssertionError, match=r"gossamer\.anything unpickles"):
                module.loads(content)
