"""Compressed strategy: Flower's FedAvg over compressed contributions is Gossamer's own, and bad nodes are left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.federations import federate

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
)
from support.flower_apps import first_arrays, flat_of, linear_app, replaced

from gossamer.errors import LayoutError, LoopError, RecipeError
from gossamer.federated.flower import CompressedStrategy, VirtualGrid, compression_mod
from gossamer.federated.flower.arrays import is_gossamer_record
from gossamer.federated.flower.client_mod import loaded
from gossamer.federated.flower.codec import NodeState
from gossamer.federated.flower.records import PAYLOAD, RECORD

logging.getLogger("flwr").setLevel(logging.ERROR)


def trained(recipe: str, pull: str | None = None, rounds: int = 6, clients: int = 4, **options: Any) -> Any:
    grid = VirtualGrid(linear_app([compression_mod(recipe)]), clients)
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), recipe, pull=pull, **options)
    result = strategy.start(grid, first_arrays(), num_rounds=rounds)
    return flat_of(result.arrays), strategy, grid


TOPK = "Route(Feedback(TopK(0.25)), smallest=1)"  # the model is tiny, and tiny tensors would travel dense
INT8 = "Route(Int8(), smallest=1)"
CHAIN = "Route(Feedback(Chain(TopK(0.5), Int8())), smallest=1)"


def own_rounds(recipe: str, pull: str | None = None) -> torch.Tensor:
    inside = "" if pull is None else f", pull={pull}"
    return federate(f"FedAvg(fraction=1.0{inside}) + {recipe}", clients=4, rounds=6).parameters


@pytest.mark.parametrize("pull", [None, TOPK, INT8])
@pytest.mark.parametrize("recipe", ["Dense()", TOPK, INT8, CHAIN])
def test_it_is_the_same_as_gossamers_own_rounds(recipe: str, pull: str | None) -> None:
    own = own_rounds(recipe, pull)
    found, strategy, _ = trained(recipe, pull)
    assert torch.allclose(found, own, rtol=0, atol=1e-12)
    assert strategy.refused == [{}] * 6
    if (recipe, pull) != ("Dense()", None):  # the twin: what is compressed is not what is not
        assert not torch.allclose(found, own_rounds("Dense()"), rtol=0, atol=1e-6)


def test_feedback_makes_the_difference() -> None:
    without, _, _ = trained("Route(TopK(0.25, feedback=False), smallest=1)")
    assert not torch.allclose(without, own_rounds(TOPK), rtol=0, atol=1e-3)


@pytest.mark.parametrize("make", [FedAvg, FedAvgM, FedAdam])
def test_dense_contributions_are_what_a_strategy_sees_without_the_wrapper(make: Any) -> None:
    plain = make(fraction_evaluate=0.0).start(VirtualGrid(linear_app(), 3), first_arrays(), num_rounds=4)
    grid = VirtualGrid(linear_app([compression_mod()]), 3)
    wrapped = CompressedStrategy(make(fraction_evaluate=0.0), "Dense()").start(grid, first_arrays(), num_rounds=4)
    assert torch.allclose(flat_of(wrapped.arrays), flat_of(plain.arrays), rtol=0, atol=1e-12)
    assert wrapped.train_metrics_clientapp.keys() == plain.train_metrics_clientapp.keys()
    assert wrapped.train_metrics_clientapp[4]["loss"] == pytest.approx(plain.train_metrics_clientapp[4]["loss"])


@pytest.mark.parametrize("where", ["server", "client"])
def test_it_stands_around_flowers_own_wrappers_and_mods(where: str) -> None:
    def trained(wrap: Any, mods: Any) -> torch.Tensor:
        private = {
            "server": DifferentialPrivacyServerSideFixedClipping,
            "client": DifferentialPrivacyClientSideFixedClipping,
        }[where](FedAvg(fraction_evaluate=0.0), noise_multiplier=0.0, clipping_norm=0.5, num_sampled_clients=3)
        own = [fixedclipping_mod] if where == "client" else []
        return flat_of(
            wrap(private).start(VirtualGrid(linear_app([*mods, *own]), 3), first_arrays(), num_rounds=3).arrays
        )

    plain = trained(lambda strategy: strategy, [])
    found = trained(lambda strategy: CompressedStrategy(strategy, "Dense()"), [compression_mod()])
    assert torch.allclose(found, plain, rtol=0, atol=1e-12)
    assert float((found - flat_of(first_arrays())).norm()) <= 1.5 + 1e-9  # three clipped rounds


def test_nodes_without_the_mod_take_part() -> None:
    plain = FedAvg(fraction_evaluate=0.0).start(VirtualGrid(linear_app(), 3), first_arrays(), num_rounds=3)
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), TOPK)
    found = strategy.start(VirtualGrid(linear_app(), 3), first_arrays(), num_rounds=3)
    assert torch.allclose(flat_of(found.arrays), flat_of(plain.arrays), rtol=0, atol=1e-13)  # summed in another order


def test_nodes_without_the_mod_begin_from_the_versions_that_others_hold() -> None:
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), TOPK, pull=INT8)
    found = strategy.start(VirtualGrid(linear_app(), 4), first_arrays(), num_rounds=6)
    assert torch.allclose(flat_of(found.arrays), own_rounds("Dense()", INT8), rtol=0, atol=1e-12)


def test_bytes_are_counted_both_ways() -> None:
    _, strategy, grid = trained(TOPK, INT8, rounds=3)
    for ours, theirs in zip(strategy.traffic, grid.traffic[::2], strict=True):
        assert 0 < ours.up_bytes < theirs.up_bytes  # notes and metrics are counted there
        assert sum(up for up, _ in ours.by_node.values()) == ours.up_bytes
        assert sum(down for _, down in ours.by_node.values()) == ours.down_bytes
    assert strategy.traffic[0].down_bytes == strategy.traffic[0].down_plain_bytes  # nobody holds a version yet


class Spoiler:
    """A mod outside of the compression mod: changes what one node sends."""

    def __init__(self, change: Any, rounds: tuple[int, ...] = (2,), node: int = 1001) -> None:
        self.change, self.rounds, self.node, self.round = change, rounds, node, 0

    def __call__(self, message: Message, context: Any, call_next: Any) -> Message:
        index = int(message.content["config"]["server-round"])
        reply = call_next(message, context)
        return self.change(reply) if context.node_id == self.node and index in self.rounds else reply


def _payload(change: Any) -> Any:
    def changed(reply: Message) -> Message:
        record = reply.content["arrays"]
        array = record[PAYLOAD]
        data = change(bytes(array.data))
        reply.content["arrays"] = replaced(record, **{PAYLOAD: Array("uint8", (len(data),), array.stype, data)})
        return reply

    return changed


def _content(**records: Any) -> Any:
    def changed(reply: Message) -> Message:
        for name, record in records.items():
            reply.content[name] = record
        return reply

    return changed


def _plain(array: Array) -> Any:
    return lambda reply: _content(
        arrays=ArrayRecord({"weight": array, "bias": Array(torch.zeros(1).double().numpy())})
    )(reply)


SMALL = Array(torch.zeros(1, 4).double().numpy()).data
BOMB = Array("float64", (1, 4), "numpy.ndarray", SMALL.replace(b"(1, 4), }          ", b"(1000000000, 4), } "))


def test_the_bomb_is_one() -> None:
    assert b"1000000000" in BOMB.data
    assert len(BOMB.data) == len(SMALL)


@pytest.mark.parametrize(
    "change",
    [
        _payload(lambda data: data[:-1]),
        _payload(lambda data: data + b"\0" * 8),
        _payload(lambda data: b""),
        _payload(lambda data: data.replace(b'"step":1', b'"step":0')),
        _payload(lambda data: data[:-16] + b"\xff" * 16),
        _content(gossamer=ConfigRecord({"note": "[]"})),
        _content(gossamer=ConfigRecord({"note": '{"run":"another"}'})),
        _content(gossamer=ConfigRecord({"note": 7})),
        _content(metrics=MetricRecord({"num-examples": -8, "loss": 0.0})),
        _content(metrics=MetricRecord({"num-examples": 10**12, "loss": 0.0})),
        _content(metrics=MetricRecord({"num-examples": float("nan"), "loss": 0.0})),
        _content(arrays=ArrayRecord({"weight": Array(torch.zeros(1, 4).double().numpy())})),
        _content(other=ArrayRecord({"weight": Array(torch.zeros(1, 4).double().numpy())})),
        _plain(Array(torch.full((1, 4), float("nan")).double().numpy())),
        _plain(Array(torch.zeros(2, 4).double().numpy())),
        _plain(Array("float64", (1, 4), "numpy.ndarray", b"\x93NUMPY")),
        _plain(Array("float64", (1, 4), "python.pickle", b"cos\nsystem\n")),
        _plain(BOMB),
        _plain(Array(torch.zeros(1, 4).double().numpy().astype(">f8"))),
    ],
)
def test_a_node_that_lies_is_left_out_and_the_round_continues(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    spoiler = Spoiler(change)
    grid = VirtualGrid(linear_app([spoiler, compression_mod()]), 3)
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), TOPK, pull=INT8)
    result = strategy.start(grid, first_arrays(), num_rounds=3)
    assert [list(each) for each in strategy.refused] == [[], [1001], []]
    assert strategy.refused[1][1001]
    assert flat_of(result.arrays).isfinite().all()
    assert "was not used" in caplog.text


def test_what_was_not_counted_stays_owed() -> None:
    """With rounds 2 and 3 of a node lost, what it gave, decoded, and what it owes add up to rounds 1 and 4 alone."""
    kept: dict[int, NodeState] = {}
    given: dict[int, torch.Tensor] = {}

    def spy(message: Message, context: Any, call_next: Any) -> Message:
        before = flat_of(message.content["arrays"])
        reply = call_next(message, context)
        if context.node_id == 1001:
            given[len(given) + 1] = before - flat_of(reply.content["arrays"])
        return reply

    lost = Spoiler(_payload(lambda data: b""), rounds=(2, 3))
    grid = VirtualGrid(linear_app([lost, compression_mod(), spy]), 3)
    taken: dict[int, torch.Tensor] = {}

    class Watching(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            kept[server_round] = loaded(grid.contexts[1001])
            for reply in replies:
                if reply.metadata.src_node_id == 1001:
                    taken[server_round] = start_of[server_round] - flat_of(reply.content["arrays"])
            return super().aggregate_train(server_round, replies)

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            start_of[server_round] = flat_of(arrays)
            return super().configure_train(server_round, arrays, config, grid)

    start_of: dict[int, torch.Tensor] = {}
    strategy = CompressedStrategy(Watching(fraction_evaluate=0.0), TOPK)
    strategy.start(grid, first_arrays(), num_rounds=4)
    assert sorted(taken) == [1, 4]
    owed = torch.zeros(5, dtype=torch.float64)
    for block in kept[4].after:
        for key, each in block.items():
            assert key.endswith("residual")
            owed[: each.numel()] += each
    assert torch.allclose(taken[1] + taken[4] + owed, given[1] + given[4], rtol=0, atol=1e-12)
    assert not torch.allclose(taken[1] + taken[4], given[1] + given[4], rtol=0, atol=1e-3)


def test_a_node_that_lost_its_state_is_sent_the_whole_model_again() -> None:
    grid = VirtualGrid(linear_app([compression_mod()]), 3)
    strategy = CompressedStrategy(FedAvg(fraction_evaluate=0.0), TOPK, pull=INT8)
    errors: list[int] = []

    class Forgetful(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            errors.append(sum(reply.has_error() for reply in replies))
            if server_round == 2:
                grid.contexts[1002].state = RecordDict()
            return super().aggregate_train(server_round, replies)

    strategy.strategy = Forgetful(fraction_evaluate=0.0)
    strategy.start(grid, first_arrays(), num_rounds=5)
    assert errors == [0, 0, 1, 0, 0]


def test_apps_see_plain_messages() -> None:
    seen: list[Message] = []

    def spy(message: Message, context: Any, call_next: Any) -> Message:
        seen.append(message)
        return call_next(message, context)

    grid = VirtualGrid(linear_app([compression_mod(), spy]), 2)
    CompressedStrategy(FedAvg(), TOPK, pull=INT8).start(grid, first_arrays(), num_rounds=3)
    assert len(seen) == 12
    assert all(set(each.content) == {"arrays", "config"} for each in seen)
    assert all(list(each.content["arrays"]) == ["weight", "bias"] for each in seen)
    assert not any(is_gossamer_record(array.stype) for each in seen for array in each.content["arrays"].values())
    assert all(RECORD not in each.content for each in seen)


def test_a_mod_whose_strategy_is_not_wrapped_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    grid = VirtualGrid(linear_app([compression_mod("TopK(0.5)")]), 2)
    FedAvg(fraction_evaluate=0.0).start(grid, first_arrays(), num_rounds=1)
    assert "CompressedStrategy(FedAvg(...)" in caplog.text


def test_mod_and_wrapper_name_their_recipes(caplog: pytest.LogCaptureFixture) -> None:
    grid = VirtualGrid(linear_app([compression_mod("TopK(0.5)")]), 2)
    CompressedStrategy(FedAvg(fraction_evaluate=0.0), "Int8()").start(grid, first_arrays(), num_rounds=1)
    assert "MismatchError" in caplog.text
    assert "TopK" in caplog.text
    assert "Int8" in caplog.text


def test_bad_recipes_are_refused_at_once() -> None:
    with pytest.raises(RecipeError):
        CompressedStrategy(FedAvg(), "Topk(")
    with pytest.raises(RecipeError):
        compression_mod("FedAvg()")


def test_models_without_floats_and_halves_with_pull_are_refused() -> None:
    app = ClientApp()
    integers = ArrayRecord({"w": Array(torch.zeros(4, dtype=torch.int64).numpy())})
    with pytest.raises(LayoutError, match="nothing to compress"):
        CompressedStrategy(FedAvg(), "TopK(0.5)").start(VirtualGrid(app, 2), integers, num_rounds=1)
    halves = ArrayRecord({"w": Array(torch.zeros(4, dtype=torch.float16).numpy())})
    with pytest.raises(LayoutError, match="float16"):
        CompressedStrategy(FedAvg(), TOPK, pull=INT8).start(VirtualGrid(app, 2), halves, num_rounds=1)
    strategy = CompressedStrategy(FedAvg(), "TopK(0.5)")
    grid = VirtualGrid(app, 2)
    message = Message(RecordDict({"a": first_arrays(), "b": first_arrays()}), 1000, "train")
    strategy.strategy.configure_train = lambda *_: [message]
    with pytest.raises(LoopError, match="2 ArrayRecords"):
        strategy.start(grid, first_arrays(), num_rounds=1)
