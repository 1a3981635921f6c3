"""Elastic transports: lock-step groups whose members come and go.

transport           the transport of an elastic run's session: recovery, one mesh after the other
admission           newcomers get the members' state, between two transactions
operation_log       answers of the last exchange, for ranks that miss some
value_transfer      tensors and texts from ranks that have them to those that do not
change              what a member sees of another view, and what the transport asks of its parts
joined_run          this process's membership: its agent, its listener, the mesh of each view
view_engines        this process's engines between devices: one for each view, where all members have a GPU
agent               a worker's connection to the coordinator
view_listener       a worker's listening socket, by which each view's mesh is connected
coordinator_server  the coordinator, served over sockets
remote_control      changes how many workers a run may have
"""
