"""Advice as JSON: all of it comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planted_advice import planted_advice
from support.planted_races import Planted, PlantedField

from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import GossamerError
from gossamer.plan.advise.advice_file import MOST_POINTS, Advice, AdviceError, read_advice, write_advice
from gossamer.plan.advise.advisor import whole_advice
from gossamer.plan.advise.answer import Setting, answer
from gossamer.plan.advise.race import Race, RaceJob


@pytest.fixture(scope="module")
def advice() -> Advice:
    return planted_advice(budget=2000.0)


@pytest.fixture
def file(tmp_path: Path, advice: Advice) -> Path:
    write_advice(tmp_path / "advice.json", advice)
    return tmp_path / "advice.json"


def test_all_of_it_comes_back(file: Path, advice: Advice) -> None:
    assert read_advice(file) == advice
    assert advice.contenders[1].curve
    assert advice.contenders[1].speedup is not None


def test_long_errors_and_file_names_that_are_not_utf_8_are_written(tmp_path: Path) -> None:
    field = PlantedField({"Dense()": Planted(step_seconds=1.0), "Int8()": Planted(step_seconds=0.5)}, 0)

    def start(recipe: str, factor: float) -> RaceJob:
        if recipe != "Dense()":
            raise GossamerError("size mismatch for weight; " * 2000)
        return field.start(recipe, factor)

    race = Race(start=start, baseline="Dense()", challengers=["Int8()"], budget_seconds=60.0, now=field.now).run()
    setting = Setting(script="tr\udcffin.py", arguments=["\udcff"], workers=2, network="1mbit")
    file = tmp_path / "advice.json"
    write_advice(file, whole_advice(race, answer(race, setting), setting))
    found = read_advice(file)
    assert found.script == "tr\\udcffin.py"
    assert str(found.contenders[1].out).startswith("failed: size mismatch for weight; ")


def test_its_recipe_is_one(file: Path, advice: Advice) -> None:
    assert read_recipe(f"@{file}") == advice.recipe
    resolve(advice.recipe)


def test_curves_are_thinned(advice: Advice) -> None:
    assert max(len(each.curve) for each in advice.contenders) <= MOST_POINTS


def _set(fields: dict[str, Any], where: tuple[Any, ...], value: object) -> None:
    *before, last = where
    for name in before:
        fields = fields[name]
    fields[last] = value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("recipe",), 7),
        (("recipe",), "x" * 50_000),
        (("workers",), -1),
        (("workers",), "four"),
        (("change",), "yes"),
        (("race_seconds",), "NaN"),
        (("contenders",), {}),
        (("contenders", 0, "curve"), [[1, 2]]),
        (("contenders", 0, "curve"), [[1.0, 2.0, 3.0]] * (MOST_POINTS + 1)),
        (("contenders", 0, "steps"), 1.5),
        (("contenders", 1, "speedup"), [1.0, 2.0]),
        (("candidates", 0, "step_seconds"), -1.0),
        (("remarks",), ["x"] * 20_000),
        (("gradients",), {"share": "half"}),
    ],
)
def test_what_has_another_type_or_length_is_refused(file: Path, where: tuple[Any, ...], value: object) -> None:
    fields = json.loads(file.read_text())
    _set(fields, where, value)
    file.write_text(json.dumps(fields))
    with pytest.raises(AdviceError, match=r"advice\.json cannot be read as an advice"):
        read_advice(file)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "[" * 100_000, '{"recipe": "Int8()"}', "\x00", '{"a":' * 5000]
)
def test_an_invalid_advice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "advice.json").write_text(text)
    with pytest.raises(AdviceError):
        read_advice(tmp_path / "advice.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AdviceError, match="No such file"):
        read_advice(tmp_path / "advice.json")


def test_another_version_is_refused(tmp_path: Path, advice: Advice) -> None:
    write_advice(tmp_path / "advice.json", replace(advice, advice_version=2))
    with pytest.raises(AdviceError, match="of version 2, and this version of Gossamer reads 1"):
        read_advice(tmp_path / "advice.json")
