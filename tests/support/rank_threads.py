"""Rank threads: run the ranks of one group in threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class RankThreads:
    """`world` ranks, each with a thread of its own; whoever derives from it fills `transports`."""

    def __init__(self, world):
        self.world, self.pool = world, ThreadPoolExecutor(world)
        self.transports = []

    def all(self, act):
        return [ticket.result(30) for ticket in [self.pool.submit(act, rank) for rank in range(self.world)]]

    def answers(self, ops):
        return self.all(lambda rank: self.transports[rank].answer(ops[rank]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for transport in self.transports:
            transport.close()
        self.pool.shutdown()
