"""Calls of World: exact collectives of objects and tensors, with and without a session, in every kind of group."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laws.laws import in_threads
from support.elastic_groups import ElasticRun, Loss
from support.pairwise_sessions import PATIENCE_SECONDS, die, still
from support.processes import run_workers
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, train_step
from torch.distributed import HashStore

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.environment import roll_call
from gossamer.comm.runtime.worker_scope import WorkerScope, enter
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import GossamerError, LoopError, MismatchError, PeerLost
from gossamer.plan.simulate.virtual_worker import VirtualGroups, VirtualWorld
from gossamer.train.session import average
from gossamer.train.session.session import Session
from gossamer.train.synchronizers import peer_endpoints
from gossamer.train.world_state import WorldState, current, place
from gossamer.world import World


def together(work: Callable[[World], Any], size: int = 3) -> list[Any]:
    """Run work(world) on each rank of an in-process job without a session; returns results by rank."""
    groups = VirtualGroups(size)

    def run(rank: int) -> Any:
        enter(WorkerScope())
        place(VirtualWorld(rank, groups))
        try:
            return work(gossamer.init())
        finally:
            groups.close(rank)

    return in_threads(run, size)


def attached(work: Callable[[World, Worker], Any], recipe: str = "Dense()") -> Callable[[Worker], Any]:
    """`work` between two steps of an attached session."""

    def run(worker: Worker) -> Any:
        enter(WorkerScope())
        state = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
        place(state)
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, world=state)
        train_step(model, optimizer, 0, worker.rank)
        found = work(gossamer.init(), worker)
        train_step(model, optimizer, 1, worker.rank)
        session.close()
        return found

    return run


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types, to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


VALUES = [
    3,
    -(2**80),
    0.1,
    float("inf"),
    "texts µ",
    "",
    None,
    True,
    b"\x00\xff",
    [],
    [1, [2.5, "a"], ()],
    {"loss": 0.5, "shape": (2, 3), "none": None, "dict": {"b": b""}},
    torch.arange(6.0).view(2, 3).t(),
    torch.rand(1, 3)[:, 1],
    torch.tensor([True, False]),
    torch.tensor(2 + 1j).conj(),
    torch.ones(0, 3, dtype=torch.bfloat16),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.array("2026-01-02", dtype="datetime64[D]"),
    [torch.ones(2), {"array": np.zeros(3), "text": "between", "tensor": torch.zeros(1, dtype=torch.int64)}],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_broadcast_returns_the_value_of_the_root_on_every_rank(value: Any) -> None:
    found = together(lambda world: world.broadcast(value if world.rank == 1 else None, root=1))
    assert all(same(each, value) for each in found)


def test_all_gather_returns_the_value_of_each_rank_in_their_order() -> None:
    given = [[1, torch.ones(2)], {"text": "longer than the others"}, None]
    for heard in together(lambda world: world.all_gather(given[world.rank])):
        assert same(heard, given)


def test_values_of_one_worker_are_copies() -> None:
    tensor = torch.ones(2)
    (found,) = together(
        lambda world: (*world.all_gather([tensor]), world.broadcast(tensor), world.all_reduce(tensor)), 1
    )
    for copy in (found[0][0], found[1], found[2]):
        assert same(copy, tensor)
        copy.zero_()
    assert tensor.sum() == 2
    assert together(lambda world: world.barrier(timedelta(seconds=1)), 1) == [None]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


SHAPES = [(), (1,), (7, 3), (0, 2)]


def reduced_in_float64(given: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype, stacked = given[0].dtype, torch.stack(given)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if op == "mean":
        return stacked.to(wide).mean(0).to(torch.float32 if whole else dtype)
    if op == "sum":
        return stacked.sum(0) if whole else stacked.to(wide).sum(0).to(dtype)
    return stacked.amin(0) if op == "min" else stacked.amax(0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_reductions_are_rounded_once_and_have_the_same_bits_on_every_rank(dtype: torch.dtype, op: Any) -> None:
    if dtype.is_complex and op in ("min", "max"):
        return
    generator = torch.Generator().manual_seed(4)
    given = [[(torch.randn(shape, generator=generator) * 9).to(dtype) for shape in SHAPES] for _ in range(3)]
    found = together(lambda world: [world.all_reduce(each, op) for each in given[world.rank]])
    expected = [reduced_in_float64(list(each), op) for each in zip(*given, strict=True)]
    assert all(same(each, expected) for each in found)


def test_a_column_of_one_row_is_reduced() -> None:
    for found in together(lambda world: world.all_reduce(torch.full((1, 3), 1.0 + world.rank)[:, 1])):
        assert same(found, torch.tensor([2.0]))


def test_a_sum_in_the_dtype_of_the_tensors_would_lose_small_terms() -> None:
    """The negative control of the test above."""
    given = [torch.tensor([2.0**24]), torch.ones(1), torch.ones(1)]
    found = together(lambda world: world.all_reduce(given[world.rank], "sum"))
    assert found[0].item() == 2.0**24 + 2 != (given[0] + given[1] + given[2]).item()


@pytest.mark.parametrize(
    ("given", "op", "expected"),
    [
        ([1, 2, 6], "mean", 3.0),
        ([1, 2, 2**70], "sum", 2**70 + 3),
        ([0.1, 0.2, 0.3], "sum", 0.6),
        ([True, True, False], "sum", 2),
        ([3, -1, 2], "min", -1),
        ([0.5, 1.5, -2.0], "max", 1.5),
        ([1e308, 1e308, 1e308], "mean", 1e308),
        ([np.float32(1), np.float32(2), np.float32(3)], "mean", 2.0),
    ],
)
def test_numbers_are_reduced_exactly(given: list[Any], op: Any, expected: Any) -> None:
    found = together(lambda world: world.all_reduce(given[world.rank], op))
    assert all(same(each, expected) for each in found)


def test_arrays_are_reduced_to_arrays() -> None:
    def work(world: World) -> list[Any]:
        array = np.array([[world.rank, 5]], dtype=np.int32)
        return [world.all_reduce(array, op) for op in ("mean", "sum", "max")] + [world.all_reduce(array / 2.0)]

    expected = [np.array([[1.0, 5.0]]), np.array([[3, 15]]), np.array([[2, 5]], dtype=np.int32), np.array([[0.5, 2.5]])]
    assert all(same(each, expected) for each in together(work))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_torch_does_not_promote_are_reduced(dtype: str) -> None:
    kind = getattr(torch, dtype)
    sums = torch.int64 if dtype.startswith("uint") else kind

    def work(world: World) -> list[Any]:
        tensor = torch.tensor([world.rank + 1, 4]).to(kind)
        ops = ("mean", "sum") if kind == torch.uint64 else ("mean", "sum", "min", "max")
        return [world.all_reduce(tensor, op) for op in ops]  # type: ignore[arg-type]

    for mean, total, *extremes in together(work, 3):
        assert mean.double().tolist() == [2.0, 4.0]
        assert (total.double().tolist(), total.dtype) == ([6.0, 12.0], sums)
        assert [(each.double().tolist(), each.dtype) for each in extremes] in (
            [],
            [([1.0, 4.0], kind), ([3.0, 4.0], kind)],
        )


def test_means_of_integer_arrays_have_the_precision_of_float64() -> None:
    """As of tokens counted by each worker; float32 represents integers up to 2^24."""
    found = together(lambda world: world.all_reduce(np.array([2**24 + 1, world.rank])), 2)
    assert all(same(each, np.array([2.0**24 + 1, 0.5])) for each in found)


def test_gradients_do_not_flow_through_a_reduction() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not any(each.requires_grad for each in together(lambda world: world.all_reduce(leaf * 2)))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), {1, 2}, {3: "a"}, [1, object], np.array(["text"]), 1j, float])
@pytest.mark.parametrize("method", ["all_gather", "broadcast"])
def test_values_that_would_need_pickle_are_refused(method: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"world\.{method} takes numbers.*JSON and bytes"):
        together(lambda world: getattr(world, method)({"deep": [value]}), 1)


@pytest.mark.parametrize(
    ("value", "op", "error", "word"),
    [
        ("text", "mean", TypeError, "tensor, a NumPy array or a number"),
        ([1.0], "mean", TypeError, "list"),
        (np.array(["a"]), "mean", TypeError, "dtype"),
        (torch.ones(2, dtype=torch.complex64), "max", TypeError, "complex"),
        (torch.ones(2).to_sparse(), "sum", TypeError, "sparse"),
        (np.ones(2, dtype=np.uint64), "min", TypeError, "uint64"),
        (1.0, "median", ValueError, "op must be"),
    ],
)
def test_reductions_that_have_no_meaning_are_refused(value: Any, op: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        together(lambda world: world.all_reduce(value, op), 1)


@pytest.mark.parametrize("root", [-1, 2, 0.0, True])
def test_a_root_that_is_no_rank_is_refused(root: Any) -> None:
    with pytest.raises(ValueError, match="root must be a rank from 0 to 1"):
        together(lambda world: world.broadcast(1, root=root), 2)


def test_a_timeout_without_a_unit_is_refused() -> None:
    with pytest.raises(TypeError, match="timedelta"):
        together(lambda world: world.barrier(timeout=5), 1)  # type: ignore[arg-type]


CALLS: dict[str, Callable[[World], Any]] = {
    "barrier": lambda world: world.barrier(),
    "barrier with a timeout": lambda world: world.barrier(timeout=timedelta(minutes=5)),
    "broadcast": lambda world: world.broadcast("text"),
    "another root": lambda world: world.broadcast("text", root=1),
    "all_gather": lambda world: world.all_gather({"a": 1}),
    "mean": lambda world: world.all_reduce(torch.ones(3)),
    "sum": lambda world: world.all_reduce(torch.ones(3), "sum"),
    "another shape": lambda world: world.all_reduce(torch.ones(4)),
    "another dtype": lambda world: world.all_reduce(torch.ones(3, dtype=torch.float64)),
    "a number": lambda world: world.all_reduce(1.0),
}
PAIRS = [
    ("barrier", "all_gather"),
    ("barrier with a timeout", "broadcast"),
    ("broadcast", "another root"),
    ("mean", "sum"),
    ("mean", "another shape"),
    ("mean", "another dtype"),
    ("mean", "a number"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("with_session", [False, True], ids=["without a session", "with a session"])
def test_different_calls_raise_on_every_rank_and_calls_continue(one: str, other: str, with_session: bool) -> None:
    def work(world: World, worker: Worker | None = None) -> list[int]:
        with pytest.raises(MismatchError, match=r"rank 0: world\..*rank 1: world\."):
            CALLS[other if world.rank == 1 else one](world)
        return world.all_gather(world.rank)

    found = cluster(attached(work), 3) if with_session else together(work)
    assert found == [[0, 1, 2]] * 3


def test_a_call_on_one_rank_while_others_make_a_step_raises_on_every_rank() -> None:
    def work(worker: Worker) -> str:
        enter(WorkerScope())
        state = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
        place(state)
        model, optimizer, _ = worker.start(network(), sgd, "Dense()", world=state)
        step = partial(train_step, model, optimizer, 0, worker.rank)
        with pytest.raises(GossamerError) as failure:
            (step if worker.rank else gossamer.init().barrier)()
        return type(failure.value).__name__

    assert cluster(work, 2)[0] == "MismatchError"


def test_a_dimension_of_a_mesh_has_no_collectives() -> None:
    class Dimension:
        def get_local_rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    with pytest.raises(LoopError, match=r"gossamer\.init\(\)"):
        together(lambda world: world.within(Dimension()).barrier(), 1)


def test_calls_reach_all_workers_while_a_session_has_a_part_of_them() -> None:
    """As with attach(mesh=...): the session's group would answer for one dimension of the mesh only."""
    groups, parts = VirtualGroups(4), [SimulatedGroup(2).transports for _ in range(2)]

    def run(rank: int) -> Any:
        enter(WorkerScope())
        place(VirtualWorld(rank, groups))
        model, tensor = network(), torch.tensor([float(rank)])
        try:
            with Session(model, sgd(model), resolve("Dense()"), parts[rank % 2][rank // 2], world=current()):
                gossamer.average_([tensor], "Dense()")
                return [gossamer.init().all_gather(rank), gossamer.gather(rank), gossamer.mean(rank), tensor.item()]
        finally:
            groups.close(rank)

    assert in_threads(run, 4) == [[[0, 1, 2, 3], [0, 1, 2, 3], 1.5, 1.5]] * 4


def test_an_elastic_run_without_a_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "is_elastic", lambda: True)
    with pytest.raises(LoopError, match=r"gossamer\.attach"):
        together(lambda world: world.all_gather(1), 2)


# -- in every kind of group --------------------------------------------------------------------------------------------


def every_call(world: World) -> list[Any]:
    world.barrier()
    world.barrier(timeout=timedelta(minutes=5))
    sent = world.broadcast({"rank": world.rank, "tensor": torch.full((3,), 7.0)}, root=world.size - 1)
    gathered = world.all_gather(["rank", world.rank])
    return [sent["rank"], sent["tensor"].tolist(), gathered, world.all_reduce(torch.arange(5.0) * world.rank).tolist()]


EXPECTED = [2, [7.0] * 3, [["rank", 0], ["rank", 1], ["rank", 2]], [0.0, 1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("recipe", ["Dense()", "DelayedAveraging(2)", "Gossip()"])
def test_calls_travel_among_the_steps_of_a_session(recipe: str) -> None:
    assert cluster(attached(lambda world, _: every_call(world), recipe), 3) == [EXPECTED] * 3


@pytest.mark.parametrize("op", [5, 8, 10, 12])
def test_calls_are_made_again_by_the_workers_that_are_left(op: int) -> None:
    """Rank 2 is lost at one of the operations of these calls."""
    seen: set[int] = set()

    def work(worker: Worker) -> Any:
        enter(WorkerScope())
        state = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
        place(state)
        worker.start(network(), sgd, "Dense()", world=state)
        world = gossamer.init()
        found = [(world.all_reduce(1, "sum"), world.all_gather(1), world.broadcast("text")) for _ in range(6)]
        seen.update(total for total, _, _ in found)
        return found

    here = [each for each in ElasticRun(3, Loss(victim=2, op=op))(work) if each is not None]
    assert len(here) == 2
    assert same(here[0], here[1])
    assert all(text == "text" for _, _, text in here[0])
    assert here[0][-1] == (2, [1, 1], "text")


@pytest.mark.parametrize(("victim", "expected"), [(0, {"text of 1"}), (1, {"PeerLost"}), (2, {"text of 1"})])
def test_a_broadcast_is_of_the_worker_that_was_the_root_when_others_are_lost(victim: int, expected: set[str]) -> None:
    """The victim is lost while rank 1 broadcasts, and ranks above the victim move down."""
    begun: list[int] = []

    def work(worker: Worker) -> str:
        enter(WorkerScope())
        state = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
        place(state)
        worker.start(network(), sgd, "Dense()", world=state)
        gossamer.init().barrier()
        if worker.rank == victim:
            begun.append(run.members.operations[victim, 2])
        try:
            return gossamer.init().broadcast(f"text of {worker.rank}", root=1)
        except PeerLost as failure:
            return "PeerLost" if "rank 1 was lost" in str(failure) else str(failure)

    run = ElasticRun(3)
    assert run(work) == ["text of 1"] * 3
    for op in (0, 1):
        run = ElasticRun(3, Loss(victim=victim, op=begun[0] + op))
        here = [each for each in run(work) if each is not None]
        assert len(here) == 2
        assert set(here) == expected


@pytest.fixture
def survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(roll_call, "registry_store", lambda: store)
    monkeypatch.setattr(peer_endpoints, "DEAD_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(roll_call, "SURE_SECONDS", 0.0)


@pytest.mark.usefixtures("survivors")
def test_calls_run_over_the_workers_that_are_left_by_a_recipe_that_outlives_losses() -> None:
    done = threading.Semaphore(0)

    def work(worker: Worker) -> Any:
        enter(WorkerScope())
        place(WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu")))
        session, *_ = still(worker, [1.0])
        world = gossamer.init()
        before = every_call(world)
        if worker.rank == 2:
            die(session)
            assert all(done.acquire(timeout=PATIENCE_SECONDS) for _ in range(2))
            return before
        with pytest.raises(PeerLost, match="rank 2 was lost"):
            world.broadcast("text", root=2)
        with pytest.raises(MismatchError, match=r"rank 0: world\.all_reduce"):
            world.all_reduce(torch.ones(2 + world.rank))
        after = world.all_gather(world.rank), world.all_reduce(torch.tensor([1.0 + world.rank])).item()
        done.release()
        session.close()
        return before, after

    *found, lost = cluster(work, 3)
    assert lost == EXPECTED
    assert found == [(EXPECTED, ([0, 1], 1.5))] * 2


def test_a_lost_worker_raises_peer_lost() -> None:
    def work(world: World) -> None:
        if world.rank < 2:
            with pytest.raises(PeerLost, match="rank 2"):
                world.all_gather("anybody?")

    together(work)


def test_a_barrier_ends_after_its_timeout_and_later_calls_wait_for_the_late_rank() -> None:
    late = threading.Event()

    def work(world: World) -> list[int]:
        if world.rank == 0:
            with pytest.raises(PeerLost, match=r"world\.barrier.*did not come"):
                world.barrier(timeout=timedelta(milliseconds=1))
            late.set()
        else:
            assert late.wait(PATIENCE_SECONDS)
            world.barrier()
        return world.all_gather(world.rank)

    assert together(work, 2) == [[0, 1]] * 2


SCRIPT = """
import torch, gossamer
from gossamer.errors import MismatchError
world = gossamer.init()
def calls():
    world.barrier()
    assert world.broadcast({"a": torch.arange(100_000)}, root=1)["a"].sum() == 4999950000
    assert world.all_gather((world.rank, b"x" * (1 + world.rank))) == [(0, b"x"), (1, b"xx")]
    large = torch.arange(100_001.0) * (1 + world.rank)
    assert torch.equal(world.all_reduce(large, "sum"), torch.arange(100_001.0) * 3)
    assert world.all_reduce(world.rank) == 0.5
calls()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gossamer.attach(model, optimizer, "Dense()")
for step in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    calls()
session.close()
calls()
try:
    world.all_gather(1) if world.rank else world.barrier()
    raise SystemExit("it was answered")
except MismatchError as failure:
    assert "rank 1: world.all_gather" in str(failure)
print("ok")
"""


@pytest.mark.processes
def test_calls_between_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for done in run_workers([str(tmp_path / "train.py")], 2):
        assert done.returncode == 0, done.stdout
        assert "ok" in done.stdout


# -- the public surface ------------------------------------------------------------------------------------------------


def test_a_world_shows_the_public_surface_only() -> None:
    (shown,) = together(lambda world: [name for name in dir(world) if not name.startswith("_")], 1)
    assert shown == [
        *("all_gather", "all_reduce", "barrier", "broadcast", "device", "is_first", "load_state_dict", "local_rank"),
        *("rank", "shard", "size", "state_dict", "within"),
    ]


def test_examples_of_the_methods_print_what_they_show() -> None:
    enter(WorkerScope())
    place(WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(World, "World", globs={"gossamer": gossamer}):
        runner.run(test)
    assert (runner.tries, runner.failures) == (8, 0)
