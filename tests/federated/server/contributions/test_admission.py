"""Admission: what no honest device sends is refused by name, its sender is not waited for, and the round goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as replaced
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from support.federated_faults import FEATURES, SAMPLES, WholeNumbers, WholeSteps, check_conserved
from torch import Tensor, nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated import FedAvg
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import Peer, PeerScript, Push, Stamp
from gossamer.comm.simulation import Trace, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import MalformedError
from gossamer.federated.client.contribution import contribution_context
from gossamer.federated.messages import (
    CLIENT,
    FATE_UNKNOWN,
    NOT_COUNTED,
    PART,
    REPORT,
    THE_SERVER,
    Fate,
    Report,
    Uploads,
    decode,
)
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.admission import ContributionAdmission, ContributionLimits
from gossamer.federated.server.global_model import GlobalModel
from gossamer.train.parameter_server import shard_message

N = FEATURES + 1
LIAR = 2
Lie = Callable[[Push], Iterator[Push]]


def told(push: Push, **fields: Any) -> Push:
    """The same report with other fields, whatever they mean."""
    report = msgspec.json.decode(push.about)
    return replaced(push, about=msgspec.json.encode(report | fields).decode())


def swap(change: Callable[[Push], Push]) -> Lie:
    def lie(push: Push) -> Iterator[Push]:
        yield change(push) if push.key == REPORT else push

    return lie


def other(payload: Tensor) -> Callable[[Push], Push]:
    return lambda push: replaced(push, payload=(payload,))


def parts(count: int, size: int) -> Lie:
    """Parts that nobody asked for, and the report after them."""

    def lie(push: Push) -> Iterator[Push]:
        for number in range(count):
            yield replaced(push, key=PART, payload=(torch.zeros(size),), about=str(number))
        yield told(push, parts=count, shapes=[[count * size]])

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "layout": (swap(lambda push: told(push, layout="another")), "trained another model"),
    "dtype": (swap(other(torch.zeros(N, dtype=torch.int32))), "cannot be decoded"),
    "shape": (swap(other(torch.zeros(N + 1).double())), "cannot be decoded"),
    "nan": (swap(other(torch.full((N,), torch.nan).double())), "not finite"),
    "infinite norm": (swap(other(torch.full((N,), 1e300, dtype=torch.float64))), "norm is inf"),
    "norm": (swap(other(torch.full((N,), 1e6).double())), "above 1e+04"),
    "negative samples": (swap(lambda push: told(push, samples=-4)), "no report"),
    "huge samples": (swap(lambda push: told(push, samples=10**12)), "claims 1000000000000 samples"),
    "fraction": (swap(lambda push: told(push, samples=0.5)), "no report"),
    "metrics": (swap(lambda push: told(push, metrics={str(n): 0.0 for n in range(1000)})), "claims 1000 metrics"),
    "metric name": (swap(lambda push: told(push, metrics={"m" * 65: 0.0})), "at most 64 characters"),
    "metric escape": (swap(lambda push: told(push, metrics={"\x1b[2Jloss": 0.0})), "which can be printed"),
    "unknown field": (swap(lambda push: told(push, weight=7)), "no report"),
    "text": (swap(lambda push: replaced(push, about="[" * 10**5)), "no report"),
    "long text": (swap(lambda push: replaced(push, about=" " * 10**7)), "10000000 characters"),
    "counts": (swap(lambda push: told(push, counts=[10**9])), "message for step 0"),
    "identity": (swap(lambda push: replaced(push, stamp=push.stamp._replace(worker=0))), "contribution of client 0"),
    "round": (swap(lambda push: replaced(push, stamp=push.stamp._replace(step=9))), "round 9"),
    "version": (swap(lambda push: replaced(push, stamp=push.stamp._replace(known=1))), "from version 1"),
    "key": (swap(lambda push: replaced(push, key="weights")), "no part of a contribution"),
    "large": (swap(other(torch.zeros(10**5))), "at most 4416"),
    "many parts": (parts(10, 1000), "more than the 4416 bytes"),
    "empty parts": (parts(10, 0), "more than the 0 empty parts"),
    "parts of others": (parts(2, 3), "cannot be decoded"),
    "part number": (swap(lambda push: replaced(push, key=PART, about="4000000")), "at most 65536"),
    "part text": (swap(lambda push: replaced(push, key=PART, about="-1")), "as part '-1'"),
    "announced parts": (swap(lambda push: told(push, parts=10**9)), "claims 1000000000 parts"),
    "failed": (swap(lambda push: told(push, failed="no power")), "no power"),
    "failed escape": (swap(lambda push: told(push, failed="\x1b[2Jno power")), " [2Jno power"),
}


def federation(lie: Lie, options: dict[str, Any] | None = None) -> tuple[WholeNumbers, Trace, list[str]]:
    """Three honest devices and one that says something else in its first round."""
    limits = ContributionLimits(largest_norm=1e4)
    done = WholeNumbers(WholeSteps(fraction=1.0), rounds=2, options={"admission": limits} | (options or {}))
    scripts, heard = done.scripts(), list[str]()
    honest = scripts[Peer(CLIENT, LIAR)]

    def liar() -> PeerScript:
        script, answer = honest(), None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(op, Push) and op.stamp.step == 0:
                for push in lie(op):
                    answer = yield push
                    heard.append(decode(answer.about or "{}", Fate, THE_SERVER).refused)
                    if answer.version != FATE_UNKNOWN:
                        break
                else:
                    answer = replaced(answer, version=NOT_COUNTED)
            else:
                answer = yield op

    scripts[Peer(CLIENT, LIAR)] = liar
    trace = simulate_peers(scripts, VirtualNetwork(), 0, checks=True, most_seconds=100.0)
    return done, trace, heard


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_the_round_goes_on(name: str) -> None:
    lie, why = LIES[name]
    done, trace, heard = federation(lie)
    assert [sorted(each.reports) for each in done.ledger.commits] == [[0, 1, 3], [0, 1, 2, 3]]
    (refused,) = done.ledger.commits[0].refused.values()
    assert why in refused
    assert refused.startswith(f"client {LIAR} was refused in round ")
    assert refused[:400] in "".join(heard)
    assert trace.result(Peer(CLIENT, 0)) == 2
    check_conserved(done)
    assert done.held is not None
    assert done.held.uploads.nbytes == 0


def test_replays_are_answered_as_before_and_add_nothing() -> None:
    calm, done = WholeNumbers(), WholeNumbers()
    calm.run()
    scripts, answers = done.scripts(), list[int]()
    honest = scripts[Peer(CLIENT, 1)]

    def again() -> PeerScript:
        script, answer, said = honest(), None, list[Push]()
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield op
            if isinstance(op, Push):
                said.append(op)
                answers.append(answer.version)
                answers.append((yield op).version)
                for old in said[:-1]:
                    assert (yield old).version in (NOT_COUNTED, *range(1, 4))

    scripts[Peer(CLIENT, 1)] = again
    simulate_peers(scripts, VirtualNetwork(), 0, checks=True, most_seconds=100.0)
    assert answers == [1, 1, 2, 2, 3, 3]
    assert torch.equal(done.parameters, calm.parameters)


def test_an_upload_that_never_ends_takes_no_more_than_its_quota() -> None:
    """Also of parts that are sent again, whose number comes twice."""

    def lie(push: Push) -> Iterator[Push]:
        for number in [0, 0, 0, *range(1, 30)]:
            yield replaced(push, key=PART, payload=(torch.zeros(100),), about=str(number))

    done, _, _ = federation(lie)
    (refused,) = done.ledger.commits[0].refused.values()
    assert "4416 bytes" in refused


def test_an_empty_part_is_kept_where_the_contribution_has_an_empty_tensor() -> None:
    uploads, stamp = Uploads(), Stamp(0, 0)
    uploads.add(0, stamp, 0, torch.zeros(0), most_bytes=8, most_empty=1)
    uploads.add(0, stamp, 1, torch.zeros(2), most_bytes=8, most_empty=1)
    assert uploads.missing(0, stamp, 3) == (2,)
    with pytest.raises(MalformedError, match="more than the 1 empty parts"):
        uploads.add(0, stamp, 2, torch.zeros(0), most_bytes=8, most_empty=1)


def test_a_device_that_diverges_says_so_and_takes_part_again() -> None:
    done = WholeNumbers(rounds=3)
    train = done.train
    done.train = lambda op: (  # type: ignore[method-assign]
        replaced(train(op), flat=op.anchor / 0) if op.client == 1 and op.task.round == 1 else train(op)
    )
    done.run()
    assert [sorted(each.reports) for each in done.ledger.commits] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert "could not train" in done.ledger.commits[1].refused[1]


def test_a_sum_that_leaves_its_range_is_given_up() -> None:
    """Each number is finite and the norm is; the weighted sum is not."""
    done = WholeNumbers(rounds=1, options={"admission": ContributionLimits(largest_ratio=None)})
    train, once = done.train, list[int]()

    def large(op: Any) -> Any:
        if op.task.round == 0:
            once.append(op.client)
            return replaced(train(op), flat=op.anchor - 1e307)
        return train(op)

    done.train = large  # type: ignore[method-assign]
    done.run()
    assert sorted(once) == [*range(len(SAMPLES))]
    assert done.held is not None
    assert done.held.next_round == 2
    assert done.parameters.abs().max() < 10


@pytest.mark.parametrize("limits", [{"most_bytes": 0}, {"largest_norm": -1.0}, {"largest_ratio": 0.0}])
def test_limits_are_above_zero(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        ContributionLimits(**limits)


def test_an_honest_report_is_read() -> None:
    report, admission = Report(samples=3, steps=1, layout="x"), ContributionAdmission(ContributionLimits(), FedAvg())
    assert admission.report(msgspec.json.encode(report).decode(), THE_SERVER, "x") == report


CODECS = ["Dense()", "Int8()", "Chain(TopK(0.05), Int8())", "PowerSGD(2)", "RandomK(0.1)", "TernGrad()", "OneBit()"]


@pytest.mark.parametrize("codec", CODECS)
def test_whatever_comes_is_decoded_or_refused(codec: str) -> None:
    """Wrong types, shapes, lengths and bits of every tensor of a message: numbers that are finite, or a refusal."""
    recipe = "FedAvg()" if codec == "Dense()" else f"FedAvg() + {codec}"
    compressor = resolve(recipe).compressor
    state = ModelState.of(nn.Linear(64, 32))
    model = GlobalModel(FedAvg(), compressor, None, state, torch.zeros(state.layout.numel))
    at, block = contribution_context(0, 1, 0), FlatTensors(torch.randn(state.layout.numel), state.layout)
    sent = shard_message.encode(compressor, [block], shard_message.initial_states(compressor, [block], at), [at])
    assert model.contribution_size(0).nbytes == payload_bytes(sent.payload)
    draw, refused = Random(codec), 0
    for _ in range(60):
        payload = [*sent.payload]
        place = draw.randrange(len(payload))
        payload[place] = spoiled(payload[place].clone(), draw)
        try:
            blocks = model.decode(Stamp(1, 0), tuple(payload), sent.counts)
            assert [each.shape for each in blocks] == [block.flat.shape]
            assert blocks[0].isfinite().all()
        except MalformedError:
            refused += 1
    assert refused > 20


def spoiled(tensor: Tensor, draw: Random) -> Tensor:
    match draw.randrange(5):
        case 0:
            noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
            return noise.view(tensor.dtype).reshape(tensor.shape)
        case 1:
            return tensor.reshape(-1)[: draw.randrange(tensor.numel())]
        case 2:
            return torch.cat([tensor.reshape(-1)] * 50)
        case 3:
            return tensor.to(draw.choice((torch.float64, torch.int32, torch.bool)))
        case _:
            return tensor.reshape(1, -1)
