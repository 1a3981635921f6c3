"""Server shard: who is a member, and what a change writes down first."""

from __future__ import annotations

from support.direct_server import DirectServer

from gossamer.base.peer_ops import Pull, Pulled


def test_a_rank_that_was_taken_for_lost_and_contributes_is_waited_for_again() -> None:
    server = DirectServer("ParameterServer('sync')")
    server.lose(1)
    assert server.shard.members == {0: 0}
    server.say(1, server.push(1, 0))
    assert server.shard.members == {0: 0, 1: 1}
    server.say(0, server.push(0, 0))
    server.say(0, server.push(0, 1))
    assert server.shard.version == 1, "a round went on without a worker that is back"
    server.say(1, server.push(1, 1))
    assert server.shard.version == 2


def test_a_pull_that_knows_more_than_the_server_is_told_that_it_forgot() -> None:
    server = DirectServer("ParameterServer('async')")
    (answer,) = server.say(0, server.pull(0, known=3))
    assert isinstance(answer, Pulled)
    assert (answer.version, answer.about, answer.payload) == (-1, '{"forgot": true}', ())
    assert server.shard.pending_pulls == []
    assert isinstance(server.say(0, server.pull(0, known=0))[0], Pulled)


def test_a_pull_of_what_is_to_come_waits() -> None:
    server = DirectServer("ParameterServer('sync')")
    assert server.say(0, server.pull(0, at_least=1)) == []
    (waiting,) = server.shard.pending_pulls
    assert isinstance(waiting.op, Pull)
