"""Sessions whose parameters live on servers: real endpoints on loopback, one thread a worker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from virtual import Worker, batch, cluster, network, parameters

from gossamer import circle, events, served, serving
from gossamer.environment.servers import run_token
from gossamer.errors import AttachError, ConnectError, LoopError, PeerLost, RecipeError, Stopped
from gossamer.forecast import forecast
from gossamer.peers import SERVER, Peer
from gossamer.recipe import resolve
from gossamer.serving.client import Client
from gossamer.serving.shard import Shard
from gossamer.session import Session
from gossamer.transports.tcp import TcpEndpoint

ROUNDS = {
    "sync": "ParameterServer(mode='sync')",
    "one shard": "ParameterServer(mode='sync', shards=1)",
    "stale 0": "ParameterServer(mode='stale', staleness=0)",
}


def begun(worker: Worker, recipe: str, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return model, optimizer, worker.attach(model, optimizer, recipe)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    x, y = batch(number, rank)
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(worker: Worker, recipe: str, steps: int = 5) -> torch.Tensor:
    model, optimizer, session = begun(worker, recipe)
    for number in range(steps):
        step(model, optimizer, number, worker.rank)
    session.close()
    return parameters(model)


def alone(world: int, steps: int = 5) -> torch.Tensor:
    """One process on the joined batches, from where rank 0 begins."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(steps):
        x, y = (torch.cat(each) for each in zip(*(batch(number, rank) for rank in range(world)), strict=True))
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def check_joined(recipe: str, world: int) -> None:
    found = cluster(lambda worker: trained(worker, recipe), world)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], alone(world), rtol=0, atol=1e-12)


@contextmanager
def heard(kind: type[events.Event]) -> Iterator[list[events.Event]]:
    """Events of a kind, of all workers."""
    found: list[events.Event] = []
    end = events.subscribe(lambda event: found.append(event) if isinstance(event, kind) else None)
    try:
        yield found
    finally:
        end()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("recipe", ROUNDS.values(), ids=ROUNDS.keys())
def test_in_rounds_servers_are_one_process_on_the_joined_batch(recipe: str, world: int) -> None:
    check_joined(recipe, world)


