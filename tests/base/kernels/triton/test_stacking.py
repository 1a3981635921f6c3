"""Payloads as rows of one buffer: those of a gathered one are not copied."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.triton.stacking import fit, stacked


def test_rows_of_one_buffer_stay_where_they_are() -> None:
    gathered = torch.arange(40.0).view(4, 10)
    rows, step = stacked([row[2:7] for row in gathered])
    assert step == 10
    assert rows.data_ptr() == gathered[0, 2:].data_ptr()
    assert torch.equal(rows, gathered[:, 2:7])


def test_the_same_one_several_times() -> None:
    one = torch.arange(5.0)
    rows, step = stacked([one] * 3)
    assert (rows.shape, step) == ((3, 5), 0)
    assert torch.equal(rows, torch.stack([one] * 3))


@pytest.mark.parametrize("order", [[0, 1, 3], [3, 2, 1], [0, 2, 1]])
def test_rows_in_another_order_or_of_other_buffers_are_copied(order: list[int]) -> None:
    gathered = torch.arange(40.0).view(4, 10)
    for parts in ([gathered[each] for each in order], [gathered[each].clone() for each in order]):
        rows, step = stacked(parts)
        assert step == 10
        assert torch.equal(rows, gathered[order])


def test_what_fits() -> None:
    x = torch.zeros(5)
    assert fit([x, x], torch.float32, 5, x)
    assert fit([], torch.float32, 5, x)
    for bad in (x[:4], x.double(), torch.zeros(10)[::2], x.view(5, 1), x.to("meta")):
        assert not fit([x, bad], torch.float32, 5, x)
