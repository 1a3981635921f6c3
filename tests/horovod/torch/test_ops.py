"""Collective calls on torch tensors: values, dtypes, shapes, gradients and errors, by ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.horovod_workers import horovod
from torch import Tensor

import gossamer.horovod.torch as hvd

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCTIONS: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
    (hvd.Sum, lambda ranks: ranks.sum(0)),
    (hvd.Average, lambda ranks: ranks.double().mean(0).trunc()),
    (hvd.Min, lambda ranks: ranks.amin(0)),
    (hvd.Max, lambda ranks: ranks.amax(0)),
    (hvd.Product, lambda ranks: ranks.prod(0)),
]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers from 1 to 5, of which averages over 3 ranks are whole for floats."""
    count = torch.Size(shape).numel()
    return (3 * (torch.arange(count) + rank) % 5 + 1).reshape(shape).to(dtype)


def same(found: list[Tensor], expected: Tensor) -> None:
    for each in found:
        assert each.dtype == expected.dtype
        assert torch.equal(each, expected)


@pytest.mark.parametrize(("op", "of_all"), REDUCTIONS, ids=lambda value: getattr(value, "value", ""))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_reduces_every_dtype(op: Any, of_all: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    ranks = torch.stack([tensor_of(rank, (7,), torch.int64) * (3 if op is hvd.Average else 1) for rank in range(3)])
    found = horovod(lambda rank: hvd.allreduce(ranks[rank].to(dtype), op=op), 3)
    same(found, of_all(ranks).to(dtype))


def test_allreduce_of_bools_and_of_integers_truncates() -> None:
    def work(rank: int) -> list[Tensor]:
        return [
            hvd.allreduce(torch.tensor([rank == 1, False]), op=hvd.Sum),
            hvd.allreduce(torch.tensor([-1 if rank else -2])),  # -1.5
            hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5),
        ]

    for bools, mean, scaled in horovod(work):
        assert bools.tolist() == [True, False]
        assert mean.tolist() == [-1]
        assert scaled.tolist() == [2]


def test_a_mean_is_right_if_the_sum_is_too_large_for_its_dtype() -> None:
    large = torch.tensor([1.5e308, -1.5e308, 1.5e308, 0.1], dtype=torch.float64)
    whole = torch.tensor([2**63 - 1, -(2**63) + 1, 2**63 - 1, -5])

    def work(rank: int) -> list[Tensor]:
        signs = torch.tensor([1, 1, 1 - 2 * (rank % 2), 1])
        return [hvd.allreduce(large * signs), hvd.reducescatter(large), hvd.allreduce(whole * signs)]

    for rank, (mean, part, of_integers) in enumerate(horovod(work)):
        assert mean.tolist() == [1.5e308, -1.5e308, 0.0, 0.1]
        assert part.tolist() == large.tolist()[2 * rank :][:2]
        assert of_integers.tolist() == [2**63 - 1, -(2**63) + 1, 0, -5]


def test_factors_are_applied_before_the_result_is_rounded() -> None:
    mine = torch.tensor([60000.0], dtype=torch.float16)
    factors: list[dict[str, float]] = [{"postscale_factor": 0.5}, {"prescale_factor": 4.0, "postscale_factor": 0.125}]
    for found in horovod(lambda rank: [hvd.allreduce(mine, op=hvd.Sum, **each) for each in factors]):
        assert [each.item() for each in found] == [60000.0, 60000.0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)], ids=str)
def test_every_call_takes_every_shape(shape: tuple[int, ...]) -> None:
    def work(rank: int) -> list[Tensor]:
        mine = tensor_of(rank, shape)
        return [hvd.allreduce(mine, op=hvd.Sum), hvd.broadcast(mine, 1), hvd.allgather(mine)]

    rows = [tensor_of(rank, shape) if shape else tensor_of(rank, (1,)) for rank in range(2)]
    for total, root, gathered in horovod(work):
        assert torch.equal(total, tensor_of(0, shape) + tensor_of(1, shape))
        assert torch.equal(root, tensor_of(1, shape))
        assert torch.equal(gathered, torch.cat(rows))


