"""Profiling: measures what a user's script does in a step without a network, for forecasts.

profile_runs      profiles a script in as many copies as share the machine, or assumes a step's length
profiler          one such copy (`python -m gossamer.plan.profile.profiler`)
load_meter        reads who else has this machine's cores meanwhile
exchange_timer    times a real synchronizer over a replay transport, so that only computing takes time
gradient_statistics  how gradients are made: sparse, of low rank, noisy
user_script       runs a user's script in this process until it attaches
synthetic_shapes  a transformer's shapes, where only a number of parameters is given
"""
