"""The rule in virtual time: networks are planted, and estimated by another program than the rule's own pricing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual_ladder import COMPUTING, RUNGS, WORKERS, VirtualJob, ladder, step_on, work_of

from gossamer.train.auto import loss_guard
from gossamer.train.auto.decision import RungChange, change_cost, decide, look_steps
from gossamer.train.auto.measurement import Measurement, StepSeconds
from gossamer.train.auto.network_fit import FittedLine
from gossamer.train.auto.pricing import RungPrice
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import RungCost

ALL = range(len(RUNGS))
DENSE, INT8, FLOAT4, TOPK, DILOCO = 0, 2, 3, 5, 7
HASTY = Rule(change_steps=0.0, change_means=0.0)  # the twin to which changes cost nothing


def always(text):
    return lambda second: text


def phases(second):
    """100 -> 10 -> 100 mbit/s."""
    return "10mbit,1ms" if 300 <= second % 900 < 600 else "100mbit,1ms"


def flapping(second, half_period=30.0):
    return ("1gbit,1ms", "50mbit,1ms")[int(second / half_period) % 2]


# -- planted truths ----------------------------------------------------------------------------------------------------


def test_a_fast_network_keeps_dense() -> None:
    job = VirtualJob(always("10gbit,0.1ms")).run(seconds=300)
    assert job.state.rung == DENSE
    assert not job.changes


@pytest.mark.parametrize("network", ["300mbit,1ms", "100mbit,1ms", "100mbit,20ms", "1gbit,200ms"])
@pytest.mark.parametrize("probes", [True, False])
def test_a_slow_network_gets_a_rung_within_15_percent_of_the_best(network: str, probes: bool) -> None:
    job = VirtualJob(always(network), probes=probes).run(seconds=600)
    assert job.state.rung != DENSE
    best = max(work_of(rung, network, 1.0) for rung in ALL)
    assert work_of(job.state.rung, network, 1.0) > best / 1.15
    assert job.work > work_of(DENSE, network, job.seconds)


def test_where_messages_are_slow_rounds_become_few() -> None:
    """Half a second for each message: a quarter of the bytes saves little of it."""
    job = VirtualJob(always("10gbit,1s")).run(seconds=1000)
    assert job.state.rung == DILOCO
    assert step_on(INT8, "10gbit,1s").step_seconds > 0.7 * step_on(DENSE, "10gbit,1s").step_seconds


def first_choice(network: str, *, probes: bool) -> int:
    """After the first merge of local steps, which is all that is known of the network then."""
    period = ladder()[DILOCO].period
    job = VirtualJob(always(network), probes=probes, state=RuleState(rung=DILOCO, next_look=period))
    while job.step < period:
        job.make_step()
    return job.state.rung


def test_the_first_look_tells_slow_messages_from_slow_bytes() -> None:
    """The twin that has not timed a message takes every second of the merge for bytes, which other rungs would save."""
    seeing, blind = (first_choice("1gbit,200ms", probes=probes) for probes in (True, False))
    assert work_of(blind, "1gbit,200ms", 1.0) < 0.5 * work_of(seeing, "1gbit,200ms", 1.0)
    assert seeing == DILOCO


def test_the_network_is_worth_nothing_to_the_mutant_that_sees_no_messages() -> None:
    """Without latency in the prices the same line looks as if bytes were slow."""
    costs = [replace(cost, trips=0.0) for cost in ladder()]
    blind = VirtualJob(always("1gbit,200ms"), costs=costs).run(seconds=100)
    seeing = VirtualJob(always("1gbit,200ms")).run(seconds=100)
    assert len(blind.changes) > len(seeing.changes) or blind.state.rung != seeing.state.rung


# -- a network that changes --------------------------------------------------------------------------------------------


def test_the_rung_follows_the_network() -> None:
    job = VirtualJob(phases).run(seconds=900)
    done = [0.0, *(max(work for second, _, work in job.history if second <= end) for end in (300, 600, 900))]
    for phase, network in enumerate(("100mbit,1ms", "10mbit,1ms", "100mbit,1ms")):
        best = max(work_of(rung, network, 300.0) for rung in ALL)
        assert done[phase + 1] - done[phase] > best / 1.15, f"in phase {phase}"
    rungs = [max(rung for second, rung, _ in job.history if begin < second < begin + 300) for begin in (150, 450, 750)]
    assert len({*rungs}) > 1 or job.changes


def test_the_rung_goes_up_and_comes_back_and_beats_every_fixed_one() -> None:
    """A network on which no rung is good in both phases."""

    def network(second: float) -> str:
        return "20mbit,1ms" if 600 <= second < 1200 else "10gbit,0.1ms"

    job = VirtualJob(network).run(seconds=1800)
    fixed = [work_of(rung, "10gbit,0.1ms", 1200.0) + work_of(rung, "20mbit,1ms", 600.0) for rung in ALL]
    assert job.work > max(fixed)
    by_phase = [
        {rung for second, rung, _ in job.history if begin + 300 < second < begin + 600} for begin in (0, 600, 1200)
    ]
    assert by_phase[0] == {DENSE}
    assert by_phase[2] <= {DENSE, 1, INT8}
    assert min(by_phase[1]) > FLOAT4


def test_the_mutant_that_never_changes_fails_that() -> None:
    stiff = VirtualJob(phases, costs=ladder()[:1]).run(seconds=900)
    assert stiff.work < work_of(DENSE, "100mbit,1ms", 900.0)


def most_changes(rule: Rule, seconds: float) -> int:
    """The first, one of each cost that doubles, and then one in as many seconds as the highest cost is of the shortest
    step, since no second loses more than itself."""
    return 2 + rule.most_doublings + int(seconds / (rule.change_steps * COMPUTING * 2**rule.most_doublings))


def test_a_flapping_line_makes_few_changes() -> None:
    calm, hasty = VirtualJob(flapping).run(seconds=3600), VirtualJob(flapping, rule=HASTY).run(seconds=600)
    assert len(calm.changes) <= most_changes(Rule(), calm.seconds)
    assert len(calm.changes) <= 20  # an hour
    assert 6 * len(hasty.changes) > 5 * max(len(calm.changes), 1)


@settings(max_examples=6)
@given(
    st.lists(st.sampled_from(["10gbit,0.1ms", "1gbit,1ms", "50mbit,1ms", "10mbit,1ms"]), min_size=2, max_size=8),
    st.integers(3, 120),
)
def test_no_line_makes_more_changes_than_their_cost_allows(networks: list[str], seconds: int) -> None:
    job = VirtualJob(lambda second: networks[int(second / seconds) % len(networks)]).run(seconds=600)
    assert len(job.changes) <= most_changes(Rule(), job.seconds)


def test_what_a_rung_takes_next_to_its_price_is_learned_when_it_is_tried() -> None:
    """From PowerSGD(), which sends little, the line alone says that Float4() would be as fast: it takes twice as long.
    The twin that does not remember what it left goes there and back."""
    network, costs = "50mbit,20ms", ladder()[: TOPK + 1]  # without local steps, which would be better than all of them
    learns = VirtualJob(always(network), costs=costs).run(seconds=1000)
    forgets = VirtualJob(always(network), costs=costs)
    while forgets.seconds < 1000:
        forgets.make_step()
        forgets.state = replace(forgets.state, equation=None, factors={})
    assert learns.work > 0.95 * max(work_of(rung, network, learns.seconds) for rung in range(len(costs)))
    assert len(learns.changes) < len(forgets.changes)


# -- stragglers --------------------------------------------------------------------------------------------------------


def test_a_straggler_is_no_slow_network() -> None:
    job = VirtualJob(always("10gbit,0.1ms"), slowed=0.6).run(seconds=600)
    assert not job.changes


def test_the_mutant_that_believes_who_waited_most_compresses_for_a_straggler() -> None:
    waited_most = Rule(believed=partial(max, key=lambda rank: rank.waiting))
    job = VirtualJob(always("10gbit,0.1ms"), slowed=0.6, rule=waited_most).run(seconds=600)
    assert job.changes


def test_a_straggler_on_a_slow_network_hides_nothing() -> None:
    job = VirtualJob(always("100mbit,1ms"), slowed=0.3).run(seconds=600)
    assert job.state.rung > INT8


# -- what the loss bears -----------------------------------------------------------------------------------------------


def told_along(norm, residual=0.0, learning_rate=0.1):
    def told(step, measurements):
        return [
            replace(each, gradient_norm=norm(step), residual_norm=residual, learning_rate=float(learning_rate(step)))
            for each in measurements
        ]

    return told


def steady(step):
    return 1.0


LONG_STEADY = tuple((step, 1.0) for step in range(0, 120, 10))
LONG_FALLING = tuple((step, 0.97**step) for step in range(0, 120, 10))


def chosen(norms=LONG_STEADY, rate_before=0.1, period=1) -> int:
    """Between Dense() and a rung of half the seconds that needs 1.5 times as many steps; counted twice, 2 times."""
    dense = RungCost(name="dense", steps=1.0, period=1, bytes_sent=1e6, trips=0.0, codec_seconds=0.0)
    lossy = RungCost(name="lossy", steps=1.5, period=period, bytes_sent=1e5, trips=0.0, codec_seconds=0.0)
    told = Measurement(
        steps=[StepSeconds(1.0, 0.6, 0.6, 0.0)] * 20,
        covers_steps=norms[-1][0] + 10,
        bytes_sent=1e6,
        learning_rate=0.1,
        gradient_norm=norms[-1][1],
    )
    state = RuleState(norms=norms, learning_rate=rate_before)
    state, _ = decide(Rule(), [dense, lossy], state, [told] * WORKERS, norms[-1][0] + 10)
    return state.rung


def falling(step):
    return 0.9**step


def test_what_a_rung_loses_counts_once_in_a_steady_phase() -> None:
    assert chosen() == 1


def test_in_warm_up_what_a_rung_loses_counts_twice() -> None:
    assert chosen(rate_before=0.09) == 0


def test_while_gradients_move_what_a_rung_loses_counts_twice() -> None:
    assert chosen(LONG_FALLING) == 0


def test_local_steps_lose_no_more_at_the_beginning_than_later() -> None:
    assert chosen(LONG_FALLING, period=20) == chosen(rate_before=0.09, period=20) == 1


@pytest.mark.parametrize("critical", [{"rate_before": 0.09}, {"norms": LONG_FALLING}])
def test_the_mutant_without_caution_sees_no_difference(monkeypatch, critical) -> None:
    monkeypatch.setattr(loss_guard, "CAUTION", 1.0)
    assert chosen(**critical) == chosen()


def test_many_times_as_fast_is_taken_in_a_critical_phase_too() -> None:
    job = VirtualJob(always("10mbit,1ms"), told=told_along(falling, learning_rate=steady))
    while job.step < 20:
        job.make_step()
    assert job.state.rung > FLOAT4


def test_where_too_much_waits_a_weaker_rung_takes_over() -> None:
    job = VirtualJob(always("10mbit,1ms"), costs=ladder()[: TOPK + 1])
    while job.step < 300:
        job.make_step()
    strong = job.state.rung
    job.told = told_along(steady, residual=11.0, learning_rate=steady)
    before = job.step
    while job.state.rung == strong and job.step < before + 50:
        job.make_step()
    assert job.state.rung < strong
    assert "residuals are too large" in job.changes[-1][2].reason


# -- alike on all ranks ------------------------------------------------------------------------------------------------

some_seconds = st.floats(1e-4, 10.0)
some_measurement = st.builds(
    Measurement,
    steps=st.lists(st.builds(StepSeconds, some_seconds, some_seconds, some_seconds, some_seconds), max_size=25),
    covers_steps=st.integers(0, 100),
    bytes_sent=st.floats(0, 1e9),
    look_seconds=st.none() | some_seconds,
    exchange_seconds=st.none() | some_seconds,
    learning_rate=st.none() | st.floats(0, 1),
    gradient_norm=st.none() | st.floats(0, 1e3),
    residual_norm=st.none() | st.floats(0, 1e3),
)


@settings(max_examples=40)
@given(st.lists(st.lists(some_measurement, min_size=4, max_size=4), min_size=1, max_size=12))
def test_all_ranks_decide_alike_and_a_resumed_run_repeats_it(looks: list[list[Measurement]]) -> None:
    """Each rank has the others' numbers as text; one of the ranks resumes before every look."""
    state = resumed = RuleState()
    for look in looks:
        texts, step = [each.to_text() for each in look], state.next_look
        heard = [Measurement.from_text(text) for text in texts]
        state, change = decide(Rule(), ladder(), state, heard, step)
        taken_up = RuleState.from_json(json.loads(json.dumps(resumed.to_json())))
        resumed, again = decide(Rule(), ladder(), taken_up, [Measurement.from_text(text) for text in texts], step)
        assert (state, change) == (resumed, again)
        assert state.next_look > step


