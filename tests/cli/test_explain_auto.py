from click.testing import CliRunner

from gossamer.cli.explain import explain
from gossamer.train.auto.ladder import RUNGS


def said(*arguments: str) -> str:
    result = CliRunner().invoke(explain, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_recipe_that_is_chosen_shows_its_ladder_and_what_it_begins_with() -> None:
    shown = said("auto", "--parameters", "100000")
    assert all(rung.name in shown for rung in RUNGS)
    _, _, first = shown.partition("It begins with:\n")
    assert first == said(RUNGS[-1].name, "--parameters", "100000")
    _, _, first = said("Auto(local_steps=False)", "--parameters", "100000").partition("It begins with:\n")
    assert first == said("Dense()", "--parameters", "100000")


def test_a_recipe_that_stays_shows_none() -> None:
    assert "chosen" not in said("Int8()", "--parameters", "100000")
    assert "one of these at a time" not in said("Int8()", "--parameters", "100000")


def test_bounds_are_shown() -> None:
    assert "never" in said("Auto(most_steps=1.1)", "--parameters", "100000")
