"""Sessions with a codec per worker: who is slow is agreed at the beginning, and all ranks hold the same bits."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.resumed_training import check_resume, train
from support.virtual_workers import Worker, agree, cluster, network, notices, parameters, train_step
from torch import Tensor, nn

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.transport import Transport
from gossamer.comm.mesh.link_measurement import Links
from gossamer.errors import AttachError, MismatchError, RecipeError
from gossamer.train.session.recipe_choice import compressor_alone, placed_in, refuse_inelastic
from gossamer.train.world_state import WorldState

STRATEGIES = ["EveryStep()", "LocalSGD(period=2)", "DiLoCo(period=2)"]
MIXED = "Route(Feedback(Sharded(PerWorker(Int8(block=16), slow=OneBit(block=16), ranks=1))), smallest=1)"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(worker: Worker, recipe: str, steps: int = 4) -> Tensor:
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
    for step in range(steps):
        train_step(model, optimizer, step, worker.rank)
    with session.averaged_parameters(model):
        return parameters(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_hold_the_same_bits(strategy: str) -> None:
    mixed, usual, slow = (
        agree(cluster(lambda worker, text=text: trained(worker, f"{strategy} + {text}"), 3))
        for text in (MIXED, MIXED.replace("ranks=1", "ranks=''"), MIXED.replace("ranks=1", "ranks='0-2'"))
    )
    assert not torch.equal(mixed, usual)
    assert not torch.equal(mixed, slow)
    plain = MIXED.replace("PerWorker(Int8(block=16), slow=OneBit(block=16), ranks=1)", "Int8(block=16)")
    assert torch.equal(usual, agree(cluster(lambda worker: trained(worker, f"{strategy} + {plain}"), 3)))


@pytest.mark.parametrize("strategy", ["EveryStep()", *nightly("LocalSGD(period=2)"), "DiLoCo(period=2)"])
def test_a_resumed_run_continues_with_the_same_bits(strategy: str) -> None:
    check_resume(f"{strategy} + {MIXED}", after=[5])


def test_a_checkpoint_with_other_slow_workers_keeps_its_residuals(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, MIXED, 0, 2, save=tmp_path), 3)
    with notices() as said:
        cluster(lambda worker: train(worker, MIXED.replace("ranks=1", "ranks=2"), 2, 4, load=tmp_path), 3)
    assert any("residuals are restored bit for bit" in text for text in said)


# -- selection ---------------------------------------------------------------------------------------------------------


def measured(transport: Transport) -> Transport:
    """A transport whose ranks were measured: rank 1 has the slowest upload."""
    world = transport.world
    lines = tuple(1e6 if rank == 1 else 1e9 for rank in range(world))
    none = ((0.0,) * world,) * world
    transport.links = Links(none, lines, lines, none).text
    return transport


def table(worker: Worker, recipe: str) -> str:
    return repr(placed_in(resolve(recipe, worker.world), worker.transport).compressor)


def test_workers_with_slow_lines_are_found_by_measurement() -> None:
    with notices() as said:
        found = cluster(lambda worker: table(worker, "PerWorker(Int8(), below='20mbit')"), 3, measured)
    assert {*found} == {"Route(Feedback(Sharded(PerWorker(Int8(), ranks='1'))))"}
    assert len(said) == 1
    assert "ranks='1'" in said[0]
    assert "no worker is selected" not in said[0]


def test_a_selection_without_workers_is_reported() -> None:
    with notices() as said:
        cluster(lambda worker: table(worker, "PerWorker(Int8(), hosts='elsewhere')"), 2)
    assert ["no worker is selected" in each for each in said] == [True]


def test_workers_are_found_by_host_name() -> None:
    here = socket.gethostname()
    assert {*cluster(lambda worker: table(worker, f"PerWorker(Int8(), hosts='{here}')"), 2)} == {
        "Route(Feedback(PerWorker(Int8(), ranks='0,1')))"
    }
    assert {*cluster(lambda worker: table(worker, "PerWorker(Int8(), hosts='elsewhere')"), 2)} == {
        "Route(Feedback(PerWorker(Int8(), ranks='')))"
    }


def test_unmeasured_bandwidths_are_rejected_with_the_ranks_to_write() -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(RecipeError, match="ranks=3"):
            worker.start(network(), sgd, "PerWorker(Int8(), below='20mbit')")

    cluster(work, 2)


def test_a_rank_with_another_recipe_is_named() -> None:
    def work(worker: Worker) -> None:
        if worker.rank == 0:
            worker.transport.all_gather_text("{}")  # its first call compares the ranks
            return
        with pytest.raises(MismatchError, match="rank 0 has another recipe"):
            table(worker, "PerWorker(Int8(), hosts='laptop')")

    cluster(work, 2)


def test_sessions_of_arrays_select_workers_too() -> None:
    def work(worker: Worker) -> str:
        return repr(worker.arrays({"weight": torch.zeros(300)}, "PerWorker(Int8(), below='20mbit')").recipe)

    assert all("ranks='1'" in text for text in cluster(work, 3, measured))


# -- switch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["below='20mbit'", "hosts='*'", "ranks=1"])
def test_a_session_switches_to_a_codec_per_worker_and_back(selection: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Any]:
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Int8()")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
            if step == 1:
                session.switch(f"PerWorker(Int8(), {selection})")
                found = repr(session.recipe)
            if step == 3:
                before = session._synchronizer
                session.switch(f"PerWorker(Int8(), {selection})")
                assert session._synchronizer is before, "the same recipe was switched to again"
                session.switch("OneBit()")
        return parameters(model), found

    results = cluster(work, 3, measured)
    agree([tensor for tensor, _ in results])
    expected = {"below='20mbit'": "ranks='1'", "hosts='*'": "ranks='0,1,2'", "ranks=1": "ranks=1"}[selection]
    assert all(expected in text for _, text in results)


def test_a_refused_switch_changes_nothing() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Int8()")
        train_step(model, optimizer, 0, worker.rank)
        with pytest.raises(RecipeError, match="ranks=3"):
            session.switch("PerWorker(Int8(), below='20mbit')")
        train_step(model, optimizer, 1, worker.rank)

    cluster(work, 2)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["ranks=1", "hosts='laptop'", "below='20mbit'"])
def test_elastic_runs_reject_it(selection: str) -> None:
    with pytest.raises(AttachError, match=r"PerWorker.*Write one codec"):
        refuse_inelastic(resolve(f"PerWorker(Int8(), {selection})"))


def test_calls_without_a_session_need_ranks() -> None:
    world = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    assert compressor_alone("PerWorker(Int8(), ranks=1)", world, "average_")
    with pytest.raises(RecipeError, match="ranks=0"):
        compressor_alone("PerWorker(Int8(), hosts='laptop')", world, "average_")


def test_it_is_public() -> None:
    assert gossamer.recipe("PerWorker(Int8(), ranks=3)").terms == (gossamer.PerWorker(gossamer.Int8(), ranks=3),)
