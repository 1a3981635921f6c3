"""Sessions of arrays: the bits of gossamer.attach from the same gradients, for every kind of recipe and of array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.virtual_workers import Worker, agree, cluster, heard, loss_of, network, parameters
from torch import Tensor, nn

from gossamer import engine, events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError, CheckpointError, LayoutError, LoopError, MismatchError, NonFiniteError

STEPS, LR = 7, 0.1
RECIPES = [
    "Dense()",
    "TopK(0.1)",
    "PowerSGD(rank=2)",
    "Float4()",
    "Int8()",
    "SharedMask(density=0.1)",
    "Warmup(TopK(0.05), steps=3)",
    "EveryStep(accumulate=2)",
    "EveryStep(delay=1) + Float4()",
    "LocalSGD(period=3)",
    "LocalSGD(period=2) + Float4()",
    "PostLocalSGD(period=2, start=3)",
    "DiLoCo(period=3) + Int8()",
    "DiLoCo(period=4, fragments=2, delay=1)",
    "DelayedAveraging(period=3, delay=1)",
    "Gossip() + Ring()",
    "Gossip('push-sum') + Exponential()",
    "Gossip() + Int8()",
]


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def attached(worker: Worker, recipe: str, steps: int = STEPS) -> Tensor:
    """By gossamer.attach and plain SGD."""
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    worker.attach(model, optimizer, resolve(recipe, worker.world))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
    return parameters(model)


def descend(array: Any, gradient: Any) -> Tensor:
    """As torch's SGD rounds it."""
    return torch.as_tensor(array).add(torch.as_tensor(gradient), alpha=-LR)


class Loop:
    """A loop of arrays: gradients of a model that belongs to the loop alone, and plain SGD."""

    def __init__(self, worker: Worker, recipe: str, kind: Callable[[Tensor], Any] = lambda tensor: tensor) -> None:
        self.rank, self.kind, self.model = worker.rank, kind, network(worker.rank)
        arrays = {name: kind(tensor) for name, tensor in named(self.model).items()}
        self.session = worker.arrays(arrays, recipe)
        self.arrays = self.session.parameters

    def gradients(self, step: int) -> dict[str, Any]:
        self.model.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.as_tensor(np.asarray(self.arrays[name])))
        loss_of(self.model, step, self.rank).backward()
        return {name: self.kind(p.grad.clone()) for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self, step: int) -> None:
        mean = self.session.give(self.gradients(step))
        if mean is not None:
            self.arrays = {name: self.kind(descend(array, mean[name])) for name, array in self.arrays.items()}
        self.arrays = self.session.took_step(self.arrays)

    @property
    def flat(self) -> Tensor:
        return torch.cat([torch.as_tensor(np.asarray(array)).flatten() for array in self.arrays.values()]).clone()


def by_arrays(worker: Worker, recipe: str, kind: Callable[[Tensor], Any] = lambda tensor: tensor) -> Tensor:
    loop = Loop(worker, recipe, kind)
    for step in range(STEPS):
        loop.step(step)
    return loop.flat


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_array_session_has_the_bits_of_attach(recipe: str) -> None:
    expected, found = cluster(lambda w: attached(w, recipe), 3), cluster(lambda w: by_arrays(w, recipe), 3)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_numpy_arrays_have_the_bits_of_torch_tensors() -> None:
    kinds: list[Callable[[Tensor], Any]] = [lambda tensor: tensor, lambda tensor: tensor.numpy()]
    tensors, arrays = (agree(cluster(lambda w, k=kind: by_arrays(w, "TopK(0.1)", k), 2)) for kind in kinds)
    assert torch.equal(tensors, arrays)


