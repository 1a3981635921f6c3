"""View engine: torch takes the calls that it makes, with Gloo in NCCL's place, formed by a view's own store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.standalone_group import StandaloneGroup
from torch import Tensor

from gossamer.base.kernels.library import are_built
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll
from gossamer.comm.elastic.view_engines import ViewEngine, ViewEngines

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


class Averaged:
    """Work of a sum that is to be a mean: Gloo has none."""

    def __init__(self, work: Any, total: Tensor, world: int) -> None:
        self._work, self._total, self._world = work, total, world

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
        self._total.div_(self._world)


class GlooAsNccl:
    """A group that nothing else in the process knows, as NCCL's of a view."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        self.world = world
        self._group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=20))
        self._allgather_base, self.abort = self._group._allgather_base, self._group.abort

    def allreduce(self, tensors: list[Tensor], options: Any) -> Averaged:
        options.reduceOp = dist.ReduceOp.SUM
        return Averaged(self._group.allreduce(tensors, options), tensors[0], self.world)


def numbers(rank: int) -> Tensor:
    return torch.arange(12.0).view(3, 4) * (rank + 1)


def alike(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, theirs)
    return len(mine) == len(theirs) and all(map(alike, mine, theirs))


def test_torch_takes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cpu = torch.device("cpu")
    with StandaloneGroup(3) as group:
        owners = [ViewEngines(cpu, "127.0.0.1", GlooAsNccl) for _ in range(3)]
        engines: list[ViewEngine] = group.all(lambda rank: owners[rank].of(group.transports[rank]))
        assert None not in engines
        for op_of in (
            lambda rank: AllReduceMean(numbers(rank).t()),
            lambda rank: AllReduceMean(numbers(rank), torch.empty(4, 3).t()),
            lambda rank: AllGather((numbers(rank), torch.tensor([rank], dtype=torch.int16))),
        ):
            ops = [op_of(rank) for rank in range(3)]
            expected = answer_all([op_of(rank) for rank in range(3)])
            found = group.all(lambda rank, ops=ops: engines[rank].answer(ops[rank]))
            assert all(map(alike, found, expected))
        with pytest.raises(AssertionError, match="does not support"):
            engines[0].begin(AllToAll(((numbers(0),),)))
        for engine in engines:
            engine.abort()
