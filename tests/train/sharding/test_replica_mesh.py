from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError
from gossamer.train.sharding import replica_mesh
from gossamer.train.sharding.replica_mesh import refuse_overlap, replica_ranks


class Mesh:
    """As much of a DeviceMesh as is asked for."""

    def __init__(self, ndim: int = 1, coordinate: tuple[int, ...] | None = (0,)) -> None:
        self.ndim, self._coordinate = ndim, coordinate

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self._coordinate

    def get_group(self) -> Any:
        raise AssertionError("refused before it is asked")


@pytest.mark.parametrize(
    ("mesh", "match"),
    [
        ("replicate", "is not a DeviceMesh"),
        (Mesh(ndim=2), "has 2 dimensions"),
        (Mesh(coordinate=None), "not in the mesh"),
        (Mesh(), "this job has 4 workers, but the mesh is of another process group"),
    ],
)
def test_what_says_nothing_of_replicas_is_refused(mesh: Any, match: str) -> None:
    with pytest.raises(AttachError, match=match) as caught:
        replica_ranks(mesh, 4)
    assert 'mesh["replicate"]' in str(caught.value)


@pytest.mark.parametrize("groups", [[(0, 1), (1, 2)], [(0, 1), (2,)], [(0, 1)]])
def test_groups_that_do_not_divide_the_job_are_refused(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(AttachError, match="each rank must be in one"):
        refuse_overlap(groups, 3)


@pytest.mark.parametrize("recipe", ["LocalSGD(4, balance=True)", "EveryStep(global_batch=8, balance=True)"])
def test_shares_by_speed_are_refused_where_a_model_is_divided(recipe: str) -> None:
    with pytest.raises(AttachError, match="Leave out balance=True"):
        replica_mesh.refuse_apart(resolve(recipe))
    replica_mesh.refuse_apart(resolve("LocalSGD(4)"))


def test_strided_groups_divide_it() -> None:
    refuse_overlap([(0, 2), (1, 3)], 4)


@pytest.mark.parametrize(("inner", "refused"), [([0, 1], False), ([0, 2], True), ([0, 1, 2, 3], True)])
def test_a_parameter_sharded_over_ranks_of_the_recipe_is_refused(
    inner: list[int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe runs between ranks 0 and 2. A mesh of one common rank, this one, is the shards of one replica."""
    parameter = SimpleNamespace(device_mesh=SimpleNamespace(mesh=torch.tensor(inner)))
    monkeypatch.setattr(replica_mesh, "sharded_parameters", lambda model: {"head.weight": parameter})
    if not refused:
        replica_mesh.refuse_inner_replicas(nn.Linear(1, 1), [0, 2])
        return
    with pytest.raises(AttachError, match=r"\"head.weight\" is a DTensor over ranks \[0, 2\]"):
        replica_mesh.refuse_inner_replicas(nn.Linear(1, 1), [0, 2])
