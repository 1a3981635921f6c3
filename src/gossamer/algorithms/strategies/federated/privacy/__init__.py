"""Privacy of federations: what versions tell of any one device, how it is bounded, and what that costs.

terms         Privacy, CentralPrivacy, LocalPrivacy, DistributedPrivacy
epsilon       epsilon and delta after so many rounds
integer_grid  how finely numbers are rounded under distributed privacy
"""
