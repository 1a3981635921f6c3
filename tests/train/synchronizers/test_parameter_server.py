"""Sessions whose parameters live on servers: real endpoints on loopback, one thread a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.served_training import ROUNDS, begun, check_all_learn_and_end_alike, check_joined, step, trained
from support.virtual_workers import Worker, batch, cluster, heard, network, notices, parameters
from torch.nn import Parameter
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import SERVER, Peer
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.errors import AttachError, CheckpointError, ConnectError, PeerLost, RecipeError, Stopped
from gossamer.train import parameter_server
from gossamer.train.parameter_server import shard_state
from gossamer.train.parameter_server.client.client import Client
from gossamer.train.parameter_server.shard import FlatOptimizer, ServerShard
from gossamer.train.synchronizers import parameter_server as served
from gossamer.train.synchronizers import peer_endpoints
from gossamer.train.traffic.traffic import estimate_traffic


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("recipe", ROUNDS.values(), ids=ROUNDS.keys())
def test_in_rounds_servers_are_one_process_on_the_joined_batch(recipe: str, world: int) -> None:
    check_joined(recipe, world)


def test_gradients_that_are_not_applied_before_the_next_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: parameters stay what they were."""
    monkeypatch.setattr(Client, "apply_pull", lambda self: None)
    with pytest.raises(AssertionError):
        check_joined(ROUNDS["sync"], 2)


@pytest.mark.parametrize(
    "recipe",
    [
        "ParameterServer(mode='stale', staleness=2, pull=TopK(0.3)) + Int8()",
        "ParameterServer('async', push=Route(DGC(0.3), smallest=0))",
        *nightly(
            "ParameterServer(mode='sync', push=TopK(0.1), pull=Int8())",
            "ParameterServer(push=OneBit(), pull=OneBit())",
            "ParameterServer('async', damping=True) + PowerSGD(rank=1)",
        ),
    ],
)
def test_every_pair_of_compressors_trains_and_ends_alike(recipe: str) -> None:
    check_all_learn_and_end_alike(recipe)


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

    with heard(events.ContributionsCounted) as told:
        cluster(run, 2)
    assert {event.applied for event in told} == {22}
    oldest = max(max(event.staleness) for event in told)
    assert 15 <= oldest <= 21, "the slow worker's second gradient was computed before the fast one's steps"


def test_the_fast_worker_waits_at_the_bound() -> None:
    """That the bound is exact is shown in virtual time; here, that the session asks for it."""
    bound, begun_steps = 2, [0, 0]
    fast_is_there, slow_may_go, ahead = threading.Event(), threading.Event(), [0]

    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, f"ParameterServer('stale', staleness={bound})")
        for number in range(12):
            if worker.rank == 1 and number == 0:
                assert fast_is_there.wait(20)
                slow_may_go.wait(0.2)  # the time in which it would go beyond the bound
            begun_steps[worker.rank] += 1
            if worker.rank == 0:
                ahead[0] = max(ahead[0], begun_steps[0] - begun_steps[1])
                if begun_steps[0] == bound + 1:
                    fast_is_there.set()
                if begun_steps[1] == 0 and begun_steps[0] > bound + 1:
                    slow_may_go.set()
            before = parameters(model)
            step(model, optimizer, number, worker.rank)
            assert not torch.equal(parameters(model), before), "a worker does not read its own writes"
        session.close()

    cluster(run, 2)
    assert 1 <= ahead[0] <= bound + 1, "the slow one has not counted the step that it is at"


@pytest.mark.parametrize(
    "recipe", [ROUNDS["sync"], "ParameterServer('stale', staleness=1)", "ParameterServer('async')"]
)
def test_workers_without_data_do_not_block_the_others(recipe: str) -> None:
    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, recipe)
        for _ in range(2):
            with session.epoch():
                for number in range(3 + worker.rank):
                    step(model, optimizer, number, worker.rank)
        session.close()
        return parameters(model)

    with heard(events.ContributionsCounted) as told:
        found = cluster(run, 3)
    assert all(torch.equal(each, found[0]) for each in found)
    assert {event.applied + event.late for event in told} == {2 * (3 + 4 + 5)}


def test_averaged_parameters_are_those_of_the_servers() -> None:
    def run(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer, session = begun(worker, "ParameterServer(mode='sync', pull=Route(TopK(0.1), smallest=8))")
        for number in range(3):
            step(model, optimizer, number, worker.rank)
        own = parameters(model)
        with session.averaged_parameters(model):
            lent = parameters(model)
        assert torch.equal(parameters(model), own)
        session.close()
        assert torch.equal(parameters(model), lent)
        return own, lent

    found = cluster(run, 2)
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1]), "the pulls of a tenth were not yet all"


