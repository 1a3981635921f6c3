"""Virtual grid: strategies, ServerApps and ClientApps run as they are, and the clock tells what profiles say."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.federations import federate, one_pass

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian
from support.flower_apps import first_arrays, flat_of, linear_app

from gossamer.federated.flower import VirtualGrid, simulate
from gossamer.federated.population import DeviceProfile

logging.getLogger("flwr").setLevel(logging.ERROR)
QUIET = {"fraction_evaluate": 0.0}


def asked(grid: VirtualGrid, node: int, **metrics: float) -> Message:
    content = RecordDict({"arrays": first_arrays(), "metrics": MetricRecord({"n": 1, **metrics})})
    return Message(content, node, "train")


def test_flowers_average_is_gossamers() -> None:
    own = federate("FedAvg(fraction=1.0)", clients=4, rounds=5).parameters
    result = FedAvg(**QUIET).start(VirtualGrid(linear_app(), 4), first_arrays(), num_rounds=5)
    assert torch.allclose(flat_of(result.arrays), own, rtol=0, atol=1e-12)
    less = FedAvg(**QUIET).start(VirtualGrid(linear_app(), 4), first_arrays(), num_rounds=4)
    assert not torch.allclose(flat_of(less.arrays), own, rtol=0, atol=1e-6)


def test_a_server_app_runs_as_it_is() -> None:
    server = ServerApp()
    results: list[Any] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        assert context.run_config == {"rounds": 3}
        results.append(FedMedian().start(grid, first_arrays(), num_rounds=3))

    grid = simulate(server, linear_app(), 4, run_config={"rounds": 3})
    assert grid.seconds == 0.0
    assert len(grid.traffic) == 6  # training and evaluation
    assert set(results[0].evaluate_metrics_clientapp) == {1, 2, 3}


def test_the_clock_is_the_slowest_devices() -> None:
    profiles = [
        DeviceProfile(seconds_per_step=1.0),
        DeviceProfile(seconds_per_step=5.0),
        DeviceProfile(round_trip_seconds=1.0, up_bits_per_second=1e2, down_bits_per_second=1e3),
    ]
    grid = VirtualGrid(linear_app(), profiles)
    FedAvg(**QUIET).start(grid, first_arrays(), num_rounds=1)
    up, down = grid.traffic[0].by_node[1002]
    assert grid.seconds == pytest.approx(max(5.0, 1.0 + 8 * up / 1e2 + 8 * down / 1e3))
    assert grid.seconds > 5.0


def test_a_device_that_is_too_slow_is_not_waited_for() -> None:
    slow = [DeviceProfile()] * 3 + [DeviceProfile(seconds_per_step=100.0)]
    grid = VirtualGrid(linear_app(), slow)
    replies = grid.send_and_receive([asked(grid, node) for node in grid.get_node_ids()], timeout=7.0)
    assert [each.metadata.src_node_id for each in replies] == [1000, 1001, 1002]
    assert grid.seconds == 7.0


def test_pulls_wait_for_the_next_answer() -> None:
    grid = VirtualGrid(linear_app(), [DeviceProfile(seconds_per_step=each) for each in (3.0, 1.0, 2.0)])
    names = grid.push_messages([asked(grid, node) for node in grid.get_node_ids()])
    assert grid.seconds == 0.0
    order: list[tuple[float, list[int]]] = []
    for _ in range(3):
        replies = grid.pull_messages(names)
        order.append((grid.seconds, [each.metadata.src_node_id for each in replies]))
    assert order == [(1.0, [1001]), (2.0, [1002]), (3.0, [1000])]
    assert list(grid.pull_messages(names)) == []
    assert grid.seconds == 3.0


def test_replies_name_what_they_answer() -> None:
    grid = VirtualGrid(linear_app(), 2)
    messages = [asked(grid, node) for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages)
    assert [each.metadata.reply_to_message_id for each in replies] == [each.metadata.message_id for each in messages]
    assert len({each.metadata.message_id for each in replies} | {each.metadata.message_id for each in messages}) == 4


def test_what_an_app_raises_is_an_error_reply(caplog: pytest.LogCaptureFixture) -> None:
    def failing(model: Any, told: Any) -> Any:
        if told.client == 1:
            raise RuntimeError("disk full")
        return one_pass(model, told)

    grid = VirtualGrid(linear_app(function=failing), 3)
    replies = grid.send_and_receive([asked(grid, node) for node in grid.get_node_ids()])
    assert [each.has_error() for each in replies] == [False, True, False]
    assert replies[1].error.reason == "RuntimeError: disk full"
    assert "node 1001 raised" in caplog.text


def test_failures_of_profiles_are_error_replies() -> None:
    grid = VirtualGrid(linear_app(), [DeviceProfile(failure=0.5)] * 40)
    replies = grid.send_and_receive([asked(grid, node) for node in grid.get_node_ids()])
    assert 8 <= sum(each.has_error() for each in replies) <= 32


def test_nodes_keep_their_state_and_cannot_see_each_others_writes() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert "seen" not in message.content["metrics"]
        message.content["metrics"]["seen"] = 1
        del message.content["arrays"]
        before = context.state["runs"]["n"] if "runs" in context.state else 0
        context.state["runs"] = MetricRecord({"n": before + 1})
        return Message(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"n": before})}), reply_to=message)

    grid = VirtualGrid(app, 2)
    content = RecordDict({"arrays": first_arrays(), "metrics": MetricRecord({"n": 1})})
    for turn in range(3):
        replies = grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()])
        assert [each.content["metrics"]["n"] for each in replies] == [turn, turn]
    assert set(content) == {"arrays", "metrics"}
    assert [each.node_config["partition-id"] for each in grid.contexts.values()] == [0, 1]


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        VirtualGrid(ClientApp(), 0)
    grid = VirtualGrid(ClientApp(), 1)
    with pytest.raises(ValueError, match="no node 7"):
        grid.push_messages([asked(grid, 7)])
    assert [each.node_id for each in grid.get_nodes()] == [1000]
