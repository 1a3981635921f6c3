"""TCP endpoints of peers that come and go: asks, answers and events, delivered at least once over broken connections.

endpoint          TcpEndpoint: answers the ops of a peer's scripts, from any thread        | threads
mailbox           hands events and answers from the serving thread to the scripts' threads |
event_loop        the serving thread: ready sockets, and tasks of other threads            |
dispatcher        which peer asked what, where answers go, who joined and left             | routing
peer_state        one peer: its connection, unanswered asks, backoff, traffic              |
connection_pool   all open connections: dialing, accepting, timeouts                       | sockets
connection        one connection: its send queue, and the frames that arrive               |
sockets           plain and TLS sockets that never block                                   |
options           timeouts, limits and encryption of an endpoint
transports.wire   below all of these: bytes to frames and back                             | sans-IO
"""
