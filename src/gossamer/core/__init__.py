"""The vocabulary: what an algorithm asks of its group, what it is given, and what it returns. No network, no files.

ops           collective operations: all-reduce, all-gather, all-to-all; what each says about itself
op_semantics  their reference semantics: the answers of all ranks, computed in one place
coalesce      many scripts as one: operations of the same kind travel together
relay         a script within another, each of its turns within a guard
aggregation   State, AggregationContext and AggregationResult of a compressor
layout        names, shapes and places of many tensors in one flat buffer
peer_ops      operations of peers that do not move in step: push, pull, await, reply
rng           random numbers that are a function of their address
term          the terms of a recipe: frozen hyperparameters that add up
json_text     JSON from elsewhere, its nesting limited; JSON text without NaN and infinity
bounded_mean  means of users' numbers, without overflow
bounded_file  files of other processes, read up to a limit
differing_tensor  the first tensor whose hashes differ between ranks
identity      cache keys for one object
"""
