import pytest

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.network import read_network
from gossamer.plan.estimate.step_cost import step_cost
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
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


def test_a_slow_line_with_a_smaller_codec_does_not_delay_all(tmp_path):
    there = tmp_path / "slow-line.toml"
    there.write_text('[[hosts]]\ncount = 3\nrate = "1gbit"\n[[hosts]]\nup = "5mbit"\ndown = "100mbit"\n')
    usual, slow, mixed = (
        cost(f"Feedback({codec})", 4, str(there))
        for codec in ("Int8()", "OneBit()", "PerWorker(Int8(), below='20mbit')")
    )
    assert slow.seconds <= mixed.seconds < usual.seconds
    assert mixed.seconds - slow.seconds < 0.1 * (usual.seconds - slow.seconds)
    assert mixed.bytes_sent == pytest.approx((3 * usual.bytes_sent + slow.bytes_sent) / 4, rel=1e-3)
    assert mixed.load.machine == "some workers"
    assert mixed.load.bytes_sent == pytest.approx(usual.load.bytes_sent, rel=1e-3)
    assert mixed.load.received_bytes == pytest.approx(usual.load.received_bytes, rel=1e-3)


def test_on_equal_lines_all_messages_count_as_the_largest():
    usual, mixed = (cost(f"Feedback({codec})", 4) for codec in ("Int8()", "PerWorker(Int8(), ranks=1)"))
    assert mixed.seconds == pytest.approx(usual.seconds, rel=1e-3)
    assert mixed.bytes_sent < usual.bytes_sent


def test_a_server_answers_everybody():
    servers = cost("ParameterServer(shards=2)", 1000)
    assert servers.at_least
    assert servers.load.machine == "a server"
    assert servers.load.bytes_sent == pytest.approx(999 * 4 * PARAMETERS / 2, rel=0.05)
    assert servers.seconds == pytest.approx(8 * servers.load.bytes_sent / 100e6, rel=0.05)


def test_a_server_of_local_training_answers_once_per_period():
    every, rarely = (cost(text, 1000) for text in ("ParameterServer(shards=2)", "AsyncDiLoCo(period=50, shards=2)"))
    assert rarely.load.bytes_sent == pytest.approx(every.load.bytes_sent / 50, rel=0.05)
    assert rarely.load.messages == pytest.approx(every.load.messages / 50)


def test_where_many_communicate_rarely_little_is_waited_for():
    rare, often = cost("DiLoCo(period=100)", 1000), cost("Dense()", 1000)
    assert rare.bytes_sent < often.bytes_sent / 20
    assert rare.waiting_share < often.waiting_share


def test_neighbors_cost_the_same_in_a_world_of_any_size():
    few, many = (cost("Gossip() + Ring()", workers) for workers in (100, 10_000))
    assert few.bytes_sent == pytest.approx(many.bytes_sent, rel=0.05)
    assert few.seconds == pytest.approx(many.seconds, rel=0.1)


def homes(folder, relay):
    """An office, which is rank 0, and three homes behind routers."""
    there = folder / "homes.toml"
    there.write_text(
        '[[hosts]]\nsite = "office"\nrate = "1gbit"\n[[hosts]]\ncount = 3\nsite = "home"\nrate = "20mbit"\n'
        f'[[relays]]\nbetween = ["home", "home"]\n{relay}\n'
    )
    return str(there)


@pytest.mark.parametrize(
    ("recipe", "own", "forwarded"),
    [
        ("DGC(density=0.01)", 3, 6),  # each of three homes sends to two others
        ("Gossip() + Ring()", 2, 4),  # home 1 and home 2, home 2 and home 3, in both directions
        ("Gossip() + Exponential(one_peer=True)", 2, 4),  # in two rounds; home 1 to home 2, 2 to 3, 1 to 3, 3 to 1
        ("Dense() + Ring()", 6, 12),  # 2 (n - 1) segments of each worker; two of four workers send to a home
    ],
)
def test_the_busiest_machine_is_a_relay_with_its_own_bytes_and_those_it_forwards(tmp_path, recipe, own, forwarded):
    each = cost(recipe, 4, "20mbit,1ms").bytes_sent
    of_office = cost(recipe, 4, homes(tmp_path, 'through = "office"')).load
    of_relay = cost(recipe, 4, homes(tmp_path, 'rate = "1gbit"')).load
    assert of_office.machine == of_relay.machine == "a relay"
    assert of_office.bytes_sent == pytest.approx(each * (own + forwarded) / own, rel=0.02)
    assert of_relay.bytes_sent == pytest.approx(each * forwarded / own, rel=0.02)
    assert of_office.bytes_received == pytest.approx(of_office.bytes_sent, rel=0.02)


def test_a_hub_sends_more_than_the_homes_that_need_no_relay_then(tmp_path):
    load = cost("Dense()", 4, homes(tmp_path, 'through = "office"')).load
    assert load.machine == "some workers"
    assert load.bytes_sent == pytest.approx(3 * 4 * PARAMETERS, rel=0.02)


def test_a_relay_receives_less_than_it_sends_if_another_worker_sends_less(tmp_path):
    network = homes(tmp_path, 'through = "office"')
    load = cost("Feedback(PerWorker(Int8(), slow=OneBit(), ranks=3))", 4, network).load
    equal = cost("Feedback(Int8())", 4, network).load
    assert equal.bytes_received == pytest.approx(equal.bytes_sent)
    assert load.machine == "a relay"
    assert load.bytes_received < load.bytes_sent - PARAMETERS / 2  # an entry has 8 bits or 1
