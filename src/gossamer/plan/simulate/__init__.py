"""Simulated job: real training of many workers of a user's script in one process, in virtual time.

job               the workers of one recipe, paused between calls, and their progress; learning rates and memory
virtual_worker    one worker: a thread that runs the script, the gate at which it waits, its world and groups
lock_step         workers that wait for each other, and their common time
peer_time         workers with servers or single peers, each at its own virtual second
peer_network      the scripts and messages of such workers
worker_isolation  one worker at a time runs user code, with its own random states, environment, modules and output
clock             the virtual second at which each step ends, by the current recipe and network
"""

from gossamer.plan.simulate.clock import ForecastClock, NetworkSchedule, StepClock, StepTimes
from gossamer.plan.simulate.job import JobProgress, SimulatedJob
from gossamer.plan.simulate.worker_isolation import SimulationError

__all__ = [
    "ForecastClock",
    "JobProgress",
    "NetworkSchedule",
    "SimulatedJob",
    "SimulationError",
    "StepClock",
    "StepTimes",
]
