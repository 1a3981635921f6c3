"""Positions: whoever comes or goes in an epoch, every sample is used once."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changing_group import ChangingGroup, batches, batches_ahead, indices, tracked, tracked_ahead
from torch.utils.data import RandomSampler

from gossamer.errors import CheckpointError
from gossamer.train.sampler import Shard, position, taken_up
from gossamer.train.sampler.position import Position, Regrouping
from gossamer.train.session.tracked_parts import TrackedLoader

READERS = {"indices": indices, "batches": batches, "tracked": tracked, "tracked, fetching ahead": tracked_ahead}
OPTIONS = ("plain", "in order", "stratified", "stratified, in order", "a sampler")


def maker(total: int, kind: str) -> Any:
    labels = [index % 3 for index in range(total)]
    options: dict[str, Any] = {
        "plain": {},
        "in order": {"shuffle": False},
        "stratified": {"stratify": labels},
        "stratified, in order": {"stratify": labels, "shuffle": False},
        "a sampler": {},
    }[kind]

    def make(rank: int, size: int) -> Shard:
        source: object = RandomSampler(range(total)) if kind == "a sampler" else range(total)
        return Shard(source, rank=rank, size=size, seed=5, **options)

    return make


Act = tuple[str, tuple[int, ...]]
numbers = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)
acts = st.one_of(
    st.tuples(st.just("draw"), numbers),
    st.tuples(st.just("change"), st.tuples(st.integers(1, 31), st.integers(0, 2), st.integers(0, 3))),
    st.tuples(st.just("resume"), st.tuples(st.integers(0, 4))),
)
acts_with_shares = st.one_of(acts, st.tuples(st.just("share"), numbers))


def play(group: ChangingGroup, script: list[Act]) -> None:
    for what, numbers in script:
        size = len(group.workers)
        if what == "draw":
            for rank in range(size):
                for _ in range(numbers[rank % len(numbers)]):
                    group.step(rank)
        elif what == "resume":
            group.resume(numbers[0] % size)
        elif what == "share":
            group.share([1 + numbers[rank % len(numbers)] for rank in range(size)])
            group.check_alike()
        else:
            bits, newcomers, unused = numbers
            stayed = [rank for rank in range(size) if bits >> rank & 1] or [bits % size]
            group.change(stayed, min(newcomers, 5 - len(stayed)), unused)
            group.check_alike()
    group.check()


@settings(max_examples=150)
@given(
    st.integers(5, 40),
    st.integers(1, 5),
    st.sampled_from(OPTIONS),
    st.sampled_from([*READERS]),
    st.lists(acts, max_size=12),
)
def test_every_sample_of_an_epoch_is_used_once(
    total: int, size: int, kind: str, reader: str, script: list[Act]
) -> None:
    """By those who are there, or those who were lost; whoever is resumed on the way draws the same."""
    play(ChangingGroup(maker(total, kind), total, size, READERS[reader]), script)


@settings(max_examples=150)
@given(
    st.integers(5, 40),
    st.integers(1, 5),
    st.sampled_from(["plain", "in order", "a sampler"]),
    st.sampled_from([*READERS]),
    st.lists(acts_with_shares, max_size=12),
)
def test_every_sample_is_used_once_if_shares_follow_the_speed(
    total: int, size: int, kind: str, reader: str, script: list[Act]
) -> None:
    play(ChangingGroup(maker(total, kind), total, size, READERS[reader]), script)


@settings(max_examples=60)
@given(
    st.sampled_from([*READERS]),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 5), min_size=4, max_size=4)), max_size=3),
    st.integers(1, 5),
)
def test_a_checkpoint_with_unequal_shares_is_taken_up_by_any_number(
    reader: str, story: list[tuple[int, list[int]]], size: int
) -> None:
    group = ChangingGroup(maker(240, "plain"), 240, 4, READERS[reader])
    for count, widths in story:
        group.step_all(count)
        group.share(widths)
    group.step_all(1)
    group.restart(size)
    assert not any("widths" in worker.loop.shard.state_dict() for worker in group.workers)
    group.step_all(1)
    group.check()


@settings(max_examples=60)
@given(
    st.sampled_from(OPTIONS),
    st.sampled_from([*READERS]),
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 31)), max_size=3),
    st.integers(1, 5),
)
def test_a_checkpoint_after_changes_is_taken_up_by_any_number(
    kind: str, reader: str, story: list[tuple[list[int], int]], size: int
) -> None:
    """In one epoch: of those who lag behind in an earlier one, checkpoints forget what they had left of it."""
    group = ChangingGroup(maker(180, kind), 180, 4, READERS[reader])
    for counts, bits in story:
        for rank in range(len(group.workers)):
            for _ in range(counts[rank]):
                group.step(rank)
        stayed = [rank for rank in range(len(group.workers)) if bits >> rank & 1] or [0]
        group.change(stayed, min(2, 5 - len(stayed)))
    group.step_all(2)
    group.restart(size)
    group.step_all(1)
    group.restart(3)
    group.check()


def test_what_survivors_have_fetched_is_theirs() -> None:
    """Untracked: positions count what was fetched, which who stays trains on, and who was lost does not."""
    group = ChangingGroup(maker(60, "plain"), 60, 3, batches_ahead)
    group.step_all(1)
    group.change([0, 1, 2], 1)
    group.step_all(1)
    group.check()
    group = ChangingGroup(maker(60, "plain"), 60, 3, batches_ahead)
    group.step_all(1)
    group.change([0, 1], 1)
    with pytest.raises(AssertionError, match="left out in epoch 0") as missing:
        group.check()
    assert str(missing.value).count(",") == 8, "three batches that the lost worker had fetched and not used"


UNEVEN: list[Act] = [("draw", (4, 1, 2)), ("change", (0b110, 1, 0)), ("draw", (1, 3)), ("change", (0b011, 0, 0))]


@pytest.mark.parametrize("kind", OPTIONS)
def test_uneven_draws_are_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(ChangingGroup(maker(31, kind), 31, 3, indices), UNEVEN)
    monkeypatch.setattr(Position, "drawn_in", lambda self, epoch: 2)  # as if all had drawn alike
    with pytest.raises(AssertionError, match=r"used twice|left out"):
        play(ChangingGroup(maker(31, kind), 31, 3, indices), UNEVEN)


def test_who_forgets_the_deals_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = position._dealt_state
    monkeypatch.setattr(position, "_dealt_state", lambda deal: {**forgetful(deal), "deals": []})
    with pytest.raises((AssertionError, CheckpointError)):
        play(ChangingGroup(maker(31, "plain"), 31, 3, indices), [*UNEVEN, ("resume", (0,)), ("draw", (9,))])


def test_batches_fetched_for_the_deal_before_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of dropping what was fetched ahead: a loader that never hears of a change."""
    play(ChangingGroup(maker(40, "plain"), 40, 3, tracked_ahead), UNEVEN)

    def deaf(self: TrackedLoader, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        for count, batch in enumerate(batches, 1):
            self._shard.take(3 * count)
            yield batch
        return False

    monkeypatch.setattr(TrackedLoader, "_taken", deaf)
    with pytest.raises(AssertionError):
        play(ChangingGroup(maker(40, "plain"), 40, 3, tracked_ahead), UNEVEN)


def test_workers_in_two_epochs_share_both() -> None:
    """Rank 0 is in the next epoch already, rank 1 in the last batch, and rank 2 is lost in the middle of the epoch."""
    group = ChangingGroup(maker(12, "plain"), 12, 3, indices)
    for rank, count in enumerate((6, 3, 2)):
        for _ in range(count):
            group.step(rank)
    assert [worker.loop.shard.epoch for worker in group.workers] == [1, 0, 0]
    group.change([0, 1], 1)
    ahead, behind, newcomer = (worker.loop.shard for worker in group.workers)
    assert (ahead.epoch, behind.epoch, newcomer.epoch) == (1, 0, 1)
    assert behind.state_dict()["later"] == {"1": {"deals": [[2, 0, 0]], "place": 1, "places": 3}}
    group.check()


def shard(total: int = 12, rank: int = 0, size: int = 3) -> Shard:
    return Shard(range(total), rank=rank, size=size)


def drawn(rank: int, count: int, size: int = 3) -> dict[str, Any]:
    one = shard(rank=rank, size=size)
    for _ in zip(range(count), one, strict=False):
        pass
    return one.state_dict()


def test_the_state_tells_who_drew_how_much_before_each_change() -> None:
    one = shard()
    order = list(shard(12, 0, 1))
    drawing = iter(one)
    first = [next(drawing) for _ in range(3)]
    assert first == order[0:9:3]
    one.regroup([one.state_dict(), drawn(1, 1), drawn(2, 2)], Regrouping(0, 2, [0, 2]))
    assert one.state_dict() == {
        "epoch": 0, "drawn": 0, "deals": [[3, 1, 2]], "place": 0, "places": 2, "over": False, "before": 3,
    }  # fmt: skip
    left = [entry for entry in order if entry not in {*first, order[1], order[2], order[5]}]
    assert list(drawing) == left[0::2]
    assert len(left) == 6
    other = shard(size=2)
    assert [[*other], [*other]][1] == [*one], "the next epoch knows nothing of it"
    assert one.state_dict() == {"epoch": 1, "drawn": 6}


def test_a_group_that_never_changes_writes_what_it_always_wrote() -> None:
    one = shard()
    states = [one.state_dict()] + [one.state_dict() for _ in one]
    assert states == [{"epoch": 0, "drawn": count} for count in (0, 1, 2, 3, 4)]


def test_the_length_is_that_of_the_epoch_under_way() -> None:
    one = shard()
    drawing = iter(one)
    next(drawing)
    one.regroup([one.state_dict(), drawn(1, 1), drawn(2, 1)], Regrouping(0, 2, [0, 2]))
    assert len(one) == 1 + 5
    assert len([*drawing]) == 5
    assert len(one) == 6


def test_whose_epoch_is_over_shares_nothing_of_it() -> None:
    one, other = shard(rank=0), shard(rank=1)
    under_way = iter(other)
    next(under_way)
    states = [drawn(0, 4), other.state_dict(), drawn(2, 1)]
    one.load_state_dict(states[0])
    for rank, each in enumerate((one, other)):
        each.regroup(states, Regrouping(rank, 2, [0, 1]))
    assert len([*under_way]) == 6
    assert next(iter(one)) is not None
    assert one.epoch == 1


def test_what_a_lost_worker_left_of_an_epoch_that_is_over_is_left_out() -> None:
    one = shard(rank=0)
    list(one)
    one.regroup([one.state_dict(), drawn(1, 4), drawn(2, 1)], Regrouping(0, 2, [0, 1]))
    assert one.state_dict() == {"epoch": 0, "drawn": 6}
    newcomer = shard(rank=2, size=3)
    newcomer.regroup([one.state_dict(), {"epoch": 0, "drawn": 6}], Regrouping(2, 3, [0, 1]))
    list(newcomer)
    assert newcomer.epoch == 1


def test_a_newcomer_that_has_its_first_batch_continues_with_its_part() -> None:
    states = [drawn(0, 2, 2), drawn(1, 3, 2)]
    newcomer = shard(rank=2, size=3)
    under_way = iter(newcomer)
    next(under_way)
    newcomer.regroup(states, Regrouping(2, 3, [0, 1]))
    order, mine = list(shard(12, 0, 1)), [*under_way]
    assert mine == [each for each in order if each not in {*order[0:4:2], *order[1:7:2]}][2::3]
    assert newcomer.state_dict()["drawn"] == len(mine) == 2


def test_a_loop_that_left_its_epoch_early_begins_the_next() -> None:
    one = shard()
    next(iter(one))
    one.regroup([one.state_dict(), drawn(1, 1), drawn(2, 1)], Regrouping(0, 2, [0, 2]))
    next(iter(one))
    assert one.state_dict() == {"epoch": 1, "drawn": 1}


def test_positions_are_plain_enough_for_a_wire() -> None:
    group = ChangingGroup(maker(12, "plain"), 12, 3, indices)
    for _ in range(6):
        group.step(0)
    group.change([0, 1], 1)
    states = [worker.loop.shard.state_dict() for worker in group.workers]
    assert "later" in states[1]
    assert json.loads(json.dumps(states)) == states


@pytest.mark.parametrize("kind", OPTIONS)
def test_lost_workers_that_say_nothing_are_supposed_to_have_kept_up(kind: str) -> None:
    """In lock step that is what they did."""
    group = ChangingGroup(maker(50, kind), 50, 5, batches)
    group.step_all(2)
    group.change([1, 2, 4], 1, silent=True)
    group.step_all(1)
    group.change([0, 3], 1, silent=True)
    group.check()


def test_suppositions_are_not_always_right() -> None:
    """The twin: where a lost worker had drawn less, its samples are missing."""
    group = ChangingGroup(maker(50, "plain"), 50, 3, indices)
    group.step_all(2)
    group.step(0)
    group.change([0, 1], 0, silent=True)
    with pytest.raises(AssertionError, match="left out in epoch 0"):
        group.check()


@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [2, 3], [0, 2, 3]])
def test_lost_workers_with_unequal_shares_are_supposed_to_have_kept_up(lost: list[int]) -> None:
    widths = [3, 1, 2, 1]
    group = ChangingGroup(maker(60, "plain"), 60, 4, indices)
    group.step_all(1)
    group.share(widths)
    for rank, width in enumerate(widths):
        for _ in range(2 * width):
            group.step(rank)
    group.change([rank for rank in range(4) if rank not in lost], 1, silent=True)
    assert not any(worker.loop.shard._at.widths for worker in group.workers), "equal parts until speeds are known"
    group.check()