def test_the_mutant_that_takes_its_own_numbers_for_the_others_decides_otherwise() -> None:
    mine, other = (
        Measurement(
            steps=[StepSeconds(1.0, waits, waits, 0.0)] * 20, covers_steps=20, bytes_sent=ladder()[0].bytes_sent
        )
        for waits in (0.8, 0.0)
    )
    decided = [decide(Rule(), ladder(), RuleState(), [each] * 4, 100)[1] for each in (mine, other)]
    assert decided[0] is not None
    assert decided[1] is None


def test_ranks_without_data_have_no_say_and_nobody_without_steps_changes_anything() -> None:
    state, change = decide(Rule(), ladder(), RuleState(), [Measurement()] * 4, 3)
    assert change is None
    assert state.next_look > 3


def test_looks_cost_half_a_percent_at_most() -> None:
    dear = [Measurement(look_seconds=0.4)]
    steps = look_steps(Rule(), ladder()[0], 0.5, dear)
    assert 0.005 * steps * 0.5 >= 0.4
    assert look_steps(Rule(), ladder()[0], 0.5, []) == 2  # 1 s
    assert look_steps(Rule(), ladder()[0], 30.0, []) == 2
    assert look_steps(Rule(), ladder()[DILOCO], 0.5, []) == 20  # a whole period


