"""Collective selection: a mean uses the requested all-reduce algorithm, or the fastest one on the measured links."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from gossamer import events
from gossamer.algorithms.collectives import COLLECTIVES, Collective, DirectAllReduce
from gossamer.base.transport import Transport
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.program import Ranks
from gossamer.comm.network.cost.cheapest_collective import (
    SUMMED_BYTES,
    RequestedCollective,
    broadcasting_hub,
    chosen_collective,
    gathering_hub,
)
from gossamer.errors import require

AUTO, ENGINE = "auto", "engine"
REQUESTABLE = (AUTO, ENGINE, *COLLECTIVES)


def requested_collective(collective: str | None = None) -> str:
    """Return the algorithm for a run: the command line's if set, else the recipe's, else "auto"."""
    return os.environ.get("GOSSAMER_COLLECTIVE") or collective or AUTO


def check_requested(requested: str) -> None:
    """Raise ValueError for an unknown algorithm; "hierarchical(4)" gives the number of workers per node."""
    require(
        requested in REQUESTABLE or re.fullmatch(r"hierarchical\([1-9][0-9]*\)", requested) is not None,
        f"unknown collective {requested!r}: use one of {', '.join(REQUESTABLE)}, or hierarchical(4) for nodes of four "
        "workers",
    )


Mean = tuple[int, int]  # bytes of a mean, and of one of its elements
LARGEST_AHEAD = 16  # ranks; the losses of larger groups are too many to simulate in advance
MOST_HUBS = 1024  # remembered choices
PAUSE = 20.0  # between two simulations of possible losses, in units of the last one: 5 % of a core


class CollectivePrices:
    """The fastest algorithms on given links, simulated by a background thread before they are needed.

    The simulations take from 0.05 to 1 s per size of a mean, during which the ranks of a new view would wait. So the
    choices for each loss of one rank are computed while the previous view trains, and are kept for one more view.
    Choices depend on their arguments only, so all ranks have equal ones.

    Args:
        choose: Returns the fastest algorithm for a mean on links; takes long.
        pause: Seconds between two simulations of possible losses, in units of the last one.
    """

    def __init__(
        self,
        choose: Callable[[Mean, Links], Collective] = lambda mean, links: chosen_collective(AUTO, *mean, links.network),
        pause: float = PAUSE,
    ) -> None:
        self._choose, self._pause = choose, pause
        self._links: Links | None = None
        self._choices: dict[tuple[Mean, Links], Collective] = {}
        self._means: dict[Mean, None] = {}
        self._changed = threading.Condition()  # guards all of the above
        self._working: threading.Thread | None = None

    @property
    def means(self) -> list[Mean]:
        """The means of this run so far, equal on all ranks between two transactions."""
        return list(self._means)

    def covers(self, links: Links) -> bool:
        """Whether the choices for all means on these links are known."""
        return all((mean, links) in self._choices for mean in self.means)

    def note(self, mean: Mean) -> None:
        """Compute choices for this mean, too."""
        if mean not in self._means:
            with self._changed:
                self._means[mean] = None
                self._start()

    def prepare(self, links: Links) -> None:
        """Compute the choices for these links from now on, and those for all losses of one rank."""
        with self._changed:
            kept = {*_after_losses(links), *(() if self._links is None else _after_losses(self._links))}
            self._links = links
            self._choices = {key: choice for key, choice in self._choices.items() if key[1] in kept}
            self._start()

    def choice(self, mean: Mean, links: Links) -> Collective:
        """Return the choice, if need be after a simulation in this thread."""
        known = self._choices.get((mean, links))
        return self._choose(mean, links) if known is None else known

    def wait(self) -> None:
        """Wait until all choices are known."""
        while (thread := self._working) is not None:
            thread.join()

    def _start(self) -> None:
        self._changed.notify_all()
        if self._working is None and next(self._missing(), None) is not None:
            self._working = threading.Thread(target=self._work, name="gossamer-prices", daemon=True)
            self._working.start()

    def _missing(self) -> Iterator[tuple[Mean, Links]]:
        """Choices to compute, the most urgent first."""
        for links in () if self._links is None else _after_losses(self._links):
            for mean in self._means:
                if (mean, links) not in self._choices:
                    yield mean, links

    def _work(self) -> None:
        while True:
            with self._changed:
                missing, current = next(self._missing(), None), self._links
                if missing is None:
                    self._working = None
                    return
            began = time.perf_counter()
            choice = self._choose(*missing)
            with self._changed:
                self._choices[missing] = choice
                if missing[1] != current:
                    seconds = self._pause * (time.perf_counter() - began)
                    self._changed.wait_for(lambda: self._links is not current, seconds)  # noqa: B023 - waits here


def _after_losses(links: Links) -> Iterator[Links]:
    """These links, then those after the loss of each rank."""
    world = len(links.up)
    yield links
    if 2 < world <= LARGEST_AHEAD:
        for lost in range(world):
            yield links.among([rank for rank in range(world) if rank != lost])


class CollectiveSelector:
    """Selects an algorithm per message size and caches it. All ranks know the same links, so they agree.

    Args:
        `requested`: The requested algorithm, or "auto".
        links: The measured links.
        `gives_notice`: Whether this rank warns the user when a mean cannot use the requested algorithm.
        prices: The choices for whole groups, computed in advance; None to compute each at its first use.
        provisional: Use `direct` in place of "auto" until `settle`, so that no mean waits for a simulation. Equal on
            all ranks.
    """

    def __init__(
        self,
        requested: RequestedCollective,
        links: Links,
        gives_notice: bool = True,
        prices: CollectivePrices | None = None,
        provisional: bool = False,
    ) -> None:
        if isinstance(requested, str):
            check_requested(requested)
        self._requested, self._links, self._gives_notice = requested, links, gives_notice
        self.prices, self._provisional = prices, provisional
        self._picked: dict[tuple[int, int, Ranks], Collective] = {}
        self._hubs: dict[tuple[Any, ...], int | None] = {}  # of all-gathers and broadcasts
        self._find_relays()

    def _find_relays(self) -> None:
        """Note whether all-gathers and broadcasts may use a hub: a rank relays for others."""
        self.has_hubs = self._requested == AUTO and any(relay.rank is not None for relay in self._links.relays)

    def settle(self) -> None:
        """End the provisional choices, equally on all ranks between two operations."""
        if self._provisional:
            self._provisional = False
            self._picked.clear()

    def prefer(self, requested: str) -> None:
        """Change the requested algorithm, equally on all ranks between two operations."""
        check_requested(requested)
        self._requested = requested
        self._picked.clear()
        self._hubs.clear()
        self._find_relays()

    @property
    def links(self) -> Links:
        return self._links

    @links.setter
    def links(self, links: Links) -> None:
        self._links, self._provisional = links, False  # known links decide at once, as in the run that is resumed
        self._picked.clear()
        self._hubs.clear()
        self._find_relays()
        if self.prices is not None:
            self.prices.prepare(links)

    def __call__(self, nbytes: int, itemsize: int, ranks: Ranks) -> Collective:
        """Return the algorithm for a mean of `nbytes` bytes with elements of `itemsize` bytes over `ranks`."""
        key = (nbytes, itemsize, ranks)
        if key not in self._picked:
            self._picked[key] = self._choose(nbytes, itemsize, ranks)
            picked = repr(self._picked[key])
            events.emit(events.CollectivePicked(nbytes=nbytes, collective=picked, world=len(ranks)))
            self._explain(itemsize, self._picked[key])
        return self._picked[key]

    def gathering_hub(self, sizes: tuple[int, ...], ranks: Ranks) -> int | None:
        """Return the hub of an all-gather of `sizes` bytes over `ranks`, as an index into `ranks`; None without one."""
        return self._hub(("gather", sizes, ranks), lambda: gathering_hub(sizes, self._links.among(ranks).network))

    def broadcasting_hub(self, nbytes: int, source: int) -> int | None:
        """Return the hub of a broadcast of `nbytes` from rank `source` to all ranks; None without one."""
        return self._hub(("broadcast", nbytes, source), lambda: broadcasting_hub(nbytes, source, self._links.network))

    def _hub(self, key: tuple[Any, ...], find: Callable[[], int | None]) -> int | None:
        if key not in self._hubs:
            if len(self._hubs) >= MOST_HUBS:  # sizes may differ in each step
                self._hubs.clear()
            self._hubs[key] = find()
        return self._hubs[key]

    def _choose(self, nbytes: int, itemsize: int, ranks: Ranks) -> Collective:
        if self.prices is None or self._requested != AUTO or len(ranks) < len(self._links.up):
            return chosen_collective(self._requested, nbytes, itemsize, self._links.among(ranks).network)
        self.prices.note((nbytes, itemsize))
        return DirectAllReduce() if self._provisional else self.prices.choice((nbytes, itemsize), self._links)

    def _explain(self, itemsize: int, picked: Collective) -> None:
        if self._gives_notice and itemsize < SUMMED_BYTES and self._requested not in (AUTO, picked.name, picked):
            self._gives_notice = False
            events.notice(
                f"{self._requested} was requested, but means of elements of {itemsize} bytes use a direct exchange: "
                "each owner sums in float32 and rounds once, while other algorithms would round at every hop. To use "
                f'{self._requested}, send gradients as float32: Dense(dtype="float32").'
            )


# -- the algorithm of a transport, changed during training -------------------------------------------------------------


@runtime_checkable
class ChoosesCollectives(Protocol):
    """A transport that can compute means with several all-reduce algorithms."""

    def prefer(self, requested: str) -> None: ...


@runtime_checkable
class HasPrices(Protocol):
    """A transport whose algorithms may be provisional at first."""

    @property
    def prices(self) -> CollectivePrices | None: ...
    def settle(self) -> None: ...


def settle_collectives(transport: object) -> None:
    """End a transport's provisional algorithms, if it has any, between two operations and equally on all ranks."""
    if isinstance(transport, HasPrices):
        transport.settle()


def prefer_collective(transport: Transport, requested: str) -> None:
    """Change the algorithm, between two operations and equally on all ranks. Engines keep their own collectives.

    Raises ValueError for an unknown algorithm.
    """
    if isinstance(transport, ChoosesCollectives):
        transport.prefer(requested)
