"""Remote modules against the same model in one piece: integers in float32 make equality that of bits."""

import copy
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.remote_ranks import remote_ranks
from torch import nn

from gossamer.errors import LoopError, MalformedError, PeerLost, RecipeError, RemoteError
from gossamer.train.parallel.remote import place_remotely
from gossamer.train.parallel.remote_messages import unflatten

WAIT_SECONDS = 30
SGD = partial(torch.optim.SGD, lr=1.0)


@pytest.fixture
def ranks():
    with remote_ranks(3) as found:
        yield found


def linear(inputs=4, outputs=3, seed=0):
    layer = nn.Linear(inputs, outputs)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=draws))
    return layer


class Pair(NamedTuple):
    left: Any
    right: Any


def integers(*shape, seed=7):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def parameters_of(layer):
    return layer.remote_state_dict()


def assert_same(found, due):
    assert found.keys() == due.keys()
    for name in due:
        assert torch.equal(found[name], due[name]), name


def test_a_chain_over_two_ranks_learns_as_in_one_piece(ranks):
    local = nn.Sequential(linear(seed=1), nn.ReLU(), linear(3, 2, seed=2))
    optimizer = torch.optim.SGD(local.parameters(), lr=1.0)
    first = ranks.place(lambda: linear(seed=1), 1, optimizer=SGD, clients=[0])[0]
    second = ranks.place(lambda: linear(3, 2, seed=2), 2, optimizer=SGD, clients=[0])[0]
    for step in range(3):
        x, x_local = (integers(5, 4, seed=step).requires_grad_() for _ in range(2))
        loss, due = second(torch.relu(first(x))).sum(), local(x_local).sum()
        assert torch.equal(loss, due)
        loss.backward()
        due.backward()
        assert torch.equal(x.grad, x_local.grad)
        for each in (first.optimizer, second.optimizer, optimizer):
            each.step()
        optimizer.zero_grad()
    assert_same(parameters_of(first), local[0].state_dict())
    assert_same(parameters_of(second), local[2].state_dict())
    assert not torch.equal(local[0].weight, linear(seed=1).weight), "nothing was learned, so equality says nothing"


def test_the_same_module_twice_in_one_graph_and_several_passes_before_a_backward(ranks):
    local, layer = linear(4, 4), ranks.place(lambda: linear(4, 4), 1, optimizer=SGD, clients=[0])[0]
    x, x_local = (integers(2, 4).requires_grad_() for _ in range(2))
    first, second = layer(layer(x)), layer(x + 1)
    (second.sum() + first.sum()).backward()
    (local(local(x_local)).sum() + local(x_local + 1).sum()).backward()
    assert torch.equal(x.grad, x_local.grad)
    layer.optimizer.step()
    assert torch.equal(parameters_of(layer)["weight"], linear(4, 4).weight - local.weight.grad)


def test_parameters_learn_from_inputs_that_need_no_gradient_and_not_from_other_outputs(ranks):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = linear(seed=1), linear(seed=2)

        def forward(self, x, *, scale, name):
            return {name: self.used(x) * scale, "unused": (self.unused(x), x.argmax(dim=1), None, x * 2)}

    layer = ranks.place(Two, 1, optimizer=SGD, clients=[0])[0]
    found = layer(integers(5, 4), scale=2, name="y")
    assert found["unused"][1].dtype == torch.int64
    assert not found["unused"][1].requires_grad
    assert found["unused"][2] is None
    assert not found["unused"][3].requires_grad, "it is not, in a model in one piece"
    found["y"].sum().backward()
    layer.optimizer.step()
    after, before = parameters_of(layer), Two().state_dict()
    assert torch.equal(after["used.bias"], before["used.bias"] - 10)
    assert torch.equal(after["unused.weight"], before["unused.weight"])


def test_several_clients_make_one_step_of_the_mean(ranks):
    layers = ranks.place(linear, 1, optimizer=SGD, clients=[0, 2])
    inputs = {0: integers(2, 4, seed=1), 2: integers(2, 4, seed=2)}

    def train(rank):
        for x in (inputs[rank], inputs[rank] + 1):
            layers[rank](x).sum().backward()
            layers[rank].optimizer.step()

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(train, rank) for rank in inputs]:
            done.result(WAIT_SECONDS)
    total = sum(2 * x.sum(dim=0) + 2 for x in inputs.values()) / 2
    assert torch.equal(parameters_of(layers[0])["weight"], linear().weight - total)


def test_zero_grad_forgets_those_of_this_rank_alone(ranks):
    layers = ranks.place(linear, 1, optimizer=SGD, clients=[0, 2])
    for rank in (0, 2):
        layers[rank](torch.full((1, 4), float(rank + 2))).sum().backward()
    layers[0].optimizer.zero_grad()
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(layers[rank].optimizer.step) for rank in (0, 2)]:
            done.result(WAIT_SECONDS)
    assert torch.equal(parameters_of(layers[0])["weight"], linear().weight - 2)


