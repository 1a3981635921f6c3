"""Position: a worker's progress in its epoch, and the positions of all workers after a change."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gossamer.errors import CheckpointError, require
from gossamer.train.sampler.deal import NO_PLACE, Deal

State = Mapping[str, Any]
UNKNOWN_TOTAL = sys.maxsize  # number of entries if it is not known
EPOCHS_APART = 1000  # upper bound; in lock step workers are one batch apart


def dealt_among(
    sharers: Sequence[int], rank: int, widths: Sequence[int], *, total: int, drawn: tuple[tuple[int, ...], ...] = ()
) -> Deal:
    """The deal of the worker `rank`, if the workers `sharers` divide an epoch's rest. widths: by rank; empty: equal."""
    if rank not in sharers:
        place, width = NO_PLACE, 1
    elif widths:
        place, width = sum(widths[each] for each in sharers if each < rank), widths[rank]
    else:
        place, width = sharers.index(rank), 1
    places = sum(widths[each] for each in sharers) if widths else len(sharers)
    return Deal(total=total, place=place, places=places, width=width, drawn=drawn)


@dataclass(kw_only=True, eq=False)
class Position:
    """One worker's place in its data. It is replaced as a whole, except for the counts of draws."""

    rank: int
    size: int
    epoch: int
    deal: Deal
    widths: tuple[int, ...] = ()  # places of each worker in this and later deals, by rank; empty: one each
    drawn: int = 0  # number of drawn entries of the newest deal
    in_last_batch: bool = False  # all entries are drawn, but the loop has not ended the epoch yet
    before: int = 0  # number of entries that this worker drew in the epoch under earlier deals
    later: Mapping[int, Deal] = field(default_factory=dict)  # deals of epochs that other workers have begun
    run: object = field(default_factory=object)  # identity: active iterators follow positions with the same object
    changes: int = 0  # number of changes of the workers since this one was started
    trained: int | None = None  # part of `drawn` that was trained on when last recorded; None if never recorded

    @property
    def over(self) -> bool:
        """Whether the loop has ended the epoch."""
        return self.drawn >= self.deal.part and not self.in_last_batch

    @property
    def begun(self) -> bool:
        """Whether any worker has drawn in this epoch, as far as this worker knows."""
        return self.drawn > 0 or bool(self.deal.drawn)

    @property
    def plain(self) -> bool:
        """Whether the deal is that of an epoch without changes of the workers."""
        return self.deal == self.plain_deal

    @property
    def plain_deal(self) -> Deal:
        """The deal of an epoch without changes of the workers."""
        return dealt_among(range(self.size), self.rank, self.widths, total=self.deal.total)

    def deal_in(self, epoch: int) -> Deal | None:
        """The newest deal of an epoch; None if this worker has passed it."""
        if epoch < self.epoch:
            return None
        return self.deal if epoch == self.epoch else self.later.get(epoch, self.plain_deal)

    def drawn_in(self, epoch: int) -> int:
        return min(self.drawn, self.deal.part) if epoch == self.epoch else 0

    def is_over(self, epoch: int) -> bool:
        return self.over if epoch == self.epoch else epoch < self.epoch

    def state(self, *, marks_end: bool) -> dict[str, Any]:
        """The state for a checkpoint. marks_end: include whether the loop has ended the epoch."""
        seen = replace(self)  # another thread may draw at the same time
        state: dict[str, Any] = {"epoch": self.epoch, "drawn": seen.drawn}
        if self.widths:
            state["widths"] = list(self.widths)
        if not self.plain:
            state |= _dealt_state(self.deal)
        if marks_end or seen.in_last_batch or not self.plain:
            state["over"] = seen.over
        if self.before:
            state["before"] = self.before
        if self.trained not in (None, seen.drawn):
            state["trained"] = self.trained
        if self.later:
            state["later"] = {str(epoch): _dealt_state(deal) for epoch, deal in sorted(self.later.items())}
        return state

    @classmethod
    def of(cls, state: State, *, total: int, rank: int, size: int) -> Position:
        """Parse the state of one of `size` workers. total: entries of an epoch. Raises CheckpointError."""
        try:
            rank, size = state.get("own", (rank, size))  # with non_iid, the rank that the samples were split for
            trained = int(state["trained"]) if "trained" in state else None
            widths = _widths(state, size)
            later = {
                int(epoch): _dealt(each, total, rank, size, widths) for epoch, each in state.get("later", {}).items()
            }
            deal, drawn = _dealt(state, total, rank, size, widths), int(state["drawn"])
            position = cls(
                rank=rank, size=size, epoch=int(state["epoch"]), deal=deal, widths=widths, drawn=drawn, later=later,
                before=int(state.get("before", 0)), trained=trained,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{state!r} is not a position of one of {size} workers in {total} samples ({error}), so the samples "
                "drawn so far are unknown. Pass a result of Shard.state_dict() for the same data."
            ) from None
        nothing_was_dealt = drawn == 0 and deal.place != NO_PLACE and deal.left > 0
        over = state.get("over", drawn >= deal.part and not nothing_was_dealt)
        position.in_last_batch = drawn >= deal.part and not over
        return position


