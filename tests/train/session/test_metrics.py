"""Metrics over all workers: the mean and the list of what each has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_workers

import gossamer
from gossamer.base.runner import simulate
from gossamer.errors import MismatchError
from gossamer.train.session import metrics
from gossamer.train.session.metrics import exchange


class _Lane:
    """All ranks' scripts at once, in this thread."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others

    def run(self, script: Any) -> Any:
        return simulate([script(), *map(exchange, self.others)])[0]


@pytest.fixture
def among(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this process rank 0 of a group whose other ranks hold these."""

    def surround(*others: Any) -> None:
        named = [value if isinstance(value, dict) else {"": value} for value in others]
        world = type("World", (), {"rank": 0, "size": 1 + len(others)})
        monkeypatch.setattr(metrics, "current", world)
        monkeypatch.setattr(metrics.CallLane, "of_this_process", lambda caller: _Lane(named))

    return surround


@pytest.mark.parametrize(
    "values", [(1, 2), (0.5, float("inf")), ("one", "two \u00b5"), (True, False), (2**70, -1), ("", "long")]
)
def test_scalars_come_back_by_rank_as_they_are(among: Any, values: tuple[Any, Any]) -> None:
    among(values[1])
    found = gossamer.gather(values[0])
    assert found == list(values)
    assert [type(each) for each in found] == [type(each) for each in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_tensors_come_back_by_rank_bit_for_bit(among: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mine, other = (torch.randn(shape).mul(9).to(dtype) for _ in range(2))
    among(other)
    first, second = gossamer.gather(mine)
    assert torch.equal(first, mine)
    assert torch.equal(second, other)
    assert (second.dtype, second.shape) == (dtype, shape)


def test_a_transposed_tensor_travels_as_it_is_seen(among: Any) -> None:
    mine = torch.arange(6.0).view(2, 3).t()
    among(mine.contiguous() + 1)
    assert torch.equal(gossamer.gather(mine)[0], mine)
    assert torch.equal(gossamer.mean(mine), mine + 0.5)


def test_dicts_are_gathered_and_averaged_regardless_of_their_order(among: Any) -> None:
    mine = {"loss": 1.0, "counts": torch.tensor([1, 2]), "big": torch.ones(2, 2)}
    other = {"big": torch.zeros(2, 2), "counts": torch.tensor([3, 5]), "loss": 4}
    among(other)
    assert [each["loss"] for each in gossamer.gather(mine)] == [1.0, 4]
    found = gossamer.mean(mine)
    assert list(found) == ["loss", "counts", "big"]
    assert found["loss"] == 2.5
    assert torch.equal(found["counts"], torch.tensor([2.0, 3.5]))
    assert torch.equal(found["big"], torch.full((2, 2), 0.5))


def test_means_are_of_all_ranks(among: Any) -> None:
    among(2, 6)
    assert gossamer.mean(1) == 3.0
    assert gossamer.mean(np.float32(1)) == 3.0
    among(torch.tensor(2.0), torch.tensor(6.0))
    leaf = torch.tensor(1.0, requires_grad=True)
    found = gossamer.mean(leaf)
    assert (found.item(), found.requires_grad, leaf.requires_grad) == (3.0, False, True)


def test_a_mean_in_half_precision_is_rounded_once(among: Any) -> None:
    values = [torch.tensor([1 + 2**-7], dtype=torch.bfloat16), *[torch.ones(1, dtype=torch.bfloat16)] * 2]
    among(*values[1:])
    expected = torch.stack([each.double() for each in values]).mean(0).bfloat16()
    assert torch.equal(gossamer.mean(values[0]), expected)


@pytest.mark.parametrize(
    ("mine", "other", "ops"),
    [
        (torch.ones(3), torch.ones(4), ["(3,) and float32 on rank 0", "(4,) and float32 on rank 1"]),
        (torch.ones(3), torch.ones(3).double(), ["float32 on rank 0", "float64 on rank 1"]),
        (torch.ones(3), 1.0, ["a tensor of shape (3,)", "1.0 on rank 1"]),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0}, ['"b": 2.0 on rank 0 and nothing on rank 1']),
        ({"a": 1.0}, {"a": 1.0, "c": torch.ones(1)}, ['"c": nothing on rank 0']),
    ],
)
@pytest.mark.parametrize("call", [gossamer.mean, gossamer.gather])
def test_mismatched_metrics_are_refused_with_both_values(
    among: Any, call: Callable[[Any], Any], mine: Any, other: Any, ops: list[str]
) -> None:
    among(other)
    with pytest.raises(MismatchError) as refused:
        call(mine)
    assert all(op in str(refused.value) for op in [*ops, f"gossamer.{call.__name__}", "sums and counts"])


@pytest.mark.parametrize("value", [[1, 2], None, object(), {"a": {"b": 1}}, {3: 1.0}, 1j])
@pytest.mark.parametrize("call", [gossamer.mean, gossamer.gather])
def test_values_that_need_pickle_are_refused(call: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(TypeError, match="pickled"):
        call(value)


def test_a_text_has_no_mean() -> None:
    with pytest.raises(TypeError, match=r"gossamer\.gather\('four'\)"):
        gossamer.mean("four")  # type: ignore[call-overload]


def test_alone_each_is_ones_own() -> None:
    tensor = torch.ones(2)
    assert gossamer.gather("me") == ["me"]
    assert gossamer.mean({"a": 3})["a"] == 3.0
    found = gossamer.mean(tensor)
    found.zero_()
    assert tensor.sum() == 2, "it is a copy"


SCRIPT = """
import sys, torch, gossamer
world = gossamer.init()
assert gossamer.gather(world.rank) == [0, 1]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer, "Dense()")
for step in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert gossamer.mean(float(world.rank)) == 0.5
session.close()
assert gossamer.gather({"name": f"rank {world.rank}"}) == [{"name": "rank 0"}, {"name": "rank 1"}]
try:
    gossamer.mean(torch.ones(2 + world.rank))
except gossamer.errors.MismatchError:
    print("told")
"""


@pytest.mark.processes
def test_workers_call_them_before_attach_while_training_and_after_close(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    for done in run_workers([str(tmp_path / "work.py")], 2):
        assert done.returncode == 0, done.stdout
        assert "told" in done.stdout


def test_the_mean_of_huge_numbers_is_finite(among: Any) -> None:
    huge = torch.tensor([1e308, -1.7e308], dtype=torch.float64)
    among({"loss": 1e308, "huge": huge})
    found = gossamer.mean({"loss": 1e308, "huge": huge})
    assert found["loss"] == 1e308
    assert torch.equal(found["huge"], huge)


def test_the_mean_of_an_integer_beyond_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"too large for the mean.*gossamer\.mean\(count / 1e9\)"):
        gossamer.mean(10**400)
