"""Collective selection by measured links: the same in a run that is resumed."""

from __future__ import annotations

import pytest
from support.mesh_group import Group

from gossamer.base.kernels.library import are_built
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.link_measurement import Links

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


def test_a_run_that_is_resumed_picks_as_the_one_that_it_continues():
    near, far = 0.0002, 0.08
    sites = Links.alike(tuple(tuple(near if a % 2 == b % 2 else far for b in range(4)) for a in range(4)), 2e8)
    flat = Links.alike(((near,) * 4,) * 4, 1e9)
    picker = CollectiveSelector("ring", flat)  # along fast links
    everyone = (0, 1, 2, 3)
    before = picker(4_000_000, 4, everyone)
    with Group(4) as group:
        first, second = group.transports[:2]
        first._operations.pick = picker
        first.links = sites.text
        assert Links.of(first.links) == sites
        assert picker(4_000_000, 4, everyone) == CollectiveSelector("ring", sites)(4_000_000, 4, everyone) != before
        second.links = flat.among((0, 1)).text  # of another number of workers
        second.links = ""
        assert len(Links.of(second.links).round_trips) == 4


def test_links_among_some_are_those_between_them():
    links = Links.alike(tuple(tuple(float(10 * a + b) for b in range(4)) for a in range(4)), 5.0)
    assert links.among((1, 3)) == Links.alike(((11.0, 13.0), (31.0, 33.0)), 5.0)
