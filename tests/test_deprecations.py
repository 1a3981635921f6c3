"""Deprecated names: each is on the page, works, and warns at the line that uses it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.paths import ROOT

from gossamer import events
from gossamer.algorithms.topologies import Ring, Topology
from gossamer.base.former_names import warn_former_name
from gossamer.base.ops import NeighborAllGather
from gossamer.train.session.arrays import ArraySession
from gossamer.train.session.session import Session
from gossamer.train.session.session_base import SessionBase

PAGE = ROOT / "docs" / "reference" / "deprecations.md"
SOURCE = ROOT / "src" / "gossamer"
X = torch.zeros(2)


class FakeSession(NamedTuple):
    averaged_parameters: str = "averaged_parameters"
    set_batch_weight: str = "set_batch_weight"
    reset_compressor_state: str = "reset_compressor_state"
    request_stop: str = "request_stop"
    should_stop: str = "should_stop"


def attribute(owner: type, old: str, new: str) -> Callable[[], Any]:
    def use() -> None:
        found = getattr(owner, old)
        assert isinstance(found, property), f"{owner.__name__}.{old} does not warn"
        assert found.fget is not None
        assert found.fget(FakeSession()) == new

    return use


def method(old: str) -> Callable[[], Any]:
    def use() -> None:
        type("Older", (Topology,), {old: lambda self, rank, world, round, seed=0: ()})  # noqa: A006

    return use


USES: dict[str, Callable[[], Any]] = {
    "session.merged": attribute(Session, "merged", "averaged_parameters"),
    "session.weight": attribute(Session, "weight", "set_batch_weight"),
    "session.reset": attribute(Session, "reset", "reset_compressor_state"),
    "session.ask_to_stop": attribute(SessionBase, "ask_to_stop", "request_stop"),
    "session.stopping": attribute(SessionBase, "stopping", "should_stop"),
    "topology.tells": lambda: Ring().tells(0, 4, 0),
    "topology.hears": lambda: Ring().hears(0, 4, 0),
    "def tells(...)": method("tells"),
    "def hears(...)": method("hears"),
    **{f"events.{name}": partial(getattr, events, name) for name in events._FORMER},
    "NeighborAllGather(tells=...)": lambda: NeighborAllGather((X,), ((1, 1.0),), tells=(2,)),
}


def rows() -> Iterator[tuple[str, str]]:
    yield from re.findall(r"^\| `([^`]+)`[^|]*\| [\d.]+ \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("old", "new"), list(rows()))
def test_a_deprecated_name_works_and_warns_with_the_new_name(old: str, new: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        USES[old]()
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert new.removesuffix("(...)") in str(warning.message)


@pytest.mark.parametrize("old", ["topology.tells", "topology.hears", "NeighborAllGather(tells=...)"])
def test_a_warning_has_the_line_that_uses_the_name(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="has a new name") as caught:
        USES[old]()
    assert caught[0].filename == __file__


def test_every_alias_of_the_source_is_on_the_page_and_has_a_use() -> None:
    """Calls of the functions in base/former_names name the alias; other code gives no DeprecationWarning."""
    listed = {old for old, _ in rows()}
    assert listed == USES.keys()
    aliases = {*_aliases(), *(f"events.{name}" for name in events._FORMER)}
    assert {name for name in listed if not name.startswith("def ")} == aliases
    direct = [path for path in SOURCE.rglob("*.py") if "DeprecationWarning" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(SOURCE).as_posix() for path in direct] == ["base/former_names.py"]


def test_a_session_of_arrays_has_the_same_deprecated_names() -> None:
    assert issubclass(ArraySession, SessionBase)
    assert {"ask_to_stop", "stopping"}.isdisjoint(vars(ArraySession))


def _aliases() -> Iterator[str]:
    texts = (path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    for text in (text for text in texts if re.search("former_attribute|warn_former_name", text)):
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(func=ast.Name(id="former_attribute"), args=[ast.Constant(owner), ast.Constant(old), _]):
                    yield f"{owner}.{old}"
                case ast.Call(func=ast.Name(id=warn_former_name.__name__), args=[ast.Constant(old), *_]):
                    yield str(old)
