"""TCP endpoints of peers that join and leave: requests, answers and events, with at-least-once delivery.

endpoint                    TcpEndpoint: executes the ops of a peer's scripts, from any thread      | threads
mailbox                     passes events and answers from the serving thread to the script threads |
event_loop                  the serving thread: ready sockets, and tasks of other threads           |
dispatcher                  routes requests, answers and membership events                          | routing
unanswered_requests         one peer: its connection, unanswered requests, backoff, traffic         |
connections_and_heartbeats  all open connections: dialing, accepting, heartbeats, timeouts          | sockets
connection                  one connection: its send queue, and the received frames                 |
tls_sockets                 non-blocking sockets, plain and TLS                                     |
options                     timeouts, limits and encryption of an endpoint                          |
comm.rpc_protocol           the layer below: bytes to frames and back                               | sans-IO
"""
