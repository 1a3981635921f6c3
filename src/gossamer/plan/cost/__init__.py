"""Forecasts: what a recipe would send, and how long a step would take on a network, before anything is run there.

step_cost           bytes and seconds of a recipe's step: a row of a cost table
step_time           seconds of a step: a workload profile and a network in, a simulation in virtual time out
calibration         the interval around a forecast, from past forecasts and what was then measured
workload_profile    what a worker does in a step without a network: the numbers of a profile
timeline            a schedule as a drawing
"""
