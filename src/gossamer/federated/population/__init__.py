"""Population: devices unlike each other, in their data, what they compute, how they are connected, when they are there.

partition       partition: which samples each device holds, by four rules of unlikeness
sample_values   reads labels or inputs from datasets, tensors, arrays and lists
picture         draws who has what
device_profile  DeviceProfile: one device's speed, link and hours
profile_draws   draws profiles from distributions
profile_file    reads profiles from a TOML file
"""

from gossamer.federated.population.device_profile import DeviceProfile
from gossamer.federated.population.partition import partition
from gossamer.federated.population.picture import plot_partition
from gossamer.federated.population.profile_draws import drawn_profiles
from gossamer.federated.population.profile_file import DeviceProfileError, read_profiles

__all__ = ["DeviceProfile", "DeviceProfileError", "drawn_profiles", "partition", "plot_partition", "read_profiles"]
