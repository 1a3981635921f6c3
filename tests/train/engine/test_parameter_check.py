"""Parameter check: ranks that part are named within 100 steps, and ranks that do not are left alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import filterfalse
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.sessions import sgd
from support.virtual_workers import Worker, batch, cluster, heard, loss_of, network, notices, parameters
from torch import Tensor, nn

from gossamer.errors import AttachError, LayoutError, LoopError, MismatchError
from gossamer.events import ParametersDiffer
from gossamer.train.engine.parameter_check import EVERY_STEPS, PARTS, ParameterCheck, ParameterForm, check_verify
from gossamer.train.session.session_checkpoint import compare_parameters

RECIPES = [
    "Dense()",
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "QSGD(4)",
    "RandomK(0.2)",
    "EveryStep(delay=1)",
    "LocalSGD(200, per_site=3)",
]
WITHIN = EVERY_STEPS * PARTS


# -- parts ------------------------------------------------------------------------------------------------------------


def check_of(model: nn.Module, rank: int = 0) -> ParameterCheck:
    return ParameterCheck(model, dict(model.named_parameters()), "warn", rank)


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("build", [network, lambda: nn.Linear(2, 1), channels_last, lambda: network().bfloat16()])
def test_every_bit_of_every_parameter_is_in_the_checksum_of_some_step(build: Callable[[], nn.Module]) -> None:
    model = build()
    check = check_of(model)
    before = [check.sample(step) for step in range(WITHIN)]
    for parameter in model.parameters():
        memory = parameter.detach().as_strided((parameter.numel(),), (1,))
        for place in range(0, parameter.numel(), 11):
            old = memory[place].clone()
            memory[place] += 1
            assert [check.sample(step) for step in range(WITHIN)] != before
            memory[place] = old
    assert [check.sample(step) for step in range(WITHIN)] == before


@pytest.mark.parametrize("here", [True, False])
def test_a_checksum_for_another_thread_is_of_the_parameters_as_they_were(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied where a GPU holds them; not called there, they are not read."""
    monkeypatch.setattr(Tensor, "is_cpu", here)
    model = network()
    check = check_of(model)
    before = check.sample(0)
    asked = check.sampled(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert asked() == before != check.sample(0)


def test_most_steps_look_at_nothing() -> None:
    check = check_of(network())
    assert sum(check.sample(step) != 0 for step in range(4 * WITHIN)) == WITHIN


@pytest.mark.parametrize(
    ("values", "whose"),
    [
        ([0, 1, 0], "rank 1 are not those of the others"),
        ([0, 1, 2], "ranks 0, 1 and 2 differ"),
        ([1, 0], "ranks 0 and 1 differ"),
    ],
)
def test_the_majority_is_taken_to_be_right(values: list[float], whose: str) -> None:
    def model_of(value: float) -> nn.Module:
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, value)
        nn.init.zeros_(layer.bias)
        return layer

    checks = [check_of(model_of(value)) for value in values]
    with notices() as said:
        checks[0].compare({rank: check.text() for rank, check in enumerate(checks)}, "at step 3")
    (line,) = said
    assert f"{whose} at step 3" in line
    assert '"weight"' in line
    assert '"bias"' not in line


# -- deviations -------------------------------------------------------------------------------------------------------