class Regrouping(NamedTuple):
    """A change of the workers, or of their shares, for the worker that is `rank` of `size` after it.

    Args:
        stayed: former ranks of the remaining workers, in the order of their new ranks, which come first; the others are
            new and continue in the same epoch. Empty if all are new, as after a checkpoint.
        widths: each worker's share of the rest and of later epochs, by new rank, relative to their sum; empty if all
            are equal.
    """

    rank: int
    size: int
    stayed: Sequence[int] = ()
    widths: Sequence[int] = ()


def regrouped(positions: Sequence[Position], change: Regrouping) -> Position:
    """The position from which a worker continues, given those of all workers before the change, by rank.

    New workers begin in the newest epoch of the remaining workers; each gets a part of its rest in proportion to its
    width. Workers that have ended an epoch get nothing of it; if all have, its rest is skipped.
    """
    rank, size, stayed, widths = change
    if len({*stayed}) != len(stayed) or not {*stayed} <= {*range(len(positions))} or len(stayed) > size:
        raise ValueError(
            f"stayed={list(stayed)} must be different ranks of {len(positions)} workers, at most the {size} workers "
            "of now. Pass the former rank of each remaining worker, in the order of new ranks."
        )
    guides = [positions[old] for old in stayed] or positions
    newest = max(each.epoch for each in guides)
    own = positions[stayed[rank]] if rank < len(stayed) else None
    epoch = own.epoch if own else newest
    last = max(epoch, *(each.epoch for each in positions), *(later for each in positions for later in each.later))
    if last - epoch > EPOCHS_APART:
        raise CheckpointError(
            f"workers that trained together are in epochs {epoch} to {last}, so these positions are not of one group "
            "at one moment. Pass those of the previous view."
        )
    deals = {each: _deal_again(positions, each, newest, change) for each in range(epoch, last + 1)}
    deal = deals.pop(epoch)
    position = Position(rank=rank, size=size, epoch=epoch, deal=deal, widths=tuple(widths))
    plain = position.plain_deal
    position.later = {each: later for each, later in deals.items() if later != plain}
    if all(each.is_over(epoch) for each in guides):  # as without any change
        position.deal, position.drawn = plain, plain.part
        return position
    position.in_last_batch = deal.place != NO_PLACE and not deal.part
    position.before = own.before + own.drawn if own and deal != plain else 0
    return position


