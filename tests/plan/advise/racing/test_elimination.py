"""Who goes out before a halving: only who is dear, behind, and could be judged."""

from gossamer.plan.advise.racing.contender import Contender
from gossamer.plan.advise.racing.elimination import FIRST_STEPS, dear_and_behind, kept_of


def field(*paces: float, steps: int = FIRST_STEPS):
    """The best first, and what a virtual second of each takes."""
    ranked = [Contender(recipe=f"R{place}", steps=steps) for place in range(len(paces))]
    return ranked, dict(zip((each.recipe for each in ranked), paces, strict=True))


def leaves(*paces: float, steps: int = FIRST_STEPS) -> str | None:
    ranked, by_name = field(*paces, steps=steps)
    found = dear_and_behind(ranked, lambda each: by_name[each.recipe])
    return None if found is None else found.recipe


def test_the_dearest_of_those_behind_goes() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 10.0, 20.0) == "R5"


def test_who_is_dear_and_ahead_stays() -> None:
    assert leaves(20.0, 10.0, 1.0, 1.0, 1.0, 1.0) is None


def test_who_takes_an_even_part_waits_for_the_halving() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 2.0, 2.0) is None


def test_who_could_not_be_judged_stays() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 1.0, 20.0, steps=FIRST_STEPS - 1) is None


def test_finalists_stay_whatever_they_cost() -> None:
    assert leaves(1.0, 100.0) is None
    assert leaves() is None
    assert [kept_of(count) for count in (16, 9, 4, 2, 1)] == [8, 5, 2, 2, 2]