def test_no_measurement_is_larger_than_a_kilobyte() -> None:
    full = Measurement(
        steps=[StepSeconds(*[1.2345678e-5] * 4)] * 100,
        covers_steps=100_000,
        bytes_sent=123456789.123,
        look_seconds=1 / 3,
        exchange_seconds=1 / 3,
        learning_rate=1 / 3,
        gradient_norm=1 / 3,
        residual_norm=1 / 3,
    )
    assert len(full.to_text()) < 1200


# -- The formulas of the rule, computed by hand for two rungs: Dense() takes 1 s a step, a compressed rung 0.46 s

DENSE_BYTES = RungCost(name="dense", steps=1.0, period=1, bytes_sent=1e6, trips=0.0, codec_seconds=0.0)
LOSSY = replace(DENSE_BYTES, name="lossy", steps=1.5, bytes_sent=1e5)
LINE = FittedLine(seconds_per_byte=0.6e-6, trip_seconds=0.0)
STEPS = 20
SAVED = 1 - 1.5 * 0.46  # share of the seconds to a loss: the compressed step computes 0.4 s and sends for 0.06 s
RULE = Rule()


def look(
    state: RuleState, lossy: RungCost = LOSSY, step: int = 100, **told: float
) -> tuple[RuleState, RungChange | None]:
    """One look, after 20 steps in which every rank computed 0.4 s and waited 0.6 s for the bytes of its rung."""
    seconds = StepSeconds(1.0, 0.6, 0.6, 0.0) if state.rung == 0 else StepSeconds(0.46, 0.06, 0.06, 0.0)
    sent = (DENSE_BYTES, lossy)[state.rung].bytes_sent
    measured = Measurement(steps=[seconds] * STEPS, covers_steps=STEPS, bytes_sent=sent, **told)
    return decide(RULE, [DENSE_BYTES, lossy], state, [measured] * 2, step)


