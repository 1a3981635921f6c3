"""Virtual device: links, speed and hours decide when an answer comes."""

from __future__ import annotations

import pytest

from gossamer.federated.population import DeviceProfile
from gossamer.federated.population.profiles import DAY_SECONDS as DAY
from gossamer.federated.population.profiles import VirtualDevice, presence

SLOW = DeviceProfile(seconds_per_step=2.0, up_bits_per_second=80.0, down_bits_per_second=800.0, round_trip_seconds=0.5)


def test_a_task_takes_its_way_its_steps_and_its_way_back() -> None:
    times = VirtualDevice(0, SLOW).take(10.0, down_bytes=100, steps=3, up_bytes=20)
    assert times.began == pytest.approx(10 + 0.25 + 1)
    assert times.arrived == pytest.approx(times.began + 6 + 2 + 0.25)


def test_tasks_wait_for_each_other() -> None:
    device = VirtualDevice(0, SLOW)
    first = device.take(0.0, 0, 5, 0)
    second = device.take(0.0, 0, 1, 0)
    assert second.began == pytest.approx(first.began + 10)


@pytest.mark.parametrize(
    ("begins", "lasts", "moment", "there"),
    [
        (0, DAY, 5, 5),
        (100, 50, 0, 100),
        (100, 50, 120, 120),
        (100, 50, 150, 100 + DAY),
        (DAY - 10, 20, 5, 5),
    ],
)
def test_a_device_that_is_absent_begins_when_it_is_back(
    begins: float, lasts: float, moment: float, there: float
) -> None:
    assert presence(DeviceProfile(present_from=begins, present_seconds=lasts), moment)[0] == there


def test_failures_are_drawn_as_often_as_said_and_alike_for_a_seed() -> None:
    def draws(seed: int) -> list[bool]:
        device = VirtualDevice(3, DeviceProfile(failure=0.25), seed)
        return [device.fails_next() for _ in range(2000)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    z = (sum(draws(1)) - 500) / (2000 * 0.25 * 0.75) ** 0.5
    assert abs(z) < 4
    assert not VirtualDevice(3, DeviceProfile()).fails_next()
