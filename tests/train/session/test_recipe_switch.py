import json
from dataclasses import replace

import pytest
import torch
from support.elastic_groups import ElasticRun, Loss
from support.nightly import nightly, once_each
from support.processes import succeed
from support.switched_training import EXACT, ROUNDED, loss_of_chain, sampled_chains
from support.virtual_workers import agree, cluster, heard, loss_of, network, notices, parameters, train_step

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError, CheckpointError, LoopError, MismatchError, RecipeError
from gossamer.train.session import recipe_switch
from gossamer.train.synchronizers.stages import StageSequence


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_switch_is_reported_on_all_ranks():
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
def test_refused_switch_changes_nothing(recipe):
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


@pytest.mark.parametrize("recipe", ["LocalSGD(2, second_moment='agreed')", "DiLoCo(2, second_moment='amsgrad')"])
def test_switch_that_the_optimizer_does_not_support_changes_nothing(recipe):
    def work(worker):
        _, optimizer, session = worker.start(network(worker.rank), sgd, "TopK(density=0.1)")
        train_step(session.model, optimizer, 0, worker.rank)
        before = session.recipe, session._synchronizer, session.state_dict()["recipe"]
        with pytest.raises(AttachError, match="needs the second moment of torch"):
            session.switch(recipe)
        return before == (session.recipe, session._synchronizer, session.state_dict()["recipe"])

    assert cluster(work, 2) == [True, True]


def test_local_steps_after_a_switch_divide_by_no_second_moment_that_was_agreed_on_before():
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), adam, "LocalSGD(2, second_moment='agreed')")
        found = []
        for step in range(9):
            if step == 4:
                session.switch("Dense()")
            if step == 6:
                session.switch("LocalSGD(2, second_moment='agreed')")
            train_step(model, optimizer, step, worker.rank)
            found.append(all("shared_exp_avg_sq" in state for state in optimizer.state.values()))
            assert found[-1] == any("shared_exp_avg_sq" in state for state in optimizer.state.values())
        return found

    assert cluster(work, 2) == [[False, True, True, True, False, False, False, True, True]] * 2


@pytest.mark.parametrize("recipe", ["LocalSGD(2, optimizer_state='average')", "DiLoCo(2, second_moment_period=2)"])
def test_optimizer_that_finds_its_kinds_of_state_is_no_optimizer_of_the_loop(recipe):
    def work(worker):
        model, optimizer, session = worker.start(network(worker.rank), adam, "Dense()")
        train_step(model, optimizer, 0, worker.rank)
        session.switch(recipe)
        worker.start(network(worker.rank), adam, recipe)
        return session.recipe.strategy

    with notices() as said:
        assert cluster(work, 2) == [resolve(recipe, 2).strategy] * 2
    assert [text for text in said if "belong" in text] == []


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


def test_switch_on_one_rank_alone_raises_on_all_ranks():
    def work(worker):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        train_step(model, optimizer, 0, worker.rank)
        with pytest.raises(LoopError, match="rank 1 called it"):
            session.switch("Dense()") if worker.rank == 1 else train_step(model, optimizer, 1, worker.rank)

    cluster(work, 2)


def test_skipped_step_keeps_pending_gradients():
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


def test_samples_of_tensors_continue():
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
    told = [event for event in found if isinstance(event, events.TensorsMeasured)]
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
def test_a_residual_continues_bit_for_bit(following):
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
def test_optimizers_that_trained_apart_continue_alike(local):
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


# -- The law of a switch: sum of what was sent + what is owed = sum of what was given, over random chains of recipes


@pytest.mark.parametrize("seed", [*range(2), *nightly(*range(2, 12))])
def test_chain_of_switches_loses_no_residual(seed):
    """Exactly: whole numbers, and means over four workers, have few bits."""
    (chain,) = sampled_chains(EXACT, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) == 0


@pytest.mark.parametrize("seed", [*range(2), *nightly(*range(2, 12))])
def test_chain_of_switches_with_rounding_loses_no_residual(seed):
    (chain,) = sampled_chains(ROUNDED, 1, 5, seed)
    assert loss_of_chain(chain, 4, seed) < 1e-12


# -- broken twins of the law -------------------------------------------------------------------------------------------


def scaled(pending, factor):
    return {name: tensor * factor for name, tensor in pending.items()}


TWINS = {
    "dropped": (
        "unsent_gradients",
        lambda whole: lambda *a: {},
        ["TopK(density=0.05)", "Feedback(RandomK(density=0.05))"],
    ),
    "doubled": ("unsent_gradients", lambda whole: lambda *a: scaled(whole(*a), 2), ["TopK(density=0.05)", "Dense()"]),
    "wrong sign": (
        "unsent_gradients",
        lambda whole: lambda *a: scaled(whole(*a), -1),
        ["OneBit()", "LocalSGD(period=3)"],
    ),
    "not taken up": ("take_up", lambda whole: lambda pending, buckets: {}, ["OneBit()", "EveryStep(delay=1)"]),
    "dropped on its way": ("on_their_way", lambda whole: lambda before: {}, ["EveryStep(delay=2)", "OneBit()"]),
    "summed": (
        "_mean",
        lambda whole: lambda *a: (scaled(whole(*a)[0], 4), 0.0),
        ["TopK(density=0.05)", "EveryStep(accumulate=2)"],
    ),
    "not merged": ("merge_parameters", lambda whole: lambda *a: 0.0, ["LocalSGD(period=9)", "EveryStep()"]),
}


