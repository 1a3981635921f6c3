"""Rows of sparse gradients: their mean over workers, the bytes that travel, and what an optimizer is shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.base.ops import AllGather, payload_bytes
from gossamer.base.runner import price, simulate
from gossamer.errors import LayoutError, LoopError
from gossamer.train.engine import sparse_gradients as module
from gossamer.train.engine.parameter_views import sparse_names
from gossamer.train.engine.sparse_gradients import Rows, SparseGradients, entries, mean_rows

TABLE = Parameter(torch.zeros(6, 2))


def sparse(numbers: Sequence[int], table: Tensor = TABLE, dtype: torch.dtype = torch.float32) -> Tensor:
    """Row k of what is given is (k + 1) of everything; numbers may be there several times."""
    values = torch.arange(1, len(numbers) + 1, dtype=dtype).unsqueeze(1).expand(-1, table.shape[1])
    return torch.sparse_coo_tensor(
        torch.tensor([list(numbers)], dtype=torch.int64), values, table.shape, check_invariants=True
    )


def means(gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """By rank, the dense means of each table, from each rank's gradients."""
    owns = [[Rows.of(gradient, gradient) for gradient in mine] for mine in gradients]
    found = simulate([mean_rows(own, len(owns)) for own in owns])
    return [[rows.sparse(g).to_dense() for rows, g in zip(mine, gradients[0], strict=True)] for mine in found]


@pytest.mark.parametrize(
    "numbers",
    [
        ([0, 3], [3, 5]),
        ([0, 3, 0, 0], [3]),  # one is there three times
        ([], [1, 1]),
        ([], []),
        ([2], [2], [2, 4, 5], []),
    ],
)
def test_the_mean_is_that_of_dense_gradients(numbers: Sequence[Sequence[int]]) -> None:
    gradients = [[sparse(mine), sparse(mine[::-1])] for mine in numbers]
    expected = [torch.stack([g.to_dense() for g in of_table]).mean(0) for of_table in zip(*gradients, strict=True)]
    for mine in means(gradients):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_half_precision_is_rounded_once() -> None:
    """1 is lost in 2048 when three of them are added up in float16 one after the other."""
    tables = [torch.full((1, 1), value, dtype=torch.float16) for value in (2048, 1, 1, 2)]
    ((mean,), *_) = means([[table.to_sparse(1)] for table in tables])
    assert mean.item() == 513


def test_bytes_are_those_of_the_longest() -> None:
    own = [Rows.of(sparse([0, 3, 3]), TABLE), Rows.of(sparse([]), TABLE)]
    counts, rows = price(mean_rows(own, 4), world=4)
    assert counts.bytes_sent == 3 * 2 * 8
    assert rows.bytes_sent == 3 * 2 * (4 + 2 * 4)  # two rows: a number and two values each
    longer = mean_rows(own, 2)
    next(longer)
    asked = longer.send([(torch.tensor([2, 0]),), (torch.tensor([3, 1]),)])
    assert isinstance(asked, AllGather)
    assert payload_bytes(asked.payload) == 4 * (4 + 2 * 4)


def test_nothing_travels_where_no_rank_has_rows() -> None:
    assert [each.op for each in price(mean_rows([Rows.none_of(TABLE)], 2), world=2)] == ["Gather"]


def test_the_check_catches_a_forgotten_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: one rank's rows are left out."""
    whole = module._mean
    monkeypatch.setattr(module, "_mean", lambda rows: whole(rows[:-1]))
    with pytest.raises(AssertionError):
        test_the_mean_is_that_of_dense_gradients(([0, 3], [3, 5]))


# -- what the optimizer is shown ---------------------------------------------------------------------------------------


def held() -> SparseGradients:
    return SparseGradients({"table": Parameter(torch.zeros(6, 2)), "other": Parameter(torch.zeros(3, 2))})


def test_means_are_shown_to_the_optimizer() -> None:
    gradients = held()
    table, other = gradients.parameters.values()
    table.grad = sparse([4, 1], table)
    assert gradients.has_new
    assert not gradients.still_shown
    gradients.show(gradients.rows(), {"table"}, 2.0)
    assert table.grad is not None
    assert table.grad.is_coalesced()
    assert torch.equal(table.grad.to_dense()[[1, 4]], torch.tensor([[4.0, 4.0], [2.0, 2.0]]))
    assert other.grad is None
    assert gradients.still_shown
    assert not gradients.has_new
    assert not gradients.zeroed
    table.grad.zero_()
    assert gradients.zeroed
    gradients.show_infinite({"table", "other"})
    assert all(bool(entries(p.grad).isinf().all()) for p in (table, other) if p.grad is not None)
    gradients.clear()
    assert table.grad is other.grad is None


def test_a_dense_gradient_and_a_resized_table_are_told_of() -> None:
    gradients = held()
    table = gradients.parameters["table"]
    table.grad = torch.ones(6, 2)
    with pytest.raises(LoopError, match=r'"table" .* is dense, not rows: .* with sparse=False'):
        gradients.rows()
    table.grad = torch.ones(6, 2).to_sparse()
    with pytest.raises(LoopError, match="sparse in 2 dimensions"):
        gradients.rows()
    table.grad = None
    table.data = torch.zeros(7, 2)
    table.grad = sparse([6], table)
    with pytest.raises(LayoutError, match=r'\(6, 2\) at attach and is \(7, 2\).*reset_compressor_state\("table"\)'):
        gradients.rows()


def test_modules_say_whose_gradients_are_sparse() -> None:
    tied = nn.Embedding(5, 3, sparse=True)
    model = nn.ModuleDict({"dense": nn.Embedding(5, 3), "bag": nn.EmbeddingBag(5, 3, sparse=True), "again": tied})
    model["first"] = tied
    frozen = nn.Embedding(5, 3, sparse=True)
    frozen.weight.requires_grad_(False)
    model["frozen"] = frozen
    assert sparse_names(model) == {"bag.weight", "again.weight"}