def test_a_step_sets_what_it_is_given_and_clients_agree_on_it(ranks):
    layers = ranks.place(linear, 1, optimizer=SGD, clients=[0, 2])
    layers[0](torch.ones(1, 4)).sum().backward()

    def step(rank, lr):
        layers[rank].optimizer.step(lr=lr)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(step, rank, 4.0) for rank in (0, 2)]:
            done.result(WAIT_SECONDS)
        assert torch.equal(parameters_of(layers[0])["weight"], linear().weight - 2)
        for done in [pool.submit(step, rank, 1.0 + rank) for rank in (0, 2)]:
            with pytest.raises(RemoteError, match=r"MismatchError.*clients \[0, 2\] step with"):
                done.result(WAIT_SECONDS)


def test_an_owner_calls_others_within_its_forward(ranks):
    inner = ranks.place(lambda: linear(3, 2, seed=2), 2, optimizer=SGD, clients=[0])
    outer = ranks.place(lambda: nn.Sequential(linear(seed=1), inner[1]), 1, optimizer=SGD, clients=[0])
    local = nn.Sequential(linear(seed=1), linear(3, 2, seed=2))
    x, x_local = (integers(5, 4).requires_grad_() for _ in range(2))
    outer[0](x).sum().backward()
    local(x_local).sum().backward()
    assert torch.equal(x.grad, x_local.grad)
    outer[0].optimizer.step()
    inner[0].optimizer.step()
    assert torch.equal(parameters_of(outer[0])["0.weight"], local[0].weight - local[0].weight.grad)
    assert torch.equal(parameters_of(inner[0])["weight"], local[1].weight - local[1].weight.grad)


def test_an_owner_calls_its_own_module_as_others_do(ranks):
    layer = ranks.place(linear, 1, optimizer=SGD, clients=[1])[1]
    assert layer.local_module is not None
    assert not list(layer.parameters()), "attach would see other parameters here than on other ranks"
    x = integers(5, 4).requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(x.grad, linear().weight.sum(dim=0).expand(5, 4))
    layer.optimizer.step()
    assert torch.equal(layer.local_module.weight, linear().weight - x.detach().sum(dim=0))


def test_compressed_calls_are_close_and_fewer_bytes(ranks):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    made = {}
    for codec in ("Dense()", "Int8()"):
        layer = ranks.place(lambda: linear(64, 64), 1, codec=codec)[0]
        sent = x.clone().requires_grad_()
        layer(sent).square().mean().backward()
        made[codec] = sent.grad, layer.bytes_sent, layer.bytes_received
    dense, sent, received = made["Dense()"]
    close, fewer_sent, fewer_received = made["Int8()"]
    assert (sent, received) == (2 * x.nbytes, 2 * x.nbytes)
    assert fewer_sent < 0.3 * sent
    assert fewer_received < 0.3 * received
    error = float((close - dense).norm() / dense.norm())
    assert 0 < error < 0.05


