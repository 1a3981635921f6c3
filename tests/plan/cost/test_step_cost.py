import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.plan.cost.step_cost import step_cost
from gossamer.plan.cost.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.profile.synthetic_shapes import assumed

PARAMETERS = 200_000


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch):
    monkeypatch.delenv("GOSSAMER_COLLECTIVE", raising=False)


def cost(text, workers, network="100mbit,10ms"):
    recipe = resolve(text, workers)
    model = assumed(PARAMETERS, recipe)

    def profile():
        """A step of 0.1 seconds, in which compressing takes no time; about as many operations as a recipe has."""
        from gossamer.base.layout import dtype_of
        from gossamer.train.traffic.op_trace import trace_ops

        ops = [len(trace_ops(recipe, layout, dtype_of(dtype), workers)) for dtype, layout in model.layouts]
        buckets = [
            BucketProfile(
                dtype=dtype,
                shapes={slot.name: slot.shape for slot in layout},
                ready_seconds=0.1,
                computing_seconds=[0.0] * (count + 1),
                engine_seconds=[0.0] * count,
            )
            for (dtype, layout), count in zip(model.layouts, ops, strict=True)
        ]
        return WorkloadProfile(
            recipe="", backward_seconds=0.1, rest_seconds=0.0, buckets=buckets, control_bytes=model.control_bytes
        )

    return step_cost(recipe, model, read_network(network, workers), workers, 0.1, profile)


def test_ten_thousand_workers_send_what_the_formulas_say():
    dense = cost("Dense()", 10_000)
    assert dense.bytes_sent == pytest.approx(2 * 4 * PARAMETERS, rel=0.5)  # and reports of 10,000 workers
    assert dense.load.messages == 2 * 9999
    assert dense.seconds > 0.1 + 8 * 2 * 4 * PARAMETERS / 100e6
    gathered = cost("DGC(density=0.0001)", 1000)
    assert gathered.load.received_bytes > 0


def test_a_server_answers_everybody():
    servers = cost("ParameterServer(shards=2)", 1000)
    assert servers.at_least
    assert servers.load.machine == "a server"
    assert servers.load.bytes_sent == pytest.approx(999 * 4 * PARAMETERS / 2, rel=0.05)
    assert servers.seconds == pytest.approx(8 * servers.load.bytes_sent / 100e6, rel=0.05)


def test_where_many_talk_rarely_little_is_waited_for():
    rare, often = cost("DiLoCo(period=100)", 1000), cost("Dense()", 1000)
    assert rare.bytes_sent < often.bytes_sent / 20
    assert rare.waiting_share < often.waiting_share


def test_neighbors_cost_the_same_in_a_world_of_any_size():
    few, many = (cost("Gossip() + Ring()", workers) for workers in (100, 10_000))
    assert few.bytes_sent == pytest.approx(many.bytes_sent, rel=0.05)
    assert few.seconds == pytest.approx(many.seconds, rel=0.1)
