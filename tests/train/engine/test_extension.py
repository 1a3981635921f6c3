"""Extensions: each is called at the moments that it defines, in order, and only while it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, cluster, loss_of, network

from gossamer.train.engine.extension import Extension, Extensions, GradientUse

USE = GradientUse(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), {}, False)


class Noting(Extension):
    """Notes its name at two moments."""

    def __init__(self, name: str, notes: list[str], order: int = 0) -> None:
        self.name, self.notes, self.order = name, notes, order

    def pass_began(self) -> None:
        self.notes.append(f"{self.name} began")

    def after_step(self) -> None:
        self.notes.append(f"{self.name} stepped")


def acted(extensions: Extensions) -> None:
    for begin in extensions.pass_began:
        begin()
    for prepare in extensions.before_exchange:
        prepare(0)
    for act in extensions.before_step:
        act(USE)
    for tell in extensions.after_step:
        tell()


def test_extensions_act_in_ascending_order_whenever_they_were_added() -> None:
    notes: list[str] = []
    extensions = Extensions()
    for name, order in (("c", 3), ("a", 1), ("b", 2)):
        extensions.add(Noting(name, notes, order))
    acted(extensions)
    assert notes == ["a began", "b began", "c began", "a stepped", "b stepped", "c stepped"]


def test_a_moment_that_an_extension_does_not_define_is_not_called() -> None:
    extensions = Extensions()
    extensions.add(Noting("a", []))
    assert (len(extensions.pass_began), len(extensions.after_step)) == (1, 1)
    assert extensions.before_exchange == extensions.before_step == ()


def test_an_extension_that_is_added_twice_acts_once_and_not_after_it_was_discarded() -> None:
    notes: list[str] = []
    extensions, extension = Extensions(), Noting("a", notes)
    extensions.add(extension)
    extensions.add(extension)
    acted(extensions)
    extensions.discard(extension)
    extensions.discard(extension)
    acted(extensions)
    assert notes == ["a began", "a stepped"]


def test_an_extension_may_discard_itself_while_others_act() -> None:
    notes: list[str] = []
    extensions = Extensions()

    class Once(Noting):
        def pass_began(self) -> None:
            super().pass_began()
            extensions.discard(self)

    extensions.add(Once("once", notes))
    extensions.add(Noting("always", notes))
    for _ in range(2):
        for begin in extensions.pass_began:
            begin()
    assert notes == ["once began", "always began", "always began"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"ParameterForm", "ParameterCheck"}),
        ({"clip_norm": 1.0}, {"ParameterForm", "ParameterCheck", "GradientClip"}),
        ({"verify": "off"}, {"ParameterForm"}),
    ],
)
def test_a_session_registers_the_features_that_are_on_and_no_other(options: dict[str, Any], expected: set[str]) -> None:
    def registered(worker: Worker) -> set[str]:
        model = network(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = worker.attach(model, optimizer, "Dense()", **options)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        return {type(each).__name__ for each in session._extensions._on}

    assert cluster(registered, 2) == [expected] * 2