def test_gradients_that_are_not_landed_before_the_next_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: parameters stay what they were."""
    monkeypatch.setattr(Client, "land", lambda self: None)
    with pytest.raises(AssertionError):
        check_joined(ROUNDS["sync"], 2)


@pytest.mark.parametrize(
    "recipe",
    [
        "ParameterServer(mode='sync', push=TopK(0.1), pull=Int8())",
        "ParameterServer(push=OneBit(), pull=OneBit())",
        "ParameterServer(mode='stale', staleness=2, pull=TopK(0.3)) + Int8()",
        "ParameterServer('async', damping=True) + PowerSGD(rank=1)",
    ],
)
def test_every_pair_of_compressors_trains_and_ends_alike(recipe: str) -> None:
    def run(worker: Worker) -> tuple[float, float, torch.Tensor]:
        model, optimizer, session = begun(worker, recipe, momentum=0.0)
        losses = [step(model, optimizer, 0, worker.rank) for _ in range(40)]
        session.close()
        return losses[0], losses[-1], parameters(model)

    found = cluster(run, 3)
    assert all(torch.equal(values, found[0][2]) for *_, values in found)
    assert sum(last for _, last, _ in found) < 0.8 * sum(first for first, *_ in found)


def test_a_fast_worker_does_not_wait_for_a_slow_one() -> None:
    """The slow one makes its second step when the fast one has made all of its own."""
    fast_is_done = threading.Event()

    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, "ParameterServer('async')")
        for number in range(20 if worker.rank == 0 else 2):
            if worker.rank == 1 and number == 1:
                assert fast_is_done.wait(20)
            step(model, optimizer, number, worker.rank)
        if worker.rank == 0:
            fast_is_done.set()
        session.close()

    with heard(events.ServersTold) as told:
        cluster(run, 2)
    assert {event.applied for event in told} == {22}
    oldest = max(max(event.staleness) for event in told)
    assert 15 <= oldest <= 21, "the slow worker's second gradient was computed before the fast one's steps"


def test_the_fast_worker_waits_at_the_bound() -> None:
    """That the bound is exact is shown in virtual time; here, that the session asks for it."""
    bound, begun_steps = 2, [0, 0]
    slow_may_go, ahead = threading.Event(), [0]

    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, f"ParameterServer('stale', staleness={bound})")
        for number in range(12):
            if worker.rank == 1:
                slow_may_go.wait(0.2 if number == 0 else 0.0)  # the fast one comes to the bound meanwhile
            begun_steps[worker.rank] += 1
            if worker.rank == 0:
                ahead[0] = max(ahead[0], begun_steps[0] - begun_steps[1])
                if begun_steps[1] == 0 and begun_steps[0] > bound + 1:
                    slow_may_go.set()
            step(model, optimizer, number, worker.rank)
        session.close()

    cluster(run, 2)
    assert 1 <= ahead[0] <= bound + 1, "a step more than the bound is begun, and no gradient of it is pushed"


@pytest.mark.parametrize(
    "recipe", [ROUNDS["sync"], "ParameterServer('stale', staleness=1)", "ParameterServer('async')"]
)
def test_workers_that_run_out_of_data_hold_nobody_up(recipe: str) -> None:
    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, recipe)
        for _ in range(2):
            with session.epoch():
                for number in range(3 + worker.rank):
                    step(model, optimizer, number, worker.rank)
        session.close()
        return parameters(model)

    with heard(events.ServersTold) as told:
        found = cluster(run, 3)
    assert all(torch.equal(each, found[0]) for each in found)
    assert {event.applied + event.late for event in told} == {2 * (3 + 4 + 5)}


def test_merged_lends_what_the_servers_have() -> None:
    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer, session = begun(worker, "ParameterServer(mode='sync', pull=Route(TopK(0.1), smallest=8))")
        for number in range(3):
            step(model, optimizer, number, worker.rank)
        own = parameters(model)
        with session.merged(model):
            lent = parameters(model)
        assert torch.equal(parameters(model), own)
        session.close()
        assert torch.equal(parameters(model), lent)
        return own, lent

    found = cluster(run, 2)
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1]), "the pulls of a tenth were not yet all"


def test_a_gradient_that_is_not_finite_is_no_step_and_holds_nobody_up() -> None:
    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, ROUNDS["sync"])
        for number in range(4):
            x, y = batch(number, worker.rank)
            scale = float("inf") if (worker.rank, number) == (1, 2) else 1.0
            (mse_loss(model(x), y) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()
        return parameters(model)

    with heard(events.Skipped) as skipped:
        found = cluster(run, 2)
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
    assert [(event.rank, event.step) for event in skipped if isinstance(event, events.Skipped)] == [(1, 3)]


def test_bytes_are_those_of_letters_and_links() -> None:
    """Two workers, a server beside each: half of everything crosses the network."""

    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, ROUNDS["sync"])
        for number in range(4):
            step(model, optimizer, number, worker.rank)
        session.close()

    with heard(events.StepEnded) as ended:
        cluster(run, 2)
    count = 8 * sum(parameter.numel() for parameter in network().parameters())
    steps = [event for event in ended if isinstance(event, events.StepEnded)]
    assert sum(event.bytes_pulled for event in steps) == 4 * count
    pushed = 4 * count
    sent = sum(event.bytes_sent for event in steps)
    # Of what servers send, the first parameters may be counted with the first step, and the last not at all.
    assert pushed < sent <= pushed + 5 * count


@pytest.mark.parametrize(
    "recipe",
    [ROUNDS["sync"], "ParameterServer('sync', push=Route(TopK(0.1), smallest=8), pull=Route(Int8(), smallest=8))"],
)
def test_bytes_are_those_that_are_foretold(recipe: str) -> None:
    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, recipe)
        for number in range(6):
            step(model, optimizer, number, worker.rank)
        session.close()

    with heard(events.StepEnded) as ended, heard(events.Attached) as attached:
        cluster(run, 3)
    steps = [event for event in ended if isinstance(event, events.StepEnded)]
    assert isinstance(attached[0], events.Attached)
    said = forecast(resolve(recipe, 3), attached[0], workers=3)
    pulled = sum(each.bytes_sent for each in said.others if each.word == "Reply")
    assert sum(event.bytes_pulled for event in steps) == pytest.approx(3 * 6 * pulled, rel=1e-12)
    pushed = sum(each.bytes_sent for each in said.others if each.word == "Push")
    sent = sum(event.bytes_sent for event in steps)
    assert 0 < sent - 3 * 6 * pushed <= 3 * 6 * pulled + 3 * 8 * 10_000


def test_what_cannot_be_served_is_refused() -> None:
    def saves(worker: Worker) -> None:
        *_, session = begun(worker, ROUNDS["sync"])
        with pytest.raises(LoopError, match="journal"):
            session.save("nowhere")
        session.close()

    cluster(saves, 2)

    def scales(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AttachError, match="GradScaler"):
            worker.attach(model, optimizer, ROUNDS["sync"], scaler=torch.amp.GradScaler("cpu"))

    cluster(scales, 2)

    def clips(worker: Worker) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(AttachError, match="clip_grad_norm_"):
            worker.attach(model, optimizer, ROUNDS["sync"], clip_norm=1.0)

    cluster(clips, 2)
    with pytest.raises(RecipeError, match="push"):
        resolve("ParameterServer(push=TopK(0.1)) + Int8()")
    with pytest.raises(RecipeError, match="Leave it out"):
        resolve("ParameterServer() + Ring()")


@contextmanager
def dedicated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A server of its own, as the launcher would have started it."""
    token = folder / "token"
    token.write_bytes(bytes(range(32)))
    monkeypatch.setenv("GOSSAMER_TOKEN_FILE", str(token))
    monkeypatch.setenv("GOSSAMER_RUN", "run")
    secret = run_token()
    assert secret is not None
    limit = circle.LARGEST_FRAME_BYTES
    with TcpEndpoint(
        Peer(SERVER, 0), token=secret, run="run", recipe="", layout="", largest_frame_bytes=limit
    ) as endpoint:
        host, port = endpoint.address
        monkeypatch.setenv("GOSSAMER_SERVERS", f"{host}:{port}")
        endpoint.start(serving.host(0, stays=True))
        yield


