import json
from dataclasses import replace

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.processes import succeed
from support.virtual_workers import agree, cluster, heard, loss_of, network, parameters, train_step

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import LoopError, MismatchError, RecipeError
from gossamer.train.session import recipe_switch
from gossamer.train.synchronizers.stages import StageSequence


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_all_tell_the_recipe_in_force():
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Dense()")
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        session.switch("LocalSGD(period=2) + TopK(density=0.1)", reason="the link is slow")
        train_step(model, optimizer, 3, worker.rank)
        assert session.recipe == resolve("LocalSGD(period=2) + TopK(density=0.1)", 2)
        assert "LocalSGD(period=2)" in repr(session)
        assert session.state_dict()["recipe"] == repr(session.recipe)
        return session.steps

    with heard(events.RecipeSwitched) as found:
        assert cluster(work, 2) == [4, 4]
    assert [(each.step, each.before, each.reason) for each in found] == 2 * [
        (3, repr(resolve("Dense()")), "the link is slow")
    ]


def test_the_same_recipe_changes_nothing():
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        train_step(model, optimizer, 0, worker.rank)
        before = session._synchronizer
        session.switch("Feedback(TopK(density=0.1))")
        assert session._synchronizer is before

    with heard(events.RecipeSwitched) as found:
        cluster(work, 2)
    assert not found


@pytest.mark.parametrize(
    "recipe",
    [
        "ParameterServer()",
        "Gossip('pairwise')",
        "DGC(density=0.01)",
        "OneBitAdam(warmup=10)",
        "LocalSGD(period=2) + Nonsense()",
    ],
)
def test_what_cannot_be_switched_to_leaves_all_as_it_was(recipe):
    def work(worker, switches):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
            if switches and step == 2:
                with pytest.raises(RecipeError, match=r"Write|Train|Switch|rite|Did you mean|known"):
                    session.switch(recipe)
        return parameters(model)

    refused = agree(cluster(lambda worker: work(worker, True), 2))
    assert torch.equal(refused, agree(cluster(lambda worker: work(worker, False), 2)))


def test_ranks_that_ask_for_different_recipes_lose_nothing():
    def work(worker, switches):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
            if switches and step == 2:
                with pytest.raises(MismatchError, match="ranks 1, 2"):
                    session.switch("Int8()" if worker.rank else "Dense()")
        return parameters(model)

    refused = agree(cluster(lambda worker: work(worker, True), 3))
    assert torch.equal(refused, agree(cluster(lambda worker: work(worker, False), 3)))


@pytest.mark.parametrize("recipe", ["EveryStep()", "EveryStep(delay=1)", "LocalSGD(period=2)", "Gossip()"])
def test_within_a_step_there_is_no_switch(recipe):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, recipe)
        train_step(model, optimizer, 0, worker.rank)
        optimizer.zero_grad()
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        with pytest.raises(LoopError, match=r"optimizer\.step"):
            session.switch("Int8()")
        optimizer.step()
        session.switch("Int8()")
        with session.no_sync():
            model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            with pytest.raises(LoopError, match="no_sync"):
                session.switch("Dense()")
        with pytest.raises(LoopError, match="no_sync"):
            session.switch("Dense()")

    cluster(work, 2)


