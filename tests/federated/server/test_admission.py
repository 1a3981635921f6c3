"""Admission: refused reports and contributions, comparison with usual ones, counts of refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from dataclasses import replace as replaced
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from support.federated_faults import FEATURES, SAMPLES, WholeNumbers, WholeSteps, check_conserved
from support.federations import Federation, federate, one_pass
from support.rounds_by_hand import rounds_of
from torch import Tensor, nn

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    SCAFFOLD,
    CentralPrivacy,
    CohortSummary,
    FedAvg,
    FedBuff,
    FederatedStrategy,
    FedNova,
    LocalPrivacy,
    LocalWork,
    Privacy,
)
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import Peer, PeerScript, Push, Stamp
from gossamer.comm.simulation import Trace, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import MalformedError, NotFinite
from gossamer.federated import Round, Update
from gossamer.federated.client.contribution import contribution_context
from gossamer.federated.client.local_training import Trainer
from gossamer.federated.client.script import Train, Trained
from gossamer.federated.messages import (
    CLIENT,
    FATE_UNKNOWN,
    NOT_COUNTED,
    PART,
    REPORT,
    THE_SERVER,
    Fate,
    Report,
    Uploads,
    decode,
    encode,
)
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.admission import FEWEST, TRIES, Attempts, ContributionAdmission, ContributionLimits
from gossamer.federated.server.aggregation import ContributionSum, WeightedSum
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.virtual.simulate import Simulation, SimulationSettings
from gossamer.train.parameter_server import shard_message

N = FEATURES + 1
LIAR = 2
Lie = Callable[[Push], Iterator[Push]]


def told(push: Push, **fields: Any) -> Push:
    """The same report with other fields, whatever they mean."""
    report = msgspec.json.decode(push.about)
    return replaced(push, about=msgspec.json.encode(report | fields).decode())


def swap(change: Callable[[Push], Push]) -> Lie:
    def lie(push: Push) -> Iterator[Push]:
        yield change(push) if push.key == REPORT else push

    return lie


def other(payload: Tensor) -> Callable[[Push], Push]:
    return lambda push: replaced(push, payload=(payload,))


def parts(count: int, size: int) -> Lie:
    """Parts that nobody asked for, and the report after them."""

    def lie(push: Push) -> Iterator[Push]:
        for number in range(count):
            yield replaced(push, key=PART, payload=(torch.zeros(size),), about=str(number))
        yield told(push, parts=count, shapes=[[count * size]])

    return lie


LIES: dict[str, tuple[Lie, str]] = {
    "layout": (swap(lambda push: told(push, layout="another")), "trained another model"),
    "dtype": (swap(other(torch.zeros(N, dtype=torch.int32))), "cannot be decoded"),
    "shape": (swap(other(torch.zeros(N + 1).double())), "cannot be decoded"),
    "nan": (swap(other(torch.full((N,), torch.nan).double())), "not finite"),
    "infinite norm": (swap(other(torch.full((N,), 1e300, dtype=torch.float64))), "norm is inf"),
    "norm": (swap(other(torch.full((N,), 1e6).double())), "above 1e+04"),
    "negative samples": (swap(lambda push: told(push, samples=-4)), "invalid Report"),
    "huge samples": (swap(lambda push: told(push, samples=10**12)), "claims 1000000000000 samples"),
    "fraction": (swap(lambda push: told(push, samples=0.5)), "invalid Report"),
    "metrics": (swap(lambda push: told(push, metrics={str(n): 0.0 for n in range(1000)})), "claims 1000 metrics"),
    "metric name": (swap(lambda push: told(push, metrics={"m" * 65: 0.0})), "at most 64 printable characters"),
    "metric escape": (swap(lambda push: told(push, metrics={"\x1b[2Jloss": 0.0})), "printable"),
    "unknown field": (swap(lambda push: told(push, weight=7)), "invalid Report"),
    "text": (swap(lambda push: replaced(push, about="[" * 10**5)), "invalid Report"),
    "long text": (swap(lambda push: replaced(push, about=" " * 10**7)), "10000000 characters"),
    "counts": (swap(lambda push: told(push, counts=[10**9])), "message for step 0"),
    "identity": (swap(lambda push: replaced(push, stamp=push.stamp._replace(worker=0))), "contribution of client 0"),
    "round": (swap(lambda push: replaced(push, stamp=push.stamp._replace(step=9))), "round 9"),
    "version": (swap(lambda push: replaced(push, stamp=push.stamp._replace(known=1))), "from version 1"),
    "key": (swap(lambda push: replaced(push, key="weights")), "no part of a contribution"),
    "large": (swap(other(torch.zeros(10**5))), "at most 4416"),
    "many parts": (parts(10, 1000), "more than the 4416 bytes"),
    "empty parts": (parts(10, 0), "more than the 0 empty parts"),
    "parts of others": (parts(2, 3), "cannot be decoded"),
    "part number": (swap(lambda push: replaced(push, key=PART, about="4000000")), "at most 65536"),
    "part text": (swap(lambda push: replaced(push, key=PART, about="-1")), "as part '-1'"),
    "announced parts": (swap(lambda push: told(push, parts=10**9)), "claims 1000000000 parts"),
    "failed": (swap(lambda push: told(push, failed="no power")), "no power"),
    "failed escape": (swap(lambda push: told(push, failed="\x1b[2Jno power")), " [2Jno power"),
}


def federation(lie: Lie, options: dict[str, Any] | None = None) -> tuple[WholeNumbers, Trace, list[str]]:
    """Three honest devices and one that says something else in its first round."""
    limits = ContributionLimits(largest_norm=1e4)
    done = WholeNumbers(WholeSteps(fraction=1.0), rounds=2, options={"admission": limits} | (options or {}))
    scripts, heard = done.scripts(), list[str]()
    honest = scripts[Peer(CLIENT, LIAR)]

    def liar() -> PeerScript:
        script, answer = honest(), None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(op, Push) and op.stamp.step == 0:
                for push in lie(op):
                    answer = yield push
                    heard.append(decode(answer.about or "{}", Fate, THE_SERVER).refused)
                    if answer.version != FATE_UNKNOWN:
                        break
                else:
                    answer = replaced(answer, version=NOT_COUNTED)
            else:
                answer = yield op

    scripts[Peer(CLIENT, LIAR)] = liar
    trace = simulate_peers(scripts, VirtualNetwork(), 0, checks=True, most_seconds=100.0)
    return done, trace, heard


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_and_the_round_continues(name: str) -> None:
    lie, why = LIES[name]
    done, trace, heard = federation(lie)
    assert [sorted(each.reports) for each in done.ledger.commits] == [[0, 1, 3], [0, 1, 2, 3]]
    (refused,) = done.ledger.commits[0].refused.values()
    assert why in refused
    assert refused.startswith(f"client {LIAR} was refused in round ")
    assert refused[:400] in "".join(heard)
    assert trace.result(Peer(CLIENT, 0)) == 2
    check_conserved(done)
    assert done.held is not None
    assert done.held.uploads.nbytes == 0


def test_replays_are_answered_as_before_and_add_nothing() -> None:
    calm, done = WholeNumbers(), WholeNumbers()
    calm.run()
    scripts, answers = done.scripts(), list[int]()
    honest = scripts[Peer(CLIENT, 1)]

    def again() -> PeerScript:
        script, answer, said = honest(), None, list[Push]()
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield op
            if isinstance(op, Push):
                said.append(op)
                answers.append(answer.version)
                answers.append((yield op).version)
                for old in said[:-1]:
                    assert (yield old).version in (NOT_COUNTED, *range(1, 4))

    scripts[Peer(CLIENT, 1)] = again
    simulate_peers(scripts, VirtualNetwork(), 0, checks=True, most_seconds=100.0)
    assert answers == [1, 1, 2, 2, 3, 3]
    assert torch.equal(done.parameters, calm.parameters)


def test_an_upload_that_never_ends_takes_no_more_than_its_quota() -> None:
    """Also of parts that are sent again, whose number comes twice."""

    def lie(push: Push) -> Iterator[Push]:
        for number in [0, 0, 0, *range(1, 30)]:
            yield replaced(push, key=PART, payload=(torch.zeros(100),), about=str(number))

    done, _, _ = federation(lie)
    (refused,) = done.ledger.commits[0].refused.values()
    assert "4416 bytes" in refused


def test_an_empty_part_is_kept_where_the_contribution_has_an_empty_tensor() -> None:
    uploads, stamp = Uploads(), Stamp(0, 0)
    uploads.add(0, stamp, 0, torch.zeros(0), most_bytes=8, most_empty=1)
    uploads.add(0, stamp, 1, torch.zeros(2), most_bytes=8, most_empty=1)
    assert uploads.missing(0, stamp, 3) == (2,)
    with pytest.raises(MalformedError, match="more than the 1 empty parts"):
        uploads.add(0, stamp, 2, torch.zeros(0), most_bytes=8, most_empty=1)
    payload = uploads.take(0, Report(samples=1, steps=1, parts=2, shapes=((0,), (2,))))
    assert [tuple(each.shape) for each in payload] == [(0,), (2,)]
    assert uploads.nbytes == 0


def test_a_device_that_diverges_reports_it_and_takes_part_again() -> None:
    done = WholeNumbers(rounds=3)
    train = done.train
    done.train = lambda op: (  # type: ignore[method-assign]
        replaced(train(op), flat=op.anchor / 0) if op.client == 1 and op.task.round == 1 else train(op)
    )
    done.run()
    assert [sorted(each.reports) for each in done.ledger.commits] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]
    assert "could not train" in done.ledger.commits[1].refused[1]


def test_a_sum_that_leaves_its_range_is_given_up() -> None:
    """Each number is finite and the norm is; the weighted sum is not."""
    done = WholeNumbers(rounds=1, options={"admission": ContributionLimits(largest_ratio=None)})
    train, once = done.train, list[int]()

    def large(op: Any) -> Any:
        if op.task.round == 0:
            once.append(op.client)
            return replaced(train(op), flat=op.anchor - 1e307)
        return train(op)

    done.train = large  # type: ignore[method-assign]
    done.run()
    assert sorted(once) == [*range(len(SAMPLES))]
    assert done.held is not None
    assert done.held.next_round == 2
    assert done.parameters.abs().max() < 10


@pytest.mark.parametrize("limits", [{"most_bytes": 0}, {"largest_norm": -1.0}, {"largest_ratio": 0.0}])
def test_limits_are_above_zero(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        ContributionLimits(**limits)


def test_an_honest_report_is_read() -> None:
    report, admission = Report(samples=3, steps=1, layout="x"), ContributionAdmission(ContributionLimits(), FedAvg())
    assert admission.report(msgspec.json.encode(report).decode(), THE_SERVER, "x") == report


CODECS = ["Dense()", "Int8()", "Chain(TopK(0.05), Int8())", "PowerSGD(2)", "RandomK(0.1)", "TernGrad()", "OneBit()"]


@pytest.mark.parametrize("codec", CODECS)
def test_whatever_comes_is_decoded_or_refused(codec: str) -> None:
    """Wrong types, shapes, lengths and bits of every tensor of a message: numbers that are finite, or a refusal."""
    recipe = "FedAvg()" if codec == "Dense()" else f"FedAvg() + {codec}"
    compressor = resolve(recipe).compressor
    state = ModelState.of(nn.Linear(64, 32))
    model = GlobalModel(FedAvg(), compressor, None, state, torch.zeros(state.layout.numel))
    at, block = contribution_context(0, 1, 0), FlatTensors(torch.randn(state.layout.numel), state.layout)
    sent = shard_message.encode(compressor, [block], shard_message.initial_states(compressor, [block], at), [at])
    assert model.contribution_size(0).nbytes == payload_bytes(sent.payload)
    draw, refused = Random(codec), 0
    for _ in range(60):
        payload = [*sent.payload]
        place = draw.randrange(len(payload))
        payload[place] = spoiled(payload[place].clone(), draw)
        try:
            blocks = model.decode(Stamp(1, 0), tuple(payload), sent.counts)
            assert [each.shape for each in blocks] == [block.flat.shape]
            assert blocks[0].isfinite().all()
        except MalformedError:
            refused += 1
    assert refused > 20


def spoiled(tensor: Tensor, draw: Random) -> Tensor:
    match draw.randrange(5):
        case 0:
            noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
            return noise.view(tensor.dtype).reshape(tensor.shape)
        case 1:
            return tensor.reshape(-1)[: draw.randrange(tensor.numel())]
        case 2:
            return torch.cat([tensor.reshape(-1)] * 50)
        case 3:
            return tensor.to(draw.choice((torch.float64, torch.int32, torch.bool)))
        case _:
            return tensor.reshape(1, -1)


TrainedLie = Callable[[Trained], Trained]


def sent(value: float, admission: ContributionAdmission, into: ContributionSum, client: int = 0, **work: int) -> None:
    """A contribution of four equal numbers."""
    told = LocalWork(**{"samples": 1, "steps": 1} | work)
    admission.admit(into, client, [torch.full((4,), value)], float(told.samples), told)


def test_a_norm_far_from_the_usual_is_refused_once_there_is_a_usual() -> None:
    admission, into = ContributionAdmission(ContributionLimits(largest_ratio=100.0), FedAvg()), WeightedSum()
    for size in range(1, FEWEST + 1):
        assert not admission.compares(into)
        sent(float(size), admission, into, client=size)
    assert (into.count, len(into.held), admission.compares(into)) == (0, FEWEST, True)
    assert admission.compare(into) == {}
    assert (into.count, into.held, admission.compares(into)) == (FEWEST, {}, False)
    assert torch.equal(into.means()[0], torch.full((4,), 5.5))
    sent(550.0, admission, into)
    with pytest.raises(MalformedError, match=r"norm is 1\.4e\+03, above 1\.2e\+03"):
        sent(700.0, admission, into)
    again = ContributionAdmission(ContributionLimits(largest_ratio=100.0), FedAvg())
    sent(700.0, again, WeightedSum())  # it knows of none
    again.load_state_dict(admission.state_dict())
    with pytest.raises(MalformedError):
        sent(700.0, again, into)
    assert again.state_dict() == admission.state_dict()


def test_the_first_contributions_are_compared_with_each_other() -> None:
    admission, into = ContributionAdmission(ContributionLimits(), FedAvg()), WeightedSum()
    for client, value in enumerate((1.0, 1e30, 2.0)):
        sent(value, admission, into, client)
    ((client, why),) = admission.compare(into).items()
    assert client == 1
    assert "update's norm is 2e+30, above 4e+03" in why
    assert into.means()[0].tolist() == [1.5] * 4
    sent(1e30, admission, into, client=7)  # beside two that are known
    assert list(admission.compare(into)) == [7]
    assert into.count == 2


def test_nothing_is_held_where_any_size_will_do() -> None:
    admission, into = ContributionAdmission(ContributionLimits(largest_ratio=None), FedAvg()), WeightedSum()
    sent(1.0, admission, into)
    assert (into.count, into.held) == (1, {})


@pytest.mark.parametrize(
    ("strategy", "claim", "why"),
    [
        (FedAvg(), {"samples": 10**9}, r"its weight is 1e\+09, above 8e\+03"),
        (FedNova(), {"samples": 10**9, "steps": 10**9}, r"its number of steps is 1e\+09, above 2e\+03"),
        (FedBuff(), {"samples": 10**9, "steps": 10**9}, None),
        (SCAFFOLD(), {"samples": 10**9, "steps": 10**9}, None),
    ],
)
def test_claims_far_from_the_usual_are_refused_where_they_count(
    strategy: FederatedStrategy, claim: dict[str, int], why: str | None
) -> None:
    admission, into = ContributionAdmission(ContributionLimits(), strategy), WeightedSum()
    for client in range(FEWEST):
        sent(1.0, admission, into, client, samples=8, steps=2)
    assert admission.compare(into) == {}
    if why is None:
        sent(1.0, admission, into, **claim)
    else:
        with pytest.raises(MalformedError, match=why):
            sent(1.0, admission, into, **claim)
    assert into.count == FEWEST + (why is None)


# -- whole federations ---------------------------------------------------------------------------------------------


def claiming(**work: int) -> TrainedLie:
    return lambda trained: replace(trained, work=replace(trained.work, **work))


def shouting(value: float) -> TrainedLie:
    return lambda trained: replace(trained, flat=trained.flat + value)


def lying_at_first(lie: TrainedLie) -> Any:
    """A trainer's answers, of which one device's in the first round is a lie."""
    honest = Trainer.__call__

    def answer(trainer: Trainer, op: Train) -> Trained:
        trained = honest(trainer, op)
        return lie(trained) if op.client == LIAR and op.task.round == 0 else trained

    return answer


def lied_to(monkeypatch: pytest.MonkeyPatch, lie: TrainedLie, recipe: str, **options: Any) -> Federation:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__call__", lying_at_first(lie))
        return federate(recipe, rounds=3, **options)


def absent_at_first(model: nn.Module, told: Round) -> Update:
    """The same without the liar's first round."""
    return Update(samples=0) if told.client == LIAR and told.index == 0 else one_pass(model, told)


