"""Gossip: rules by which neighbors average their parameters, in lock step or pairwise at each worker's own pace.

rules           averaging, CHOCO, push-sum and NoLoCo: the payload for neighbors, and the update
partner         one worker's pairwise exchanges (AD-PSGD): shown parameters, pending changes, scripts of both sides
state_transfer  a restarted worker receives a live peer's state
final_mean      the mean over all workers, with the consensus distance
"""