def test_one_worker_alone_trains_as_before():
    def work(worker, recipes):
        model, optimizer, session = worker.start(network(0), adam, recipes[0])
        for step in range(8):
            session.switch(recipes[step // 2])
            train_step(model, optimizer, step, 0)
            assert session.steps == step + 1
        return parameters(model)

    chain = ["TopK(density=0.1)", "LocalSGD(period=2)", "DGC(density=0.01)", "Gossip()"]
    plain = cluster(lambda worker: work(worker, ["Dense()"] * 4), 1)
    assert torch.equal(cluster(lambda worker: work(worker, chain), 1)[0], plain[0])


def test_a_switch_before_the_first_step_is_an_attach_with_that_recipe():
    def work(worker, switches):
        model, optimizer, session = worker.start(network(0), adam, "Dense()" if switches else "Feedback(RandomK(0.1))")
        if switches:
            session.switch("Feedback(RandomK(0.1))")
        for step in range(5):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    switched = agree(cluster(lambda worker: work(worker, True), 2))
    assert torch.equal(switched, agree(cluster(lambda worker: work(worker, False), 2)))


def test_a_rank_that_trains_on_is_told_and_so_are_the_others():
    def work(worker):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        train_step(model, optimizer, 0, worker.rank)
        with pytest.raises(LoopError, match="rank 1 called it"):
            session.switch("Dense()") if worker.rank == 1 else train_step(model, optimizer, 1, worker.rank)

    cluster(work, 2)


def test_a_skipped_step_leaves_what_is_owed_to_the_next():
    """One rank's gradient is not a number: nobody makes a step, and nothing is paid twice."""

    def work(worker, bad):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        for step in range(3):
            train_step(model, optimizer, step, worker.rank)
        session.switch("Dense()")
        if bad:
            before = parameters(model)
            optimizer.zero_grad()
            (loss_of(model, 3, worker.rank) * (float("nan") if worker.rank else 1.0)).backward()
            optimizer.step()
            assert torch.equal(parameters(model), before)
        for step in range(3, 5):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    assert torch.equal(*(agree(cluster(lambda worker, bad=bad: work(worker, bad), 2)) for bad in (True, False)))


@pytest.mark.parametrize("following", ["Dense()", "OneBit()", "LocalSGD(period=2)"])
def test_the_loss_scale_does_not_show(following):
    def work(worker, scale):
        model = network(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        session = worker.attach(model, optimizer, "TopK(density=0.1)", scaler=scaler)
        for step in range(8):
            if step == 4:
                session.switch(following)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, worker.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        session.switch("Dense()")
        return parameters(model)

    assert torch.equal(*(agree(cluster(lambda worker, scale=scale: work(worker, scale), 2)) for scale in (1.0, 1024.0)))


def test_a_topology_is_switched_along():
    def work(worker):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        for step, recipe in enumerate(["Dense() + Ring()", "Gossip() + Ring()", "Dense() + Hierarchy(per_node=2)"]):
            session.switch(recipe)
            train_step(model, optimizer, step, worker.rank)
            assert session.recipe.topology == resolve(recipe, 4).topology
        return parameters(model)

    agree(cluster(work, 4))


def test_an_elastic_run_keeps_its_recipe():
    """All ranks are told alike, and go on."""

    def work(worker):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        for step in range(4):
            train_step(model, optimizer, step, worker.rank)
            with pytest.raises(RecipeError, match="join later"):
                session.switch("Dense()")
        return parameters(model)

    agree(ElasticRun(3, Loss(victim=1, op=10**6))(work))


def test_samples_of_tensors_go_on():
    def work(worker):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        for step in range(6):
            if step == 4:
                session.switch("OneBit()")
                found.clear()
            train_step(model, optimizer, step, worker.rank)

    found = []
    stop = events.subscribe(found.append, takes_samples=True)
    cluster(work, 2)
    stop()
    told = [event for event in found if isinstance(event, events.TensorsTold)]
    assert told
    assert all(tensor.bytes > 0 for event in told for tensor in event.tensors)


# -- what goes on, and what begins anew --------------------------------------------------------------------------------


def residuals(session):
    return {
        name: tensor.clone()
        for name, kept in session.state_dict()["state"].items()
        for key, tensor in kept.items()
        if key.endswith("residual")
    }


@pytest.mark.parametrize("following", ["Feedback(RandomK(density=0.1))", "EveryStep(accumulate=2) + OneBit()"])
def test_a_residual_goes_on_bit_for_bit(following):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        for step in range(4):
            train_step(model, optimizer, step, worker.rank)
        before = residuals(session)
        session.switch(following)
        after = residuals(session)
        assert after.keys() == before.keys() != set()
        assert all(torch.equal(after[name], before[name]) for name in before)

    cluster(work, 2)


@pytest.mark.parametrize(
    "local", ["LocalSGD(period=4)", "DiLoCo(period=5, delay=2)", "Gossip()", "DelayedAveraging(2)"]
)
def test_optimizers_that_trained_apart_go_on_alike(local):
    """Else their moments would drive equal parameters apart: `verify` would stop it, and compares in every step."""

    def work(worker):
        options = {"verify": "stop", "verify_every": 1}
        model, optimizer, session = worker.start(network(worker.rank), adam, local, **options)
        for step in range(7):
            train_step(model, optimizer, step, worker.rank)
        session.switch("Dense()")
        for step in range(7, 12):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    agree(cluster(work, 4))


def steps_in_which_all_agree(first, second, at, steps):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, first)
        found = []
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
            found.append(parameters(model))
            if step + 1 == at:
                session.switch(second)
        return found

    by_step = zip(*cluster(work, 2), strict=True)
    return [step + 1 for step, (mine, theirs) in enumerate(by_step) if torch.equal(mine, theirs)]


class NotRestarted(StageSequence):
    @property
    def _stages(self):
        return [*self.recipe.strategy.stages]


def test_schedules_count_from_the_switch(monkeypatch):
    assert steps_in_which_all_agree("Dense()", "LocalSGD(period=3)", 2, 10) == [1, 2, 5, 8]
    assert steps_in_which_all_agree("LocalSGD(period=3)", "LocalSGD(period=2)", 4, 10) == [3, 6, 8, 10]
    assert steps_in_which_all_agree("Dense()", "PostLocalSGD(period=2, start=3)", 2, 10) == [1, 2, 3, 4, 5, 7, 9]
    monkeypatch.setattr(recipe_switch, "StageSequence", NotRestarted)
    assert steps_in_which_all_agree("Dense()", "LocalSGD(period=3)", 2, 10) != [1, 2, 5, 8]


def bytes_by_step(recipe, at):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), sgd, "Dense()")
        for step in range(at + 5):
            if step == at:
                session.switch(recipe)
            train_step(model, optimizer, step, worker.rank)

    with heard(events.StepEnded) as found:
        cluster(work, 2)
    return [each.bytes_sent for each in sorted(found, key=lambda each: each.step)][::2][at:]


