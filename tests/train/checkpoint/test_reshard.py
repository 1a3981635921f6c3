"""Resharding a checkpoint for another number of workers: no residual is lost, and no sample either."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.laws import Group, in_threads
from support.nightly import once_each
from support.resharded_training import copied, train
from support.resumed_training import check_resume
from support.virtual_workers import Worker, agree, cluster, network, notices, parameters, train_step
from torch import Tensor, nn

from gossamer.algorithms.compressors import Compressor, Feedback, Sharded, SparseSum, TopK, feedback_rules
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.feedback_rules import BEGUN, KNOWN, KNOWN_MEAN, SMOOTHED
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.sharded import UNSENT
from gossamer.algorithms.recipes.catalog import describe
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import reshard
from gossamer.train.sampler import Shard
from gossamer.train.session.average import AverageState

SEVERAL = "Route(Int8(block=16), smallest=10)"  # sharded among three or more
RECIPES = [
    "TopK(0.1)", SEVERAL, "Sharded(OneBit())", "PowerSGD(rank=2)", "DGC(density=0.1)", "ARCTopK(density=0.1, row=8)",
    "SharedMask(density=0.1)", "Warmup(TopK(0.05))",
]  # fmt: skip


def outstanding(states: Sequence[Mapping[str, Any]], kind: str = RESIDUAL) -> dict[str, Tensor]:
    """By parameter, the mean residual and all that is owed."""
    found: dict[str, Tensor] = {}
    for name in states[0]["state"]:
        parts = [state["state"].get(name, {}) for state in states]
        for key in [key for key in parts[0] if key.rpartition(".")[2] == kind]:
            found[name] = torch.stack([part[key] for part in parts]).mean(0)
        pieces = [part[key] for part in parts for key in part if key.rpartition(".")[2] == UNSENT]
        if pieces and kind == RESIDUAL:
            found[name] = found[name] + torch.cat(pieces).view(found[name].shape)
    return found


def fold(old: int, new: int, recipe: str, folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """(before, at once after, some steps later), each (parameters, state, steps, mine) by rank."""
    before = [end for _, end in cluster(lambda worker: train(worker, recipe, 5, save=folder), old)]
    later = cluster(lambda worker: train(worker, recipe, 3, load=folder), new)
    return before, [begun for begun, _ in later], [end for _, end in later]


def check_folding(old: int, new: int, recipe: str, folder: Path) -> None:
    before, begun, later = fold(old, new, recipe, folder)
    kinds = (RESIDUAL, "momentum") if recipe.startswith("DGC") else (RESIDUAL,)
    for kind in kinds:
        were = outstanding([state for _, state, *_ in before], kind)
        are = outstanding([state for _, state, *_ in begun], kind)
        assert were.keys() == are.keys() != set()
        assert any(tensor.any() for tensor in were.values())
        for name, tensor in were.items():
            torch.testing.assert_close(are[name], tensor, rtol=1e-13, atol=1e-13)
    for found, state, steps, mine in begun:
        assert torch.equal(found, before[0][0])
        assert (steps, state["world"], mine["rank"]) == (5, new, state["rank"] % old)
    assert all(torch.equal(found, later[0][0]) and steps == 8 for found, _, steps, _ in later)
    assert not torch.equal(later[0][0], before[0][0])


@once_each("recipe, worlds", RECIPES, [(4, 2), (3, 5), (2, 4)])
def test_what_was_still_to_be_sent_is_kept(worlds: tuple[int, int], recipe: str, tmp_path: Path) -> None:
    check_folding(*worlds, recipe, tmp_path)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_mean", sum), ("_mean", lambda tensors: tensors[0]), ("is_group_residual", lambda key: False)],
    ids=["sum", "own", "no debts"],
)
def test_the_check_catches_what_loses_or_doubles(
    name: str, broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, name, broken)
    with pytest.raises(AssertionError):
        check_folding(4, 2, SEVERAL, tmp_path)


def test_factors_stay_alike(tmp_path: Path) -> None:
    before, begun, _ = fold(2, 3, "PowerSGD(rank=2)", tmp_path)
    for _, state, *_ in begun:
        for name, remembered in state["state"].items():
            for key, tensor in remembered.items():
                if key.endswith("q"):
                    assert torch.equal(tensor, before[0][1]["state"][name][key])


def test_debts_find_their_places_in_tensors_of_any_strides() -> None:
    """Parts are pieces of memory; what is saved of a tensor is in the order of its indices."""
    layout = Layout.of({"w": torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last), "v": torch.empty(7)})
    group = Group(Feedback(Sharded(Int8(block=4))), 3, layout=layout)
    for _ in range(2):
        group.aggregate(group.gradients())
    whole = torch.cat([state[UNSENT].flat for state in group.states])
    assert whole.any()
    states = [
        {
            "rank": rank,
            "world": 3,
            "step": 2,
            "progress": {},
            "recipe": "Int8()",
            "layout": "",
            "state": {
                name: {key: packed[name].contiguous() for key, packed in state.items() if name in packed.layout.by_name}
                for name in layout.names
            },
        }
        for rank, state in enumerate(group.states)
    ]
    mine = {name: {RESIDUAL: slot.view(torch.zeros(layout.numel))} for name, slot in layout.by_name.items()}
    begun = reshard.fold(states, {"rank": 0, "world": 2, "recipe": "Int8()", "layout": "", "state": mine})["state"]
    residuals = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
    for name, slot in layout.by_name.items():
        torch.testing.assert_close(begun[name][RESIDUAL], slot.view(residuals + whole), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("old", "new", "ops"),
    [
        (
            3,
            2,
            "written by 3 workers, and 2 continue from it: each starts with the mean of the unsent residuals of the 3",
        ),
        (2, 1, "unsent residuals of the 2 are dropped"),
        (1, 2, "written by one worker, and 2 continue from it: it had no unsent residuals"),
    ],
)
def test_one_line_says_what_was_done(old: int, new: int, ops: str, tmp_path: Path) -> None:
    with notices() as said:
        before, begun, later = fold(old, new, "TopK(0.1)", tmp_path)
    assert [ops in line for line in said] == [True], said
    assert torch.equal(begun[-1][0], before[0][0])
    assert not torch.equal(later[0][0], before[0][0])


def test_an_equal_number_of_workers_needs_no_words(tmp_path: Path) -> None:
    with notices() as said:
        fold(2, 2, "Int8()", tmp_path)
    assert said == []


def test_the_states_themselves_can_be_given_and_all_are_needed() -> None:
    states = [end[1] for _, end in cluster(lambda worker: train(worker, "TopK(0.1)", 3), 3)]

    def take(worker: Worker, count: int) -> Any:
        model = network(0)
        session = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), "TopK(0.1)")
        session.load_state_dict(*states[:count])
        return session.state_dict()

    taken = outstanding(cluster(lambda worker: take(worker, 3), 2))
    for name, tensor in outstanding(states).items():
        torch.testing.assert_close(taken[name], tensor, rtol=1e-13, atol=1e-13)
    for count in (1, 2):
        with pytest.raises(CheckpointError, match=rf"{count} of the 3 states.*load_state_dict\(\*states\)"):
            cluster(lambda worker, some=count: take(worker, some), 2)


def test_another_recipe_is_refused_in_any_world(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "Int8()", 2, save=tmp_path), 4)
    for recipe in ("Int8(block=7)", "TopK(0.1)", "Dense()"):
        with pytest.raises(CheckpointError, match="recipe"):
            cluster(lambda worker, other=recipe: train(worker, other, 1, load=tmp_path), 2)


@pytest.mark.parametrize("lost", ["rank-3.json", "rank-3.safetensors"])
def test_an_older_step_is_taken_where_a_part_of_the_newest_is_missing(lost: str, tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, save=tmp_path), 4)
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, load=tmp_path, save=tmp_path), 4)
    (tmp_path / "step-00000004" / lost).unlink()
    assert [begun[2] for begun, _ in cluster(lambda worker: train(worker, "TopK(0.1)", 1, load=tmp_path), 2)] == [2, 2]


def test_a_folder_of_several_worlds_is_read_by_the_newest(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, save=tmp_path), 4)
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, load=tmp_path, save=tmp_path), 2)
    for world in (4, 3, 2):
        later = cluster(lambda worker: train(worker, "TopK(0.1)", 1, load=tmp_path), world)
        assert [begun[2] for begun, _ in later] == [2] * world
        assert outstanding([begun[1] for begun, _ in later])["2.weight"].any()


def test_files_of_workers_that_are_no_more_go_with_their_step(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 1, save=tmp_path), 4)
    for _ in range(2):
        cluster(lambda worker: train(worker, "TopK(0.1)", 1, load=tmp_path, save=tmp_path), 2)
    left = {(path.parent.name[-1], path.name) for path in tmp_path.glob("*/*")}
    assert left == {
        (step, f"rank-{rank}.{kind}") for step in "23" for rank in (0, 1) for kind in ("json", "safetensors")
    }


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 4), (4, 3), (5, 1), (1, 5)])
@pytest.mark.parametrize("total", [60, 61, 67])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_an_epoch_continues_without_gaps_and_repetitions(old: int, new: int, total: int, share: float) -> None:
    before = [Shard(range(total), rank=rank, size=old, seed=3) for rank in range(old)]
    count = total if share == 1.0 else int(share * (total // old))
    seen = [index for shard in before for _, index in zip(range(count), iter(shard), strict=False)]
    worlds = [{"shards": [shard.state_dict()]} for shard in before]
    after = [Shard(range(total), rank=rank, size=new, seed=3) for rank in range(new)]
    for rank, shard in enumerate(after):
        shard.load_state_dict(reshard.fold_positions(worlds, rank, new)["shards"][0])
    rest = [index for shard in after for index in shard]
    if share == 1.0:
        assert [shard.epoch for shard in after] == [1] * new
        assert sorted(rest) == list(range(total))
    else:
        assert sorted(seen + rest) == list(range(total))


def test_worlds_without_shards_fold_too() -> None:
    assert reshard.fold_positions([{}, {}], 0, 3) == {}
    assert reshard.fold_positions([{"shards": []}], 0, 3) == {"shards": []}


# -- parts that move for other reasons ---------------------------------------------------------------------------------


def test_debts_outlive_a_resized_neighbour() -> None:
    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = worker.attach(model, optimizer, resolve(SEVERAL, worker.world))
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        before = copied(session.state_dict())
        model[4].weight = nn.Parameter(torch.zeros(9, 16, dtype=torch.float64))
        session.reset_compressor_state("4.weight")
        return before, session.state_dict()

    before, after = zip(*cluster(work, 3), strict=True)
    were, are = outstanding(before), outstanding(after)
    assert were.keys() == are.keys() == {"0.weight", "2.weight", "4.weight"}
    assert any(key.endswith(UNSENT) and tensor.any() for x in before[0]["state"].values() for key, tensor in x.items())
    assert not are.pop("4.weight").any()
    for name, tensor in are.items():
        torch.testing.assert_close(tensor, were[name], rtol=1e-13, atol=1e-13)


def test_debts_follow_tensors_into_other_buckets() -> None:
    """As DistributedDataParallel forms them anew after its first step."""
    shapes = {"a": (30,), "b": (50,), "c": (7, 3)}
    transports = SimulatedGroup(3).transports

    def work(rank: int) -> Any:
        memory = AverageState(Feedback(Sharded(Int8(block=4))), transports[rank])
        given, sent = {name: torch.zeros(shape) for name, shape in shapes.items()}, dict[str, Tensor]()
        for step, buckets in enumerate([["abc"], ["abc"], ["cb", "a"], ["ca", "b"]]):
            for bucket in buckets:
                generator = rng.generator(step, rank, bucket)
                x = FlatTensors.pack({name: torch.randn(shapes[name], generator=generator).double() for name in bucket})
                for name, view in x.items():
                    given[name] = given[name] + view
                memory.average_(x)
                for name, view in x.items():
                    sent[name] = sent.get(name, 0) + view
        newest = {name: state for state in memory._states.values() for name in state[RESIDUAL].layout.names}
        residual = {name: state[RESIDUAL][name] for name, state in newest.items()}
        pending = {name: state[UNSENT][name] for name, state in newest.items() if name in state[UNSENT].layout.by_name}
        return given, sent, residual, pending

    found = in_threads(work, 3)
    for name in shapes:
        given, residual = (torch.stack([each[kind][name] for each in found]).mean(0) for kind in (0, 2))
        pending = torch.cat([each[3][name] for each in found if name in each[3]]).view(given.shape)
        assert pending.any()
        torch.testing.assert_close(found[0][1][name] + residual + pending, given, rtol=1e-12, atol=1e-12)


def check_one_memory(compressor: Compressor, world: int = 4) -> None:
    """Of each tensor, whatever it lies beside from call to call; multiples of `world` are exact."""
    transports = SimulatedGroup(world).transports

    def work(rank: int) -> tuple[Tensor, Tensor]:
        memory = AverageState(compressor, transports[rank])
        given, sent = (dict.fromkeys("abc", torch.zeros(8, 32)) for _ in range(2))
        for step, names in enumerate(["ab", "a", "ab", "bc", "a", "ab", "cba"]):
            draws = rng.generator(step, rank, names)
            x = FlatTensors.pack({name: torch.randint(-9, 9, (8, 32), generator=draws) * 8.0 * world for name in names})
            given |= {name: given[name] + view for name, view in x.items()}
            memory.average_(x)
            sent |= {name: sent[name] + view for name, view in x.items()}
        *_, state = memory._states.values()
        waiting = torch.stack([state[RESIDUAL][name] for name in "abc"])
        return torch.stack(list(given.values())) - waiting, torch.stack(list(sent.values()))

    found = in_threads(work, world)
    assert torch.equal(torch.stack([gone for gone, _ in found]).mean(0), found[0][1])


@pytest.mark.parametrize("compressor", [Feedback(TopK(density=0.1)), Feedback(SparseSum(TopK(density=0.1)))], ids=repr)
def test_what_waits_is_remembered_once_whoever_lies_beside(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_memory(compressor)
    monkeypatch.setitem(AverageState._state.__globals__, "_without", lambda names, state: State())
    with pytest.raises(AssertionError):
        check_one_memory(compressor)


NODES = "Hierarchy(per_node=2, between=TopK(density=0.1))"


def told_of_folding(recipe: str, world: int) -> str:
    return reshard.describe("here", 5, 4, world, recipe=repr(resolve(recipe)), apart=False)


@pytest.mark.parametrize(
    ("recipe", "world", "news"),
    [
        (NODES, 2, "unsent residuals of the 4 are dropped, since a node alone sends nothing"),
        (NODES, 1, "unsent residuals of the 4 are dropped, since one alone sends nothing"),
        (NODES, 8, "each starts with the mean"),
        ("Hierarchical(Hierarchical(Int8(), per_node=2), per_node=2)", 4, "dropped, since a node alone"),
        ("Feedback(Hierarchical(TopK(density=0.1), per_node=2))", 2, "each starts with the mean"),
    ],
)
def test_a_single_node_says_that_it_drops_what_was_to_cross(
    recipe: str, world: int, news: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert news in told_of_folding(recipe, world)
    monkeypatch.setattr(reshard, "_in_one_node", lambda recipe, world: not IN_ONE_NODE(recipe, world))
    assert world == 1 or news not in told_of_folding(recipe, world)


IN_ONE_NODE = reshard._in_one_node


def test_local_steps_since_the_last_round_weigh_nothing_after_resharding(tmp_path: Path) -> None:
    def saved(worker: Worker) -> Any:
        return train(worker, "DiLoCo(4)", 6, save=tmp_path)[1][1]["progress"]

    assert all(any(progress["weights"]) for progress in cluster(saved, 3))
    begun = cluster(lambda worker: train(worker, "DiLoCo(4)", 0, load=tmp_path)[0][1]["progress"], 2)
    assert [progress["weights"] for progress in begun] == [[0.0] * len(begun[0]["weights"])] * 2
    assert [progress["flights"] for progress in begun] == [[], []]


@pytest.mark.parametrize("compressor", ["Int8(block=16)", "Sharded(OneBit())"])
def test_one_worker_continues_a_global_batch_of_several(compressor: str, tmp_path: Path) -> None:
    """It accumulates passes and has no residual, into which values that shards had not delivered could move."""

    def work(worker: Worker, first: int, last: int) -> Tensor:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        recipe = resolve(f"EveryStep(global_batch=12, batch=4) + Route({compressor}, smallest=10)", worker.world)
        session = worker.attach(model, optimizer, recipe)
        begun = parameters(model)
        if first:
            session.load(tmp_path)
            begun = parameters(model)
        passes = 0
        while session.steps < last:
            train_step(model, optimizer, passes := passes + 1, worker.rank)
        if not first:
            session.save(tmp_path)
            return parameters(model)
        assert passes == 3 * (last - first)
        return begun

    saved = agree(cluster(lambda worker: work(worker, 0, 2), 3))
    assert torch.equal(cluster(lambda worker: work(worker, 2, 4), 1)[0], saved)


def test_the_weight_accumulated_for_a_step_is_the_mean_after_resharding() -> None:
    progress = [{"accumulated": {"weight": weight, "used": used}} for weight, used in ((3.0, ["b"]), (1.0, ["a"]))]
    states = [
        {"rank": rank, "world": 2, "step": 1, "recipe": "Dense()", "layout": "", "state": {}, "progress": each}
        for rank, each in enumerate(progress)
    ]
    mine = {"rank": 0, "world": 3, "recipe": "Dense()", "layout": "", "state": {}}
    assert reshard.fold(states, mine)["progress"] == {"accumulated": {"weight": 2.0, "used": ["a", "b"]}}


# -- new workers begin from what all agreed on, as if they had sent it -------------------------------------------------


PLAIN = "Feedback(TopK(0.1), rule='ef21', momentum=0.5)"
RECIPES_DIFFERENCES = [
    PLAIN,
    "Feedback(Sharded(Int8(block=16)), rule='ef21')",
    "Feedback(PowerSGD(2), rule='ef21')",
    "OneBitAdam(warmup=1, inner=Feedback(OneBit(), rule='ef21'))",
]


def of(state: Any, kind: str) -> dict[str, Tensor]:
    """By parameter, what a worker keeps under a key that ends so."""
    return {name: tensor for name, kept in state["state"].items() for key, tensor in kept.items() if key.endswith(kind)}


def check_folding_differences(old: int, new: int, recipe: str, folder: Path) -> None:
    before = [end for _, end in cluster(lambda worker: train(worker, recipe, 5, save=folder), old)]
    later = cluster(lambda worker: train(worker, recipe, 3, load=folder), new)
    answers = of(before[0][1], "." + KNOWN_MEAN)
    assert answers
    assert all(tensor.any() for tensor in answers.values())
    for (_, begun, *_), _ in later:
        for name, answer in answers.items():
            assert torch.equal(of(begun, "." + KNOWN_MEAN)[name], answer)
            assert torch.equal(of(begun, "." + KNOWN)[name], answer), "a new worker has told something else"
        for name, tensor in of(begun, SMOOTHED).items():
            theirs = torch.stack([of(state, SMOOTHED)[name] for _, state, *_ in before])
            torch.testing.assert_close(tensor, theirs.mean(0), rtol=1e-13, atol=1e-13)
        assert all(flag == 1 for flag in of(begun, BEGUN).values())
        assert not any(debt.any() for debt in of(begun, UNSENT).values())
    assert torch.isfinite(agree([ended for _, (ended, *_) in later])).all()
    for name, answer in of(later[0][1][1], "." + KNOWN_MEAN).items():
        told = torch.stack([of(state, "." + KNOWN)[name] for _, (_, state, *_) in later]).mean(0)
        debts = [of(state, UNSENT)[name].flatten() for _, (_, state, *_) in later if name in of(state, UNSENT)]
        debt = torch.cat(debts).view(answer.shape) if debts else 0.0
        torch.testing.assert_close(told - debt, answer, rtol=1e-12, atol=1e-12)


@once_each("recipe, worlds", RECIPES_DIFFERENCES[:3], [(4, 2), (2, 4), (3, 5)])
def test_new_workers_have_told_what_all_agreed_on(worlds: tuple[int, int], recipe: str, tmp_path: Path) -> None:
    check_folding_differences(*worlds, recipe, tmp_path)


@pytest.mark.parametrize("recipe", [PLAIN, RECIPES_DIFFERENCES[1]])
def test_that_check_catches_who_begins_from_its_own(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard, "begins_from", lambda key: key)
    with pytest.raises(AssertionError):
        check_folding_differences(4, 2, recipe, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES_DIFFERENCES)
def test_resuming_changes_no_bit(recipe: str) -> None:
    """Also where batches differ in size from step to step."""
    check_resume(recipe, (1, 5))


@pytest.mark.parametrize("kind", [KNOWN, KNOWN_MEAN, SMOOTHED, BEGUN])
def test_resuming_without_any_of_it_is_found(kind: str) -> None:
    def spoil(session: Any) -> None:
        for kept in session["state"].values():
            for key in [key for key in kept if key.rpartition(".")[2] == kind]:
                kept[key].zero_()

    with pytest.raises(AssertionError, match="another way"):
        check_resume(PLAIN, (5,), spoil)


def test_a_resized_parameter_begins_again_and_its_neighbours_continue() -> None:
    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = worker.attach(model, optimizer, resolve(RECIPES_DIFFERENCES[1], worker.world))
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        answers = {name: tensor.clone() for name, tensor in of(session.state_dict(), "." + KNOWN_MEAN).items()}
        model[4].weight = nn.Parameter(torch.zeros(9, 16, dtype=torch.float64))
        session.reset_compressor_state("4.weight")
        return answers, of(session.state_dict(), "." + KNOWN)

    found = cluster(work, 3)
    for name, answer in found[0][0].items():
        told = torch.stack([kept[name] for _, kept in found]).mean(0)
        torch.testing.assert_close(
            told, torch.zeros_like(told) if name == "4.weight" else answer, rtol=1e-12, atol=1e-12
        )


def test_debtors_and_beginnings_are_found_behind_prefixes() -> None:
    assert feedback_rules.begins_from("place1.0.known") == "place1.0.known_mean"
    assert feedback_rules.begins_from("0.smoothed") == "0.smoothed"
    assert feedback_rules.debtor("0.", {"0.known": None}) == ("0.known", -1)
    assert feedback_rules.debtor("0.", {"0.residual": None}) == ("0.residual", 1)


# -- Resharding where a recipe's text has come to mean other wrappers: what still had to be sent is the same -----------

GATHERED = "EveryStep() + Route(Feedback(TopK(density=0.1))) + Complete()"
SUMMED = "EveryStep() + Route(Feedback(SparseSum(TopK(density=0.1)))) + Complete()"
SHARDED = "EveryStep() + Route(Feedback(Sharded(Int8()))) + Complete()"
WORLD = 4

StateDict = Mapping[str, Any]


def advance(worker: Worker, recipe: str, state: StateDict) -> tuple[StateDict, torch.Tensor, StateDict]:
    """(remembered at once, parameters and what is remembered some steps later)"""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = worker.attach(model, optimizer, recipe)
    session.load_state_dict(reshard.taken_up(state, session.state_dict()))
    begun = copied(session.state_dict())
    assert begun["recipe"] == recipe
    for step in range(session.steps, session.steps + 3):
        train_step(model, optimizer, step, worker.rank)
    assert session.steps == state["step"] + 3
    return begun["state"], parameters(model), session.state_dict()["state"]


def check_taken_up(written: str, now: str, spoil: Callable[[StateDict], StateDict] = lambda state: state) -> list[str]:
    """Residuals are bit-equal, and workers train on together; returns what was said."""
    states = [end[1] for _, end in cluster(lambda worker: train(worker, written, 5), WORLD)]
    with notices() as said:
        found = cluster(lambda worker: advance(worker, now, spoil(states[worker.rank])), WORLD)
    for state, (begun, _, later) in zip(states, found, strict=True):
        waiting = {name: kept for name, kept in state["state"].items() if kept}
        assert any(tensor.any() for kept in waiting.values() for tensor in kept.values())
        for name, kept in waiting.items():
            assert kept.keys() == begun[name].keys()
            assert all(key.endswith(RESIDUAL) and torch.equal(kept[key], begun[name][key]) for key in kept)
            assert not any(torch.equal(later[name][key], kept[key]) for key in kept)
    assert torch.isfinite(agree([ended for _, ended, _ in found])).all()
    return said


@pytest.mark.parametrize(("written", "now"), [(GATHERED, SUMMED), (SUMMED, GATHERED)], ids=["summed", "gathered"])
def test_what_waits_continues_bit_for_bit_and_rank_0_reports_it(written: str, now: str) -> None:
    (line,) = check_taken_up(written, now)
    assert f"was written with {written}; the run continues with {now}" in line
    assert "write the recipe of the checkpoint with its wrappers" in line


def test_nothing_is_said_where_nothing_changed() -> None:
    assert check_taken_up(GATHERED, GATHERED) == []


def emptied(state: StateDict) -> StateDict:
    kept = {name: {key: torch.zeros_like(x) for key, x in each.items()} for name, each in state["state"].items()}
    return {**state, "state": kept}


def test_the_check_catches_what_is_forgotten() -> None:
    with pytest.raises(AssertionError):
        check_taken_up(GATHERED, SUMMED, emptied)


def test_who_owes_parts_is_refused_with_the_line_to_write() -> None:
    whole = SHARDED.replace("Sharded(Int8())", "Int8()")
    for written, now in ((SHARDED, whole), (whole, SHARDED)):
        with pytest.raises(CheckpointError, match=re.escape(f'gossamer.attach(model, optimizer, "{written}")')):
            check_taken_up(written, now)


def check_another_strategy(folder: Path, world: int) -> None:
    """Though their compressors are alike, and remember the same."""
    cluster(lambda worker: train(worker, "EveryStep(accumulate=2) + TopK(0.1)", 2, save=folder), 4)
    with pytest.raises(CheckpointError, match="recipe"):
        cluster(lambda worker: train(worker, "EveryStep() + TopK(0.1)", 1, load=folder), world)


@pytest.mark.parametrize("world", [2, 4])
def test_another_strategy_is_refused(world: int, tmp_path: Path) -> None:
    check_another_strategy(tmp_path, world)


def test_looking_at_compressors_only_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard, "_plain", lambda text: resolve(text).compressor)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_another_strategy(tmp_path, 2)


def test_texts_differ_only_in_what_the_number_of_workers_chooses() -> None:
    for example, _ in describe():
        assert reshard.alike(repr(resolve(example)), repr(resolve(example, 5)))
    assert not reshard.alike(GATHERED, GATHERED.replace("0.1", "0.2"))
    assert not reshard.alike(GATHERED, GATHERED.replace("EveryStep()", "LocalSGD(period=8)"))
    assert not reshard.alike("OfAnotherVersion()", GATHERED)
