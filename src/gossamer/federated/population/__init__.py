"""Population: devices with different data, speed, links and availability.

partition  partition: the samples of each device, by four rules of heterogeneity
picture    plot_partition: draws the labels of each device
profiles   DeviceProfile: one device's speed, link and availability; drawn from distributions or read from a file
"""

from gossamer.federated.population.partition import partition
from gossamer.federated.population.picture import plot_partition
from gossamer.federated.population.profiles import DeviceProfile, DeviceProfileError, drawn_profiles, read_profiles

__all__ = ["DeviceProfile", "DeviceProfileError", "drawn_profiles", "partition", "plot_partition", "read_profiles"]
