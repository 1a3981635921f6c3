"""Costs of collective operations and of steps on a network, in virtual time.

step_simulator       time of a step, from the operations of its buckets
op_cost              time of an operation
cheapest_collective  the fastest algorithm for a mean
representative_cost  time of operations on uniform networks, from the messages of one rank
message_schedule     the messages of one rank in an operation, in order
message_simulator    the messages of all ranks on lines, some of them shared by sites, in virtual time
"""
