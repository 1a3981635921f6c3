"""A hub under messages that come twice, too late, or mean nothing."""

from queue import Queue

import torch
from torch import nn

from gossamer.algorithms.compressors import Dense
from gossamer.base.peer_ops import WORKER, Arrived, Peer, PeerLeft, Push, Reply, Stamp
from gossamer.train.parallel.remote_codec import TensorCoder
from gossamer.train.parallel.remote_hub import RemoteHub
from gossamer.train.parallel.remote_messages import Forward, encode
from gossamer.train.parallel.remote_service import RemoteService, ServiceSettings

WAIT_SECONDS = 30


class Wire:
    """An endpoint whose events are the test's, and whose replies it sees."""

    def __init__(self):
        self.me, self.replies, self.tokens = Peer(WORKER, 1), Queue(), 0

    def start(self, script):
        self.script = script
        next(script)

    def answer(self, op):
        self.replies.put(op)

    def close(self):
        self.script.close()

    def send(self, event):
        op = self.script.send(event)
        if isinstance(op, Reply):
            self.replies.put(op)
            next(self.script)

    def arrive(self, number, known=0, about=None):
        coder = TensorCoder(Dense(), 0, 2**20)
        records, payload = coder.encode([torch.ones(2)], (0, number, "forward"))
        request = Forward(
            tree={"tuple": [{"tuple": [{"tensor": 0}]}, {"dict": {}}]},
            tensors=records,
            training=True,
            hold=False,
            dropped=(),
        )
        op = Push(
            to=self.me,
            key="0",
            stamp=Stamp(0, number, known),
            payload=payload,
            about=encode(request) if about is None else about,
        )
        self.tokens += 1
        self.send(Arrived(moment=0.0, token=self.tokens, sender=Peer(WORKER, 0), op=op))

    def reply(self):
        return self.replies.get(timeout=WAIT_SECONDS)


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def served():
    wire, module = Wire(), Counts()
    hub = RemoteHub(wire, 1, 2)
    settings = ServiceSettings(layer=0, clients=(0,), coder=TensorCoder(Dense(), 0, 2**20), most_held=4)
    hub.serve(0, RemoteService(module, None, settings))
    return wire, module, hub


def test_a_call_that_comes_twice_is_served_once_and_answered_alike():
    wire, module, hub = served()
    wire.arrive(1)
    first = wire.reply()
    wire.arrive(1)
    second = wire.reply()
    assert (first.token, second.token) == (1, 2)
    assert torch.equal(second.answer.payload[0], first.answer.payload[0])
    assert module.calls == 1
    wire.arrive(2, known=2)
    assert wire.reply().answer.payload[0].tolist() == [2, 2]
    wire.arrive(1)  # nobody waits for it any more
    wire.arrive(3)
    assert wire.reply().token == 5
    assert module.calls == 3
    hub.close()


def test_a_client_that_left_and_came_back_is_served_again():
    wire, module, hub = served()
    wire.arrive(1)
    wire.reply()
    wire.send(PeerLeft(moment=0.0, peer=Peer(WORKER, 0)))
    wire.arrive(1)
    wire.reply()
    assert module.calls == 2
    hub.close()


def test_requests_that_mean_nothing_are_answered_by_an_error():
    wire, module, hub = served()
    for number, text in enumerate(["", "[" * 10_000, '{"type": "Eval"}', '{"type": "Forward", "tree": 1}']):
        wire.arrive(number + 1, about=text)
        assert "MalformedError" in wire.reply().answer.about
    larger = '{"type":"Forward","tree":null,"tensors":[{"dtype":"float32","shape":[4294967296,64],"parts":1,'
    wire.arrive(9, about=larger + '"encoded":true,"needs_gradient":false}],"training":true,"hold":true,"dropped":[]}')
    assert "is larger than the limit of 1,048,576 bytes" in wire.reply().answer.about
    assert module.calls == 0
    hub.close()
