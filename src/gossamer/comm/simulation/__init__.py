"""Deterministic simulation testing of peer scripts: virtual time, one thread, and faults drawn from a seed.

simulator        simulate_peers: resumes scripts until all except the servers have ended; faults, messages, membership
actors           a peer's script with its inbox, pending requests, and current wait
faulty_network   links, faults, and random networks drawn from a seed
trace            the outcome of a simulation

Payloads are passed by reference. They must not be modified until the answer arrives, and received ones never;
`checks=True` detects violations. A peer has one script and receives nothing while it waits for an answer. To ask and
answer concurrently, use two peers that share their state.
"""

from gossamer.comm.simulation.simulator import compute, simulate_peers
from gossamer.comm.simulation.trace import Ended, Trace

__all__ = ["Ended", "Trace", "compute", "simulate_peers"]
