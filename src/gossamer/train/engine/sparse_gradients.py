"""Sparse gradients: averages the gradients of embeddings as rows, outside of the buckets of dense ones.

    counts   all-gather   [3, 0] on rank 0, [2, 4] on rank 1: number of rows of two tables on each rank
    rows     all-gather   3 rows of the first table and 4 of the second from either rank, padded to these numbers

Both are sent together with the report that ends a step. Rows are not compressed, since they are few bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from gossamer.base.layout import accumulation_dtype, dtype_name
from gossamer.base.ops import AllGather
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.errors import LayoutError, LoopError


@dataclass(frozen=True)
class Rows:
    """Nonzero rows of a table. `numbers` are the row indices, ascending and unique."""

    numbers: Tensor  # (n,), int32 if that suffices
    values: Tensor  # (n, ...), in the table's dtype

    @classmethod
    def none_of(cls, table: Tensor) -> Rows:
        wide = len(table) > torch.iinfo(torch.int32).max
        numbers = torch.empty(0, dtype=torch.int64 if wide else torch.int32, device=table.device)
        return cls(numbers, table.new_empty((0, *table.shape[1:])))

    @classmethod
    def of(cls, gradient: Tensor, table: Tensor) -> Rows:
        """gradient: in the layout sparse_coo, with one sparse dimension."""
        summed = gradient.detach().coalesce()
        return cls(summed.indices()[0].to(cls.none_of(table).numbers.dtype), summed.values())

    def __len__(self) -> int:
        return len(self.numbers)

    def scaled(self, factor: float) -> Rows:
        return self if factor == 1.0 else Rows(self.numbers, self.values * factor)

    def none(self) -> Rows:
        return Rows(self.numbers[:0], self.values[:0])

    def padded(self, count: int) -> tuple[Tensor, Tensor]:
        """The payload: (count,) and (count, ...)."""
        missing = count - len(self)
        padding = (0, 0) * (self.values.dim() - 1)
        return pad(self.numbers, (0, missing)), pad(self.values, (*padding, 0, missing)).contiguous()

    def sparse(self, table: Tensor) -> Tensor:
        """As a coalesced sparse gradient of the table."""
        indices = self.numbers.to(torch.int64).unsqueeze(0)
        return torch.sparse_coo_tensor(indices, self.values, table.shape, is_coalesced=True, check_invariants=False)


def mean_rows(own: Sequence[Rows], world: int) -> Generator[AllGather, Any, list[Rows]]:
    """All-gather rows of several tables. Returns their means over the group, the same bits on every rank."""
    lengths = torch.tensor([len(rows) for rows in own], dtype=torch.int64, device="cpu")
    counts = [remote.tolist() for (remote,) in (yield AllGather((lengths,)))]
    longest = [max(of_table) for of_table in zip(*counts, strict=True)]
    payload = tuple(part for rows, most in zip(own, longest, strict=True) if most for part in rows.padded(most))
    received = (yield AllGather(payload)) if payload else [()] * world
    parts = [iter(remote) for remote in received]
    means = []
    for table, rows in enumerate(own):
        if not longest[table]:
            means.append(rows)
            continue
        ends = [remote[table] for remote in counts]
        means.append(_mean([Rows(next(part)[:end], next(part)[:end]) for part, end in zip(parts, ends, strict=True)]))
    return means


def _mean(rows: Sequence[Rows]) -> Rows:
    """Sum in rank order, then divide once; half precision is summed in float32 and rounded once."""
    dtype = rows[0].values.dtype
    numbers, places = torch.unique(torch.cat([each.numbers for each in rows]), return_inverse=True)
    total = rows[0].values.new_zeros((len(numbers), *rows[0].values.shape[1:]), dtype=accumulation_dtype(dtype))
    for each, place in zip(rows, places.split([len(each) for each in rows]), strict=True):
        total.index_add_(0, place, each.values.to(total.dtype))  # rows are unique: a deterministic order
    return Rows(numbers, total.div_(len(rows)).to(dtype))


class SparseGradients:
    """Parameters of one model with sparse gradients, and the means assigned to them."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._shown: dict[str, Tensor] = {}  # means, by name

    def __len__(self) -> int:
        return len(self.parameters)

    def rows(self) -> dict[str, Rows]:
        """Rows of all gradients. Raises LoopError for a dense gradient, LayoutError for a resized table."""
        return {name: self._rows(name, table) for name, table in self.parameters.items()}

    def no_rows(self) -> dict[str, Rows]:
        return {name: Rows.none_of(table) for name, table in self.parameters.items()}

    def _rows(self, name: str, table: Parameter) -> Rows:
        gradient = table.grad
        if gradient is None:
            return Rows.none_of(table)
        if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            raise LoopError(
                f'"{name}" belongs to a module built with sparse=True, but its gradient is {_layout(gradient)}, not '
                "rows: another module uses it as well, such as a tied output layer. All of its rows would be sent in "
                "every step. Build the module with sparse=False."
            )
        if gradient.shape != self._shapes[name]:
            raise LayoutError(
                f'"{name}" was {tuple(self._shapes[name])} at attach and is {tuple(gradient.shape)} now, so rows of '
                f'different ranks do not match. Call session.reset_compressor_state("{name}") after resizing.'
            )
        return Rows.of(gradient, table)

    # -- gradients for the optimizer -----------------------------------------------------------------------------------

    def show(self, means: Mapping[str, Rows], used: Set[str], correction: float) -> None:
        """Assign the means, times `correction`, to the gradients of `used` parameters; the others get None."""
        self._shown = {}
        for name, table in self.parameters.items():
            table.grad = None
            if name in used:
                mean = means[name].scaled(correction)
                use_on_current_stream([mean.numbers, mean.values])
                table.grad = self._shown[name] = mean.sparse(table)

    def show_infinite(self, used: Set[str]) -> None:
        """Assign infinite gradients, which signal the skipped step to a GradScaler."""
        infinite = {
            name: Rows(blank.numbers.new_zeros(1), blank.values.new_full((1, *blank.values.shape[1:]), torch.inf))
            for name, blank in self.no_rows().items()
        }
        self.show(infinite, used, 1.0)

    def clear(self) -> None:
        """Remove all gradients, so that optimizers skip the parameters."""
        self.show({}, set(), 1.0)

    @property
    def has_new(self) -> bool:
        """Whether there are gradients other than the assigned means."""
        return any(table.grad is not None and table.grad is not self._shown.get(n) for n, table in self._tables)

    @property
    def still_shown(self) -> bool:
        """Whether a mean is still some parameter's gradient."""
        return any(table.grad is not None and table.grad is self._shown.get(name) for name, table in self._tables)

    @property
    def zeroed(self) -> bool:
        """Whether zero_grad(set_to_none=False) has cleared the means; one new gradient may have arrived."""
        filled = sum(gradient._nnz() > 0 for gradient in self._shown.values())
        return filled <= (len(self._shown) > 1)

    @property
    def _tables(self) -> list[tuple[str, Parameter]]:
        return list(self.parameters.items())

    def fingerprint(self) -> str:
        """Names, shapes and dtypes, equal on every rank; empty without sparse gradients."""
        return "".join(
            f";{name} by rows {tuple(table.shape)} {dtype_name(table.dtype)}" for name, table in self._tables
        )


def entries(gradient: Tensor) -> Tensor:
    """The stored values of a gradient: itself, or the rows of a sparse one, as a view."""
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient


def _layout(gradient: Tensor) -> str:
    if gradient.layout != torch.sparse_coo:
        return "dense"
    return f"sparse in {gradient.sparse_dim()} dimensions"
