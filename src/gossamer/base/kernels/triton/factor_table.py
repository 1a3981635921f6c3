"""Factor table: where matrices and their thin factors lie, on a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.triton.block_table import BlockTable, block_table
from gossamer.base.kernels.triton.launch import serves

BLOCK = 1024  # entries of a buffer that a program serves


@dataclass(frozen=True)
class FactorTable:
    """Of each tensor: (tensors,) int32."""

    factoring: Factoring
    blocks: BlockTable  # of the whole buffer
    ats: Tensor  # where it begins in the buffer
    columns: Tensor  # zero where the tensor is no matrix
    lefts: Tensor  # where its p begins, or its entries where it is no matrix
    rights: Tensor  # where its q begins
    numel: int
    plain: bool  # whether tensors lie side by side, each row by row

    @classmethod
    def of(cls, factoring: Factoring, device: torch.device) -> FactorTable:
        places = factoring.places
        sizes = [place.numel for place in places]
        starts = list(accumulate(sizes, initial=0))
        plain = all(place.is_row_major for place in factoring.matrices)
        numbers = [(each.at, each.columns if each.rows else 0, each.left, each.right) for each in places]
        ats, columns, lefts, rights = torch.tensor(numbers, dtype=torch.int32).view(-1, 4).t().contiguous().to(device)
        return cls(
            factoring=factoring,
            blocks=block_table(sizes, BLOCK, device),
            ats=ats,
            columns=columns,
            lefts=lefts,
            rights=rights,
            numel=starts[-1],
            plain=plain and [place.at for place in places] == starts[:-1],
        )

    def serves(self, *buffers: Tensor) -> bool:
        return self.plain and all(holds(buffer, self.numel) for buffer in buffers)


def holds(buffer: Tensor, numel: int) -> bool:
    return buffer.shape == (numel,) and serves(buffer, types=(torch.float32,))


_latest: dict[tuple[int, torch.device], FactorTable] = {}


def factor_table(factoring: Factoring, device: torch.device) -> FactorTable:
    """A factoring is one object at every step: found by its identity, it is not even hashed."""
    found = _latest.get((id(factoring), device))
    if found is not None and found.factoring is factoring:
        return found
    if len(_latest) >= 256:
        _latest.clear()
    made = _latest[id(factoring), device] = FactorTable.of(factoring, device)
    return made
