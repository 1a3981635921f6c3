"""Gossip: rules by which neighbors average their parameters, in lock step or pairwise at each worker's own pace.

rules             plain averaging, CHOCO and push-sum: what leaves for neighbors, what parameters become
pairwise          a worker's state in pairwise gossip (AD-PSGD): shown, owed and open exchanges
pairwise_scripts  both sides of a pairwise exchange, as scripts that no network knows
incarnation       numbers by which a restarted worker's messages are told from stale ones
state_transfer    how a worker that was lost begins again from a live peer's state
final_mean        that mean, with the consensus distance
"""
