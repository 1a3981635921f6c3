"""Array layout: floats with dimensions are compressed, the rest travels as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.flower.arrays import ArrayLayout

ARRAYS = {
    "conv": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(7),
    "mean": np.array(3.0),  # what an averaging strategy makes of a count
    "odd": np.zeros(2, np.float64),
    "bias": np.ones(3, np.float32),
    "places": np.arange(4),
}


def test_floats_of_the_most_common_dtype_are_compressed() -> None:
    layout = ArrayLayout.of(ARRAYS)
    assert layout.layout.names == ("conv", "bias")
    assert "conv" in layout
    assert "odd" not in layout
    flat = layout.read(ARRAYS, "it")
    assert torch.equal(flat, torch.cat([torch.arange(12.0), torch.ones(3)]))
    written = layout.write(flat)
    assert all(np.array_equal(written[name], ARRAYS[name]) for name in written)
    written["conv"] += 1
    assert flat[0] == 0


def test_halves_are_summed_in_single_precision() -> None:
    layout = ArrayLayout.of({"w": np.ones(4, np.float16)})
    assert (layout.dtype, layout.is_exact) == (torch.float32, False)
    assert layout.write(torch.ones(4))["w"].dtype == np.float16
    assert ArrayLayout.of({"w": np.ones(4)}).is_exact


def test_the_text_rebuilds_it() -> None:
    layout = ArrayLayout.of(ARRAYS)
    assert ArrayLayout.from_text(layout.to_text()) == layout
    for text in ("", "[]", '["int64", []]', '["float32", [["w", [-1.5]]]]'):
        with pytest.raises(MalformedError):
            ArrayLayout.from_text(text)


def test_names_shapes_and_dtypes_are_in_the_fingerprint() -> None:
    first = ArrayLayout.of({"w": np.ones(4)})
    others = [{"v": np.ones(4)}, {"w": np.ones((2, 2))}, {"w": np.ones(4, np.float32)}]
    assert len({first.fingerprint(), *(ArrayLayout.of(each).fingerprint() for each in others)}) == 4


@pytest.mark.parametrize(
    "arrays",
    [
        {"bias": ARRAYS["bias"]},
        ARRAYS | {"conv": np.zeros((4, 3), np.float32)},
        ARRAYS | {"conv": np.zeros((3, 4), np.int64)},
        ARRAYS | {"conv": np.zeros((3, 4), ">f4")},
        ARRAYS | {"conv": np.zeros((3, 4), "U1")},
    ],
)
def test_other_arrays_are_refused(arrays: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    with pytest.raises(LayoutError, match='it: "conv"'):
        ArrayLayout.of(ARRAYS).read(arrays, "it")


def test_a_record_without_floats_is_refused() -> None:
    with pytest.raises(LayoutError, match="nothing to compress"):
        ArrayLayout.of({"count": np.array(3), "places": np.arange(3)})
