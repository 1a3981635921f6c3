"""Algorithms: the operations that workers request, independent of transports and sessions.

compressors/   the bytes sent for a tensor, and the residual that a worker keeps
strategies/    when workers communicate, and the rule that applies a mean
topologies/    the neighbors of each worker
collectives/   all-reduce algorithms as tables of hops
gossip/        averaging with neighbors, in lock step and in pairs
recipes/       the grammar: strategy + compressor + topology, from text and from Python
"""
