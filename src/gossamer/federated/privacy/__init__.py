"""Federated privacy: clips contributions, adds noise, and accounts for the versions that a device is part of.

noise       Gaussian, Skellam and discrete Gaussian numbers of random bits
mechanisms  clipping, and where noise is added: by a device, by devices of a secure sum, by the server
accountant  PrivacyAccountant: the clip norm, epsilon spent, selection by coins, and when a budget ends the rounds
"""
