"""Costs of collective operations and of steps on a network, in virtual time.

step_simulator       how long a step takes, by the operations of its buckets
op_cost              how long an operation takes: its price
cheapest_collective  which collective computes a mean the fastest
representative_cost  operations and tables of hops by the messages of one rank, where all do alike
message_schedule     the messages of one rank in an operation, in order
message_simulator    carries the messages of all ranks over lines, some of which sites share, in virtual time
"""
