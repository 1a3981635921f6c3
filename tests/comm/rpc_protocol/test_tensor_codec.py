"""Tensors as bytes: every type, every shape, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.comm.rpc_protocol.tensor_codec import DTYPES, TensorSpec, allocate, decode_tensors, encode_tensors
from gossamer.errors import MalformedError

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (1, 2, 3, 4, 1, 2, 1, 3), (2,) * 8]


def carried(payload: Payload) -> tuple[tuple[TensorSpec, ...], Tensor]:
    laid, buffers = encode_tensors(payload)
    data = b"".join(buffers)
    received = allocate(laid, len(data))
    received.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return laid, received


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    bits = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64).mul(37).add(200).to(torch.uint8)
    return (bits % 2 if dtype is torch.bool else bits).view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    payload = tuple(sample(dtype, shape) for shape in SHAPES)
    laid, received = carried(payload)
    heard = decode_tensors(laid, received)
    assert [each.shape for each in heard] == [each.shape for each in payload]
    assert {each.dtype for each in heard} == {dtype}
    assert [bits(each) for each in heard] == [bits(each) for each in payload]
    assert received.numel() % 8 == 0


def test_a_column_of_one_row_comes_back() -> None:
    column = torch.rand(1, 3)[:, 1]
    (heard,) = decode_tensors(*carried((column,)))
    assert torch.equal(heard, column)


def test_nan_and_signed_zero_keep_their_bits() -> None:
    strange = torch.tensor([float("nan"), -0.0, float("-inf")])
    strange.view(torch.int32)[0] ^= 0x80001234 - 2**32
    laid, received = carried((strange,))
    assert bits(decode_tensors(laid, received)[0]) == bits(strange)


def test_contiguous_tensors_are_sent_from_their_own_memory_and_others_from_a_copy() -> None:
    x = torch.arange(12.0).view(3, 4)
    (_, (buffer,)) = encode_tensors((x,))
    x[0, 0] = 5
    assert np.frombuffer(buffer, dtype=np.float32)[0] == 5
    laid, received = carried((x.T, x[:, 1:3]))
    assert torch.equal(decode_tensors(laid, received)[0], x.T)
    assert torch.equal(decode_tensors(laid, received)[1], x[:, 1:3])


def test_what_arrives_shares_the_memory_that_was_received_into() -> None:
    laid, received = carried((torch.arange(4), torch.ones(3)))
    heard = decode_tensors(laid, received)
    assert {each.untyped_storage().data_ptr() for each in heard} == {received.untyped_storage().data_ptr()}


@pytest.mark.parametrize("fault", [torch.zeros(1, dtype=torch.complex64), torch.zeros((1,) * 9)], ids=["type", "rank"])
def test_what_cannot_travel_is_refused(fault: Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        encode_tensors((fault,))


def test_descriptions_that_do_not_fit_the_bytes_are_malformed() -> None:
    laid = (TensorSpec(8, (4,)),)
    for nbytes in (8, 15, 24):
        with pytest.raises(MalformedError, match="describes tensors of 16 bytes"):
            allocate(laid, nbytes)
    with pytest.raises(MalformedError):
        allocate((TensorSpec(8, (2**60, 2**60)),), 16)


def test_a_bool_is_zero_or_one_and_a_shape_one_that_can_be() -> None:
    data = np.array([2, 0, 0, 0, 0, 0, 0, 0], dtype=np.uint8)
    with pytest.raises(MalformedError, match="other than 0 and 1"):
        decode_tensors((TensorSpec(0, (8,)),), torch.from_numpy(data))
    with pytest.raises(MalformedError, match="invalid shape"):
        decode_tensors((TensorSpec(8, (2**63, 0)),), torch.from_numpy(data[:0]))
