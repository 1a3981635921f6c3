import pytest
import torch

from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced, InGroup
from gossamer.base.runner import ScriptRun, run_script
from gossamer.comm import echo_transport
from gossamer.comm.echo_transport import ReplayTransport
from gossamer.comm.runtime.pipeline import Pipeline


class Clock:
    """Time passes only where scripts compute and where operations are answered."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def script(self, *seconds):
        """Computes so long before its first operation, between its operations, and after the last."""
        *before, last = seconds
        for each in before:
            self.now += each
            yield AllReduceMean(torch.ones(3))
        self.now += last

    def answer(self, op):
        self.now += 0.5
        return op.tensor


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seconds_belong_to_the_script_that_computes(depth, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(echo_transport, "time", clock)
    transport, pipeline = ReplayTransport(2, clock.answer), Pipeline(depth)
    scripts = [[1, 3], [2, 0, 4], [5, 1]]
    for seconds in scripts:
        transport.begin_script()
        pipeline.put(ScriptRun(clock.script(*seconds), transport))
    pipeline.finish()
    transport.pause()
    assert [spent.computing for spent in transport.scripts] == scripts
    assert [spent.engine for spent in transport.scripts] == [[0.5] * (len(seconds) - 1) for seconds in scripts]


def test_a_script_that_begins_once_more_is_one():
    transport = ReplayTransport(2)
    assert transport.begin_script() is transport.begin_script()
    transport.answer(AllReduceMean(torch.ones(3)))
    assert transport.begin_script() is transport.scripts[1]


def test_all_ranks_say_the_same():
    transport, x, out = ReplayTransport(3), torch.tensor([1.0, 2.0]), torch.empty(2)
    assert transport.answer(AllReduceMean(x, out)) is out
    assert torch.equal(out, x)
    mean, gathered = transport.answer(Coalesced((AllReduceMean(x), AllGather((x,)))))
    assert torch.equal(mean, x)
    assert [payload[0] is x for payload in gathered] == [True] * 3
    assert len(transport.answer(InGroup((0, 2), AllGather((x,))))) == 2
    assert transport.all_gather_text("a") == ["a"] * 3


def check_half_sums(monkeypatch, dtype, world):
    """A rank sums its own part alone, as the mesh and the engine have it, and what it hears is what all say."""
    summed, real = [], echo_transport.half_decode

    def counting(heard, total, divisor):
        summed.append((len(heard), total.numel(), total.dtype))
        return real(heard, total, divisor)

    monkeypatch.setattr(echo_transport, "half_decode", counting)
    x = torch.randn(12 * world + 1).to(dtype)
    for out in (None, torch.empty_like(x)):
        mean = ReplayTransport(world).answer(AllReduceMean(x, out))
        assert torch.equal(mean, x)
        assert out is None or mean is out
    assert summed == [(world, 13, torch.float32)] * 2


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_costs_what_one_rank_has_to_sum(monkeypatch, dtype, world):
    check_half_sums(monkeypatch, dtype, world)


def test_a_sum_of_all_that_everyone_says_is_noticed(monkeypatch):
    monkeypatch.setattr(echo_transport, "WIDE_BYTES", 0)
    with pytest.raises(AssertionError):
        check_half_sums(monkeypatch, torch.bfloat16, 4)


def test_parts_that_were_exchanged_are_gathered_from_whom_they_were_sent_to():
    transport, parts = ReplayTransport(2), tuple((torch.full((4,), float(rank)),) for rank in range(2))
    assert transport.answer(AllToAll(parts)) == [parts[0]] * 2
    assert transport.answer(AllGather((torch.zeros(4),))) == list(parts)
    other = (torch.zeros(5),)
    assert transport.answer(AllGather(other)) == [other] * 2


def test_answers_may_be_given():
    transport = ReplayTransport(2, lambda op: "recorded")

    def asking():
        return (yield AllGather((torch.ones(1),)))

    assert run_script(asking(), transport).result == "recorded"
