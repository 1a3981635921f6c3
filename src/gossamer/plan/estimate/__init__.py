"""Estimates: bytes of a recipe, and seconds of its step on a network, before a run.

step_cost           bytes and seconds of a recipe's step: a row of a cost table
step_time           seconds of a step, from a workload profile and a network, simulated in virtual time
calibration         prediction interval of an estimate, from past estimates and measurements
workload_profile    work of a worker in a step without a network: the numbers of a profile
worker_speeds       the speed of each worker, from a text or from the measurements of a run
timeline            a schedule as a drawing
"""