def test_shares_apply_to_the_rest_of_the_epoch_and_to_later_ones() -> None:
    group = ChangingGroup(maker(24, "plain"), 24, 3, indices)
    group.step_all(2)
    group.share([4, 1, 1])
    shards = [worker.loop.shard for worker in group.workers]
    assert [len(one) for one in shards] == [2 + 12, 2 + 3, 2 + 3]
    while shards[0].epoch == 0:
        group.step(0)
    assert [len(one) for one in shards] == [16, 2 + 3, 2 + 3]
    group.share([1, 1, 1])
    group.check()


def test_no_worker_is_left_without_samples() -> None:
    group = ChangingGroup(maker(7, "plain"), 7, 3, indices)
    group.share([8, 8, 1])
    assert [len(worker.loop.shard) for worker in group.workers] == [3, 2, 2]
    group.check()


def test_states_of_equal_shares_are_unchanged() -> None:
    group = ChangingGroup(maker(24, "plain"), 24, 3, indices)
    group.share([])
    group.step_all(2)
    assert [worker.loop.shard.state_dict() for worker in group.workers] == [{"epoch": 0, "drawn": 2}] * 3
    group.share([2, 1, 1])
    state = group.workers[0].loop.shard.state_dict()
    deal = {"deals": [[2, 2, 2]], "place": 0, "places": 4, "width": 2}
    assert state == {"epoch": 0, "drawn": 0, "widths": [2, 1, 1], **deal, "over": False, "before": 2}
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("noted", [True, False])
def test_what_was_drawn_for_a_step_that_broke_is_dealt_out_again(noted: bool) -> None:
    """Three steps of 4 were made together; in the fourth rank 2 is lost before it has contributed."""
    parts = [shard(60, rank, 3) for rank in range(3)]
    drawing = [iter(each) for each in parts]
    used: list[int] = []
    for step in range(4):
        for rank, each in enumerate(drawing):
            batch = [next(each) for _ in range(4)]
            used += batch if step < 3 or rank < 2 else []
        for each in parts if noted and step < 3 else ():
            each.note_trained()
    positions = [parts[0].state_dict(), parts[1].state_dict(), None]
    for rank in range(2):
        parts[rank].regroup(positions, Regrouping(rank, 2, [0, 1]))
        used += [*drawing[rank]]
    assert len({*used}) == len(used) == (60 if noted else 56)


