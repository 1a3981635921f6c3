"""Hours: when a device is there, in seconds of virtual time that begins at a midnight."""

from __future__ import annotations

from math import floor, inf

from gossamer.federated.population.device_profile import DAY_SECONDS, ROUNDING_SECONDS, DeviceProfile


def presence(profile: DeviceProfile, moment: float) -> tuple[float, float]:
    """The device's present or next stay: from when, at least `moment`, and until when."""
    if profile.is_always_present:
        return moment, inf
    day = floor((moment - profile.present_from + ROUNDING_SECONDS) / DAY_SECONDS)
    begins = profile.present_from + day * DAY_SECONDS
    if moment + ROUNDING_SECONDS < begins + profile.present_seconds:
        return max(moment, begins), begins + profile.present_seconds
    begins = profile.present_from + (day + 1) * DAY_SECONDS
    return begins, begins + profile.present_seconds
