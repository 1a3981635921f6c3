"""Collective selection: a mean uses the requested all-reduce algorithm, or the fastest one on the measured links."""

from __future__ import annotations

import os
import re
from typing import Protocol, runtime_checkable

from gossamer import events
from gossamer.algorithms.collectives import COLLECTIVES, Collective
from gossamer.base.transport import Transport
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.network.cost.cheapest_collective import SUMMED_BYTES, Wish, wished
from gossamer.errors import require

AUTO, ENGINE = "auto", "engine"
WISHES = (AUTO, ENGINE, *COLLECTIVES)


def requested_collective(collective: str | None = None) -> str:
    """Return the algorithm for a run: the command line's if set, else the recipe's, else "auto"."""
    return os.environ.get("GOSSAMER_COLLECTIVE") or collective or AUTO


def check_wish(wish: str) -> None:
    """Raise ValueError for an unknown algorithm; "hierarchical(4)" gives the number of workers per node."""
    require(
        wish in WISHES or re.fullmatch(r"hierarchical\([1-9][0-9]*\)", wish) is not None,
        f"unknown collective {wish!r}: use one of {', '.join(WISHES)}, or hierarchical(4) for nodes of four workers",
    )


class CollectiveSelector:
    """Selects an algorithm per message size and caches it. All ranks know the same links, so they agree.

    Args:
        `wish`: The requested algorithm, or "auto".
        links: The measured links.
        `says`: Whether this rank warns the user when a mean cannot use the requested algorithm.
    """

    def __init__(self, wish: Wish, links: Links, says: bool = True) -> None:
        if isinstance(wish, str):
            check_wish(wish)
        self._wish, self._links, self._says = wish, links, says
        self._picked: dict[tuple[int, int, Ranks], Collective] = {}

    def prefer(self, wish: str) -> None:
        """Change the requested algorithm, equally on all ranks between two operations."""
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
        """Return the algorithm for a mean of `nbytes` bytes with elements of `itemsize` bytes over `ranks`."""
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
                f"{self._wish} was requested, but means of elements of {itemsize} bytes use a direct exchange: each "
                "owner sums in float32 and rounds once, while other algorithms would round at every hop. To use "
                f'{self._wish}, send gradients as float32: Dense(dtype="float32").'
            )


# -- the algorithm of a transport, changed during training -------------------------------------------------------------


@runtime_checkable
class ChoosesCollectives(Protocol):
    """A transport that can compute means with several all-reduce algorithms."""

    def prefer(self, wish: str) -> None: ...


def prefer_collective(transport: Transport, wish: str) -> None:
    """Change the algorithm, between two operations and equally on all ranks. Engines keep their own collectives.

    Raises ValueError for an unknown algorithm.
    """
    if isinstance(transport, ChoosesCollectives):
        transport.prefer(wish)
