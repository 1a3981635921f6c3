"""Federation server: over real sockets it comes to what scripts without sockets come to, and goes on after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployed_federations import alone, flat, join, server
from support.federations import model_of, one_pass
from support.rpc_endpoints import wait_until
from torch import nn

from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import gaussian_epsilon
from gossamer.errors import CheckpointError, MismatchError, RecipeError
from gossamer.federated import evaluation
from gossamer.federated.client.functions import Round, ScriptFile, Update
from gossamer.federated.server.selection import LeastTrained, WithinDeadline

PRIVATE = "FedAvg(fraction=1.0, local_steps=1, privacy=CentralPrivacy(noise=4.0, clip=1.0, delta=0.01, budget={:g}))"


def test_sockets_come_to_what_a_simulation_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_WAITING", 3)  # no version is left out on a busy machine
    recipe = "FedAvg(fraction=1.0, pull=Int8()) + TopK(0.5)"
    said: list[str] = []
    served = server(recipe, clients=3, rounds=3, print_text=said.append)
    devices = [join(served.address, number) for number in range(3)]
    assert served.run() == "finished"
    assert [each.ended() for each in devices] == [3, 3, 3]
    assert torch.allclose(served.rounds.model.parameters, alone(recipe, 3, 3), rtol=0, atol=1e-12)
    assert not torch.allclose(served.rounds.model.parameters, alone(recipe, 3, 2), rtol=0, atol=1e-6)  # the twin
    assert [entry.clients for entry in served.report.rounds] == [(0, 1, 2)] * 3
    assert [entry.metrics.keys() for entry in served.report.rounds] == [{"weight"}] * 3
    assert all(entry.up_bytes > 0 and entry.down_bytes > 0 for entry in served.report.rounds)
    assert len(said) == 3
    assert said[0].startswith("round 1/3")
    assert "weight" in said[0]


def test_devices_without_numbers_get_different_ones() -> None:
    served = server(clients=3, rounds=1)
    devices = [join(served.address) for _ in range(3)]
    served.run()
    assert [each.ended() for each in devices] == [1, 1, 1]
    assert served.report.rounds[0].clients == (0, 1, 2)


def test_a_server_that_was_stopped_continues(tmp_path: Path) -> None:
    recipe = "FedAvg(fraction=1.0) + TopK(0.5)"
    first = server(recipe, clients=2, rounds=6, journal=tmp_path)
    address = first.address
    first.rounds.on_commit = lambda committed, said=first.rounds.on_commit: (
        said(committed), first.stop() if committed.version == 2 else None
    )  # fmt: skip
    devices = [join(address, number) for number in range(2)]
    assert first.run() == "stopped"
    second = server(recipe, clients=2, rounds=6, journal=tmp_path, address=address)
    assert second.resumed
    assert second.rounds.model.version == 2
    assert second.run() == "finished"
    assert sum(each.ended() for each in devices) == 12
    assert torch.allclose(second.rounds.model.parameters, alone(recipe, 2, 6), rtol=0, atol=1e-12)
    assert [entry.version for entry in second.report.rounds] == [1, 2, 3, 4, 5, 6]


class Killed(BaseException):
    """A server ends here, as by SIGKILL."""


@pytest.mark.parametrize("journaled", [False, True])
def test_a_journaled_version_has_its_row_wherever_its_server_is_killed(tmp_path: Path, journaled: bool) -> None:
    """Killed on either side of the write of version 2 to the journal, before it is evaluated."""
    first = server(clients=2, rounds=4, journal=tmp_path)
    journal = first.rounds.journal
    keep = journal.committed

    def killed(rounds: Any) -> None:
        if rounds.model.version < 2 or journaled:
            keep(rounds)
        if rounds.model.version == 2:
            raise Killed

    submit = first._evaluation.submit
    first._evaluation.submit = lambda version, *more: submit(version, *more) if version < 2 else None  # type: ignore[method-assign]
    journal.committed = killed  # type: ignore[method-assign]
    devices = [join(first.address, number) for number in range(2)]
    with pytest.raises(Killed):
        first.run()
    second = server(clients=2, rounds=4, journal=tmp_path, address=first.address)
    made = 2 if journaled else 1
    assert second.rounds.model.version == made
    assert [each.version for each in second.report.rounds] == [*range(1, made + 1)]
    assert second.run() == "finished"
    assert [each.version for each in second.report.rounds] == [1, 2, 3, 4]
    assert all(each.clients == (0, 1) for each in second.report.rounds)
    assert [each.ended() for each in devices] == [4, 4]


def test_devices_begin_again_with_a_server_that_lost_its_rounds(tmp_path: Path) -> None:
    """Its name and their numbers are the same, and nothing of the rounds that are gone gets into those that follow."""
    recipe = "FedAvg(fraction=1.0, pull=Int8()) + TopK(0.5)"
    first = server(recipe, clients=2, rounds=6, journal=tmp_path)
    address = first.address
    first.rounds.on_commit = lambda committed, said=first.rounds.on_commit: (
        said(committed), first.stop() if committed.version == 3 else None
    )  # fmt: skip
    devices = [join(address, number) for number in range(2)]
    assert first.run() == "stopped"
    shutil.rmtree(tmp_path / "rounds")
    second = server(recipe, clients=2, rounds=6, journal=tmp_path, address=address)
    assert not second.resumed
    assert second.run() == "finished"
    assert all(isinstance(each.ended(), int) for each in devices)
    assert torch.allclose(second.rounds.model.parameters, alone(recipe, 2, 6), rtol=0, atol=1e-12)


def test_a_journal_of_another_federation_is_refused(tmp_path: Path) -> None:
    server("FedAvg(fraction=1.0)", journal=tmp_path).close()
    with pytest.raises(CheckpointError, match=r"recipe .*fraction=1.0.* and not .*fraction=0.5"):
        server("FedAvg(fraction=0.5)", journal=tmp_path)
    with pytest.raises(CheckpointError, match="clients 3 and not 4"):
        server("FedAvg(fraction=1.0)", clients=4, journal=tmp_path)


def test_a_recipe_of_workers_in_step_is_refused() -> None:
    with pytest.raises(RecipeError, match="Begin its recipe"):
        server("EveryStep()")


def test_another_model_is_refused_with_both_values() -> None:
    served = server(clients=1)
    other = ScriptFile(train=lambda model, told: Update(samples=1), model=lambda: nn.Linear(5, 1))
    refusal = join(served.address, script=other).ended()
    assert isinstance(refusal, MismatchError)
    fingerprint = served.rounds.model.state.fingerprint
    assert fingerprint in str(refusal)
    assert "build the same model everywhere" in str(refusal)
    served.close()


def test_a_device_that_leaves_is_not_waited_for() -> None:
    served = server(clients=2, rounds=1)
    serving = served.start()

    def slow(model: nn.Module, told: Round) -> Update:
        wait_until(lambda: len(served.reception.joined) == 1)
        return one_pass(model, told)

    stays = join(served.address, 0, script=ScriptFile(train=slow, model=model_of))
    leaves = join(served.address, 1, script=ScriptFile(train=slow, model=model_of))
    wait_until(lambda: len(served.rounds.assigned) == 2)
    leaves.device.leave()
    assert stays.ended() == 1
    serving.wait(10)
    assert served.report.rounds or served.rounds.model.version == 1
    served.close()


def test_an_evaluation_that_fails_stops_nothing() -> None:
    def fails(model: nn.Module, told: Round) -> Update:
        raise ValueError("no data here")

    script = ScriptFile(train=one_pass, model=model_of, evaluate=fails)
    served = server(clients=1, rounds=2, script=script)
    device = join(served.address)
    assert served.run() == "finished"
    assert device.ended() == 2
    assert [entry.metrics for entry in served.report.rounds] == [{}, {}]


def test_the_model_of_the_last_version_is_there() -> None:
    served = server(clients=1, rounds=2)
    device = join(served.address)
    served.run()
    assert device.ended() == 2
    assert torch.equal(flat(served.model()), served.rounds.model.parameters)
    assert not torch.equal(flat(served.model()), flat(model_of()))


def test_a_spent_budget_ends_it_and_is_reported(tmp_path: Path) -> None:
    one, two, three = (gaussian_epsilon(4.0, rounds, 0.01) for rounds in (1, 2, 3))
    said: list[str] = []
    recipe = PRIVATE.format((two + three) / 2)
    served = server(recipe, clients=2, rounds=5, journal=tmp_path / "journal", print_text=said.append)
    devices = [join(served.address, number) for number in range(2)]
    assert served.run() == "exhausted"
    assert [each.ended() for each in devices] == [2, 2]
    assert [each.epsilon for each in served.report.rounds] == [one, two]
    assert f"epsilon {one:.4g}" in said[0]
    assert "the privacy budget is spent" in served.why
    served.record(tmp_path / "record.json")
    found = json.loads((tmp_path / "record.json").read_text())
    assert (found["ended"], found["why"], found["rounds"]) == ("exhausted", served.why, 2)


def test_a_budget_that_a_restart_would_spend_again_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"a restart would spend it again.*--journal"):
        server(PRIVATE.format(5), clients=2)


def test_a_device_that_was_drawn_by_a_coin_is_not_kept(tmp_path: Path) -> None:
    recipe = "FedAvg(fraction=0.5, local_steps=1, privacy=CentralPrivacy(noise=4.0, clip=1.0, delta=0.01))"
    served = server(recipe, clients=2, rounds=3, journal=tmp_path)
    assert served.rounds.selection.draws_each
    devices = [join(served.address, number) for number in range(2)]
    assert served.run() == "finished"
    assert sum(each.ended() for each in devices) == sum(each.counted for each in served.report.rounds)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().split("\n") if line]
    assert all(each["clients"] == [] for each in lines)
    counted = {each["version"]: each["counted"] for each in lines}  # a line as it was made, another once evaluated
    assert counted == {each.version: each.counted for each in served.report.rounds}


def test_it_ends_once_it_is_good_enough_also_after_a_restart(tmp_path: Path) -> None:
    served = server(clients=1, rounds=10**6, until="weight>-1000", journal=tmp_path)
    device = join(served.address)
    assert served.run() == "reached"
    assert device.ended() >= 1
    assert served.why == "weight>-1000 is reached"
    again = server(clients=1, rounds=10**6, until="weight>-1000", journal=tmp_path)
    assert again.run() == "reached"
    assert again.rounds.model.version == served.rounds.model.version


def test_devices_and_the_evaluation_are_told_the_config_of_the_round() -> None:
    told: list[tuple[int | None, object]] = []

    def seen(model: nn.Module, round_: Round) -> Update:
        told.append((round_.client, round_.config["rate"]))
        return Update(samples=1) if round_.client is None else one_pass(model, round_)

    script = ScriptFile(train=seen, model=model_of, evaluate=seen)
    served = server(clients=1, rounds=2, script=script, config=lambda index: {"rate": 0.5**index})
    device = join(served.address, script=script)
    served.run()
    assert device.ended() == 2
    assert sorted(told, key=str) == [(0, 0.5), (0, 1.0), (None, 0.5), (None, 1.0)]


def test_a_round_begins_with_who_is_there_after_a_while() -> None:
    served = server(clients=3, rounds=1, gather_seconds=0.3)
    device = join(served.address)
    assert served.run() == "finished"
    assert device.ended() == 1
    assert (served.report.rounds[0].counted, served.report.rounds[0].present) == (1, 1)


def test_a_version_is_made_of_what_is_there_after_a_while() -> None:
    """With a buffer that the two devices of fifty that ever join cannot fill."""
    served = server("FedBuff(buffer=20, fraction=1.0)", clients=50, rounds=2, gather_seconds=0.3)
    devices = [join(served.address, number) for number in range(2)]
    assert served.run() == "finished"
    counted = [each.counted for each in served.report.rounds]
    assert set(counted) <= {1, 2}
    assert sum(each.ended() for each in devices) == sum(counted)


def test_a_late_report_is_a_part_of_the_next_version() -> None:
    """Both are chosen, the first report makes the first version, and the second one waits for the late one."""

    def late(model: nn.Module, told: Round) -> Update:
        wait_until(lambda: served.rounds.model.version >= 1)
        return one_pass(model, told)

    def quick(model: nn.Module, told: Round) -> Update:
        wait_until(lambda: not served.rounds.model.version or 1 in served.rounds.reported)
        return one_pass(model, told)

    served = server("FedAvg(fraction=0.5)", clients=2, rounds=2, over_selection=1.0, late="count")
    devices = [
        join(served.address, number, script=ScriptFile(train=train, model=model_of))
        for number, train in enumerate((quick, late))
    ]
    assert served.run() == "finished"
    assert [each.clients for each in served.report.rounds] == [(0,), (0, 1)]
    assert [each.ended() for each in devices] == [2, 1]


def test_a_server_remembers_whom_it_counted_and_forgets_it_for_another_selection(tmp_path: Path) -> None:
    served = server("FedAvg(fraction=1.0)", clients=2, rounds=2, selection=LeastTrained(), journal=tmp_path)
    devices = [join(served.address, number) for number in range(2)]
    assert served.run() == "finished"
    assert [each.ended() for each in devices] == [2, 2]
    again = server("FedAvg(fraction=1.0)", clients=2, rounds=2, selection=LeastTrained(), journal=tmp_path)
    assert again.rounds.selection.counted == {0: 2, 1: 2}  # type: ignore[attr-defined]
    again.close()
    other = server("FedAvg(fraction=1.0)", clients=2, rounds=2, selection=WithinDeadline(9.0), journal=tmp_path)
    assert other.rounds.selection.seconds == {}  # type: ignore[attr-defined]
    other.close()


def test_options_that_mean_nothing_are_refused() -> None:
    server("FedBuff(buffer=1)").close()
    for option, value in (("over_selection", 0.5), ("late", "count")):
        with pytest.raises(RecipeError, match=f"{option} means nothing"):
            server("FedBuff(buffer=1)", **{option: value})


def test_a_metric_that_nothing_told_is_noticed_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    served = server(clients=1, rounds=2, until="wieght>0")
    device = join(served.address)
    assert served.run() == "finished"
    assert device.ended() == 2
    assert (
        "No round reported 'wieght', so the federation could not end by wieght>0; there are: loss, weight"
        in caplog.text
    )