def later(**fields: object) -> RuleState:
    """The state at a look that is not the first one, at which a change is still too expensive."""
    return replace(RuleState(line=LINE, changed_at=99, doublings=RULE.most_doublings), **fields)


def test_staying_loses_the_saved_share_of_all_seconds_since_the_last_look() -> None:
    state, change = look(later())
    assert change is None
    assert state.lost == pytest.approx((0.0, STEPS * 1.0 * SAVED))
    again, _ = look(replace(state, equation=None))
    assert again.lost == pytest.approx((0.0, 2 * STEPS * 1.0 * SAVED))


def test_a_weaker_rung_counts_as_a_tenth_cheaper() -> None:
    state, _ = look(later(rung=1))
    share = 1 - 1.0 / (1.5 * 0.46) + RULE.close  # below 0: Dense() is slower
    assert share < 0
    assert state.lost == pytest.approx((0.0, 0.0))
    equal, _ = look(later(rung=1), replace(LOSSY, steps=1.0 / 0.46))
    assert equal.lost == pytest.approx((STEPS * 0.46 * RULE.close, 0.0))


@pytest.mark.parametrize(("saved", "changes"), [(0.10, False), (0.14, False), (0.16, True), (0.3, True)])
def test_a_stronger_rung_is_taken_if_it_saves_more_than_its_worth(saved: float, changes: bool) -> None:
    _, change = look(RuleState(), replace(LOSSY, steps=(1 - saved) / 0.46))
    assert (change is not None) == changes


