"""Elastic states: commit, restore and sync around a function; a restarted run continues from its last commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.horovod_workers import horovod
from support.virtual_workers import agree, network, parameters
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.horovod.elastic import run_fn
from gossamer.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt


def state_of(rank: int) -> Any:
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=rank, seen=[rank])


def test_sync_gives_every_rank_the_state_of_the_first() -> None:
    def work(rank: int) -> tuple[Tensor, int, list[int]]:
        state = state_of(rank)
        state.sync()
        return parameters(state.model), state.batch, state.seen

    results = horovod(work)
    assert torch.equal(agree([found for found, _, _ in results]), parameters(network(0)))
    assert [rest for _, *rest in results] == [[0, [0]]] * 2


def test_a_failure_restores_the_last_commit_and_repeats() -> None:
    def work(rank: int) -> list[Any]:
        state, told = state_of(0), []

        def train(state: Any) -> float:
            told.extend([state.batch, float(parameters(state.model)[0])])
            for each in state.model.parameters():
                each.data.fill_(state.batch + 1.0)
            state.batch += 1
            if state.batch < 3:
                state.commit()
                for each in state.model.parameters():
                    each.data.fill_(99.0)
                state.batch = 99
                raise HorovodInternalError("a peer's call failed")
            return float(parameters(state.model)[0])

        state.register_reset_callbacks([lambda: told.append("reset")])
        return [run_fn(train, lambda: None)(state), state.batch, *told]

    assert horovod(work, 1) == [[3.0, 3, 0, float(parameters(network(0))[0]), "reset", 1, 1.0, "reset", 2, 2.0]]


def test_a_failure_restores_containers_that_were_changed_in_place() -> None:
    def work(rank: int) -> list[Any]:
        losses = [0.5]
        state = hvd.elastic.ObjectState(losses=losses, best={"loss": [0.5]})
        assert state.losses is losses
        found = []
        for _ in range(2):
            state.losses.append(0.25)
            state.best["loss"].append(0.25)
            state.restore()
            found.append((list(state.losses), list(state.best["loss"])))
        state.losses.append(0.125)
        state.commit()
        state.losses.clear()
        state.restore()
        return [*found, state.losses]

    assert horovod(work, 1) == [[([0.5], [0.5]), ([0.5], [0.5]), [0.5, 0.125]]]


def test_an_interrupt_keeps_uncommitted_changes() -> None:
    def work(rank: int) -> int:
        state, calls = hvd.elastic.ObjectState(step=0), []

        def train(state: Any) -> int:
            calls.append(1)
            state.step += 1
            if len(calls) == 1:
                raise HostsUpdatedInterrupt(skip_sync=True)
            return int(state.step)

        return run_fn(train, lambda: None)(state)

    assert horovod(work, 1) == [2]


def test_a_lost_rank_ends_the_function_so_that_the_launcher_restarts_all() -> None:
    def work(rank: int) -> None:
        def train(state: Any) -> None:
            raise HorovodInternalError("PeerLost: rank 1 left")

        with pytest.raises(HorovodInternalError, match="PeerLost"):
            run_fn(train, lambda: pytest.fail("reset"))(hvd.elastic.ObjectState(step=0))

    horovod(work, 1)


def test_a_restarted_run_takes_up_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def first(rank: int) -> None:
        state = state_of(rank)
        state.batch = 7
        for each in state.model.parameters():
            each.data.fill_(0.5)
        state.commit()
        state.batch = 8

    def again(rank: int) -> tuple[int, Tensor]:
        state = state_of(rank)
        return run_fn(lambda state: (state.batch, parameters(state.model)), lambda: None)(state)

    horovod(first)
    assert horovod(again)[0][0] == 0, "the first attempt begins anew"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    results = horovod(again)
    assert [batch for batch, _ in results] == [7, 7]
    assert agree([found for _, found in results]).unique().tolist() == [0.5]


def test_without_restarts_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    horovod(lambda rank: state_of(rank).commit())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_sampler_deals_out_what_is_left_of_an_epoch(shuffle: bool) -> None:
    def work(rank: int) -> tuple[list[int], list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=shuffle)
        state = hvd.elastic.TorchState(sampler=sampler)
        first = list(sampler)
        sampler.record_batch(0, 2)
        state.commit()
        sampler.record_batch(1, 2)
        state.restore()
        rest = list(sampler)
        sampler.set_epoch(1)
        return first, rest, list(sampler)

    results = horovod(work)
    first, rest, after = ([index for one in part for index in one] for part in zip(*results, strict=True))
    assert sorted(first) == sorted(after) == list(range(10))
    assert (first != after) is shuffle
    seen = {index for each, _, _ in results for index in each[:2]}
    assert set(rest) == set(range(10)) - seen


def test_the_sampler_gives_every_rank_an_index_where_fewer_are_left_than_ranks() -> None:
    def work(rank: int) -> tuple[list[int], int]:
        sampler = hvd.elastic.ElasticSampler(range(9), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": 8})
        return list(sampler), len(sampler)

    assert horovod(work, 4) == [([8], 1)] * 4
