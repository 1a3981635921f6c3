from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from typing import Any

import torch
from torch.nn import Parameter

from gossamer.comm.simulated import SimulatedGroup
from gossamer.train.sharding.local_shards import WholeParameters
from gossamer.train.sharding.model_group import ELSEWHERE, ModelGroup


class Mesh:
    """As much of a DeviceMesh as a DTensor is asked for."""

    def __init__(self, *sizes: int) -> None:
        self.mesh = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)

    def size(self, dim: int) -> int:
        return self.mesh.shape[dim]


class Placed:
    def __init__(self, *, replicated: bool) -> None:
        self._replicated = replicated

    def is_replicate(self) -> bool:
        return self._replicated


def parameter(gradient: float, mesh: Mesh | None = None, *, replicated: bool = False) -> Parameter:
    found: Any = Parameter(torch.zeros(1))
    found.grad = torch.tensor([gradient])
    if mesh is not None:
        found.device_mesh, found.placements = mesh, (Placed(replicated=replicated),)
    return found  # type: ignore[no-any-return]


def on_two_ranks(act: Callable[[ModelGroup, int], Any]) -> list[Any]:
    groups = [SimulatedGroup(2) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        made = [ModelGroup(*(group.transports[rank] for group in groups), shards="") for rank in range(2)]
        return list(pool.map(act, made, range(2)))


def norms(held: Callable[[int], Sequence[Parameter]]) -> list[tuple[float, bool]]:
    def act(group: ModelGroup, rank: int) -> tuple[float, bool]:
        parameters = dict(zip("abc", held(rank), strict=False))
        group.hold(WholeParameters(parameters))
        return float(group.total_norm(parameters.values())), group.staged

    return on_two_ranks(act)


def test_shards_add_up_and_replicated_tensors_count_once() -> None:
    mesh = Mesh(2)
    found = norms(lambda rank: (parameter(3.0 + rank, mesh), parameter(5.0, mesh, replicated=True), parameter(7.0)))
    assert found == [(torch.tensor(sqrt(9 + 16 + 25 + 49)).item(), False)] * 2


def test_stages_hold_different_layers() -> None:
    assert norms(lambda rank: (parameter(3.0 + rank),)) == [(5.0, True)] * 2


def test_a_rank_without_gradients_takes_part() -> None:
    assert norms(lambda rank: (parameter(4.0),) * (1 - rank)) == [(4.0, True)] * 2


def test_all_parts_agree_on_what_was_not_finite() -> None:
    def act(group: ModelGroup, rank: int) -> Any:
        mine = (1, "weight") if rank else None
        return group.agree(mine), group.agree_in_round(None), group.agree_in_round(mine)

    assert on_two_ranks(act) == [(ELSEWHERE, None, ELSEWHERE), ((1, "weight"), None, (1, "weight"))]
