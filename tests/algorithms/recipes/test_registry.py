"""Terms of scripts and of installed packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal, Optional

import pytest

import gossamer
from gossamer.algorithms.recipes import registry
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.algorithms.recipes.parser import UnknownTerm
from gossamer.errors import RecipeError


@pytest.fixture(autouse=True)
def terms_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(NOUNS)
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry, "_failures", {})
    yield
    NOUNS.clear()
    NOUNS.update(known)


@dataclass(frozen=True, repr=False)
class Coarse(gossamer.Int8):
    """Int8 with larger blocks."""

    block: int = 1024


COARSE = f"{Coarse.__module__}:Coarse"  # as an entry point names it


@dataclass(frozen=True, repr=False)
class Rarely(gossamer.LocalSGD):
    """LocalSGD under another name."""


def test_a_registered_term_is_read_from_text_at_any_depth() -> None:
    with pytest.raises(UnknownTerm, match="no Coarse"):
        gossamer.recipe("Coarse()")
    assert gossamer.register(Coarse) is Coarse
    gossamer.register(Rarely)
    assert gossamer.recipe("Rarely(4) + Feedback(Coarse(block=64))") == Rarely(4) + gossamer.Feedback(Coarse(block=64))
    assert gossamer.recipe(repr(Rarely(4) + Coarse())) == Rarely(4) + Coarse()


def test_a_registered_term_resolves_as_a_built_in_one_does() -> None:
    gossamer.register(Coarse)
    assert repr(registry_resolved("Coarse()")) == repr(registry_resolved("Int8(block=1024)")).replace(
        "Int8(block=1024)", "Coarse()"
    )


def registry_resolved(text: str) -> gossamer.Recipe:
    from gossamer.algorithms.recipes.recipe import resolve

    return resolve(text, 4)


def test_a_misspelled_registered_term_is_guessed() -> None:
    gossamer.register(Coarse)
    with pytest.raises(UnknownTerm, match=r"Write one of: Coarse\(block=1024"):
        gossamer.recipe("Corse()")


def test_a_class_defined_again_replaces_the_first() -> None:
    gossamer.register(Coarse)
    again = dataclass(frozen=True, repr=False)(type("Coarse", (gossamer.Int8,), {"__module__": __name__}))
    gossamer.register(again)
    assert type(gossamer.recipe("Coarse()").terms[0]) is again


@dataclass(frozen=True, repr=False)
class Typed(gossamer.Int8):
    """Int8 with arguments as other programs declare them."""

    most: Optional[int] = 8  # noqa: UP045
    way: Literal["up", "down"] = "up"
    then: gossamer.Codec = field(default_factory=gossamer.Float4)


def test_arguments_of_a_registered_term_may_be_optional_or_made_for_each() -> None:
    gossamer.register(Typed)
    assert gossamer.recipe("Typed()") == gossamer.recipe("Typed(then=Float4())")
    assert repr(gossamer.recipe("Typed(most=None)")) == "Typed(most=None)"
    with pytest.raises(RecipeError, match=r"most of Typed must be a whole number or None, got 2.5: Typed\(block=256"):
        gossamer.recipe("Typed(most=2.5)")


def test_a_type_that_no_recipe_text_has_is_refused() -> None:
    gossamer.register(Typed)
    with pytest.raises(RecipeError, match=r"way of Typed has a type that .* cannot have\. Write way: str"):
        gossamer.recipe("Typed(way='down')")


def test_a_type_that_cannot_be_found_is_refused() -> None:
    kind = dataclass(frozen=True, repr=False)(
        type("Lost", (gossamer.Int8,), {"__annotations__": {"by": "Elsewhere"}, "by": None, "__module__": __name__})
    )
    gossamer.register(kind)
    with pytest.raises(RecipeError, match=r"the types of Lost's arguments cannot be read .*'Elsewhere'"):
        gossamer.recipe("Lost(4)")


class Plain(gossamer.Compressor):
    def aggregate(self, x, state, at, out=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@dataclass
class Bare:
    pass


@pytest.mark.parametrize(
    ("term", "reason"),
    [
        (Bare, "not a subclass"),
        (gossamer.Median, "not a subclass"),
        ("Coarse", "not a subclass"),
        (gossamer.Codec, "abstract"),
        (Plain, "not a frozen dataclass"),
        (dataclass(frozen=True, repr=False)(type("TopK", (gossamer.Int8,), {})), "already has a meaning"),
        (dataclass(frozen=True, repr=False)(type("home", (gossamer.Int8,), {})), "already has a meaning"),
        (dataclass(frozen=True, repr=False)(type("FSDP", (gossamer.Int8,), {})), "already has a meaning"),
        (dataclass(frozen=True, repr=False)(type("a-b", (gossamer.Int8,), {})), "cannot contain this name"),
    ],
    ids=str,
)
def test_a_class_that_is_no_term_is_refused(term: type, reason: str) -> None:
    before = dict(NOUNS)
    with pytest.raises(RecipeError, match=reason):
        gossamer.register(term)
    assert before == NOUNS


def test_entry_points_of_installed_packages_are_loaded_at_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("Coarse", f"{__name__}:Coarse", group)]

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys.modules[Coarse.__module__]))
    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert gossamer.recipe("Int8()") is not None
    assert asked == []
    assert type(gossamer.recipe("Coarse()").terms[0]).__name__ == "Coarse"
    with pytest.raises(UnknownTerm):
        gossamer.recipe("Elsewhere()")
    assert asked == ["gossamer.terms"]


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("Coarse", "no_such_package:Coarse", "gossamer.terms")
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"no_such_package:Coarse.*cannot be imported") as refused:
            gossamer.recipe("Coarse()")
        assert isinstance(refused.value.__cause__, ModuleNotFoundError)
    with pytest.raises(UnknownTerm, match=r"no Elsewhere.*Also, the entry point Coarse"):
        gossamer.recipe("Elsewhere()")


@pytest.mark.parametrize("broken", [f"no_such_package:{Coarse.__name__}", f"{Coarse.__module__}:Bare"])
def test_an_entry_point_that_fails_leaves_those_of_other_packages(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, value, "gossamer.terms") for name, value in (("Mine", broken), ("Coarse", COARSE))]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    for _ in range(2):
        assert type(gossamer.recipe("Coarse()").terms[0]).__name__ == "Coarse"
        with pytest.raises(RecipeError, match=r"cannot be (imported|registered)"):
            gossamer.recipe("Mine()")


SCRIPT = """
from dataclasses import dataclass
import torch, gossamer

@gossamer.register
@dataclass(frozen=True, repr=False)
class Halves(gossamer.Int8):
    block: int = 64

world = gossamer.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.attach(model, optimizer, "Dense()") as session:
    for _ in range(4):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained with", session.recipe)
"""


def command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "own.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "gossamer", *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )


@pytest.mark.processes
def test_explain_prices_a_compressor_that_the_script_defines(tmp_path: Path) -> None:
    done = command(tmp_path, "explain", "--step-seconds", "0.1", "LocalSGD(2) + Halves()", "own.py")
    assert done.returncode == 0, done.stderr
    assert "Halves()" in done.stdout


@pytest.mark.processes
def test_run_trains_with_a_compressor_that_the_script_defines(tmp_path: Path) -> None:
    done = command(tmp_path, "run", "--workers", "2", "--recipe", "Halves()", "own.py")
    assert done.returncode == 0, done.stderr
    assert "Halves()" in done.stdout


@pytest.mark.processes
def test_run_refuses_a_term_that_the_script_does_not_name(tmp_path: Path) -> None:
    done = command(tmp_path, "run", "--workers", "2", "--recipe", "Thirds()", "own.py")
    assert done.returncode == 2
    assert "There is no Thirds" in done.stderr
