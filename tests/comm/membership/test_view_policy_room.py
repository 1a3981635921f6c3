"""View rule: the places of a view when newcomers, losses, leaves and resizes come together."""

from __future__ import annotations

from support.coordinator_desk import Desk


def test_of_two_newcomers_ready_at_once_one_place_takes_the_first() -> None:
    desk = Desk(initial=3, most=3)
    desk.begin(1, 2, 3)
    desk.here(4, 5)
    desk.ready(4, 5)
    assert desk.members == [1, 2, 3]
    desk.gone(3)
    desk.wait(1)
    assert (desk.view.number, desk.members) == (2, [1, 2, 4])
    assert not desk.news[5].out, "it was never taken in, so it may come later"


def test_a_resize_keeps_the_only_member_that_has_the_parameters() -> None:
    """Members 3 and 4 come in together; only member 4 has the parameters when the member before them is lost."""
    desk = Desk(initial=2, most=4)
    desk.begin(1, 2)
    desk.here(3, 4)
    desk.silent.add(2)
    desk.broken(1)
    desk.ready(3, 4)
    desk.wait(6)
    assert (desk.members, desk.view.newcomers) == ([1, 3, 4], {3, 4})
    desk.caught_up(4)
    desk.gone(1)
    desk.resize(1)
    desk.wait(1)
    assert desk.members == [4], "member 3, which is before member 4, has no parameters"


def test_a_worker_that_leaves_is_no_loss_of_its_place() -> None:
    desk = Desk(initial=3, least=1)
    desk.begin(1, 2, 3)
    desk.leave(3)
    desk.gone(3)
    desk.wait(0.2)
    assert desk.members == [1, 2]
    desk.here(13, place=3)
    desk.ready(13)
    assert desk.members == [1, 2, 13], "let in at once"
    desk.gone(13)
    desk.wait(0.5)
    desk.here(23, place=3)
    desk.ready(23)
    assert desk.members == [1, 2], "a loss waits for a second"