def check_large(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What a server cannot be told in one message is refused before anything is said, with the line to write."""
    count = 8 * sum(parameter.numel() for parameter in network().parameters())
    monkeypatch.setattr(circle, "SLACK_BYTES", 1000)
    monkeypatch.setattr(circle, "LARGEST_FRAME_BYTES", circle.SLACK_BYTES + count // 2 - 1)
    with dedicated(monkeypatch, folder):
        with pytest.raises(AttachError, match=rf"{count:,} bytes.*gossamer run --servers 3 "):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
        monkeypatch.setattr(circle, "LARGEST_FRAME_BYTES", circle.SLACK_BYTES + 1)
        with pytest.raises(AttachError, match=r"one row of a tensor.*Write EveryStep\(\)"):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)


def test_a_part_that_is_too_large_names_how_many_servers_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_large(monkeypatch, tmp_path)


def test_a_count_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served, "servers_for", lambda *_: 2)
    with pytest.raises(AssertionError, match="servers 2"):
        check_large(monkeypatch, tmp_path)


def check_absent() -> None:
    """A server that nobody started: who waits says so, and gives up with the place where it should have been."""
    with heard(events.Noticed) as said, pytest.raises(ConnectError, match=r"nothing was heard of server 0 at 127\.0"):
        cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
    late = [event.message for event in said if isinstance(event, events.Noticed)]
    assert sorted(each[:8] for each in late if "waits for server 0 at 127.0.0.1" in each) == ["worker 0", "worker 1"]


def absent(monkeypatch: pytest.MonkeyPatch, folder: Path, late_seconds: float) -> None:
    with dedicated(monkeypatch, folder):
        pass  # its port is known, and it has ended
    monkeypatch.setattr(circle, "LATE_SECONDS", late_seconds)
    monkeypatch.setattr(circle, "MEETING_SECONDS", 0.3)


def test_a_server_that_never_comes_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent(monkeypatch, tmp_path, 0.05)
    check_absent()


def test_waiting_in_silence_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent(monkeypatch, tmp_path, 10.0)
    with pytest.raises(AssertionError):
        check_absent()


def test_a_server_of_its_own_trains_what_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with dedicated(monkeypatch, tmp_path):
        check_joined(ROUNDS["sync"], 2)


def test_a_server_that_cannot_go_on_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections would stay, and everybody would wait for an answer for ever."""

    def breaks(shard: Shard, rate: float = 1.0) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Shard, "apply", breaks)

    def run(worker: Worker) -> None:
        with pytest.raises(PeerLost):
            trained(worker, ROUNDS["one shard"])

    with heard(events.Noticed) as said:
        cluster(run, 2)
    assert any("no room" in event.message for event in said if isinstance(event, events.Noticed))


def test_what_is_refused_leaves_no_endpoint_open() -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("gossamer server")]

    def run(worker: Worker) -> None:
        model = network()
        with pytest.raises(AttachError, match="LBFGS"):
            worker.attach(model, torch.optim.LBFGS(model.parameters()), ROUNDS["sync"])

    before = threads()
    cluster(run, 2)
    assert threads() == before


def test_without_msgspec_all_but_endpoints_is_there() -> None:
    program = """
import sys
sys.modules["msgspec"] = None
import gossamer
from gossamer.circle import assemble, assemble_workers
from gossamer.errors import AttachError
for open_endpoints in (lambda: assemble(0, 2, None, 8, lambda text: [text] * 2),
                       lambda: assemble_workers(0, 8, lambda text: [text] * 2)):
    try:
        open_endpoints()
    except AttachError as error:
        assert "pip install 'gossamer[wire]'" in str(error), error
    else:
        raise AssertionError("an endpoint was opened")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("recipe", [ROUNDS["sync"], "ParameterServer('async')"])
def test_one_worker_asks_and_all_stop(recipe: str) -> None:
    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, recipe)

        def until_told() -> None:
            for number in range(10**6):
                step(model, optimizer, number, worker.rank)
                if worker.rank == 0 and number == 3:
                    session.ask_to_stop()

        with pytest.raises(Stopped):
            until_told()
        session.close()
        return parameters(model)

    found = cluster(run, 3)
    assert all(torch.equal(each, found[0]) for each in found)