def a_weight_is_set(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[2].weight[3, 3] += 1e-6
    optimizer.step()


def other_weights_are_loaded(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].load_state_dict(nn.Linear(16, 16).double().state_dict())
    optimizer.step()


def the_step_is_left_out(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    pass


def gradients_are_cleared_before_the_step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


Deviation = Callable[[nn.Sequential, torch.optim.Optimizer], None]
DEVIATIONS: list[Deviation] = [
    a_weight_is_set,
    other_weights_are_loaded,
    the_step_is_left_out,
    gradients_are_cleared_before_the_step,
]


def train(
    worker: Worker,
    recipe: str,
    deviation: Deviation | None,
    verify: str = "warn",
    steps: int = 0,
    every: int | None = None,
) -> int:
    """The steps that were made, of which rank 1 makes the fifth in its own way."""
    model = network(worker.rank)
    assert isinstance(model, nn.Sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = worker.attach(model, optimizer, recipe, verify=verify, verify_every=every)
    for step in range(steps or 6 + WITHIN):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        if deviation is not None and (step, worker.rank) == (5, 1):
            deviation(model, optimizer)
        else:
            optimizer.step()
    return session.steps


CASES = [
    (recipe, deviation)
    for recipe in RECIPES
    for deviation in DEVIATIONS
    if (recipe, deviation) != ("EveryStep(delay=1)", the_step_is_left_out)  # the next backward pass is refused
]


def every_day(case: tuple[str, Deviation]) -> bool:
    """Each recipe and each deviation once."""
    return RECIPES.index(case[0]) % len(DEVIATIONS) == DEVIATIONS.index(case[1])


@pytest.mark.parametrize(("recipe", "deviation"), [*filter(every_day, CASES), *nightly(*filterfalse(every_day, CASES))])
def test_a_rank_that_parts_is_named_within_a_hundred_steps(recipe: str, deviation: Deviation) -> None:
    with notices() as said:
        cluster(lambda worker: train(worker, recipe, deviation), 3)
    told = [line for line in said if "the parameters of rank 1 are not those of the others" in line]
    assert len(told) == 1
    assert '"2.weight"' in told[0]


@pytest.mark.parametrize(
    "recipe", ["RandomK(0.2)", *RECIPES[-2:], *nightly("Dense()", "TopK(0.1)", "PowerSGD(rank=2)", "QSGD(4)")]
)
def test_ranks_that_stay_together_are_left_alone(recipe: str) -> None:
    with notices() as said:
        cluster(lambda worker: train(worker, recipe, None), 3)
    assert [line for line in said if "rank" in line] == []


@pytest.mark.parametrize("deviation", [a_weight_is_set, the_step_is_left_out])
@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)"])
def test_it_ends_the_run_on_every_rank_where_that_is_asked_for(recipe: str, deviation: Deviation) -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(MismatchError) as refused:
            train(worker, recipe, deviation, "stop")
        return str(refused.value)

    told = cluster(work, 3)
    assert len(set(told)) == 1
    assert "rank 1" in told[0]


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "RandomK(0.2)"])
def test_a_step_that_one_rank_leaves_out_is_told_by_number_and_training_continues(recipe: str) -> None:
    with notices() as said:
        steps = cluster(lambda worker: train(worker, recipe, the_step_is_left_out, steps=12), 3)
    assert len(set(steps)) == 1
    (told,) = [line for line in said if "different numbers of steps" in line]
    assert "6 on rank 0, 5 on rank 1, 6 on rank 2" in told


def test_nothing_is_looked_at_where_that_is_asked_for() -> None:
    with notices() as said:
        cluster(lambda worker: train(worker, "Dense()", a_weight_is_set, "off"), 2)
    assert said == []


def test_verify_is_one_of_three() -> None:
    with pytest.raises(ValueError, match='"warn", "stop" or "off", got \'always\''):
        cluster(lambda worker: train(worker, "Dense()", None, "always"), 2)


def test_without_checksums_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(ParameterCheck, "sample", lambda self, step: 0)
    with pytest.raises(AssertionError):
        test_a_rank_that_parts_is_named_within_a_hundred_steps("Dense()", a_weight_is_set)


# -- what one rank sees by itself -------------------------------------------------------------------------------------


def replaced(worker: Worker, verify: str) -> None:
    model = network(worker.rank)
    assert isinstance(model, nn.Sequential)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker.attach(model, optimizer, "Dense()", verify=verify)
    for step in range(WITHIN):
        if (step, worker.rank) == (3, 1):
            model[4]._parameters["bias"] = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # no hook is called
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()


def test_a_parameter_that_was_replaced_is_named() -> None:
    with notices() as said:
        cluster(lambda worker: replaced(worker, "warn"), 2)
    (told,) = [line for line in said if "than at attach" in line]
    assert 'another "4.bias" on rank 1' in told
    with pytest.raises(LoopError, match=r'another "4\.bias" on rank 1'):
        cluster(lambda worker: replaced(worker, "stop"), 2)


@pytest.mark.parametrize("recipe", ["Dense()", "EveryStep(delay=1)"])
def test_a_step_made_twice_is_reported(recipe: str) -> None:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, recipe)
        for step in range(6):
            if (step, worker.rank) == (5, 1):
                continue  # it has made one more
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            if (step, worker.rank) == (2, 1):
                optimizer.step()

    with notices() as said:
        cluster(work, 2)
    (told,) = [line for line in said if "without a backward()" in line]
    assert "called on rank 1" in told


def ends(worker: Worker, fewer: int) -> None:
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = worker.attach(model, optimizer, "EveryStep(delay=1)")
    for step in range(6 - (fewer if worker.rank == 1 else 0)):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    session._synchronizer.end_run()


@pytest.mark.parametrize("fewer", [1, 2])
def test_delayed_gradients_of_a_rank_that_ends_early_are_missed(fewer: int) -> None:
    cluster(lambda worker: ends(worker, 0), 2)
    with pytest.raises(LoopError, match="session of rank 1 ended while others continued"):
        cluster(lambda worker: ends(worker, fewer), 2)


def saved(worker: Worker, verify: str) -> Tensor:
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = worker.attach(model, optimizer, "Dense()", verify=verify)
    if worker.rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index,operator]
    compare_parameters(session._check, session._group, session.steps)
    return model[0].weight  # type: ignore[index,return-value]