def test_gradient_that_is_not_finite_is_skipped_without_blocking() -> None:
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
def test_bytes_are_those_that_are_estimated(recipe: str) -> None:
    def run(worker: Worker) -> None:
        model, optimizer, session = begun(worker, recipe)
        for number in range(6):
            step(model, optimizer, number, worker.rank)
        session.close()

    with heard(events.StepEnded) as ended, heard(events.Attached) as attached:
        cluster(run, 3)
    steps = [event for event in ended if isinstance(event, events.StepEnded)]
    assert isinstance(attached[0], events.Attached)
    said = estimate_traffic(resolve(recipe, 3), attached[0], workers=3)
    pulled = sum(each.bytes_sent for each in said.others if each.op == "Reply")
    assert sum(event.bytes_pulled for event in steps) == pytest.approx(3 * 6 * pulled, rel=1e-12)
    pushed = sum(each.bytes_sent for each in said.others if each.op == "Push")
    sent = sum(event.bytes_sent for event in steps)
    assert 0 < sent - 3 * 6 * pushed <= 3 * 6 * pulled + 3 * 8 * 10_000


@pytest.mark.parametrize("recipe", [ROUNDS["sync"], "ParameterServer('async')"])
def test_one_worker_asks_and_all_stop(recipe: str) -> None:
    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, recipe)

        def until_told() -> None:
            for number in range(10**6):
                step(model, optimizer, number, worker.rank)
                if worker.rank == 0 and number == 3:
                    session.request_stop()

        with pytest.raises(Stopped):
            until_told()
        session.close()
        return parameters(model)

    found = cluster(run, 3)
    assert all(torch.equal(each, found[0]) for each in found)


def test_random_compressors_use_the_seed_of_the_session() -> None:
    """Which entries travel, with compressors that draw."""

    def trained(seed: int) -> torch.Tensor:
        def run(worker: Worker) -> torch.Tensor:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            recipe = "ParameterServer('sync', push=Route(Feedback(RandomK(0.2)), smallest=0))"
            session = worker.attach(model, optimizer, recipe, seed=seed)
            for number in range(3):
                step(model, optimizer, number, worker.rank)
            session.close()
            return parameters(model)

        return cluster(run, 2)[0]

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(-2))


def test_parameters_that_differ_on_purpose_are_not_reported_at_a_save(tmp_path: Path) -> None:
    """On arrival each worker has what it pulled last: rank 0 before rank 1 has made any step."""
    first_is_done = threading.Event()

    def run(worker: Worker) -> torch.Tensor:
        model, optimizer, session = begun(worker, "ParameterServer('async')")
        assert worker.rank == 0 or first_is_done.wait(20)
        step(model, optimizer, 0, worker.rank)
        with session.averaged_parameters(model):  # its pull has landed
            first_is_done.set()
        session.save(tmp_path)
        return parameters(model)

    with notices() as told:
        first, second = cluster(run, 2)
    assert not torch.equal(first, second)
    assert [each for each in told if "differ in the checkpoint" in each] == []


# -- What servers cannot do for a session, and servers that are late, too small, broken or not there -------------------


def test_unsupported_options_of_parameter_servers_are_refused() -> None:
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
    with pytest.raises(RecipeError, match="Omit it"):
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
    limit = peer_endpoints.LARGEST_FRAME_BYTES
    with TcpEndpoint(Credentials(me=Peer(SERVER, 0), token=secret, run="run", largest_frame_bytes=limit)) as endpoint:
        host, port = endpoint.address
        monkeypatch.setenv("GOSSAMER_SERVERS", f"{host}:{port}")
        endpoint.start(parameter_server.host(0, keep_serving=True))
        yield


