"""Packing: payloads as one buffer of bytes, and back; adjacent tensors are not copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernel_codecs import compiled
from torch import Tensor

from gossamer.base.kernels import buffer_pool, float4_encode, int8_encode, onebit_encode
from gossamer.comm import packing
from gossamer.comm.packing import join, split

X = torch.randn(1000, generator=torch.Generator().manual_seed(0))
SIZES = (300, 700)


def cut(numbers: int, codes: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """float32 and uint8 tensors in one memory, with a gap of so many bytes between them."""
    room = torch.randint(256, (4 + 4 * numbers + gap + codes,), dtype=torch.uint8)
    return room[4 : 4 + 4 * numbers].view(torch.float32), room[4 + 4 * numbers + gap :]


APART = (torch.arange(3.0), torch.arange(5, dtype=torch.uint8))
PAYLOADS = [
    APART,
    APART[::-1],
    cut(3, 5),
    cut(3, 5)[::-1],
    cut(3, 5, gap=1),
    (cut(3, 5)[0], cut(3, 5)[1]),
    (cut(3, 5)[0],) * 2,
    (torch.empty(0), *cut(3, 5)),
    (torch.empty(0),),
    (torch.arange(12.0).view(3, 4).T,),
    (torch.arange(12.0)[::2],),
    (torch.arange(3.0)[1::2],),  # one element
    (torch.arange(12.0)[::3], torch.arange(6, dtype=torch.int16)[1::2]),
    (torch.tensor(2.0).expand(5),),
    (torch.tensor([True, False]), torch.arange(2, dtype=torch.int16)),
]


def check_bytes(payload: tuple[Tensor, ...]) -> None:
    """The bytes are those of the tensors, largest elements first, and give the same payload."""
    ordered = sorted(payload, key=lambda tensor: -tensor.element_size())
    expected = b"".join(tensor.contiguous().numpy().tobytes() for tensor in ordered)
    joint = join(payload)
    assert joint.dtype == torch.uint8
    assert joint.numpy().tobytes() == expected
    for before, after in zip(payload, split(joint, payload), strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert after.contiguous().numpy().tobytes() == before.contiguous().numpy().tobytes()


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag, lambda x: torch._neg_view(x.real)], ids=range(3))
def test_the_bytes_of_a_view_with_a_deferred_operation_are_those_of_its_values(
    view: Callable[[Tensor], Tensor],
) -> None:
    values = view(torch.arange(6.0).view(3, 2)[:, ::2] + 1j)
    (found,) = split(join((values,)), (values,))
    assert torch.equal(found, values.clone())


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_a_payload_is_the_bytes_of_its_tensors(payload: tuple[Tensor, ...]) -> None:
    check_bytes(payload)


def test_the_check_finds_tensors_that_are_only_taken_to_be_adjacent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_adjacent", lambda parts: parts[0].numel() > 0)
    with pytest.raises(AssertionError):
        check_bytes(cut(3, 5, gap=1))


@compiled
@pytest.mark.parametrize(
    "encode",
    [
        lambda: int8_encode(X, SIZES, 256),
        lambda: float4_encode(X, SIZES, 32),
        lambda: onebit_encode(X, SIZES, 64),
    ],
)
def test_messages_of_compiled_encoders_are_sent_without_a_copy(encode: Callable[[], tuple[Tensor, Tensor]]) -> None:
    scales, codes = encode()
    joint = join((scales, codes))
    assert joint.data_ptr() == scales.data_ptr()
    assert joint.nbytes == scales.nbytes + codes.nbytes
    assert codes.data_ptr() % buffer_pool.ALIGNMENT == 0
    check_bytes((scales, codes))
