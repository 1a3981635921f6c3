import pytest
import torch

from gossamer.foretell import Foretold, Job, Measured, MeasuredBucket, foretell, plan, run_step
from gossamer.network import read_network
from gossamer.recipe import resolve
from gossamer.words import Gather, Mean, Together

WORD = Gather((torch.empty(1, device="meta"),))


class Fixed:
    """Every word takes ten seconds after the last rank has said it, every broadcast one."""

    def answer(self, words, starts):
        return [max(starts) + 10.0] * len(starts)

    def broadcast(self, nbytes, starts):
        return [max(starts) + 1.0] * len(starts)


def measured(**changes):
    return Measured(**{"recipe": "", "backward_seconds": 20.0, "rest_seconds": 4.0, "buckets": []} | changes)


def job(ready, *rounds, last=0.0):
    return Job(ready_seconds=ready, rounds=[(seconds, WORD, 0.0) for seconds in rounds], last_seconds=last)


@pytest.mark.parametrize(
    ("jobs", "end", "waiting", "wire", "codec"),
    [
        ([], 24.0, 0.0, 0.0, 0.0),
        ([job(5.0, 1.0)], 24.0, 0.0, 10.0, 1.0),  # hidden: 5 + 1 + 10 < 20
        ([job(20.0, 1.0, last=2.0)], 37.0, 13.0, 10.0, 3.0),  # all after backward
        ([job(5.0, 1.0), job(6.0, 1.0)], 31.0, 7.0, 20.0, 2.0),  # the second waits for the lane until 16
        ([job(2.0, 1.0), job(18.0, 1.0)], 33.0, 9.0, 20.0, 2.0),  # the lane waits for the second until 18
        ([job(20.0, 1.0, 3.0, last=2.0)], 50.0, 26.0, 20.0, 6.0),  # two rounds
    ],
)
def test_the_lane_is_a_queue(jobs, end, waiting, wire, codec):
    step = run_step(jobs, measured(), Fixed(), [0.0, 0.0])
    assert (step.ends, step.waiting) == ([end] * 2, [waiting] * 2)
    assert (step.wire, step.codec) == ([wire] * 2, [codec] * 2)


def test_steps_begin_where_the_last_one_ended():
    step = run_step([job(20.0, 0.0)], measured(), Fixed(), [100.0, 103.0])
    assert step.ends == [137.0, 137.0]
    assert step.waiting == [13.0, 10.0]


def test_on_crowded_processors_the_codec_and_backward_take_turns():
    """At 10 both want the core: the codec's 4 seconds take 8, and backward's last 10 take 14."""
    step = run_step([job(10.0, 4.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [28.0 + 4.0]
    alone = run_step([job(10.0, 4.0)], measured(), Fixed(), [0.0])
    assert alone.ends == [24.0 + 4.0]


def test_after_backward_there_is_nothing_to_share():
    work = [job(20.0, 4.0)]
    assert run_step(work, measured(crowded=True), Fixed(), [0.0]) == run_step(work, measured(), Fixed(), [0.0])


def test_what_is_delayed_is_ready_later():
    step = run_step([job(1.0, 4.0), job(15.0, 0.0)], measured(crowded=True), Fixed(), [0.0])
    assert step.ends == [29.0 + 4.0]  # the second is ready at 15 + 4, when the lane just became free
    assert step.codec == [8.0]


def test_buffers_follow_the_last_bucket():
    step = run_step([job(20.0, 0.0)], measured(buffer_bytes=[8, 8, 8]), Fixed(), [0.0, 0.0])
    assert step.waiting == [13.0, 13.0]
    assert run_step([], measured(buffer_bytes=[8]), Fixed(), [0.0]).wire == [0.0]


def bucket(rounds, **shapes):
    return MeasuredBucket(
        dtype="float32",
        shapes=shapes,
        ready_seconds=0.1,
        computing_seconds=[0.001] * (rounds + 1),
        engine_seconds=[0.0] * rounds,
    )


def test_the_last_bucket_takes_the_control_word_along():
    model = measured(buckets=[bucket(1, a=(50, 50)), bucket(1, b=(60, 60), c=(7,))], control_bytes=23)
    first, last = plan(resolve("Dense"), model, 4)
    assert [type(word) for _, word, _ in first.rounds] == [Mean]
    ((_, word, _),) = last.rounds
    assert isinstance(word, Together)
    assert [type(each) for each in word.words] == [Mean, Gather]
    assert word.words[1].payload[0].nbytes == 23


def test_a_compressor_of_several_rounds_has_a_computing_time_before_each():
    (only,) = plan(resolve("PowerSGD(rank=2)"), measured(buckets=[bucket(2, a=(50, 50))], control_bytes=23), 4)
    assert [type(word) for _, word, _ in only.rounds] == [Together, Mean]


def test_foretold_is_compute_and_what_the_network_adds():
    model = measured(
        backward_seconds=0.2, rest_seconds=0.05, buckets=[bucket(1, a=(1000, 1000))], control_bytes=23, copies=2
    )
    told = foretell(resolve("Dense"), model, read_network("100mbit", 2), 2)
    line = 4e6 * 1526 / 1448 * 8 / 100e6
    assert told.wire_seconds == pytest.approx(line, rel=0.01)
    assert told.step_seconds == pytest.approx(0.05 + max(0.2, 0.102 + line), rel=0.01)
    assert told.waiting_share == pytest.approx(told.waiting_seconds / told.step_seconds)
    assert told.inputs["network"] == "100mbit"
    assert told.inputs["copies_measured_side_by_side"] == 2


def test_alone_there_is_nothing_to_wait_for():
    model = measured(buckets=[bucket(1, a=(10, 10))])
    told = foretell(resolve("Dense"), model, read_network("1mbit,1s", 1), 1)
    assert told == Foretold(
        step_seconds=24.0, waiting_seconds=0.0, wire_seconds=0.0, codec_seconds=0.0, inputs=told.inputs
    )


def test_more_hosts_than_workers_leave_the_rest_out():
    model = measured(buckets=[bucket(1, a=(100, 100))], control_bytes=23)
    two = foretell(resolve("Dense"), model, read_network("1mbit,1s", 2), 2)
    assert foretell(resolve("Dense"), model, read_network("1mbit,1s", 8), 2).step_seconds == two.step_seconds


def test_measurements_survive_json():
    model = measured(buckets=[bucket(1, a=(10, 10))])
    assert Measured.from_json(model.to_json()) == model