@pytest.mark.parametrize("twin", TWINS)
def test_the_law_finds_a_broken_switch(twin, monkeypatch):
    name, broken, chain = TWINS[twin]
    assert loss_of_chain(chain, 4, 3) < 1e-12
    monkeypatch.setattr(recipe_switch, name, broken(getattr(recipe_switch, name)))
    try:
        lost = loss_of_chain(chain, 4, 3)
    except (AssertionError, MismatchError):
        lost = 1.0  # the workers hold different bits
    assert lost > 0.1


def test_the_law_finds_differences_of_parameters_that_are_dropped(monkeypatch):
    chain = ["LocalSGD(period=2) + TopK(density=0.05)", "Dense()"]
    assert loss_of_chain(chain, 4, 3) == 0
    monkeypatch.setattr(recipe_switch, "unsent", lambda bucket, *_: torch.zeros_like(bucket.flat))
    assert loss_of_chain(chain, 4, 3) > 0.1


# -- A run that switched its recipe, saved and loaded, goes on to the same bits ----------------------------------------


CHAINS = [
    ["TopK(density=0.1)", "Dense()"],
    ["TopK(density=0.1)", "EveryStep(delay=2) + Feedback(Sharded(Int8()))"],
    ["EveryStep(delay=1) + OneBit()", "LocalSGD(period=3) + TopK(density=0.1)"],
    ["Dense()", "Warmup(TopK(density=0.1), steps=3)"],
    ["LocalSGD(period=2) + TopK(density=0.1)", "Feedback(RandomK(density=0.1))"],
    ["DiLoCo(period=3)", "PostLocalSGD(period=2, start=2)"],
    ["Gossip()", "LocalSGD(period=2, per_site=2)"],
    ["Dense()", "Gossip()"],
    ["Hierarchical(OneBit(), per_node=2)", "TopK(density=0.1)"],
    ["TopK(density=0.1)", "DelayedAveraging(delay=2) + TopK(density=0.1)"],
]


@once_each("chain, stop", CHAINS, [3, 4, 7], not_by_day=[CHAINS[0], CHAINS[3], CHAINS[7], CHAINS[8]])
def test_a_run_that_switched_resumes_to_the_same_bits(chain, stop, tmp_path):
    """At the switch, one step after it, and later. The script attaches with its own recipe each time."""
    first, second = chain

    def work(worker, begin, end, saves=False):
        model, optimizer, session = worker.start(network(worker.rank), adam, first)
        if begin:
            session.load(tmp_path)
            assert (session.steps, session.recipe) == (begin, resolve(second, worker.world))
        for step in range(begin, end):
            train_step(model, optimizer, step, worker.rank)
            if step == 2:
                session.switch(second)
        if saves:
            session.save(tmp_path)
        return parameters(model)

    whole = cluster(lambda worker: work(worker, 0, 11), 4)
    cluster(lambda worker: work(worker, 0, stop, saves=True), 4)
    resumed = cluster(lambda worker: work(worker, stop, 11), 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_another_number_of_workers_continues_in_the_recipe_in_force(tmp_path):
    """With the mean of what is owed, which the first step then adds."""

    def work(worker, begin, saves):
        model, optimizer, session = worker.start(network(0), sgd, "TopK(density=0.1)")
        session.load(tmp_path)
        assert session.steps == begin
        for step in range(begin, begin + 3):
            train_step(model, optimizer, step, worker.rank)
        if saves:
            session.switch("Dense()")
            session.save(tmp_path)
            pending = session.state_dict()["state"]
            assert any(kept["owed_gradient"].any() for kept in pending.values())
        assert session.recipe == resolve("Dense()")
        return parameters(model)

    cluster(lambda worker: work(worker, 0, True), 4)
    agree(cluster(lambda worker: work(worker, 3, False), 2))


def test_a_checkpoint_of_another_script_s_recipe_is_refused(tmp_path):
    def work(worker, recipe):
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        if recipe == "Int8()":
            with pytest.raises(CheckpointError, match="recipe"):
                session.load(tmp_path)
            return
        train_step(model, optimizer, 0, worker.rank)
        session.switch("Dense()")
        session.save(tmp_path)

    cluster(lambda worker: work(worker, "TopK(density=0.1)"), 2)
    cluster(lambda worker: work(worker, "Int8()"), 2)
