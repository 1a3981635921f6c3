"""Shards from recipes: terms that the server's process does not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
from support.direct_server import DirectServer

import gossamer
from gossamer.algorithms.recipes import registry
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.errors import MalformedError
from gossamer.train.parameter_server.from_recipe import make_shard


@dataclass(frozen=True, repr=False)
class Quarters(gossamer.Int8):
    """Int8 with larger blocks."""

    block: int = 1024


@pytest.fixture
def worker() -> Iterator[DirectServer]:
    """Workers that know a term, in a process that has forgotten it, as a server's has never known it."""
    known = dict(NOUNS)
    gossamer.register(Quarters)
    worker = DirectServer("ParameterServer(push=Quarters())")
    NOUNS.pop("Quarters")
    yield worker
    NOUNS.clear()
    NOUNS.update(known)


def begun_by(worker: DirectServer) -> str:
    """The recipe of a shard that is made of what a worker sends."""
    client = worker.workers[0]
    return make_shard(client.spec.to_json(), [block.flat for block in worker.shard.blocks]).spec.recipe


def test_a_server_that_does_not_know_a_term_names_the_entry_point(worker: DirectServer) -> None:
    with pytest.raises(MalformedError) as refused:
        begun_by(worker)
    assert '[project.entry-points."gossamer.terms"] Quarters = "my_package:Quarters"' in str(refused.value)


def test_a_server_follows_a_term_of_an_installed_package(worker: DirectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("Quarters", f"{Quarters.__module__}:Quarters", "gossamer.terms")
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert "Quarters()" in begun_by(worker)
