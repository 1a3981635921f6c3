"""Messages: what is read and refused, and contributions in parts."""

from __future__ import annotations

import sys

import pytest
import torch

from gossamer.base.peer_ops import Peer
from gossamer.errors import MalformedError
from gossamer.federated.messages import CLIENT, Fate, Report, Task, assembled, cut, decode, encode

SENDER = Peer(CLIENT, 3)
REPORT = Report(samples=15, steps=5, learning_rate=0.5, metrics={"loss": 0.25}, counts=(7,), layout="5d2c1db34e9ab773")


@pytest.mark.parametrize("told", [REPORT, Task(round=3, version=2, config={"rate": 0.1}), Fate(missing=(0, 2)), Fate()])
def test_what_was_told_comes_back(told: Report | Task | Fate) -> None:
    assert decode(encode(told), type(told), SENDER) == told


def test_what_goes_without_saying_is_not_said() -> None:
    """A report travels beside contributions of a few hundred bytes."""
    assert encode(Fate()) == "{}"
    assert len(encode(REPORT)) < 120
    assert "parts" not in encode(REPORT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"samples": -1, "steps": 1}',
        '{"samples": 1e3, "steps": 1}',
        '{"samples": 1, "steps": 1, "more": 1}',
        '{"samples": 1, "steps": 1, "metrics": {"loss": NaN}}',
        '{"samples": 1, "steps": 1, "metrics": {"loss": "low"}}',
        '{"samples": 99999999999999999999, "steps": 1}',
        "[" * 10_000,
    ],
)
def test_an_invalid_report_is_refused_by_its_sender(text: str) -> None:
    with pytest.raises(MalformedError, match="client 3"):
        decode(text, Report, SENDER)


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
