"""Algorithms: which operations the workers ask for. No module here knows a transport or a session.

compressors/   which bytes of a tensor travel, and what a worker remembers of the rest
strategies/    when workers communicate, and the rule that applies a mean
topologies/    which workers are neighbors
collectives/   an all-reduce as a table of hops
gossip/        averaging with neighbors, in lock step and in pairs
recipes/       the grammar: strategy + compressor + topology, from text and from Python
"""