@pytest.mark.parametrize(
    ("recipe", "lie"),
    [
        ("FedNova(fraction=1.0, local_epochs=2)", claiming(steps=10**9)),
        ("FedNova(fraction=1.0, local_steps=2)", claiming(steps=10**9)),
        ("FedAvg(fraction=1.0)", claiming(samples=10**9)),
        ("FedNova(fraction=1.0)", claiming(samples=10**9)),
    ],
)
def test_who_claims_to_have_done_it_all_does_not_count(
    recipe: str, lie: TrainedLie, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lied_to(monkeypatch, lie, recipe, clients=10)
    assert list(run.commits[0].refused) == [LIAR]
    assert [len(each.reports) for each in run.commits] == [9, 10, 10]
    without = federate(recipe, rounds=3, clients=10, function=absent_at_first)
    assert torch.allclose(run.parameters, without.parameters, rtol=0, atol=1e-12)
    if "local_steps" not in recipe:  # the twin: believes whatever it is told
        twin = lied_to(monkeypatch, lie, recipe, clients=10, admission=ContributionLimits(largest_ratio=None))
        assert not torch.allclose(twin.parameters, without.parameters, rtol=0, atol=0.1)


@pytest.mark.parametrize("recipe", ["FedAvg(fraction=1.0)", "FedOpt('adam', learning_rate=0.1, fraction=1.0)"])
def test_one_huge_update_in_the_first_round_ruins_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lied_to(monkeypatch, shouting(1e30), recipe, clients=5)
    assert list(run.commits[0].refused) == [LIAR]
    assert [len(each.reports) for each in run.commits] == [4, 5, 5]
    without = federate(recipe, rounds=3, clients=5, function=absent_at_first)
    assert torch.allclose(run.parameters, without.parameters, rtol=0, atol=1e-12)
    assert run.parameters.abs().max() < 100


def small_step(model: nn.Module, told: Round) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return Update(samples=2)


def test_a_version_whose_memory_is_not_finite_is_never_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each number that came is finite, and its square is not."""
    recipe, versions = "FedOpt('adam', learning_rate=0.1, fraction=1.0)", list[dict[str, Tensor]]()

    def noted(record: object) -> None:
        server = simulation.engine._rounds.model
        versions.append({key: each.clone() for key, each in {"parameters": server.parameters, **server.memory}.items()})

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__call__", lying_at_first(shouting(1e30)))
        simulation = Simulation(
            small_step,
            lambda: nn.Linear(4, 1),
            recipe,
            SimulationSettings(clients=5, rounds=3, on_round=noted, admission=ContributionLimits(largest_ratio=None)),
        )
        simulation.run()
    assert "round 0 is given up" in caplog.text
    assert len(versions) == 3
    assert all(each.isfinite().all() for version in versions for each in version.values())
    assert all(version["parameters"].abs().max() < 100 for version in versions)


def test_a_model_stays_at_its_version_where_the_next_one_has_no_numbers() -> None:
    model = federate("FedOpt('adam', learning_rate=0.1, fraction=1.0)", clients=2, rounds=1).rounds.model
    before = {key: each.clone() for key, each in {"parameters": model.parameters, **model.memory}.items()}
    cohort = CohortSummary(contributions=1, clients=2, steps=1.0)
    with pytest.raises(NotFinite, match="left the range"):
        model.apply((torch.full_like(model.parameters, 1e200),), cohort)
    assert model.version == 1
    assert all(torch.equal(each, before[key]) for key, each in {"parameters": model.parameters, **model.memory}.items())


@pytest.mark.parametrize(
    ("strategy", "refused"), [(FedNova(local_steps=5), True), (FedNova(), False), (FedAvg(local_steps=5), False)]
)
def test_more_steps_than_the_recipe_asks_for_are_refused_where_they_count(
    strategy: FederatedStrategy, refused: bool
) -> None:
    admission = ContributionAdmission(ContributionLimits(), strategy)
    for steps in (5, 6):
        report = encode(Report(samples=1, steps=steps, layout="x"))
        if refused and steps > 5:
            with pytest.raises(MalformedError, match=r"claims 6 steps, .* local_steps=5: take batches from"):
                admission.report(report, THE_SERVER, "x")
        else:
            assert admission.report(report, THE_SERVER, "x").steps == steps


@pytest.mark.parametrize(
    ("privacy", "ratio"),
    [(None, 1000.0), (LocalPrivacy(noise=4.0, delta=0.01), 1000.0), (CentralPrivacy(noise=4.0, delta=0.01), None)],
)
def test_who_adds_noise_says_whether_contributions_may_be_compared(
    privacy: Privacy | None, ratio: float | None
) -> None:
    """One device's numbers decide over another's only where they left it with noise."""
    assert rounds_of(FedAvg(fraction=1.0, privacy=privacy), 4).admission.limits.largest_ratio == ratio


def tried(attempts: Attempts, client: int, times: int = TRIES) -> None:
    for _ in range(times):
        attempts.empty(client)


def test_too_few_are_left_once_a_device_failed_so_often_in_a_row() -> None:
    attempts = Attempts(clients=3)
    attempts.fewest = 2
    tried(attempts, 0)
    assert not attempts.leave_too_few()
    assert attempts.leave_too_few(lost=[1])
    assert not attempts.leave_too_few(lost=[0])
    tried(attempts, 1, TRIES - 1)
    assert not attempts.leave_too_few()
    attempts.refused(1, "client 1 was refused")
    assert attempts.leave_too_few()


def test_a_counted_device_is_expected_again() -> None:
    attempts = Attempts(clients=1)
    tried(attempts, 0)
    assert attempts.leave_too_few()
    attempts.counted([0])
    assert not attempts.leave_too_few()
    assert attempts.summary() == ""
    tried(attempts, 0, TRIES - 1)
    assert not attempts.leave_too_few()


def test_the_summary_names_both_reasons() -> None:
    attempts = Attempts(clients=4)
    tried(attempts, 0, 2)
    attempts.refused(3, "client 3 was refused in round 2: it diverged")
    assert attempts.summary() == (
        "1 of 4 devices had nothing to train on: the client function returned Update(samples=0), or its loader has no "
        "batch. Give these devices data. 1 of 4 devices were refused. The last: client 3 was refused in round 2: it "
        "diverged."
    )


def test_notices_of_what_repeats_become_rare(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(clients=2)
    for index in range(100):
        attempts.given_up(index, "too few devices reported in time", reports=0)
        attempts.refused(0, f"client 0 was refused in round {index}")
    assert caplog.text.count("is given up") == 7
    assert "round 63 is given up, 64 in a row, and another is begun: too few devices" in caplog.text
    assert sum(record.getMessage().startswith("client 0 was refused") for record in caplog.records) == 7
    attempts.counted([])
    caplog.clear()
    attempts.given_up(100, "too few devices reported in time", reports=1)
    assert "round 100 is given up, and another is begun: too few devices reported in time (1 reports)" in caplog.text
