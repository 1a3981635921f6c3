"""Profiling: measures a user's script in a step without a network, for estimates.

profile_runs      profiles a script in as many copies as share the machine, or assumes a step time
profiler          one such copy (`python -m gossamer.plan.profile.profiler`)
load_meter        other use of this machine's cores meanwhile
exchange_timer    times a real synchronizer over a replay transport, so that only its work takes time
gradient_statistics  sparsity, rank and noise of gradients
user_script       runs a user's script in this process until it attaches
synthetic_shapes  a transformer's shapes for a given number of parameters
"""