@pytest.mark.parametrize("doublings", [0, 1, 3])
def test_an_overgrown_rung_stays_closed_longer_after_each_change(doublings: int) -> None:
    state, change = look(later(rung=1, doublings=doublings), gradient_norm=1.0, residual_norm=11.0)
    assert change is not None
    assert change.after == 0
    assert (state.closed_from, state.closed_until) == (1, 100 + 1000 * 2**doublings)


PRICES = [
    RungPrice(name="dense", step_seconds=1.0, loss_seconds=1.0),
    RungPrice(name="lossy", step_seconds=0.46, loss_seconds=0.69),
]


@pytest.mark.parametrize("doublings", [0, 2, 6])
def test_a_change_costs_five_steps_of_the_target_doubled_by_each_change_before(doublings: int) -> None:
    state = RuleState(changed_at=50, doublings=doublings)
    assert change_cost(RULE, state, DENSE_BYTES, PRICES, 1, 60) == pytest.approx(5 * 0.46 * 2**doublings)


def test_leaving_local_steps_costs_a_dense_mean_in_addition() -> None:
    local = replace(LOSSY, period=20)
    assert change_cost(RULE, RuleState(), local, PRICES, 0, 60) == pytest.approx(5 * 1.0 + 1.0)


@pytest.mark.parametrize(("steps", "cost"), [(128 * 5 * 4, 4.0), (128 * 5 * 4 + 1, 1.0)])
def test_a_long_rest_makes_the_cost_single_again(steps: int, cost: float) -> None:
    state = RuleState(changed_at=50, doublings=2)
    assert change_cost(RULE, state, DENSE_BYTES, PRICES, 1, 50 + steps) == pytest.approx(5 * 0.46 * cost)