def test_warm_ups_count_from_the_switch(monkeypatch):
    recipe = "Warmup(TopK(density=0.01), steps=2)"
    warm, also, *cold = bytes_by_step(recipe, 3)
    assert warm == also > 2 * max(cold)
    whole = StageSequence._context
    monkeypatch.setattr(StageSequence, "_context", lambda *args: replace(whole(*args), since=0))
    assert max(bytes_by_step(recipe, 3)[:2]) < warm


# -- with real workers -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import gossamer

world = gossamer.init()
torch.manual_seed(world.rank)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with gossamer.attach(model, optimizer, "Dense()", verify="stop", verify_every=1) as session:
    for step in range(16):
        if step in (4, 8, 13):
            session.switch({4: "TopK(density=0.01)", 8: "LocalSGD(period=3)", 13: "Dense()"}[step])
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
    hashes = gossamer.gather({"hash": gossamer.train.checkpoint.digest(model.parameters())})
    assert hashes[0] == hashes[1], hashes
    print("equal after", session.steps, session.recipe)
"""


@pytest.mark.processes
def test_two_real_workers_switch_three_times_and_end_alike(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    record = {"GOSSAMER_RECORD": str(tmp_path / "run.json")}
    for said in succeed([str(tmp_path / "train.py")], 2, extra=record):
        assert "equal after 16 EveryStep() + Dense()" in said
    written = json.loads((tmp_path / "run.json").read_text())
    assert [each["step"] for each in written["switches"]] == [4, 8, 13]
    assert written["switches"][1]["recipe"] == repr(resolve("LocalSGD(period=3)", 2))