def test_a_transposed_tensor_is_reduced_as_it_looks() -> None:
    found = horovod(lambda rank: hvd.allreduce(tensor_of(rank, (2, 3)).t(), op=hvd.Sum))
    same(found, (tensor_of(0, (2, 3)) + tensor_of(1, (2, 3))).t().contiguous())


def test_allgather_concatenates_different_numbers_of_rows() -> None:
    found = horovod(lambda rank: hvd.allgather(torch.full((rank, 2), float(rank))), 4)
    same(found, torch.cat([torch.full((rank, 2), float(rank)) for rank in range(4)]))


def test_alltoall_sends_different_numbers_of_rows() -> None:
    def work(rank: int) -> Any:
        rows = torch.arange(sum(range(3)) + 1).float() + 10 * rank  # the last one stays
        return hvd.alltoall(rows, torch.arange(3, dtype=torch.int32))

    for rank, (rows, received) in enumerate(horovod(work, 3)):
        first = sum(range(rank))
        assert received.tolist() == [rank] * 3
        assert rows.tolist() == [10 * peer + first + row for peer in range(3) for row in range(rank)]


def test_reducescatter_leaves_one_row_more_to_the_first_ranks() -> None:
    found = horovod(lambda rank: hvd.reducescatter(tensor_of(rank, (5, 2)), op=hvd.Sum), 3)
    total = sum(tensor_of(rank, (5, 2)) for rank in range(3))
    assert [len(each) for each in found] == [2, 2, 1]
    assert torch.equal(torch.cat(found), total)


def test_in_place_and_asynchronous_calls() -> None:
    def work(rank: int) -> list[Tensor]:
        first, second, third = (torch.full((3,), float(rank + 1)) for _ in range(3))
        assert hvd.allreduce_(first, op=hvd.Sum) is first
        handle = hvd.broadcast_async_(second, 1, name="second")
        assert hvd.synchronize(handle) is second
        assert hvd.poll(handle)
        group = hvd.grouped_allreduce_async_([third], op=hvd.Max)
        assert hvd.synchronize(group)[0] is third
        (gathered,) = hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([rank])]))
        (part,) = hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(2)], op=hvd.Sum))
        return [first, second, third, gathered, part]

    for first, second, third, gathered, part in horovod(work):
        assert [first[0], second[0], third[0]] == [3, 2, 2]
        assert gathered.tolist() == [0, 1]
        assert part.tolist() == [2]


def test_a_column_of_one_row_is_reduced_gathered_and_overwritten() -> None:
    def work(rank: int) -> list[Tensor]:
        first, second = (torch.full((1, 3), float(rank + 1))[:, 1] for _ in range(2))
        gathered = hvd.allgather(first)
        assert hvd.broadcast_(first, 1) is first
        assert hvd.allreduce_(second, op=hvd.Sum) is second
        return [first, second, gathered]

    for first, second, gathered in horovod(work):
        assert (first.tolist(), second.tolist(), gathered.tolist()) == ([2.0], [3.0], [1.0, 2.0])


def test_a_broadcast_leaves_its_input_alone() -> None:
    def work(rank: int) -> Tensor:
        mine = torch.tensor([float(rank)])
        hvd.broadcast(mine, 0)
        return mine

    assert [each.item() for each in horovod(work)] == [0, 1]


def test_scalings_and_half_compression() -> None:
    def work(rank: int) -> list[Tensor]:
        mine = torch.full((2,), float(rank + 1))
        return [
            hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
            hvd.allreduce(torch.full((1,), 1.0 + 2**-12), compression=hvd.Compression.fp16),
        ]

    for scaled, half in horovod(work):
        assert scaled.tolist() == [1.5, 1.5]
        assert half.dtype == torch.float32
        assert half.item() == 1.0


