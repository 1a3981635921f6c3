"""Profile draws: devices drawn from distributions, alike for the same seed, whichever of them are asked for."""

from __future__ import annotations

from math import exp, inf, isfinite
from random import Random

from gossamer.base import rng
from gossamer.errors import require
from gossamer.federated.population.device_profile import DAY_SECONDS, DeviceProfile


def drawn_profiles(
    count: int,
    seed: int = 0,
    *,
    seconds_per_sample: float = 0.005,
    compute_sigma: float = 0.6,
    samples_per_step: int = 32,
    up_bits_per_second: float = 5e6,
    down_bits_per_second: float = 20e6,
    link_sigma: float = 0.8,
    round_trip_seconds: float = 0.06,
    present_seconds: float = DAY_SECONDS / 3,
    night_hour: float = 2.0,
    night_sigma_hours: float = 3.0,
    failure: float = 0.0,
) -> list[DeviceProfile]:
    """`count` devices unlike each other; device k is the same however many are drawn.

    compute     seconds_per_sample e^(compute_sigma z), z ~ N(0, 1): 5 ms and 0.6 are FedScale's own (Lai et al. 2022,
                ICML), times `samples_per_step` for a step
    links       up and down share one draw e^(link_sigma z): who has a slow line has it both ways; medians as given
    presence    a window of `present_seconds` a day, longer or shorter by up to a half, whose middle is normal around
                `night_hour`: phones take part while they charge (Bonawitz et al. 2019, MLSys). A day: always there
    failure     the same for all

    Raises ValueError for a median that is not positive, or a spread below 0.
    """
    require(type(count) is int and count >= 1, f"count is 1 or more devices, not {count!r}")
    require(type(samples_per_step) is int and samples_per_step >= 1, "samples_per_step is a batch's, 1 or more")
    require(isfinite(seconds_per_sample) and seconds_per_sample >= 0, "seconds_per_sample is 0 or more: write 0.005")
    require(min(up_bits_per_second, down_bits_per_second) > 0, "rates are above 0 bits per second: write 1e6")
    spreads = {"compute_sigma": compute_sigma, "link_sigma": link_sigma, "night_sigma_hours": night_sigma_hours}
    for name, spread in spreads.items():
        require(isfinite(spread) and spread >= 0, f"{name} is a spread, 0 or more and finite, not {spread}")
    require(0 < present_seconds <= DAY_SECONDS, f"present_seconds is above 0 and at most a day's {DAY_SECONDS:.0f}")
    return [
        _drawn(
            Random(rng.address(seed, "device profile", number)),
            compute=(seconds_per_sample * samples_per_step, compute_sigma),
            up=up_bits_per_second,
            down=down_bits_per_second,
            link_sigma=link_sigma,
            round_trip_seconds=round_trip_seconds,
            present_seconds=present_seconds,
            night=(night_hour * 3600, night_sigma_hours * 3600),
            failure=failure,
        )
        for number in range(count)
    ]


def _drawn(
    random: Random,
    *,
    compute: tuple[float, float],
    up: float,
    down: float,
    link_sigma: float,
    round_trip_seconds: float,
    present_seconds: float,
    night: tuple[float, float],
    failure: float,
) -> DeviceProfile:
    seconds_per_step = _lognormal(random, *compute)
    line = _lognormal(random, 1.0, link_sigma)
    middle, length = random.gauss(*night), present_seconds * random.uniform(0.5, 1.5)
    always = present_seconds >= DAY_SECONDS
    length = DAY_SECONDS if always else min(length, DAY_SECONDS)
    return DeviceProfile(
        seconds_per_step=seconds_per_step,
        up_bits_per_second=up if up == inf else up * line,
        down_bits_per_second=down if down == inf else down * line,
        round_trip_seconds=round_trip_seconds,
        present_from=0.0 if always else (middle - length / 2) % DAY_SECONDS,
        present_seconds=length,
        failure=failure,
    )


def _lognormal(random: Random, median: float, sigma: float) -> float:
    return median * exp(sigma * random.gauss(0.0, 1.0))