def test_what_is_trained_on_counts_again_in_every_epoch() -> None:
    one = shard(12, 0, 3)
    list(one)
    one.note_trained()
    drawing = iter(one)
    next(drawing)
    assert one.state_dict() == {"epoch": 1, "drawn": 1, "trained": 0}
    one.note_trained()
    one.regroup([one.state_dict(), None, None], Regrouping(0, 2, [0]))
    assert one.state_dict() == {
        "epoch": 1,
        "drawn": 0,
        "deals": [[1, 1, 1]],
        "place": 0,
        "places": 2,
        "over": False,
        "before": 1,
    }


def test_a_rank_that_was_lost_in_silence_between_two_epochs() -> None:
    """Rank 0 has begun the next epoch and is lost; the others know of it since an earlier change."""
    group = ChangingGroup(maker(12, "plain"), 12, 4, indices)
    for _ in range(5):
        group.step(0)
    group.step_all(1)
    group.change([1, 2, 3], 0)
    assert [worker.loop.shard.state_dict()["later"]["1"]["deals"] for worker in group.workers] == [[[3, 0, 0, 0]]] * 3
    group.change([0, 1], 0, silent=True)
    group.check()


def test_somebody_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no worker's position is known"):
        shard().regroup([None, None, None], Regrouping(0, 2))


