"""Federated privacy: clips contributions, adds noise, and accounts for the privacy loss of each device.

noise_sampling      Gaussian, Skellam and discrete Gaussian numbers from random bits
clipping_and_noise  clipping and noise: on a device, on the devices of a secure sum, or on the server
accountant          PrivacyAccountant: the clip norm, epsilon, Poisson sampling, and the end of a spent budget
"""
