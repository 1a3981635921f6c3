"""Prices: what is measured comes out again, and what is hidden stays hidden."""

import pytest
from support.virtual_ladder import COMPUTING, RUNGS, ladder, step_on

from gossamer.train.auto.network_fit import FittedLine, StepWindow
from gossamer.train.auto.pricing import hidden_seconds, price
from gossamer.train.auto.rung_cost import RungCost

ONE_BUCKET = RungCost(name="a", steps=1.0, period=1, bytes_sent=1e6, trips=2.0, codec_seconds=0.01)
FEWER = RungCost(name="b", steps=1.2, period=1, bytes_sent=1e5, trips=2.0, codec_seconds=0.02)
RARE = RungCost(name="c", steps=1.7, period=20, bytes_sent=5e3, trips=0.1, codec_seconds=0.001)
LINE = FittedLine(seconds_per_byte=1e-7, trip_seconds=0.01)
WINDOW = StepWindow(step=0.33, computing=0.2, waiting=0.13, wire=0.12, codec=0.01, bytes_sent=1e6, steps=20)


def test_a_single_bucket_hides_nothing() -> None:
    assert hidden_seconds(WINDOW, ONE_BUCKET) == 0.0
    here, fewer, rare = price([ONE_BUCKET, FEWER, RARE], ONE_BUCKET, WINDOW, LINE, {})
    assert here.step_seconds == pytest.approx(WINDOW.step)
    assert fewer.step_seconds == pytest.approx(0.2 + 0.02 + 0.01 + 0.02)
    assert rare.step_seconds == pytest.approx(0.2 + 0.001 + 0.0005 + 0.001)
    assert [each.loss_seconds / each.step_seconds for each in (here, fewer, rare)] == pytest.approx([1.0, 1.2, 1.7])


def test_what_was_measured_of_a_codec_counts_instead_of_what_was_thought() -> None:
    _, fewer = price([ONE_BUCKET, FEWER], ONE_BUCKET, WINDOW, LINE, {"b": 1.0})
    assert fewer.step_seconds == pytest.approx(0.2 + 1.0 + 0.01 + 0.02)


@pytest.mark.parametrize("network", ["1gbit,1ms", "300mbit,1ms", "100mbit,20ms", "30mbit,5ms", "1gbit,100ms"])
@pytest.mark.parametrize("rung", range(len(RUNGS)))
def test_from_any_rung_its_own_price_is_its_step(rung: int, network: str) -> None:
    """Fitted to the simulator's step, the price of the rung in force is that step."""
    truth, cost = step_on(rung, network), ladder()[rung]
    window = StepWindow(
        step=truth.step_seconds,
        computing=COMPUTING,
        waiting=truth.waiting_seconds,
        wire=truth.wire_seconds,
        codec=truth.codec_seconds,
        bytes_sent=cost.bytes_sent,
        steps=20,
    )
    line = FittedLine(seconds_per_byte=truth.wire_seconds / cost.bytes_sent, trip_seconds=0.0)
    (own,) = price([cost], cost, window, line, {cost.name: truth.codec_seconds})
    assert own.step_seconds == pytest.approx(truth.step_seconds, rel=0.15)


@pytest.mark.parametrize("network", ["300mbit,1ms", "100mbit,1ms", "30mbit,1ms"])
def test_from_dense_all_others_are_estimated(network: str) -> None:
    truth, cost = step_on(0, network), ladder()[0]
    window = StepWindow(
        step=truth.step_seconds,
        computing=COMPUTING,
        waiting=truth.waiting_seconds,
        wire=truth.wire_seconds,
        codec=truth.codec_seconds,
        bytes_sent=cost.bytes_sent,
        steps=20,
    )
    line = FittedLine(seconds_per_byte=truth.wire_seconds / cost.bytes_sent, trip_seconds=0.0)
    estimated = price(ladder(), cost, window, line, {})
    for rung, each in enumerate(estimated):
        assert each.step_seconds == pytest.approx(step_on(rung, network).step_seconds, rel=0.3)
