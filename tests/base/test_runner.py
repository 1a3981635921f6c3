from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gossamer.base.ops import AllGather, AllReduceMean, Coalesced, InGroup, NeighborAllGather, Script
from gossamer.base.runner import run_script
from gossamer.base.spans import active
from gossamer.base.spans.record_format import EVERYONE, SpanKind, operation_text
from gossamer.comm.echo_transport import ReplayTransport
from gossamer.observe.trace.span_files import ProcessSpans, read_run

X = torch.ones(8)


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    active.end()


def script() -> Script:
    mean = yield AllReduceMean(X.clone())
    both = yield Coalesced((AllReduceMean(mean), AllGather((X,))))
    return both


def recorded(folder: Path) -> ProcessSpans:
    active.end()
    (only,) = read_run(folder)
    return only


def test_a_script_is_encode_wire_and_decode_around_its_operations(tmp_path: Path) -> None:
    active.begin(tmp_path, 0, 4)
    cost = run_script(script(), ReplayTransport(4))
    spans = recorded(tmp_path)
    assert len(spans.of(SpanKind.ENCODE)) == 1
    assert len(spans.of(SpanKind.WIRE)) == len(spans.of(SpanKind.DECODE)) == 2
    decode = spans.of(SpanKind.DECODE)
    assert (decode["end"] - decode["begin"]).sum() == pytest.approx(cost.decode_seconds)
    operations = spans.of(SpanKind.OPERATION)
    assert [operation_text(code) for code in operations["code"]] == ["all-reduce", "all-reduce + all-gather"]
    assert list(operations["number"]) == [0, 1]
    assert set(operations["peers"]) == {EVERYONE}
    assert operations["nbytes"].sum() == cost.bytes_sent
    assert operations["end"][0] <= decode["begin"][0]


def test_one_group_is_one_channel(tmp_path: Path) -> None:
    active.begin(tmp_path, 0, 4)
    transport = ReplayTransport(4)
    for _ in range(2):
        run_script(script(), transport)
    spans = recorded(tmp_path)
    assert list(spans.of(SpanKind.CHANNEL)["nbytes"]) == [4]
    assert list(spans.of(SpanKind.OPERATION)["number"]) == [0, 1, 2, 3]


def test_a_script_whose_recording_begins_amid_it_continues(tmp_path: Path) -> None:
    def beginning() -> Script:
        first = yield AllReduceMean(X.clone())
        active.begin(tmp_path, 0, 4)
        second = yield AllReduceMean(first)
        return second

    assert torch.equal(run_script(beginning(), ReplayTransport(4)).result, X)
    assert len(recorded(tmp_path).of(SpanKind.OPERATION)) == 1


def test_an_answer_holds_the_parts_of_those_whom_it_waits_for() -> None:
    neighbors = NeighborAllGather((X,), ((1, 0.5), (3, 0.5)))
    assert list(AllGather((X,)).sources(4)) == [0, 1, 2, 3]
    assert set(neighbors.sources(4)) == {1, 3}
    assert set(InGroup((0, 2), AllGather((X,))).sources(4)) == {0, 2}
    assert set(Coalesced((InGroup((0, 2), AllGather((X,))), neighbors)).sources(4)) == {0, 1, 2, 3}


def test_neighbor_all_gather_accepts_receivers_by_the_former_name() -> None:
    edges = ((1, 1.0),)
    with pytest.warns(DeprecationWarning, match="sends_to"):
        assert NeighborAllGather((X,), edges, tells=(2,)) == NeighborAllGather((X,), edges, (2,))
