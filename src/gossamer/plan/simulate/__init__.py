"""Simulated job: real training of many workers of a user's script in one process, in virtual time.

job             the workers of one recipe, paused between calls, and their progress; learning rates and memory
virtual_worker  one worker: a thread that runs the script, the gate at which it waits, its world and groups
shared_process  one worker at a time runs user code, with its own random states, environment, modules and output
clock           the virtual second at which each step ends, by the current recipe and network
"""

from gossamer.plan.simulate.clock import ForecastClock, NetworkSchedule, StepClock, StepTimes
from gossamer.plan.simulate.job import JobProgress, SimulatedJob
from gossamer.plan.simulate.shared_process import SimulationError

__all__ = [
    "ForecastClock",
    "JobProgress",
    "NetworkSchedule",
    "SimulatedJob",
    "SimulationError",
    "StepClock",
    "StepTimes",
]