class Foreign:
    """An array of another framework: it can be exported, and its namespace imports."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def from_dlpack(cls, exported: Any) -> Foreign:
        return cls(torch.utils.dlpack.from_dlpack(exported))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign


def test_arrays_come_back_as_the_kind_that_was_given() -> None:
    ones = torch.ones(3)
    with engine.Session({"a": ones.numpy(), "b": ones, "c": Foreign(ones.clone())}, "Dense()", alone()) as session:
        gradients = {"a": np.full(3, 2, np.float32), "b": ones * 3, "c": Foreign(ones * 4)}
        mean = session.give(gradients)
        assert mean is not None
        assert isinstance(mean["a"], np.ndarray)
        assert isinstance(mean["b"], Tensor)
        assert isinstance(mean["c"], Foreign)
        assert mean["c"]._tensor.tolist() == [4.0] * 3
        stepped = session.took_step(mean)
        assert all(stepped[name] is mean[name] for name in mean)  # nothing was averaged, and nothing is copied


def test_read_only_arrays_are_served_and_not_written() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    with engine.Session({"w": array}, "Dense()", alone()) as session:
        mean = session.give({"w": array})
        session.took_step({"w": array - 0.5 * mean["w"]})  # type: ignore[index]
        assert session.parameters["w"].tolist() == [0.5] * 3
    assert array.tolist() == [1.0] * 3


def test_numbers_that_numpy_makes_of_arrays_without_dimensions_are_arrays() -> None:
    with engine.Session({"w": np.zeros(())}, "Dense()", alone()) as session:
        parameters = session.parameters
        mean = session.give({"w": np.ones(3).sum()})
        assert mean is not None
        number = parameters["w"] - 0.5 * mean["w"]
        assert isinstance(number, np.float64)
        assert session.took_step({"w": number})["w"] == session.parameters["w"] == -1.5
        kept, more = session.end_epoch({"moment": number})
        assert [type(each) for each in (kept["w"], more["moment"])] == [np.ndarray] * 2


def test_arrays_returned_are_copies() -> None:
    gradient = np.ones(3)
    with engine.Session({"w": np.zeros(3)}, "Dense()", alone()) as session:
        first = session.give({"w": gradient})
        session.took_step({"w": np.ones(3)})
        second = session.give({"w": 5 * gradient})
        session.took_step({"w": np.ones(3)})
    assert first is not None
    assert second is not None
    assert (first["w"].tolist(), second["w"].tolist(), gradient.tolist()) == ([1.0] * 3, [5.0] * 3, [1.0] * 3)


def alone() -> Any:
    from gossamer.comm.simulated import SimulatedGroup

    return SimulatedGroup(1).transports[0]


# -- one rank and another --------------------------------------------------------------------------------------------


def test_all_ranks_begin_with_rank_0s_parameters() -> None:
    found = cluster(lambda w: Loop(w, "LocalSGD(period=3)").flat, 3)
    assert torch.equal(agree(found), parameters(network(0)))


def test_ranks_with_other_arrays_are_refused() -> None:
    def train(worker: Worker) -> None:
        worker.arrays({"w": np.zeros(3 + worker.rank)}, "Dense()")

    with pytest.raises(MismatchError, match="shapes"):
        cluster(train, 2)


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
def test_a_rank_with_fewer_batches_ends_the_epoch_with_the_others_parameters_and_state(recipe: str) -> None:
    def train(worker: Worker) -> tuple[Tensor, Any]:
        loop = Loop(worker, recipe)
        for step in range(4 + worker.rank):
            loop.step(step)
        loop.arrays, state = loop.session.end_epoch({"moment": np.full(2, float(worker.rank))})
        if recipe != "Dense()":
            loop.arrays = loop.session.averaged_parameters()
        return loop.flat, state["moment"]

    (first, state), (second, other) = cluster(train, 2)
    assert torch.equal(first, second)
    if recipe == "Dense()":
        assert state.tolist() == other.tolist() == [1.0, 1.0]


def test_ranks_begin_the_next_epoch_of_their_shards_together() -> None:
    """Rank 0 has looked at a sample of its first epoch before, and trains on another one."""

    def train(worker: Worker) -> list[int]:
        session = worker.arrays({"w": np.zeros(1)}, "Dense()")
        shard = session._world.shard(range(8))  # type: ignore[attr-defined]
        drawn: list[int] = []
        if worker.rank == 0:
            next(iter(shard))
        for _ in range(2):
            drawn.clear()
            for index in shard:
                session.give({"w": np.ones(1)})
                session.took_step({"w": np.ones(1)})
                drawn.append(index)
            session.end_epoch()
        return drawn

    first, second = cluster(train, 2)
    assert sorted(first + second) == [*range(8)]


def test_no_sync_adds_gradients_up_on_this_rank() -> None:
    def train(worker: Worker) -> Any:
        session = worker.arrays({"w": np.zeros(2)}, "Dense()")
        first = np.full(2, worker.rank + 1.0)
        with session.no_sync():
            assert session.give({"w": first}) is None
        assert session.steps == 0  # nothing was sent
        mean = session.give({"w": np.full(2, 10.0)})
        assert first.tolist() == [worker.rank + 1.0] * 2
        return mean["w"].tolist()  # type: ignore[index]

    assert cluster(train, 2) == [[11.5, 11.5]] * 2


def test_numbers_that_stay_non_finite_raise_an_error_with_advice_for_arrays() -> None:
    def train(worker: Worker) -> None:
        session = worker.arrays({"w": np.zeros(1)}, "Dense()")
        for _ in range(5):
            session.give({"w": np.full(1, np.nan)})
            session.took_step({"w": np.zeros(1)})

    with pytest.raises(NonFiniteError, match=r'"w" on rank 0.*mixed_bfloat16') as raised:
        cluster(train, 2)
    assert "attach" not in str(raised.value)


def test_a_loaded_state_has_no_gradients_of_passes_before() -> None:
    with engine.Session({"w": np.zeros(2)}, "Dense()", alone()) as session:
        saved = session.state_dict()
        with session.no_sync():
            session.give({"w": np.full(2, 100.0)})
        session.load_state_dict(saved)
        mean = session.give({"w": np.ones(2)})
        assert mean is not None
        assert mean["w"].tolist() == [1.0, 1.0]


def test_an_epoch_that_ends_within_no_sync_keeps_the_gradients() -> None:
    def train(worker: Worker) -> Any:
        session = worker.arrays({"w": np.zeros(1)}, "Dense()")
        with session.no_sync():
            session.give({"w": np.full(1, worker.rank + 1.0)})
        session.end_epoch()
        mean = session.give({"w": np.full(1, 10.0)})
        return mean["w"].tolist()  # type: ignore[index]

    assert cluster(train, 2) == [[11.5]] * 2


def test_weights_count_as_given() -> None:
    def train(worker: Worker) -> Any:
        session = worker.arrays({"w": np.zeros(1)}, "Dense()")
        mean = session.give({"w": np.full(1, float(worker.rank))}, weight=[1.0, 3.0][worker.rank])
        return mean["w"].tolist()  # type: ignore[index]

    assert cluster(train, 2) == [[0.75]] * 2


def test_gradients_that_are_not_finite_make_no_step_on_any_rank() -> None:
    def train(worker: Worker) -> Any:
        loop = Loop(worker, "TopK(0.1)")
        before = loop.flat
        gradients = loop.gradients(0)
        if worker.rank:
            gradients["0.weight"][0] = float("nan")
        assert loop.session.give(gradients) is None
        loop.arrays = loop.session.took_step(loop.arrays)
        assert torch.equal(loop.flat, before)
        loop.step(1)
        return loop.session.steps, loop.flat

    (steps, first), (_, second) = cluster(train, 2)
    assert steps == 1
    assert torch.equal(first, second)


def test_a_request_to_stop_reaches_all_ranks_after_the_same_step() -> None:
    def train(worker: Worker) -> int:
        loop, made = Loop(worker, "Dense()"), 0
        while not loop.session.should_stop:
            loop.step(made)
            made += 1
            if made == 3 and worker.rank == 1:
                loop.session.request_stop()
        return made

    assert cluster(train, 2) == [4, 4]


def test_servers_make_the_step_of_arrays() -> None:
    def train(worker: Worker, server: bool) -> Tensor:
        model = network(0)
        options: dict[str, Any] = (
            {"server_optimizer": lambda tensors: torch.optim.SGD(tensors, lr=LR)} if server else {}
        )
        recipe = "ParameterServer(mode='sync')" if server else "Dense()"
        session = worker.arrays(named(model), recipe, **options)
        arrays = session.parameters
        for step in range(3):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(arrays[name])
            model.zero_grad()
            loss_of(model, step, worker.rank).backward()
            mean = session.give({name: p.grad for name, p in model.named_parameters()})
            assert (mean is None) == server
            if mean is not None:
                arrays = {name: descend(array, mean[name]) for name, array in arrays.items()}
            arrays = session.took_step(arrays)
        session.close()
        return torch.cat([array.flatten() for array in arrays.values()])

    served, direct = (agree(cluster(lambda w, s=s: train(w, s), 2)) for s in (True, False))
    torch.testing.assert_close(served, direct, rtol=0, atol=1e-12)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "TopK(0.1)",
        "PowerSGD(rank=2)",
        "DiLoCo(period=3) + Int8()",
        "DiLoCo(period=3, delay=2)",
        "DelayedAveraging(delay=2)",
        "Gossip() + Ring()",
    ],
)
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_array_session_has_the_bits_of_an_uninterrupted_one(recipe: str, at: int) -> None:
    def interrupted(worker: Worker) -> Any:
        loop = Loop(worker, recipe)
        for step in range(at):
            loop.step(step)
        state = loop.session.state_dict()
        for step in range(at, at + 2):
            loop.step(step)  # what it writes belongs to no checkpoint
        return state

    def resumed(worker: Worker) -> Tensor:
        again = Loop(worker, recipe)
        again.arrays = again.session.load_state_dict(states[worker.rank])
        for step in range(at, STEPS):
            again.step(step)
        return again.flat

    expected, states = cluster(lambda w: by_arrays(w, recipe), 2), cluster(interrupted, 2)
    found = cluster(resumed, 2)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("compressor", ["TopK(0.5)", "Int8()"])  # from three workers on Int8 is within Sharded
def test_the_states_of_another_number_of_workers_are_folded(compressor: str) -> None:
    recipe = f"LocalSGD(period=2) + {compressor}"

    def saved(worker: Worker) -> Any:
        loop = Loop(worker, recipe)
        for step in range(4):
            loop.step(step)
        return loop.session.state_dict(), loop.session.averaged_parameters()

    (first, merged), (second, _) = cluster(saved, 2)

    def resumed(worker: Worker) -> Tensor:
        loop = Loop(worker, recipe)
        loop.arrays = loop.session.load_state_dict(first, second)
        return loop.flat

    found = agree(cluster(resumed, 3))
    torch.testing.assert_close(found, torch.cat([each.flatten() for each in merged.values()]), rtol=0, atol=1e-12)


def test_a_checkpoint_holds_the_loops_other_arrays() -> None:
    own = {"w": np.zeros(3), "count": np.array(2)}
    with engine.Session({"w": np.zeros(3)}, "Dense()", alone(), state=lambda: own) as session:
        own = {"w": np.ones(3), "count": np.array(5)}
        state = session.state_dict()
        own["w"][:] = 7
    fresh = {"w": np.zeros(3), "count": np.array(0)}
    with engine.Session({"w": np.zeros(3)}, "Dense()", alone(), state=lambda: fresh) as again:
        again.load_state_dict(state)
        with pytest.raises(LoopError, match=r"w, count differ.*session\.state"):
            again.give({"w": np.zeros(3)})
        again.load_state_dict(state)
        fresh = again.state
        assert (fresh["w"].tolist(), int(fresh["count"])) == ([1.0] * 3, 5)
        assert again.give({"w": np.zeros(3)}) is not None
        again.took_step({"w": np.zeros(3)})
        assert again.state["w"] is fresh["w"]


def test_a_checkpoint_with_other_arrays_of_the_loop_is_refused() -> None:
    with engine.Session({"w": np.zeros(3)}, "Dense()", alone(), state=lambda: {"m": np.zeros(3)}) as session:
        state = session.state_dict()
    with session_of(w=np.zeros(3)) as other, pytest.raises(CheckpointError, match=r"m float64\[3\].*state="):
        other.load_state_dict(state)


def test_the_checkpoint_of_another_recipe_is_refused() -> None:
    with engine.Session({"w": np.zeros(3)}, "Dense()", alone()) as session:
        state = session.state_dict()
    with (
        engine.Session({"w": np.zeros(3)}, "TopK(0.1)", alone()) as other,
        pytest.raises(CheckpointError, match="recipe"),
    ):
        other.load_state_dict(state)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def session_of(**arrays: Any) -> engine.Session:
    return engine.Session(arrays or {"w": np.zeros(3), "b": np.zeros(1)}, "Dense()", alone())


@pytest.mark.parametrize(
    ("gradients", "told"),
    [
        ({"w": np.zeros(3)}, "missing"),
        ({"w": np.zeros(3), "b": np.zeros(1), "x": np.zeros(1)}, "unknown"),
        ({"w": np.zeros(4), "b": np.zeros(1)}, r"shape \(4,\)"),
        ({"w": np.zeros(3, np.float32), "b": np.zeros(1)}, "float32"),
        ({"w": [0.0, 0.0, 0.0], "b": np.zeros(1)}, "list"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_and_nothing_was_sent(gradients: dict[str, Any], told: str) -> None:
    with session_of() as session:
        with pytest.raises(LayoutError, match=told):
            session.give(gradients)
        assert session.give({"w": np.ones(3), "b": np.ones(1)}) is not None
        with pytest.raises(LayoutError, match=told):
            session.took_step(gradients)
        session.took_step({"w": np.ones(3), "b": np.ones(1)})
        assert session.steps == 1


def test_give_and_took_step_come_in_turns() -> None:
    with session_of(w=np.zeros(3)) as session:
        with pytest.raises(LoopError, match="give"):
            session.took_step({"w": np.zeros(3)})
        session.give({"w": np.zeros(3)})
        with pytest.raises(LoopError, match="twice"):
            session.give({"w": np.zeros(3)})


@pytest.mark.parametrize("parameters", [{}, [np.zeros(3)], {"w": np.zeros(3, np.int64)}])
def test_parameters_that_cannot_be_averaged_are_refused(parameters: Any) -> None:
    with pytest.raises(AttachError):
        engine.Session(parameters, "Dense()", alone())


@pytest.mark.parametrize(
    ("recipe", "told"), [("DGC(0.1)", "momentum"), ("LocalSGD(period=2, optimizer_state='average')", "optimizer")]
)
def test_recipes_that_share_the_optimizers_work_are_refused(recipe: str, told: str) -> None:
    with pytest.raises(AttachError, match=told):
        cluster(lambda w: w.arrays({"w": np.zeros((64, 64))}, recipe), 2)


# -- the record and the estimate ---------------------------------------------------------------------------------------


def test_events_of_an_array_session_are_those_of_a_run() -> None:
    with heard() as found:
        cluster(lambda w: by_arrays(w, "TopK(0.1)"), 2)
    kinds = [type(event) for event in found]
    assert (kinds.count(events.Attached), kinds.count(events.StepEnded), kinds.count(events.Closed)) == (2, 14, 2)
    assert all(event.bytes_sent > 0 for event in found if isinstance(event, events.StepEnded))


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "DiLoCo(period=3) + Int8()"])
def test_the_estimate_is_that_of_a_model_with_these_parameters(recipe: str) -> None:
    arrays = named(network(0))
    described = {name: (tuple(tensor.shape), "float64") for name, tensor in arrays.items()}
    assert engine.estimate(arrays, recipe, workers=4) == engine.estimate(described, recipe, workers=4)
    with heard(events.StepEnded) as found:
        cluster(lambda w: by_arrays(w, recipe), 4)
    sent = max(event.bytes_sent for event in found)
    estimated = engine.estimate(arrays, recipe, workers=4)
    assert sent == pytest.approx(estimated.cycle_bytes_sent, rel=0.02)
