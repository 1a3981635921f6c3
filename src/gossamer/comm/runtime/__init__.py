"""Runtime: the thread and the order in which scripts run over a transport (see gossamer.base.runner).

comm_thread     the communication thread: a queue of jobs, executed in order
comm_streams    its CUDA stream of each device, and events that order it with the loop's
transaction     operations that are finished or made again as a whole where the group changes
pipeline        several scripts at once over one transport, in an order that is the same on every rank; their number
peer_thread     scripts of peers that do not move in step, each in a thread of its own
worker_scope    which worker of this process the running code belongs to, where several share it
uncaught_errors the traceback of an error that was raised on purpose, up to the user's line
signal_handlers handlers of signals; a signal that was ignored at the start stays ignored
interruption    Ctrl-C, which takes effect after the same step on every rank
open_sessions   the sessions of this process that are not closed
"""
