"""Deduplication: the last answers of a worker are remembered, and older contributions are late."""

from __future__ import annotations

from support.direct_server import DirectServer
from support.server_runs import TINY

from gossamer.base.peer_ops import Receipt
from gossamer.train.parameter_server.deduplication import LATE, REMEMBERED


def test_the_last_answers_are_given_again_and_older_ones_are_late() -> None:
    server = DirectServer("ParameterServer('async')", world=1, shapes=TINY)
    pushes = [server.push(0, step) for step in range(REMEMBERED + 6)]
    first = [server.say(0, push) for push in pushes]
    again = [server.say(0, push) for push in pushes]
    assert first == [[Receipt(version=step + 1)] for step in range(len(pushes))]
    assert again[6:] == first[6:]
    assert again[:6] == [[Receipt(version=LATE)]] * 6
    assert server.shard.version == len(pushes)
