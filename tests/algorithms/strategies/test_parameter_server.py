"""The term: what it says, what it refuses, and the line that each refusal asks for."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.algorithms.compressors import Compressor, Feedback, RandomK, TernGrad, TopK
from gossamer.algorithms.compressors.distortion import relative_error
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.parameter_server import ParameterServer
from gossamer.errors import RecipeError

TEXTS = [
    "ParameterServer()",
    "ParameterServer(mode='sync', backup=1)",
    "ParameterServer(mode='stale', staleness=2, shards=3)",
    "ParameterServer(push=OneBit(), pull=Int8(), damping=True)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_its_text_gives_it_back(text: str) -> None:
    (term,) = parse(text).terms
    assert repr(term) == text
    assert resolve(text).strategy == term
    assert resolve(repr(resolve(text))) == resolve(text)


def test_the_mode_comes_first() -> None:
    assert parse("ParameterServer('stale')").terms == (ParameterServer("stale"),)


def test_how_far_workers_run_ahead() -> None:
    terms = [
        ParameterServer("sync"),
        ParameterServer("stale"),
        ParameterServer("stale", staleness=0),
        ParameterServer(),
    ]
    assert [term.rounds_ahead for term in terms] == [0, 4, 0, 0]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"mode": "asynchronous"}, r'Write ParameterServer\(mode="async"\)'),
        ({"staleness": 3}, r'Write ParameterServer\(mode="stale", staleness=3\)'),
        ({"mode": "sync", "staleness": 0}, r'mode="stale", staleness=0'),
        ({"mode": "stale", "staleness": -1}, "0 or more"),
        ({"backup": 1}, r'Write ParameterServer\(mode="sync", backup=1\)'),
        ({"mode": "stale", "backup": 2}, r'mode="sync", backup=2'),
        ({"mode": "sync", "backup": -1}, "0 or more"),
        ({"shards": 0}, "1 or more"),
        ({"mode": "sync", "damping": True}, 'write mode="async"'),
        ({"pull": Feedback(TopK(density=0.1))}, r"Write pull=TopK\(density=0.1\)"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        ParameterServer(**given)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ParameterServer() + DGC(0.001)", r"ParameterServer\(push=Route\(DGC"),
        ("ParameterServer(push=OneBitAdam())", "momentum"),
        ("ParameterServer(push=AdamUpdate())", "momentum"),
        ("ParameterServer(pull=TernGrad())", r"pull=Int8\(\)"),
        ("ParameterServer(pull=RandomK(0.1, feedback=False))", r"relative error of [0-9.]+"),
        ("ParameterServer(pull=QSGD(levels=1))", "grow without limit"),
        ("ParameterServer(staleness=1)", "stale"),
    ],
)
def test_what_does_not_go_with_it(text: str, line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        resolve(text)


def test_compressors_that_lose_less_than_they_are_given() -> None:
    fine: list[Compressor] = [Int8(), QSGD(levels=127), TopK(density=0.01), RandomK(density=0.01)]
    assert all(0 <= relative_error(each, "lost") <= 1.001 for each in fine)
    assert abs(relative_error(RandomK(density=0.25, feedback=False), "lost") - 3) < 0.5
    assert relative_error(TernGrad(), "lost") > 1.2
