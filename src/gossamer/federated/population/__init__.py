"""Population: devices unlike each other, in what they compute, how they are connected and when they are there.

device_profile  DeviceProfile: one device's speed, link and hours
"""

from gossamer.federated.population.device_profile import DeviceProfile

__all__ = ["DeviceProfile"]
