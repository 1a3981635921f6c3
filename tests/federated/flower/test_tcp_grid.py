"""TCP grid: the same strategy and app over sockets come to the same parameters, and who is gone is not waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch
from support.federations import one_pass
from support.rpc_endpoints import endpoint, wait_until

pytest.importorskip("flwr")
from flwr.serverapp.strategy import FedAvg
from support.flower_apps import first_arrays, flat_of, linear_app

from gossamer.errors import PeerLost
from gossamer.federated.flower import CompressedStrategy, TcpGrid, VirtualGrid, compression_mod, serve_node
from gossamer.federated.flower.tcp_grid import node_peer
from gossamer.federated.messages import THE_SERVER

logging.getLogger("flwr").setLevel(logging.ERROR)
TOPK = "Route(Feedback(TopK(0.25)), smallest=1)"


@pytest.fixture
def served() -> Iterator[Any]:
    """A grid of so many nodes, each in a thread with an endpoint of its own."""
    with ExitStack() as stack:

        def begin(app: Any, nodes: int, dead_after_seconds: float = 60.0) -> tuple[TcpGrid, list[Any]]:
            server = stack.enter_context(endpoint(THE_SERVER, dead_after_seconds=dead_after_seconds))
            grid, ends = TcpGrid(server), []
            for number in range(nodes):
                own = stack.enter_context(endpoint(node_peer(number), dead_after_seconds=dead_after_seconds))
                ends.append(own)
                thread = threading.Thread(target=_serve, args=(app, own, server.address, nodes), daemon=True)
                thread.start()
                stack.callback(thread.join, 10.0)
            stack.callback(grid.close)
            wait_until(lambda: len(grid.get_node_ids()) == nodes)
            return grid, ends

        yield begin


def test_it_is_the_same_over_sockets(served: Any) -> None:
    def trained(grid: Any) -> torch.Tensor:
        strategy = CompressedStrategy(FedAvg(fraction_evaluate=1.0), TOPK, pull="Route(Int8(), smallest=1)")
        return flat_of(strategy.start(grid, first_arrays(), num_rounds=3).arrays)

    app = linear_app([compression_mod(TOPK)])
    grid, _ = served(app, 3)
    assert torch.allclose(trained(grid), trained(VirtualGrid(app, 3)), rtol=0, atol=1e-13)


def test_a_device_that_is_gone_is_answered_for(served: Any) -> None:
    grid, ends = served(linear_app(), 3, dead_after_seconds=1.0)
    messages = list(FedAvg(min_train_nodes=3).configure_train(1, first_arrays(), _config(), grid))
    ends[1].close()
    replies = list(grid.send_and_receive(messages, timeout=20))
    assert 1001 in [each.metadata.src_node_id for each in replies if each.has_error()]
    assert len(replies) == 3
    assert 1001 not in grid.get_node_ids()


def test_a_device_that_is_too_slow_is_not_waited_for(served: Any) -> None:
    may_go_on = threading.Event()

    def slow(model: Any, told: Any) -> Any:
        if told.client == 1:
            may_go_on.wait(10.0)
        return one_pass(model, told)

    grid, _ = served(linear_app(function=slow), 2)
    strategy = FedAvg(min_train_nodes=2)
    replies = grid.send_and_receive(strategy.configure_train(1, first_arrays(), _config(), grid), timeout=1.0)
    assert 1001 not in [each.metadata.src_node_id for each in replies]
    may_go_on.set()
    replies = grid.send_and_receive(strategy.configure_train(2, first_arrays(), _config(), grid), timeout=20)
    assert sorted(each.metadata.src_node_id for each in replies) == [1000, 1001]


def test_a_node_that_answers_while_the_grid_closes_returns() -> None:
    may_go_on, answered = threading.Event(), []

    def slow(model: Any, told: Any) -> Any:
        may_go_on.wait(10.0)
        return one_pass(model, told)

    def serve(address: Any, own: Any) -> None:
        answered.append(serve_node(linear_app(function=slow), own, address, nodes=1))

    with endpoint(THE_SERVER) as server, endpoint(node_peer(0)) as own:
        grid = TcpGrid(server)
        node = threading.Thread(target=serve, args=(server.address, own), daemon=True)
        node.start()
        wait_until(lambda: grid.get_node_ids() == [1000])
        grid.push_messages(
            FedAvg(min_train_nodes=1, min_available_nodes=1).configure_train(1, first_arrays(), _config(), grid)
        )
        closing = threading.Thread(target=partial(grid.close, within_seconds=60.0), daemon=True)
        closing.start()
        may_go_on.set()
        closing.join(20.0)
        assert not closing.is_alive()
        server.close()
        node.join(5.0)
    assert answered == [1]


def test_closing_a_grid_does_not_wait_longer_than_requested(served: Any) -> None:
    may_go_on = threading.Event()

    def slow(model: Any, told: Any) -> Any:
        may_go_on.wait(10.0)
        return one_pass(model, told)

    grid, _ = served(linear_app(function=slow), 1)
    grid.push_messages(
        FedAvg(min_train_nodes=1, min_available_nodes=1).configure_train(1, first_arrays(), _config(), grid)
    )
    grid.close(within_seconds=0.01)
    assert grid._desk.untold == {0}
    may_go_on.set()


def _serve(app: Any, own: Any, server: Any, nodes: int) -> None:
    with suppress(PeerLost):
        serve_node(app, own, server, nodes=nodes)


def _config() -> Any:
    from flwr.app import ConfigRecord

    return ConfigRecord()
