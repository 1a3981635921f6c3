"""Elastic transports: lock-step groups with members that join and leave.

transport           the transport of an elastic run's session: recovery, and one mesh per view
admission           transfers the members' state to newcomers, between two transactions
operation_log       results of the last transaction, for ranks that lost some of them
value_transfer      sends tensors and texts from ranks that have them to ranks that do not
change              description of a change of view, and protocols that the transport uses
joined_run          this process's membership: its agent, its listener, the mesh of each view
view_engines        this process's engines between GPUs: one per view, if every member has a GPU
agent               a worker's connection to the coordinator
view_listener       a worker's listening socket, through which each view's mesh is connected
coordinator_server  serves the coordinator over sockets
remote_control      changes the maximum number of workers of a run
"""
