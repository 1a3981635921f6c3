"""Federated privacy: clips contributions, draws noise that nobody can guess, counts what versions tell of a device.

clipping            scales all tensors of a contribution together to a norm
random_bits         bits of the operating system, or of a seed for tests
gaussian_noise      Gaussian numbers of such bits
integer_noise       Skellam and discrete Gaussian integers of such bits
integer_contribution  a contribution as integers with their share of noise, for a secure sum
device_noise        what a device does to its contribution before it sends it
adaptive_clip       moves the clip norm to a quantile of the norms
poisson_selection   draws each device by a coin
privacy_guard       PrivacyGuard: what the server keeps from round to round, and when it has to end
"""
