"""Base: the operations that an algorithm may ask for, tensors in flat buffers, and the script runner.

ops           collective operations: all-reduce, all-gather, all-to-all; their properties; many scripts run as one
op_semantics  their reference semantics: the answers of all ranks, computed in one place
aggregation   State, AggregationContext and AggregationResult of a compressor
layout        names, shapes and places of many tensors in one flat buffer; layouts as keys of caches
peer_ops      operations of peers that do not move in step: push, pull, await, reply
rng           random numbers that are a function of their address
compiled      whether the compiled kernels are installed; a warning at import
term          the terms of a recipe: frozen hyperparameters that add up
json_text     JSON from elsewhere, its nesting limited; JSON text without NaN and infinity
bounded_mean  means of users' numbers, without overflow
intervals     means with a confidence interval
bounded_file  files of other processes, read up to a limit, and replaced as a whole
differing_tensor  the first tensor whose hashes differ between ranks
torch_hooks   hooks of torch: of all modules and optimizers, safe while other threads build or step them; of one model
transport     the Transport protocol: answers the operations of one worker in a lock-step group
runner        runs a script over a transport, all workers' scripts in one process, or only its price
virtual_clock   events in the order of virtual time
flight_recorder  the latest operations of this process, in a ring, and the one it waits for now
figures       pictures as files, by matplotlib, in one style
html_table    names and values as HTML, for notebooks
former_names  warnings of public names that have new ones
run_files     the run's private directory: output, start, end and failure reports by rank and attempt
system        calls that not all operating systems have, each with a portable answer
units         numbers as text: 1.2 MB, 34 ms, 12 %
host_port     addresses as text: HOST:PORT

kernels/      inner loops: compiled, in Triton, and their reference in plain torch
spans/        spans of one process: recorded by thread, written to a file
"""
