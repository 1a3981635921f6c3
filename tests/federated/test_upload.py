"""Upload: what was cut comes together again, and costs no more than its parts."""

from __future__ import annotations

import sys

import pytest
import torch

from gossamer.errors import MalformedError
from gossamer.federated.messages import assembled, cut

PAYLOAD = (torch.arange(10.0), torch.zeros(0, dtype=torch.int32), torch.ones(2, 3), torch.zeros(0), torch.arange(5))


def shapes_of(payload: tuple[torch.Tensor, ...]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in payload]


@pytest.mark.parametrize("part_bytes", [1, 4, 12, 40])
def test_what_was_cut_comes_together_again(part_bytes: int) -> None:
    parts = cut(PAYLOAD, part_bytes)
    torch.testing.assert_close(assembled(parts, shapes_of(PAYLOAD)), PAYLOAD, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parts", "shapes"),
    [
        ([], [(2,)]),
        ([torch.zeros(2)], []),
        ([torch.zeros(2)], [(3,)]),
        ([torch.zeros(2)], [(1,)]),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.int32)], [(2,)]),
        ([torch.zeros(2), torch.zeros(2)], [(2,)]),
        ([torch.zeros(2)], [(1,) * 9]),
    ],
)
def test_parts_that_make_no_payload_are_refused(parts: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(MalformedError):
        assembled(parts, shapes)


def test_many_parts_cost_as_much_as_they_are() -> None:
    """One thread serves all devices: parts without elements would each be summed again for all that follow."""

    def calls(parts: int) -> int:
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sent = [torch.zeros(0)] * parts + [torch.zeros(1)]
        sys.setprofile(counted)
        try:
            assembled(sent, [(1,)])
        finally:
            sys.setprofile(None)
        return count

    assert calls(800) < 2.1 * calls(400)
