"""Federation device: killed at any moment, it goes on where it was; a server that forgot it is joined again."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.deployed_federations import SCRIPT, TOKEN, Joined, alone, flat, join, server
from support.federations import model_of, one_pass
from support.rpc_endpoints import wait_until
from torch import nn

from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import gaussian_epsilon
from gossamer.base.peer_ops import Await, Elapsed, PeerEvent, PeerOp, Push
from gossamer.errors import CheckpointError, ConnectError, GossamerError, MismatchError, PeerLost
from gossamer.federated.client.functions import Round, ScriptFile, Update
from gossamer.federated.deployment.device import DeviceOptions, FederationDevice, ServerLink
from gossamer.federated.messages import PART, REPORT
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster

LONG = "FedAvg(fraction=1.0)"


class Killed(Exception):
    """Where a process would have ended."""


def killed_at(device: FederationDevice, keys: list[str], after: int) -> list[Push]:
    """Have a device end, without a word, before its push of that number; returns those that it has sent."""
    sent: list[Push] = []
    answer = device._endpoint.answer

    def counting(op: PeerOp) -> object:
        if isinstance(op, Push) and op.key in keys:
            if len(sent) == after:
                device._endpoint._dispatcher.loop.post(device._endpoint._dispatcher._connections.close)
                raise Killed
            sent.append(op)
        return answer(op)

    device._endpoint.answer = counting  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("after", [1, 3, 5])
def test_an_upload_continues_where_a_killed_device_broke_off(tmp_path: Path, after: int) -> None:
    """Five parts of 8 bytes and a report; what was acknowledged is not sent again."""
    served = server(LONG, clients=1, rounds=2, part_bytes=8)
    serving = served.start()
    first = FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path)
    sent = killed_at(first, [PART, REPORT], after)
    with pytest.raises(Killed):
        first.run()
    first._directory.close()
    second = FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path)
    again = killed_at(second, [PART], 1000)
    assert second.run() == 2
    serving.wait(10)
    numbers = [int(push.about) for push in again if push.stamp.step == 0]
    assert sorted([int(push.about) for push in sent] + numbers) == [0, 1, 2, 3, 4]
    assert torch.allclose(served.rounds.model.parameters, alone(LONG, 1, 2), rtol=0, atol=1e-12)
    served.close()


def test_feedback_outlives_a_killed_device(tmp_path: Path) -> None:
    recipe = "FedAvg(fraction=1.0) + TopK(0.2)"
    served = server(recipe, clients=1, rounds=5)
    serving = served.start()
    first = FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path)
    killed_at(first, [REPORT], 2)
    with pytest.raises(Killed):
        first.run()
    first._directory.close()
    assert join(served.address, directory=tmp_path).ended() == 3
    serving.wait(10)
    assert torch.allclose(served.rounds.model.parameters, alone(recipe, 1, 5), rtol=0, atol=1e-12)
    served.close()


def test_a_server_without_a_journal_is_joined_again() -> None:
    first = server(LONG, clients=1, rounds=10**6)
    first.start()
    device = join(first.address, 0)
    wait_until(lambda: first.rounds.model.version > 2)
    address = first.address
    first.stop()
    first.close()
    second = server(LONG, clients=1, rounds=2, address=address)
    assert second.run() == "finished"
    device.ended()
    assert any("joining again" in text for text in device.said)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_device_spends_its_budget_once_for_all_servers(tmp_path: Path, keeps: bool) -> None:
    """Three contributions fit into the budget. Each server begins with a journal of its own, and asks for two."""
    three, four = (gaussian_epsilon(4.0, rounds, 0.01) for rounds in (3, 4))
    recipe = f"FedAvg(fraction=1.0, privacy=LocalPrivacy(noise=8.0, delta=0.01, budget={(three + four) / 2:g}))"
    states = tmp_path / "state"
    first = server(recipe, clients=1, rounds=2, journal=tmp_path / "first")
    serving = first.start()
    assert join(first.address, directory=states).ended() == 2
    serving.wait(10)
    first.close()
    second = server(recipe, clients=1, rounds=2, journal=tmp_path / "second")
    second.start()
    ended = join(second.address, directory=states if keeps else tmp_path / "another").ended()
    if keeps:
        assert isinstance(ended, MismatchError)
        assert "requests contribution 4 of this device" in str(ended)
    assert second.rounds.model.version == (1 if keeps else 2)
    second.stop()
    second.close()


def test_another_token_is_refused_with_the_reason() -> None:
    served = server(clients=1)
    refusal = join(served.address, token=bytes(32)).ended()
    assert isinstance(refusal, ConnectError)
    assert "another token" in str(refusal)
    served.close()


def test_a_number_that_is_there_already_is_refused() -> None:
    served = server(clients=2)
    served.start()
    join(served.address, 1)
    wait_until(lambda: len(served.reception.joined) == 1)
    assert "Client 1 is connected already" in str(join(served.address, 1).ended())
    assert "There is no client 2" in str(join(served.address, 2).ended())
    served.stop()
    served.close()


def test_one_process_a_directory(tmp_path: Path) -> None:
    served = server(clients=2)
    device = FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path)
    with pytest.raises(CheckpointError, match="Another process uses"):
        FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path)
    device.close()
    FederationDevice(SCRIPT, served.address, token=TOKEN, directory=tmp_path).close()
    served.close()


def test_a_device_gives_up_once_and_says_that_nobody_answers() -> None:
    served = server(clients=1)
    address = served.address
    served.close()
    given_up = join(address, options=DeviceOptions(give_up_seconds=0.3))
    assert isinstance(given_up.ended(), PeerLost)
    assert "did not answer for" in str(given_up.result[0])


def test_an_update_that_the_server_refuses_is_reported() -> None:
    served = server(clients=1, rounds=1)
    served.start()
    trained = threading.Event()

    def lies(model: nn.Module, told: Round) -> Update:
        if trained.is_set():
            return one_pass(model, told)
        trained.set()
        return replace(one_pass(model, told), samples=10**10)

    device: Joined = join(served.address, script=ScriptFile(train=lies, model=model_of))
    assert device.ended() == 1
    assert any("not counted" in text and "0 samples" in text for text in device.said)
    served.close()


def test_a_device_without_data_is_told_that_it_does_not_count_and_stays() -> None:
    served = server(clients=2, rounds=2)
    empty = ScriptFile(train=lambda model, told: Update(samples=0), model=model_of)
    devices = [join(served.address, 0), join(served.address, 1, script=empty)]
    assert served.run() == "finished"
    assert [each.ended() for each in devices] == [2, 0]
    assert [entry.clients for entry in served.report.rounds] == [(0,), (0,)]
    assert any("not counted: it had nothing to train on" in text for text in devices[1].said)


def a_little(model: nn.Module, told: Round) -> Update:
    with torch.no_grad():
        for each in model.parameters():
            each -= ((told.client or 0) + 1) / 64
    return Update(samples=1)


def test_masked_contributions_travel_and_unmasked_ones_are_not_sent() -> None:
    """Three devices under masks; and one that has a roster refuses a server that asks for its update as it is."""
    pytest.importorskip("cryptography")
    identities = [Identity.new() for _ in range(3)]
    roster = IdentityRoster({number: each.public for number, each in enumerate(identities)})
    recipe, began = "FedAvg(fraction=1.0, secure=SecureAggregation())", flat(model_of())
    served = server(recipe, clients=3, rounds=2, identities=roster)
    script = ScriptFile(train=a_little, model=model_of)
    devices = [
        join(served.address, number, script=script, identities=roster, identity=each)
        for number, each in enumerate(identities)
    ]
    assert served.run() == "finished"
    assert [each.ended() for each in devices] == [2, 2, 2]
    learned = began - served.rounds.model.parameters
    assert torch.allclose(learned, torch.full_like(learned, 2 * (1 + 2 + 3) / 3 / 64), rtol=0, atol=1e-3)
    plain = server(clients=1)
    plain.start()
    assert "has no masks" in str(join(plain.address, identities=roster, identity=identities[0]).ended())
    plain.close()
    served = server(recipe, clients=3, identities=roster)
    served.start()
    other = join(served.address, 1, identities=roster, identity=identities[0]).ended()
    assert "The roster holds this device as client 0, but it joined as client 1" in str(other)
    served.close()


def test_a_device_is_the_client_that_the_roster_makes_it() -> None:
    """Without a number; and one that the roster does not have is told what to add, or that the number is taken."""
    pytest.importorskip("cryptography")
    identities = [Identity.new() for _ in range(4)]
    roster = IdentityRoster({number: each.public for number, each in enumerate(identities[:3])})
    served = server("FedAvg(fraction=1.0, secure=SecureAggregation())", clients=4, rounds=1, identities=roster)
    served.start()
    last = join(served.address, identities=roster, identity=identities[2])
    wait_until(lambda: any("waiting" in text for text in last.said))
    assert "joined as client 2 of 4" in last.said[0]
    taken = join(served.address, 1, identities=roster, identity=identities[3]).ended()
    assert "The roster holds another device as client 1" in str(taken)
    stranger = join(served.address, 3, identities=roster, identity=identities[3]).ended()
    assert f"on every machine: {roster.line(3, identities[3].public).strip()}" in str(stranger)
    served.stop()
    served.close()


def test_a_device_takes_part_by_the_recipe_that_it_agreed_to() -> None:
    served = server("FedAvg(fraction=1.0) + TopK(0.5)", clients=1, rounds=1)
    served.start()
    refusal = join(served.address, recipe="FedAvg(fraction=1.0, privacy=LocalPrivacy(noise=1.0)) + Dense()").ended()
    assert isinstance(refusal, ConnectError)
    assert all(text in str(refusal) for text in ("TopK(density=0.5", "LocalPrivacy(", "--recipe"))
    assert served.rounds.model.version == 0
    assert join(served.address, recipe="TopK(0.5) + FedAvg(fraction=1.0)").ended() == 1
    served.close()


class StoppedEndpoint:
    """The device was stopped for long while it waited for its server. dues: of the waits."""

    def __init__(self) -> None:
        self.dues, self.ended = list[float](), threading.Event()

    def answer(self, op: Await) -> PeerEvent:
        assert op.until is not None
        self.dues.append(op.until)
        if len(self.dues) == 3:
            self.ended.set()
            raise PeerLost("closed")
        return Elapsed(moment=op.until + (5000.0 if len(self.dues) == 2 else 0.0))

    def close(self, why: GossamerError | None = None) -> None:
        self.ended.set()


def test_a_device_that_was_stopped_waits_for_its_server_again() -> None:
    endpoint = StoppedEndpoint()
    ServerLink(endpoint, "server", lambda line: None, give_up_seconds=600.0)
    assert endpoint.ended.wait(10.0)
    assert len(endpoint.dues) == 3
    assert endpoint.dues[2] > endpoint.dues[1] + 5000.0