def test_a_checkpoint_of_ranks_that_have_parted_is_told_or_refused() -> None:
    with notices() as said:
        cluster(lambda worker: saved(worker, "warn"), 3)
    (told,) = said
    assert "rank 1 are not those of the others in the checkpoint of step 0" in told
    with pytest.raises(MismatchError, match="in the checkpoint of step 0"):
        cluster(lambda worker: saved(worker, "stop"), 3)


# -- all parameters at once --------------------------------------------------------------------------------------------


def parted(recipe: str, every: int | None, steps: int = 12) -> tuple[list[str], list[ParametersDiffer]]:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        assert isinstance(model, nn.Sequential)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, recipe, verify_every=every)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            if (step, worker.rank) == (7, 1):
                with torch.no_grad():
                    model[2].weight[15, 15] += 1e-6

    with heard(ParametersDiffer) as events, notices() as said:
        cluster(work, 3)
    return [line for line in said if "not those of the others" in line], events


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "EveryStep(delay=1)"])
def test_all_parameters_are_compared_every_so_many_steps(recipe: str) -> None:
    (line,), (event,) = parted(recipe, every=3)
    assert (event.tensor, event.agreed) == ("2.weight", 6)
    assert [ranks for _, ranks in event.held] == [(0, 2), (1,)]
    assert len({value for value, _ in event.held}) == 2
    assert "the same everywhere at step 6" in line
    assert f'The checksum of "2.weight" is {event.held[0][0]} on ranks 0 and 2; {event.held[1][0]} on rank 1' in line


def test_without_it_the_same_difference_is_found_later() -> None:
    """The twin."""
    assert parted("Dense()", every=None) == ([], [])


def test_ranks_that_stay_together_are_left_alone_by_whole_comparisons() -> None:
    with notices() as said:
        cluster(lambda worker: train(worker, "TopK(0.1)", None, steps=9, every=2), 3)
    assert [line for line in said if "rank" in line] == []


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "100"])
def test_verify_every_counts_steps(every: Any) -> None:
    with pytest.raises(ValueError, match="verify_every is the number of steps"):
        check_verify("warn", every)


def test_verify_every_needs_a_look() -> None:
    with pytest.raises(ValueError, match="has no effect"):
        check_verify("off", 100)


def test_ranks_compare_after_equally_many_steps() -> None:
    def work(worker: Worker) -> None:
        train(worker, "Dense()", None, steps=2, every=[None, 5][worker.rank])

    with pytest.raises(MismatchError, match="verify"):
        cluster(work, 2)


# -- Parameter form: a model that is cast after attach is refused before its ranks part; resets name what is there

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
}


def cast(worker: Worker, recipe: str, act: Callable[[nn.Module], Any], when: int) -> Tensor:
    model, optimizer, _ = worker.start(network(0), sgd, recipe)
    for step in range(when + 2):
        if step == when:
            act(model)
        inputs, _ = batch(step, worker.rank, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("kind", CASTS)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(
    "recipe", ["Dense()", "TopK(0.1)", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip() + Ring()"]
)
def test_a_cast_model_is_refused(recipe: str, when: int, kind: str) -> None:
    with pytest.raises(LayoutError, match=r'"0\.weight" was torch\.float64 on cpu at attach.*session\.close\(\) first'):
        cluster(lambda worker: cast(worker, recipe, CASTS[kind], when), 2)


def test_alone_too_since_the_same_script_would_fail_on_two() -> None:
    with pytest.raises(LayoutError, match=r"Write model\.to\("):
        cluster(lambda worker: cast(worker, "Dense()", CASTS["half"], 0), 1)


@pytest.mark.parametrize("recipe", ["LocalSGD(period=2)", "Gossip() + Ring()"])
def test_also_in_a_step_that_the_scaler_leaves_out(recipe: str) -> None:
    """No hook of the optimizer's is called then, and parameters are averaged all the same."""

    def work(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        model, optimizer, _ = worker.start(network(0), sgd, recipe, scaler=scaler)
        model.float()
        loss = model(batch(0, worker.rank, dtype=torch.float32)[0]).square().mean() * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    with pytest.raises(LayoutError, match=r'"0\.weight" was torch\.float64 on cpu at attach'):
        cluster(work, 2)


def test_without_the_check_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterForm, "pass_began", lambda self: None)
    one, other = cluster(lambda worker: cast(worker, "Dense()", CASTS["bfloat16"], 2), 2)
    assert not torch.equal(one, other)


def test_the_same_cast_changes_nothing() -> None:
    cluster(lambda worker: cast(worker, "Dense()", lambda model: model.double(), 1), 2)


@pytest.mark.parametrize("name", ["1.weigth", None, ["0.weight"]])
def test_a_reset_of_what_is_not_there_reports_how_names_are_written(name: Any) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, session = worker.start(network(0), sgd)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()
        session.reset_compressor_state(name)

    with pytest.raises(
        AttachError,
        match=r"no trainable parameters \[.*session\.reset_compressor_state\('head\.weight', 'head\.bias'\)",
    ):
        cluster(work, 1)
