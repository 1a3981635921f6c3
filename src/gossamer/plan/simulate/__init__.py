"""Simulated job: real training of many workers of a user's script in one process, in virtual time.

job               the workers of one recipe, which pause between calls, and what they have told
virtual_worker    one worker: a thread that runs the script, and the gate at which it waits
baton             one worker at a time runs user code
process_state     random states, environment, modules: what a worker has for itself and a process has once
virtual_world     a worker's rank and size, and the groups in which workers meet
script_guards     what a script may not do in a process that it shares: fork, handle signals, make process groups
routed_output     what each worker prints goes its own way
learning_rate     a factor for the rates of a script's optimizers
memory_estimate   memory that all workers need, and what is free
job_clock         the virtual second at which each step ends, by the recipe in force
step_clock        seconds of a step, foretold for the network in force
network_schedule  networks that change at a moment
"""

from gossamer.plan.simulate.job import JobProgress, SimulatedJob
from gossamer.plan.simulate.network_schedule import NetworkSchedule
from gossamer.plan.simulate.script_guards import SimulationError
from gossamer.plan.simulate.step_clock import ForecastClock, StepClock, StepTimes

__all__ = [
    "ForecastClock",
    "JobProgress",
    "NetworkSchedule",
    "SimulatedJob",
    "SimulationError",
    "StepClock",
    "StepTimes",
]
