"""Elastic transports: lock-step groups with members that join and leave.

transport           the transport of an elastic run's session: recovery, and one mesh per view
served_member       the place of a worker whose parameters are on servers, without lock step
newcomer_state      transfers the members' state to newcomers, in the background and between two transactions
interrupted_operations  results of the last transaction, for ranks that lost some of them
value_transfer      sends tensors and texts from ranks that have them to ranks that do not
change              description of a change of view, and protocols that the transport uses
recognition         recognizes these transports without importing them
joined_run          this process's membership: its agent, its listener, the mesh of each view
view_engines        this process's engines between GPUs: one per view, if every member has a GPU
agent               a worker's connection to the coordinator
view_listener       a worker's listening socket, through which each view's mesh is connected
relay               forwards bytes between workers that cannot connect to each other
coordinator_server  serves the coordinator over sockets
remote_control      status, maximum number of workers and invitations of a run, for its owner
invited             finds the coordinator of a link, and receives the run's token
"""
