"""Gossip: rules by which neighbors average their parameters, in lock step or pairwise at each worker's own pace.

rules             averaging, CHOCO, push-sum and NoLoCo: the payload for neighbors, and the update
pairwise          a worker's state in pairwise gossip (AD-PSGD): shown parameters, pending changes, open exchanges
pairwise_scripts  both sides of a pairwise exchange, as scripts without a network
incarnation       numbers that distinguish a restarted worker's messages from stale ones
state_transfer    a restarted worker receives a live peer's state
final_mean        the mean over all workers, with the consensus distance
"""
