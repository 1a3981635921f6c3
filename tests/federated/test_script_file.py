"""Script file: its functions import what lies beside it whenever they run, and what it defines can be pickled."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from gossamer.errors import LoopError
from gossamer.federated import Round
from gossamer.federated.client.functions import OTHER_NAME, load_script

SCRIPT = """
    import sys
    sys.path.insert(0, "another folder")
    import torch
    from torch import nn
    from gossamer import federated

    words = sys.argv[1:]

    class Net(nn.Linear):
        pass

    @federated.model
    def make():
        return Net(2, 1)

    @federated.client
    def train(model, told):
        from beside_the_script import samples
        return federated.Update(samples=samples + len(words))

    if __name__ == "__main__":
        raise SystemExit("it was started, not imported")
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("a_federation", "beside_the_script", OTHER_NAME):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_script.py").write_text("samples = 3")
    return tmp_path


def written(folder: Path, name: str = "a_federation.py", script: str = SCRIPT) -> Path:
    path = folder / name
    path.write_text(dedent(script))
    return path


def test_functions_import_what_lies_beside_the_script(folder: Path) -> None:
    """In a round, long after it was loaded, though the script changed the path as well."""
    before, argv = [*sys.path], sys.argv
    script = load_script(written(folder), ["a", "b"])
    assert script.train(script.model(), Round(index=0, client=0)).samples == 5
    assert sys.path == ["another folder", str(folder), *before]
    assert sys.argv is argv


def test_models_can_be_pickled(folder: Path) -> None:
    model, file = load_script(written(folder)).model(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found) is type(model)
    assert type(model).__module__ == "a_federation"


def test_a_module_of_the_same_name_stays_what_it_is(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import random

    script = load_script(written(folder, "random.py"))
    assert sys.modules["random"] is random
    assert type(script.model()).__module__ == OTHER_NAME
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    first, again, other = (load_script(written(each)).model() for each in (folder, folder, elsewhere))
    assert [type(each).__module__ for each in (first, again, other)] == ["a_federation", "a_federation", OTHER_NAME]


def test_a_script_that_fails_leaves_no_module(folder: Path) -> None:
    path = written(folder, script="from gossamer import federated\nraise ValueError('no data here')")
    with pytest.raises(ValueError, match="no data here"):
        load_script(path)
    assert "a_federation" not in sys.modules


def test_a_script_has_annotations_of_its_own_kind(folder: Path) -> None:
    """Not those of the file that loads it."""
    script = load_script(written(folder, script=SCRIPT + "\n    def one(x: 1 + 1) -> None: ...\n"))
    assert vars(sys.modules[script.model.__module__])["one"].__annotations__ == {"x": 2, "return": None}


def test_missing_marks_are_refused(folder: Path) -> None:
    with pytest.raises(LoopError, match=r"marks no function with @gossamer\.federated\.client"):
        load_script(written(folder, script="import torch"))
