from gossamer.events import Attached, StepEnded
from gossamer.plan.rehearse.worker import SentBytes


def test_bytes_are_those_of_whole_periods_in_which_everything_lands():
    sent = SentBytes(delay=1)
    sent(Attached(recipe="", layouts=(), parameters=0, buffer_bytes=0, control_bytes=0, rank=0, world=2, period=3))
    for step, nbytes in enumerate([0, 0, 0, 9, 0, 0, 9, 0], start=1):
        sent(StepEnded(step=step, seconds=0.1, bytes_sent=nbytes))
    assert sent.bytes_per_step == 3.0