def test_changes_at_the_beginning_leave_no_trace() -> None:
    one = shard()
    one.regroup([{"epoch": 0, "drawn": 0}] * 3, Regrouping(1, 2, [2, 0]))
    assert one.state_dict() == {"epoch": 0, "drawn": 0}
    assert list(one) == list(shard(rank=1, size=2))


@pytest.mark.parametrize(
    "damage",
    [
        {"deals": [[9, 9]], "place": 0, "places": 2},
        {"deals": [[-1, 1]], "place": 0, "places": 2},
        {"deals": [[1, 1]], "place": 2, "places": 2},
        {"deals": [[1, 1]], "place": 0, "places": 10**12},
        {"deals": 3, "place": 0, "places": 2},
        {"deals": [[1, 1]]},
        {"deals": [[1, 1]], "place": 1, "places": 2, "width": 2},
        {"deals": [[1, 1]], "place": 0, "places": 2, "width": 0},
        {"widths": [1, 1]},
        {"widths": [1, 0, 1]},
        {"widths": 2},
        {"epoch": None},
        {"drawn": "all"},
        {"later": {"one": {}}},
    ],
)
def test_an_invalid_position_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not a position"):
        shard().load_state_dict({"epoch": 0, "drawn": 0, **damage})


def test_positions_that_contradict_each_other_are_refused() -> None:
    one = {"epoch": 0, "drawn": 0, "deals": [[1, 1]], "place": 0, "places": 2}
    other = {"epoch": 0, "drawn": 0, "deals": [[2, 1]], "place": 1, "places": 2}
    with pytest.raises(CheckpointError, match="different deals of epoch 0"):
        shard().regroup([one, other], Regrouping(0, 1, [0]))
    with pytest.raises(CheckpointError, match="epochs 0 to 5000"):
        shard().regroup([{"epoch": 0, "drawn": 0}, {"epoch": 5000, "drawn": 0}], Regrouping(0, 2, [0, 1]))
    for stayed in ([0, 0], [2], [0, 1]):
        with pytest.raises(ValueError, match="must be different ranks"):
            shard().regroup([{"epoch": 0, "drawn": 1}] * 2, Regrouping(0, 1, stayed))