def test_a_value_that_is_not_finite_travels_as_it_is(ranks):
    layer = ranks.place(nn.Identity, 1, codec="Int8()")[0]
    x = torch.tensor([[1.0, torch.inf, torch.nan]])
    assert torch.equal(layer(x).nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_dtypes_and_empty_shapes_arrive(ranks, dtype):
    layer = ranks.place(nn.Identity, 1)[0]
    for shape in ((), (0, 3), (2, 3)):
        x = integers(*shape).to(dtype)
        assert torch.equal(layer(x), x)
        assert layer(x).dtype == dtype


def test_operations_in_place_before_and_after_a_call_learn_as_in_one_piece(ranks):
    def block():
        return nn.Sequential(nn.ReLU(inplace=True), linear(4, 4, seed=1))

    local = nn.Sequential(linear(4, 4, seed=2), block(), nn.ReLU(inplace=True))
    layer = ranks.place(block, 1, optimizer=SGD, clients=[0])[0]
    first = linear(4, 4, seed=2)
    x = integers(5, 4)
    found, due = nn.ReLU(inplace=True)(layer(first(x))), local(x)
    assert torch.equal(found, due)
    found.sum().backward()
    due.sum().backward()
    assert first.weight.grad.any()
    assert torch.equal(first.weight.grad, local[0].weight.grad)


def test_settings_of_a_step_are_numbers(ranks):
    layer = ranks.place(linear, 1, optimizer=SGD, clients=[0])[0]
    layer.optimizer.step(lr=torch.tensor(0.5))
    with pytest.raises(TypeError, match=r"step\(\) sends settings as numbers.*betas.*optimizer=lambda parameters"):
        layer.optimizer.step(betas=(0.9, 0.95))


def test_no_grad_holds_nothing_and_forgotten_outputs_are_freed(ranks):
    layer = ranks.place(linear, 1, held=2)[0]
    x = integers(2, 4)
    with torch.no_grad():
        kept = [layer(x) for _ in range(4)]
    assert not any(y.requires_grad for y in kept)
    for _ in range(5):
        layer(x)
    kept = [layer(x), layer(x)]
    with pytest.raises(RemoteError, match=r"LoopError.*2 forward passes of rank 0.*torch.no_grad.*held=4"):
        layer(x)
    kept.pop().sum().backward()
    kept.append(layer(x))


def test_a_graph_whose_release_was_lost_with_a_call_is_released_by_the_next(ranks, monkeypatch):
    def lost(*_):
        raise PeerLost("rank 1 has not answered")

    layer = ranks.place(linear, 1, held=1)[0]
    layer(integers(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(ranks.hubs[0], "call", lost)
        with pytest.raises(PeerLost):
            layer(integers(2, 4))
    assert layer(integers(2, 4)).requires_grad


def test_no_grad_holds_no_graph_of_an_input_that_needs_a_gradient(ranks):
    layer = ranks.place(nn.Identity, 1)[0]
    with torch.no_grad():
        layer(integers(2, 4).requires_grad_())
    assert not layer.dropped, "the owner held a graph, which is to be released"


def test_a_second_backward_pass_is_refused(ranks):
    layer = ranks.place(linear, 1)[0]
    loss = layer(integers(2, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RemoteError, match="retain_graph=True"):
        loss.backward()


def test_an_owners_error_comes_back_and_it_serves_on(ranks):
    layer = ranks.place(linear, 1)[0]
    with pytest.raises(RemoteError, match="rank 1 raised RuntimeError for remote module 0: mat1 and mat2 shapes"):
        layer(integers(2, 5))
    assert layer(integers(2, 4)).shape == (2, 3)


def test_what_cannot_travel_is_refused_before_it_is_sent(ranks):
    layer = ranks.place(nn.Identity, 1)[0]
    with pytest.raises(TypeError, match=r"a complex cannot be sent.*nothing is pickled"):
        layer(1j)
    with pytest.raises(LoopError, match="neither copied nor pickled"):
        copy.deepcopy(layer)


class Named(nn.Module):
    def forward(self, pair):
        return Pair(pair.left + 1, [pair.right.max(dim=0)])


def test_named_tuples_keep_their_names(ranks):
    layer = ranks.place(Named, 1)[0]
    found = layer(Pair(integers(4), integers(3, 2)))
    assert torch.equal(found.left, integers(4) + 1)
    assert torch.equal(found.right[0].values, integers(3, 2).max(dim=0).values)
    assert torch.equal(found.right[0].indices, integers(3, 2).max(dim=0).indices)
    left, _ = found
    assert left is found[0]
    assert type(ranks.place(nn.Identity, 1)[0]((1, "a"))) is tuple


@pytest.mark.parametrize(
    "named", [["Pair", ["left"], []], ["Pair", ["1"], [1]], ["Pair", [["left"]], [1]], [1, [], []]]
)
def test_an_invalid_named_tuple_is_refused(named):
    with pytest.raises(MalformedError, match="invalid"):
        unflatten({"named": named}, [])


def test_autocast_reaches_the_owner(ranks):
    layer = ranks.place(lambda: linear(), 1, optimizer=SGD, clients=[0])[0]
    x, x_local = (integers(5, 4).requires_grad_() for _ in range(2))
    local = linear()
    with torch.autocast("cpu", torch.bfloat16):
        found, due = layer(x), local(x_local)
    assert found.dtype == due.dtype == torch.bfloat16
    assert torch.equal(found, due)
    found.float().sum().backward()
    due.float().sum().backward()
    assert torch.equal(x.grad, x_local.grad)
    assert layer(x).dtype == torch.float32


def test_training_mode_is_the_clients(ranks):
    layer = ranks.place(lambda: nn.Dropout(0.5), 1)[0]
    x = torch.ones(64, 64)
    assert 0 < int((layer(x) == 0).sum()) < 64 * 64
    layer.eval()
    assert torch.equal(layer(x), x)


def test_ranks_that_say_something_else_are_refused(ranks):
    place_remotely(ranks.hubs[1], linear(), 1, codec="Int8()")
    with pytest.raises(RemoteError, match=r"MismatchError.*rank 0 called remote\(...\) with codec=Dense\(\)"):
        place_remotely(ranks.hubs[0], None, 1)


@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        ({"codec": "PowerSGD(rank=2)"}, RecipeError, "cannot compress remote calls"),
        ({"codec": "Feedback(TopK(density=0.1))"}, RecipeError, "keeps state"),
        ({"codec": "LocalSGD(period=3)"}, RecipeError, "not a single compressor"),
        ({"clients": [0, 3]}, ValueError, "ranks are 0 to 2"),
        ({"held": 0}, ValueError, "held must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(ranks, settings, error, why):
    with pytest.raises(error, match=why):
        place_remotely(ranks.hubs[1], linear(), 1, **settings)


def test_an_owner_beyond_the_workers_of_the_job_is_refused_with_the_command(ranks):
    with pytest.raises(ValueError, match=r"this job has 3\. Start it with: gossamer run --workers 4 SCRIPT"):
        place_remotely(ranks.hubs[1], linear(), 3)


def test_steps_without_an_optimizer_or_of_no_client_are_refused(ranks):
    with pytest.raises(RemoteError, match="optimizer=lambda parameters"):
        ranks.place(linear, 1)[0].optimizer.step()
    with pytest.raises(RemoteError, match=r"rank 2 called step.*clients of this module are \[0\].*clients=\[0, 2\]"):
        ranks.place(linear, 1, optimizer=SGD, clients=[0])[2].optimizer.step()


def test_who_waits_for_a_lost_rank_is_told(ranks):
    layers = ranks.place(linear, 1, optimizer=SGD, clients=[0, 2])
    with ThreadPoolExecutor() as pool:
        step = pool.submit(layers[0].optimizer.step)
        ranks.hubs[2].close()  # before or after the step has come
        with pytest.raises(PeerLost, match=r"rank 2 is one of this module's clients \[0, 2\]"):
            step.result(WAIT_SECONDS)


def test_a_call_to_an_owner_that_leaves_is_lost(ranks):
    entered, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            entered.set()
            leave.wait(WAIT_SECONDS)
            return x

    layer = ranks.place(Waits, 1)[0]
    with ThreadPoolExecutor() as pool:
        call = pool.submit(layer, torch.ones(1))
        assert entered.wait(WAIT_SECONDS)
        closing = pool.submit(ranks.hubs[1].close)  # it waits for the module, which computes
        with pytest.raises(PeerLost, match="worker 1 has left"):
            call.result(WAIT_SECONDS)
        leave.set()
        closing.result(WAIT_SECONDS)
    with pytest.raises(PeerLost):
        layer(torch.ones(1))


def test_owners_serve_until_all_scripts_have_ended(ranks):
    layers = ranks.place(linear, 1)
    with ThreadPoolExecutor() as pool:
        served = pool.submit(layers[1].serve)
        ranks.hubs[2].end()
        assert layers[0](integers(2, 4)).shape == (2, 3)
        assert not served.done()
        ranks.hubs[0].end()
        served.result(WAIT_SECONDS)


def test_an_owner_is_told_of_a_client_that_left_without_a_word(ranks):
    layers = ranks.place(linear, 1)
    ranks.hubs[2].end()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(layers[1].serve)
        ranks.hubs[0].close()
        with pytest.raises(PeerLost, match="rank 0 left before its script ended"):
            served.result(WAIT_SECONDS)


# -- Remote modules over processes: a script under gossamer run, and an owner that is killed ---------------------------

SCRIPT = """
import os, sys, torch
from torch import nn
torch.set_num_threads(1)
import gossamer
from gossamer.errors import PeerLost
from gossamer.train.parallel import remote

world = gossamer.init()
layers = [remote(nn.Linear(4, 4), rank=rank) for rank in (1, 2)]
if world.rank == 0:
    x = torch.ones(2, 4, requires_grad=True)
    layers[1](layers[0](x)).sum().backward()
    print(f"gradient of {tuple(x.grad.shape)}", flush=True)
    sys.stdin.readline()
    try:
        layers[1](torch.ones(2, 4))
    except PeerLost as lost:
        print(f"lost: {lost}", flush=True)
    print(layers[0](torch.ones(2, 4)).shape, flush=True)
"""


@pytest.mark.processes
def test_the_death_of_an_owner_is_reported_and_others_serve_on(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py"],
            env={**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert ranks[0].stdout.readline() == "gradient of (2, 4)\n", ranks[0].stderr.read()
        os.kill(ranks[2].pid, signal.SIGKILL)
        said, errors = ranks[0].communicate("go on\n", timeout=300)
        lost, shape = said.splitlines()
        assert "worker 2 has left, or was silent towards worker 0 for 5 s" in lost
        assert shape == "torch.Size([2, 4])"
        assert ranks[0].returncode == 0, errors
        errors = ranks[1].communicate(timeout=300)[1]
        assert ranks[1].returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
