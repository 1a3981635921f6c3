"""Deterministic simulation testing of peer scripts: virtual time, one thread, and faults drawn from a seed.

simulator        simulate_peers: resumes scripts until all but the servers have ended; faults, messages, joins, leaves
actors           a peer's script with its inbox, pending asks, and what it waits for
faulty_network   links, faults, and random networks drawn from a seed
trace            the outcome of a simulation

Payloads are passed by reference: they must not be written to before the answer is there, nor what arrives at all;
`checks=True` finds violations. A peer has one script and receives nothing while it asks: one that asks and answers at
the same time is two peers that share their state.
"""

from gossamer.comm.simulation.simulator import compute, simulate_peers
from gossamer.comm.simulation.trace import Ended, Trace

__all__ = ["Ended", "Trace", "compute", "simulate_peers"]
