"""Slices: sharded arrays are averaged shard by shard, each slice with devices of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.jax_training import STEPS, batch, flat, gradient, jax, jnp, parameters, session_of, trained, update
from support.paths import ROOT
from support.virtual_workers import Worker, cluster

from gossamer.errors import AttachError
from gossamer.integrations.jax import session as jax_session
from gossamer.integrations.jax.leaves import Leaves

Spec = jax.sharding.PartitionSpec
SPECS = {"first": {"bias": Spec(), "weight": Spec("model", None)}, "last": Spec(None, "model")}


def placed(worker: Worker, tree: Any, specs: Any = SPECS) -> Any:
    """On the four devices of a slice: sharded over two, replicated over two."""
    devices = jax.devices()[4 * worker.rank : 4 * worker.rank + 4]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec)), jax.device_get(tree), specs
    )


def trained_sharded(worker: Worker, recipe: str) -> Any:
    session = session_of(worker, placed(worker, parameters(worker.rank)), recipe)
    tree = start = session.parameters
    for step in range(STEPS):
        mean = session.give(gradient(tree, *batch(step, worker.rank)))
        tree = session.took_step(update(tree, mean))
        assert jax.tree.all(
            jax.tree.map(lambda now, then: now.sharding.is_equivalent_to(then.sharding, now.ndim), tree, start)
        )
    return jax.device_get(session.averaged_parameters())


@pytest.mark.parametrize("recipe", ["Dense()", "DiLoCo(period=3)"])
def test_two_slices_train_as_two_workers_with_whole_arrays(recipe: str) -> None:
    sharded = cluster(lambda w: trained_sharded(w, recipe), 2)
    whole = cluster(lambda w: trained(w, recipe)[0].averaged_parameters(), 2)
    assert flat(sharded[0]) == flat(sharded[1])
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=0, atol=1e-6), sharded[0], whole[0]))


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "DiLoCo(period=2) + Int8()"])
def test_slices_agree_under_compression(recipe: str) -> None:
    first, second = cluster(lambda w: trained_sharded(w, recipe), 2)
    assert flat(first) == flat(second)


def test_compressors_see_each_shard_as_a_tensor_of_its_own() -> None:
    session = cluster(lambda w: [*session_of(w, placed(w, parameters()), "Dense()").arrays.parameters], 2)
    assert session[0] == [
        "first.bias",
        "first.weight[0:8,0:6]",
        "first.weight[8:16,0:6]",
        "last[0:3,0:8]",
        "last[0:3,8:16]",
    ]


@pytest.mark.parametrize("spec", [Spec("model"), Spec()])
@pytest.mark.parametrize("other", [Spec("data"), Spec("model"), Spec()])
def test_gradients_of_another_sharding_are_placed_as_the_parameters(spec: Any, other: Any) -> None:
    def train(worker: Worker) -> Any:
        session = session_of(worker, placed(worker, {"w": jnp.ones(8)}, {"w": spec}), "Dense()")
        gradients = placed(worker, {"w": jnp.arange(8.0) * worker.rank}, {"w": other})
        return session.give(gradients)["w"].tolist()

    assert cluster(train, 2) == [(np.arange(8.0) / 2).tolist()] * 2


# -- which ranks are counterparts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "processes", "place", "found"),
    [(0, 2, 0, [0, 2, 4]), (3, 2, 1, [1, 3, 5]), (4, 3, 1, [1, 4]), (2, 1, 0, None)],
)
def test_counterparts_have_one_place_in_their_slices(
    monkeypatch: pytest.MonkeyPatch, rank: int, processes: int, place: int, found: list[int] | None
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "process_index", lambda: place)
    ranks = jax_session.replicas(SimpleNamespace(rank=rank, size=6))  # type: ignore[arg-type]
    assert (None if ranks is None else [*ranks]) == found


@pytest.mark.parametrize(("rank", "size", "place"), [(0, 5, 0), (1, 4, 0)])
def test_ranks_that_are_no_slices_in_a_row_are_refused(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, place: int
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: place)
    with pytest.raises(AttachError, match=r"slices.*jax\.distributed\.initialize"):
        jax_session.replicas(SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]


def test_slices_of_several_processes_are_refused_in_an_elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax_session, "is_elastic", lambda: True)
    with pytest.raises(AttachError, match=r"rank 0: .*2 processes.*one process with all of its devices"):
        jax_session.replicas(SimpleNamespace(rank=0, size=4))  # type: ignore[arg-type]


class Held:
    """The sharding of a leaf, by the rows that each process of a slice holds."""

    def __init__(self, *rows: slice) -> None:
        self._rows = rows
        self.is_fully_replicated = len({*map(str, rows)}) == 1

    def devices_indices_map(self, shape: Any) -> Any:
        return {Place(process): (rows,) for process, rows in enumerate(self._rows)}


class Place(NamedTuple):
    process_index: int


def test_parts_that_processes_of_a_slice_share_become_those_of_the_first() -> None:
    whole, half, other = slice(None), slice(0, 2), slice(2, 4)
    tree = {"bias": Held(whole, whole, whole), "own": Held(half, half, other)}

    def settle(worker: Worker) -> Any:
        leaves = Leaves({name: jnp.zeros(4) for name in tree}, worker.rank)
        leaves.trained = [replace(leaf, sharding=tree[leaf.name]) for leaf in leaves.trained]
        shared = jax_session.SharedParts(leaves, SimpleNamespace(training=worker.transport))  # type: ignore[arg-type]
        part = "own[2:4]" if worker.rank == 2 else "own[0:2]"
        tensors = {name: torch.full((size,), float(worker.rank)) for name, size in (("bias", 4), (part, 2))}
        shared.settle(tensors)
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    first = {"bias": [0.0] * 4, "own[0:2]": [0.0] * 2}
    assert cluster(settle, 3) == [first, first, {"bias": [0.0] * 4, "own[2:4]": [2.0] * 2}]


@pytest.mark.processes
@pytest.mark.new_programs
def test_two_slices_of_two_processes_end_with_one_model() -> None:
    script = str(ROOT / "examples" / "jax_slices.py")
    command = [sys.executable, "-m", "gossamer", "run", "--workers", "4", "--recipe", "DiLoCo(period=2) + Int8()"]
    done = subprocess.run([*command, script, "--steps", "4"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    norms = re.findall(r"slice (\d), process (\d): (\{.*?\})", done.stdout)
    assert sorted(each[:2] for each in norms) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({each[2] for each in norms}) == 1
    assert re.search(r"workers agree +yes", done.stdout + done.stderr)
