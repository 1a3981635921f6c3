"""Run the scripts of peers that do not move in step, in virtual time: one thread, no clock, the same for the same seed.

A payload belongs to the transport until the answer is there, and for ever where the asker gave up; what an answer or an
arrived word brings is only to be read. The simulation passes references and copies nothing; `checks` finds who wrote.
A worker that computes awaits a moment: `now = yield from compute(seconds)`. A peer has one script and hears nothing
while it asks: who asks and answers at the same time is two peers that share their state.
"""

from gossamer.simulation.simulator import compute, simulate_peers
from gossamer.simulation.trace import Ended, Trace

__all__ = ["Ended", "Trace", "compute", "simulate_peers"]
