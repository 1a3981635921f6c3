"""Messages as the bits of float32 numbers: all bits come back, and what is no message is told apart."""

import pytest
import torch
from torch import Tensor

from gossamer.errors import MalformedError
from gossamer.train.parallel import Boundary, boundary

SHAPE = (4, 8, 32)
CODECS = ["Dense()", "Int8()", "Float4()", "TopK(0.1)", "OneBit()", "Chain(TopK(0.1), Int8())", "QSGD()"]


def edge_of(codec: str, dtype: torch.dtype = torch.float32) -> Boundary:
    return boundary(codec, shape=SHAPE, dtype=dtype)


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4 * 8 * 32, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_the_other_side_has_the_same_bits(codec: str, dtype: torch.dtype) -> None:
    edge = edge_of(codec, dtype)
    carrier, told = edge.format.pack(edge.gradient, numbers(dtype), number=7)
    header, heard = edge.format.unpack(edge.gradient, carrier)
    assert header.number == 7
    assert told is not None
    assert heard is not None
    assert heard.dtype == dtype
    assert torch.equal(heard, told)
    assert (heard.float() - numbers().to(dtype).float()).norm() < numbers().norm()
    if codec == "Dense()":
        assert torch.equal(heard, numbers(dtype))


def test_bits_that_form_nans_survive_autograd() -> None:
    """Signaling and quiet NaNs with payloads, through a leaf's .grad as pipelining reads it."""
    bits = torch.tensor([0x7F800001, 0x7FC12345, -1, -0x00400001, 0x7F800000], dtype=torch.int32)
    leaf = torch.zeros(5, requires_grad=True)
    out = torch.empty_like(leaf)

    class GradientIs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return bits.view(torch.float32).clone()

    GradientIs.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.view(torch.int32), bits)


def test_carriers_do_hold_nans() -> None:
    """Or the test above would be about nothing: int8 codes of -1 are NaNs."""
    edge = edge_of("Int8(block=1024)")
    x = torch.full((1024,), -1.0)
    x[0] = 127.0
    carrier, _ = edge.format.pack(edge.gradient, x, number=1)
    assert carrier.isnan().any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_reported(codec: str, wrong: float) -> None:
    edge = edge_of(codec)
    x = numbers()
    x[5] = wrong
    carrier, told = edge.format.pack(edge.gradient, x, number=1)
    assert told is None
    assert edge.format.unpack(edge.gradient, carrier)[1] is None


@pytest.mark.parametrize("fill", [0.0, 1.0, float("nan")])
def test_memory_that_nobody_wrote_is_no_message(fill: float) -> None:
    edge = edge_of("TopK(0.1)")
    with pytest.raises(MalformedError, match=r"input_args=edge\.carrier\(\)"):
        edge.format.unpack(edge.activation, torch.full((edge.format.numel,), fill))


def test_arithmetic_with_a_carrier_is_found() -> None:
    edge = edge_of("Int8()")
    carrier, _ = edge.format.pack(edge.activation, numbers(), number=1)
    with pytest.raises(MalformedError, match="used in arithmetic"):
        edge.format.unpack(edge.activation, carrier / 4)


def test_another_boundary_of_the_same_size_is_refused() -> None:
    mine, other = edge_of("Int8()"), edge_of("Int8(stochastic=True)")
    assert mine.format.numel == other.format.numel
    carrier, _ = other.format.pack(other.activation, numbers(), number=1)
    with pytest.raises(MalformedError, match="has another boundary"):
        mine.format.unpack(mine.activation, carrier)


def test_an_invalid_carrier_is_refused() -> None:
    edge = edge_of("Int8()")
    with pytest.raises(MalformedError, match=r"got \(4, 8, 32\) of torch.float32"):
        edge.format.unpack(edge.activation, torch.zeros(SHAPE))
    with pytest.raises(MalformedError, match="int32"):
        edge.format.unpack(edge.activation, torch.zeros(edge.format.numel, dtype=torch.int32))
