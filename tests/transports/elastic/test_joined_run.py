"""Joined run: what was measured among more members is known of those who are left, and of nobody who is new."""

from __future__ import annotations

from dataclasses import replace

from gossamer.transports.elastic.joined_run import JoinedRun
from gossamer.transports.mesh.link_measurement import Links

WAYS = ((0.1, 0.2), (0.3, 0.4))


def test_survivors_choose_between_devices_and_hosts_by_what_was_timed_before() -> None:
    run = object.__new__(JoinedRun)  # without a coordinator
    run._measured = None
    assert run._known((1, 2)) is None
    run._measured = (1, 2, 3), replace(Links.alike(((0.0,) * 3,) * 3, 1e9), ways=WAYS)
    known = run._known((1, 3))
    assert known is not None
    assert (len(known.round_trips), known.ways) == (2, WAYS)
    assert run._known((1, 4)) is None
