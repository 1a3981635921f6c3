"""Secure aggregation: masks that cancel in the sum of a cohort, so that the server learns only that sum.

It holds against a server that reads everything, and against one that lies, as long as fewer than 2 t - k devices
collude with it (of k that hold shares of a secret, or are in the cohort, t give it back, or sign the list of vectors).
With few neighbors a lying server learns sums of parts of the cohort; SecureAggregation has the numbers. It does not
hold against devices that send nonsense, which cannot be recognized any more, nor against differences of the sums of
cohorts that differ by one device.

rounds       SecureRounds: synchronous rounds in phases
cohort       the server's part of one round: phases, missing devices, the sum of masked vectors and its masks
device       a device's part: keys, shares, the masked vector, one share of each neighbor
agreement    the terms of a round, its graph of masks, and the keys that devices publish
fixed_point  weighted contributions as whole numbers under one scale for all; with noise under DistributedPrivacy
masking      integers that no sum can leave, masks, keys, and secrets in shares
identities   identities of devices, pinned by a roster file
"""
