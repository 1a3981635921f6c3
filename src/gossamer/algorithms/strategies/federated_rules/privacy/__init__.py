"""Differential privacy of federations: the privacy loss of a device, its limits, and their cost.

terms         Privacy, CentralPrivacy, LocalPrivacy, DistributedPrivacy
epsilon       epsilon and delta after a number of rounds
integer_grid  the rounding of contributions under distributed privacy
"""