def check_large(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What a server cannot be told in one message is refused before anything is said, with the line to write."""
    count = 8 * sum(parameter.numel() for parameter in network().parameters())
    monkeypatch.setattr(peer_endpoints, "SLACK_BYTES", 1000)
    monkeypatch.setattr(peer_endpoints, "LARGEST_FRAME_BYTES", peer_endpoints.SLACK_BYTES + count // 2 - 1)
    with dedicated(monkeypatch, folder):
        with pytest.raises(AttachError, match=rf"{count:,} bytes.*gossamer run --servers 3 "):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
        monkeypatch.setattr(peer_endpoints, "LARGEST_FRAME_BYTES", peer_endpoints.SLACK_BYTES + 1)
        with pytest.raises(AttachError, match=r"one row of a tensor.*Write EveryStep\(\)"):
            cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)


def test_a_part_that_is_too_large_names_how_many_servers_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_large(monkeypatch, tmp_path)


def test_a_part_whose_pulls_alone_are_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Servers keep parameters of half precision in float32 for compressed pulls."""
    count = 2 * sum(parameter.numel() for parameter in network().parameters())
    monkeypatch.setattr(peer_endpoints, "SLACK_BYTES", 1000)
    monkeypatch.setattr(peer_endpoints, "LARGEST_FRAME_BYTES", peer_endpoints.SLACK_BYTES + count)

    def attach(worker: Worker) -> None:
        model = network().bfloat16()
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "ParameterServer(pull=Int8())")

    with dedicated(monkeypatch, tmp_path), pytest.raises(AttachError, match=rf"{2 * count:,} bytes.*--servers 3 "):
        cluster(attach, 2)


def test_a_count_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served, "servers_for", lambda *_: 2)
    with pytest.raises(AssertionError, match="servers 2"):
        check_large(monkeypatch, tmp_path)


def check_absent() -> None:
    """A server that nobody started: who waits says so, and gives up with the place where it should have been."""
    with (
        heard(events.Noticed) as said,
        pytest.raises(ConnectError, match=r"could not connect to server 0 at 127\.0"),
    ):
        cluster(lambda worker: trained(worker, ROUNDS["sync"]), 2)
    late = [event.message for event in said if isinstance(event, events.Noticed)]
    assert sorted(each[:8] for each in late if "waited for server 0 at 127.0.0.1" in each) == ["worker 0", "worker 1"]


def absent(monkeypatch: pytest.MonkeyPatch, folder: Path, late_seconds: float) -> None:
    with dedicated(monkeypatch, folder):
        pass  # its port is known, and it has ended
    monkeypatch.setattr(peer_endpoints, "LATE_SECONDS", late_seconds)
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "0.3")


def test_a_server_that_never_comes_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent(monkeypatch, tmp_path, 0.05)
    check_absent()


def test_waiting_in_silence_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent(monkeypatch, tmp_path, 10.0)
    with pytest.raises(AssertionError):
        check_absent()


def test_dedicated_server_trains_a_supported_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with dedicated(monkeypatch, tmp_path):
        check_joined(ROUNDS["sync"], 2)