def supposed(known: Sequence[Position | None], *, total: int) -> list[Position]:
    """Positions of all workers; for lost workers without a position (None) the one of the foremost remaining worker.

    This is correct in lock step with one batch size: a lost worker had trained on as many samples as the foremost other
    worker (drawn, if a state has no `trained`), in proportion to their widths. If it had trained on fewer, the
    difference is skipped; if on more, it is used twice.
    """
    there = [each for each in known if each is not None]
    if not there:
        raise CheckpointError(
            "no worker's position is known, so the samples drawn so far are unknown. Pass the state_dict() of the "
            "remaining workers."
        )
    newest = max(each.epoch for each in there)
    foremost = [each for each in there if each.epoch == newest]
    rates = [((each.drawn if each.trained is None else each.trained), each.deal.width) for each in foremost]
    begun = {newest} | {epoch for each in there for epoch in each.later if epoch > newest}
    unclaimed = {epoch: _unclaimed(there, epoch, len(known), total) for epoch in begun}
    found = []
    for rank, each in enumerate(known):
        if each is None:
            later = {epoch: deals.pop(0) for epoch, deals in unclaimed.items()}
            deal = later.pop(newest)
            drawn = max(drawn * deal.width // width for drawn, width in rates)
            each = Position(rank=rank, size=len(known), epoch=newest, deal=deal, drawn=drawn, later=later)
        found.append(each)
    return found


def _unclaimed(there: Sequence[Position], epoch: int, size: int, total: int) -> list[Deal]:
    """Parts of an epoch that belong to no known worker, followed by enough empty ones. Adjacent places are one part,
    since lost workers of any widths are assumed to have drawn equally many entries per place."""
    deals = [deal for each in there if (deal := each.deal_in(epoch)) is not None]
    known = sorted((deal.place, deal.place + deal.width) for deal in deals if deal.place != NO_PLACE)
    begins, ends = [0, *(end for _, end in known)], [*(begin for begin, _ in known), deals[0].places]
    gaps = [(begin, end - begin) for begin, end in zip(begins, ends, strict=True) if begin < end]
    parts = [replace(deals[0], total=total, place=place, width=width) for place, width in gaps]
    return [*parts, *[replace(deals[0], total=total, place=NO_PLACE, width=1)] * size]


def taken_up(states: Sequence[State], rank: int, size: int) -> dict[str, Any]:
    """The state from which one of `size` workers continues a checkpoint of other workers, with `states` by rank."""
    if "source" in states[0]:
        raise CheckpointError(
            f"this position is in shards of files that {len(states)} workers have read, so {size} workers cannot "
            f"divide the rest. Start {len(states)} workers again. A torch.utils.data.IterableDataset of your own, "
            "which counts items, can be divided again."
        )
    positions = [Position.of(each, total=UNKNOWN_TOTAL, rank=old, size=len(states)) for old, each in enumerate(states)]
    newest = max(each.epoch for each in positions)
    deal = _deal_again(positions, newest, newest, Regrouping(rank, size))
    saved = [state["over"] for state in states if state["epoch"] == newest and "over" in state]
    return {
        "epoch": newest,
        "drawn": 0,
        **(_dealt_state(deal) if deal.drawn else {}),
        **({"over": all(saved)} if saved else {}),
        **({"total": sum(map(sum, deal.drawn)) if all(saved) else None} if "total" in states[0] else {}),
    }


def _deal_again(positions: Sequence[Position], epoch: int, newest: int, change: Regrouping) -> Deal:
    """The deal for the rest of an epoch. newest: the epoch in which new workers begin."""
    known = [(each, deal) for each in positions if (deal := each.deal_in(epoch)) is not None]
    total = max(deal.total for _, deal in known)  # of a stream, only workers at its end know the total
    before = replace(known[0][1], total=total)
    counts = [before.count(place) for place in range(before.places)]  # workers in a later epoch drew their whole part
    for each, deal in known:
        if (deal.places, deal.drawn) != (before.places, before.drawn):
            raise CheckpointError(
                f"workers that trained together have different deals of epoch {epoch}, {before} and {deal}, so the "
                "samples drawn so far are unknown. Pass the positions of one group at one moment."
            )
        if deal.place != NO_PLACE:
            counts[deal.place : deal.place + deal.width] = deal.counts(each.drawn_in(epoch))
    sharers = [new for new, old in enumerate(change.stayed) if not positions[old].is_over(epoch)]
    if epoch >= newest and (sharers or not change.stayed):
        sharers += range(len(change.stayed), change.size)
    drawn = (*before.drawn, tuple(counts)) if any(counts) else before.drawn
    return dealt_among(sharers, change.rank, change.widths, total=total, drawn=drawn)


def _dealt_state(deal: Deal) -> dict[str, Any]:
    width = {"width": deal.width} if deal.width != 1 else {}
    return {"deals": [list(counts) for counts in deal.drawn], "place": deal.place, "places": deal.places, **width}


def _widths(state: State, size: int) -> tuple[int, ...]:
    """Parse the widths of a state. Raises ValueError if they are invalid."""
    widths = tuple(map(int, state.get("widths", ())))
    require(len(widths) in (0, size) and all(each >= 1 for each in widths), f"widths {widths} of {size} workers")
    return widths


def _dealt(state: State, total: int, rank: int, size: int, widths: Sequence[int]) -> Deal:
    """Parse the deal of a state. Raises ValueError if it is invalid."""
    if "deals" not in state:
        return dealt_among(range(size), rank, widths, total=total)
    drawn = tuple(map(tuple, state["deals"]))
    deal = Deal(total=total, place=state["place"], places=state["places"], width=state.get("width", 1), drawn=drawn)
    most, end = sum(widths) or size, deal.place + deal.width
    require(deal.places <= most and deal.width >= 1, f"{deal.width} of {deal.places} places, for {most}")
    require(NO_PLACE <= deal.place < deal.places and end <= deal.places, f"place {deal.place} of {deal.places}")
    require(all(count >= 0 for counts in deal.drawn for count in counts), "counts of draws below 0")
    require(deal.left >= 0, f"{total - deal.left} were drawn")
    return deal
