"""Runtime: the thread and the order in which scripts run over a transport (see gossamer.base.runner).

comm_thread     the communication thread: a queue of jobs, executed in order
comm_streams    its CUDA stream per device, and events that order it with the training loop's stream
transaction     operations that are completed or repeated as a whole when the group changes
pipeline        concurrent scripts over one transport, in an order that is equal on every rank; the pipeline depth
peer_thread     scripts of asynchronous peers, each in a thread of its own
worker_scope    the current worker, in processes with several simulated workers
uncaught_errors tracebacks of this library's errors, shortened to the user's line
signal_handlers handlers of signals; an ignored signal remains ignored
interruption    Ctrl-C, which takes effect after the same step on every rank
open_sessions   the open sessions of this process
"""