def test_a_server_that_cannot_continue_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections would stay, and everybody would wait for an answer for ever."""

    def breaks(shard: ServerShard, rate: float = 1.0) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(ServerShard, "apply", breaks)

    def run(worker: Worker) -> None:
        with pytest.raises(PeerLost):
            trained(worker, ROUNDS["one shard"])

    with heard(events.Noticed) as said:
        cluster(run, 2)
    assert any("no room" in event.message for event in said if isinstance(event, events.Noticed))


def test_refused_attach_leaves_no_endpoint_open() -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("gossamer server")]

    def run(worker: Worker) -> None:
        model = network()
        with pytest.raises(AttachError, match="LBFGS"):
            worker.attach(model, torch.optim.LBFGS(model.parameters()), ROUNDS["sync"])

    before = threads()
    cluster(run, 2)
    assert threads() == before


# -- Saved servers: k steps, a save, a load and k steps are 2k steps, bit for bit where rounds are lock-step -----------

Rule = Callable[[Iterable[Parameter]], Optimizer]
RULES: dict[str, Rule] = {
    "SGD": lambda parameters: SGD(parameters, 0.05, momentum=0.9),
    "AdamW": lambda parameters: AdamW(parameters, 0.01),
}
LOCK_STEP = [
    *ROUNDS.values(),
    "ParameterServer(mode='sync', push=TopK(0.1), pull=Int8())",
    "ParameterServer(mode='sync', shards=2, pull=TopK(0.3)) + PowerSGD(rank=1)",
]


def train_part(
    worker: Worker, recipe: str, rule: Rule, stop: int, load: Path | None, save: Path | None, **options: Any
) -> Any:
    model = network(worker.rank)
    optimizer = rule(model.parameters())
    session = worker.attach(model, optimizer, recipe)
    mine = session.load(load) if load else {}
    assert not mine or mine["whose"] == worker.rank
    for number in range(session.steps, stop):
        step(model, optimizer, number, worker.rank)
    if save:
        session.save(save, whose=worker.rank, **options)
    with session.averaged_parameters(model):
        merged = parameters(model)
    found = session.steps, merged, parameters(model)
    session.close()
    return found


def check_resumes(recipe: str, rule: Rule, world: int, folder: Path, **options: Any) -> None:
    whole = cluster(lambda worker: train_part(worker, recipe, rule, 6, None, None), world)
    cluster(lambda worker: train_part(worker, recipe, rule, 3, None, folder, **options), world)
    resumed = cluster(lambda worker: train_part(worker, recipe, rule, 6, folder, None), world)
    for (steps, merged, own), (later, again, theirs) in zip(whole, resumed, strict=True):
        assert steps == later == 6
        assert torch.equal(merged, again), "the servers went another way"
        assert torch.equal(own, theirs), "a worker went another way"


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [
        pytest.param(recipe, rule, marks=[] if (place + (rule == "SGD")) % 2 else [pytest.mark.nightly])
        for place, recipe in enumerate(LOCK_STEP)
        for rule in RULES
        if (rule, "PowerSGD" in recipe) != ("AdamW", True)
    ],
)
def test_k_steps_save_load_k_steps_are_2k_steps(recipe: str, rule: str, tmp_path: Path) -> None:
    check_resumes(recipe, RULES[rule], 2, tmp_path)


def test_three_workers_and_an_asynchronous_save(tmp_path: Path) -> None:
    check_resumes(ROUNDS["sync"], RULES["AdamW"], 3, tmp_path, asynchronous=True)


def test_small_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "PIECE_BYTES", 1000)
    check_resumes(ROUNDS["sync"], RULES["SGD"], 2, tmp_path)


def test_an_optimizer_that_is_forgotten_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatOptimizer, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError, match="another way"):
        check_resumes(ROUNDS["sync"], RULES["SGD"], 2, tmp_path)


@pytest.mark.parametrize("recipe", ["ParameterServer('async')", "ParameterServer('stale', staleness=2)"])
def test_servers_without_rounds_resume_from_their_parameters(recipe: str, tmp_path: Path) -> None:
    """Later pushes may come in another order, so no more is promised."""
    before = cluster(lambda worker: train_part(worker, recipe, RULES["SGD"], 4, None, tmp_path), 2)
    after = cluster(lambda worker: train_part(worker, recipe, RULES["SGD"], 4, tmp_path, None), 2)
    assert [steps for steps, *_ in after] == [4, 4]
    assert torch.equal(before[0][1], after[0][1])
    cluster(lambda worker: train_part(worker, recipe, RULES["SGD"], 9, tmp_path, None), 2)


def test_saving_twice_and_epochs_go_together(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool, epochs: range) -> torch.Tensor:
        model = network(worker.rank)
        optimizer = RULES["SGD"](model.parameters())
        session = worker.attach(model, optimizer, ROUNDS["sync"])
        if load:
            session.load(tmp_path)
        for epoch in epochs:
            with session.epoch():
                for number in range(3):
                    step(model, optimizer, 3 * epoch + number, worker.rank)
            session.save(tmp_path)
        session.close()
        return parameters(model)

    whole = cluster(lambda worker: work(worker, False, range(4)), 2)
    for path in tmp_path.iterdir():
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    cluster(lambda worker: work(worker, False, range(2)), 2)
    resumed = cluster(lambda worker: work(worker, True, range(2, 4)), 2)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    cluster(lambda worker: train_part(worker, ROUNDS["sync"], RULES["SGD"], 2, None, tmp_path), 2)

    def load(worker: Worker) -> None:
        model = network(worker.rank)
        session = worker.attach(model, RULES["SGD"](model.parameters()), ROUNDS["sync"])
        with pytest.raises(CheckpointError, match=r"2 workers|layout|recipe"):
            session.load(tmp_path)
        session.close()

    cluster(load, 3)


def test_a_state_without_the_servers_is_refused() -> None:
    def work(worker: Worker) -> None:
        model = network(worker.rank)
        session = worker.attach(model, RULES["SGD"](model.parameters()), ROUNDS["sync"])
        with pytest.raises(CheckpointError, match=r"lacks the state of the servers.*session\.save\(directory\)"):
            session.load_state_dict(session.state_dict())
        session.close()

    cluster(work, 2)
