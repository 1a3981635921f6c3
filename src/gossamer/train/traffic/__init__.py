"""Traffic: the bytes that a step sends, computed by running the recipe's algorithms over meta tensors.

op_trace  the operations of one bucket
traffic   TrafficEstimate: bytes of a step, its rounds, and the memory of the recipe
"""
