"""Collective selection: a mean takes the table of hops that was asked for, or the fastest on the measured links."""

from __future__ import annotations

import os
import re

from gossamer import events
from gossamer.algorithms.collectives import COLLECTIVES, Collective
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.network.cost.cheapest_collective import SUMMED_BYTES, Wish, wished
from gossamer.errors import require

AUTO, ENGINE = "auto", "engine"
WISHES = (AUTO, ENGINE, *COLLECTIVES)


def requested_collective(collective: str | None = None) -> str:
    """Which collective a run is to use: the command line's where there is one, else the recipe's, else auto."""
    return os.environ.get("GOSSAMER_COLLECTIVE") or collective or AUTO


def check_wish(wish: str) -> None:
    """Raise ValueError for what is no collective; "hierarchical(4)" names the workers of a node."""
    require(
        wish in WISHES or re.fullmatch(r"hierarchical\([1-9][0-9]*\)", wish) is not None,
        f"{wish!r} is no collective: write one of {', '.join(WISHES)}, or hierarchical(4) for nodes of four workers",
    )


class CollectiveSelector:
    """Picks by size, once for each. Every rank picks alike, because all know the same links.

    says: whether this rank tells the user where a mean cannot go as was asked.
    """

    def __init__(self, wish: Wish, links: Links, says: bool = True) -> None:
        if isinstance(wish, str):
            check_wish(wish)
        self._wish, self._links, self._says = wish, links, says
        self._picked: dict[tuple[int, int, Ranks], Collective] = {}

    def prefer(self, wish: str) -> None:
        """From now on take this collective, as all ranks do from the same operation on."""
        check_wish(wish)
        self._wish = wish
        self._picked.clear()

    @property
    def links(self) -> Links:
        return self._links

    @links.setter
    def links(self, links: Links) -> None:
        self._links = links
        self._picked.clear()

    def __call__(self, nbytes: int, itemsize: int, ranks: Ranks) -> Collective:
        """The table for a mean of `nbytes` bytes, of numbers of `itemsize` bytes, that `ranks` hold."""
        key = (nbytes, itemsize, ranks)
        if key not in self._picked:
            self._picked[key] = wished(self._wish, nbytes, itemsize, self._links.among(ranks).network)
            picked = repr(self._picked[key])
            events.emit(events.CollectivePicked(nbytes=nbytes, collective=picked, world=len(ranks)))
            self._explain(itemsize, self._picked[key])
        return self._picked[key]

    def _explain(self, itemsize: int, picked: Collective) -> None:
        if self._says and itemsize < SUMMED_BYTES and self._wish not in (AUTO, picked.name, picked):
            self._says = False
            events.notice(
                f"{self._wish} was asked for, but numbers of {itemsize} bytes go straight to their owners, who sum in "
                "float32 and round once: on any other way sums would be rounded at every hop. For means that go by "
                f'{self._wish}, let gradients travel as float32: Dense(dtype="float32").'
            )