def test_a_checkpoint_is_taken_up_in_the_middle_of_a_stratified_epoch() -> None:
    labels = torch.arange(30) % 3

    def made(rank: int, size: int) -> Shard:
        return Shard(range(30), rank=rank, size=size, stratify=labels)

    seen, states = [], []
    for rank, count in enumerate((3, 5, 4)):
        one = made(rank, 3)
        seen += [index for _, index in zip(range(count), one, strict=False)]
        states.append(one.state_dict())
    parts = []
    for rank in range(2):
        one = made(rank, 2)
        one.load_state_dict(taken_up(states, rank, 2))
        parts.append([*one])
    counts = [torch.bincount(labels[part], minlength=3) for part in parts]
    assert (counts[0] - counts[1]).abs().max() <= 1, "as many of a label on each"
    assert sorted([*seen, *parts[0], *parts[1]]) == list(range(30))


def test_entries_drawn_before_several_changes_of_one_epoch_add_up() -> None:
    workers = [Position.of({"epoch": 0, "drawn": 3}, total=30, rank=rank, size=3) for rank in range(3)]
    two = [position.regrouped(workers, Regrouping(rank, 2, [0, 1])) for rank in range(2)]
    assert [each.before for each in two] == [3, 3]
    two[0].drawn, two[1].drawn = 4, 2
    three = [position.regrouped(two, Regrouping(rank, 3, [0, 1])) for rank in range(3)]
    assert [each.before for each in three] == [3 + 4, 3 + 2, 0]
