"""Secure aggregation: masks that cancel in the sum of a cohort, so that the server learns only that sum.

The guarantee holds against a server that reads all messages, and against a server that sends false ones, as long as
fewer than 2 t - k devices collude with it. Here k devices hold shares of a secret (or are in the cohort), and t of them
recover it (or sign the list of vectors). With few neighbors, a malicious server learns sums of parts of the cohort; see
SecureAggregation for the numbers. There is no protection against devices that send wrong updates, which cannot be
recognized, or against differences between the sums of cohorts that differ by one device.

rounds       SecureRounds: synchronous rounds in phases
cohort       the server's side of one round: phases, missing devices, the sum of masked vectors and its masks
device       the device's side: keys, shares, the masked vector, one share of each neighbor
agreement    the terms of a round, its graph of masks, and the keys that devices publish
fixed_point  weighted contributions as integers with one scale for all; with noise under DistributedPrivacy
masking      the ring of integers, masks, key agreement, and secret sharing
identities   identities of devices, pinned by a roster file
"""