def test_sparse_tensors_are_added_up() -> None:
    def work(rank: int) -> Tensor:
        dense = torch.zeros(4, 2)
        dense[rank] = dense[3] = rank + 1.0
        return hvd.sparse_allreduce_async(dense.to_sparse(1), name="embedding", op=hvd.Average)().to_dense()

    same(horovod(work), torch.tensor([[0.5, 0.5], [1, 1], [0, 0], [1.5, 1.5]]))


# -- gradients ---------------------------------------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]
DIFFERENTIABLE: dict[str, tuple[Call, Callable[[int, int], float]]] = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda rank, world: sum(range(1, world + 1))),
    "average": (lambda x: hvd.allreduce(x), lambda rank, world: sum(range(1, world + 1)) / world),
    "allgather": (lambda x: hvd.allgather(x), lambda rank, world: sum(range(1, world + 1)) / world),
    "broadcast": (
        lambda x: hvd.broadcast(x, 0),
        lambda rank, world: 0.0 if rank else sum(range(1, world + 1)) / world,
    ),
    "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda rank, world: world),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_flow_through(name: str) -> None:
    """As in Horovod: rank r's loss is (r + 1) times the sum of the result."""
    call, expected = DIFFERENTIABLE[name]

    def work(rank: int) -> Tensor:
        x = torch.ones(4, 2, requires_grad=True)
        weight = 1 if name == "reducescatter" else rank + 1
        (call(x).sum() * weight).backward()
        assert x.grad is not None
        return x.grad

    for rank, gradient in enumerate(horovod(work)):
        assert torch.equal(gradient, torch.full((4, 2), float(expected(rank, 2))))


def test_gradients_of_alltoall_go_back_to_their_rows() -> None:
    def work(rank: int) -> Tensor:
        x = torch.ones(4, requires_grad=True)
        rows, _ = hvd.alltoall(x, [1, 2])
        (rows.sum() * (rank + 1)).backward()
        assert x.grad is not None
        return x.grad

    same(horovod(work), torch.tensor([1.0, 2.0, 2.0, 0.0]))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: hvd.allreduce(torch.ones(2 + rank)),
        lambda rank: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int32][rank])),
        lambda rank: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][rank]),
        lambda rank: hvd.allgather(torch.ones(2, 1 + rank)),
        lambda rank: hvd.broadcast(torch.ones(2), rank),
        lambda rank: hvd.alltoall(torch.ones(2, 1 + rank)),
        lambda rank: hvd.reducescatter(torch.ones(2 + rank)),
        lambda rank: [hvd.allreduce, hvd.allgather][rank](torch.ones(2)),  # type: ignore[operator]
    ],
)
def test_different_calls_raise_on_every_rank_and_the_next_call_works(call: Callable[[int], Any]) -> None:
    def work(rank: int) -> Tensor:
        with pytest.raises(hvd.HorovodInternalError, match=r"different calls.*rank 1"):
            call(rank)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum)

    same(horovod(work), torch.tensor([2.0]))


@pytest.mark.parametrize(
    ("call", "error", "about"),
    [
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)), ValueError, "not supported.*view_as_real"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), ValueError, "sparse_allreduce_async"),
        (lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), NotImplementedError, "hvd.Average"),
        (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), hvd.HorovodInternalError, "reshape"),
        (lambda: hvd.alltoall(torch.ones(3)), ValueError, "splits"),
        (lambda: hvd.alltoall(torch.ones(3), [3, 1]), ValueError, "at most 3"),
        (lambda: hvd.alltoall(torch.ones(3), torch.tensor([1.0, 2.0])), ValueError, "integers"),
        (lambda: hvd.broadcast(torch.ones(3), 2), hvd.HorovodInternalError, "root_rank 2"),
        (lambda: hvd.synchronize(10**6), ValueError, "synchronized before"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_sent(
    call: Callable[[], Any], error: type[Exception], about: str
) -> None:
    def work(rank: int) -> None:
        with pytest.raises(error, match=about):
            call()

    horovod(work)
