"""Session: the training loop's one stateful object, which synchronizes a model around its optimizer's steps.

attach.py              gossamer.attach: checks what it is given, then opens a session
recipe_choice.py       the command line's recipe before the script's; a compressor alone
session.py             Session: hooks around forward and step, epochs, weights, stopping, saving
session_checkpoint.py  its part of a checkpoint; what a reset keeps
tracked_parts.py       schedulers, further optimizers and whatever else checkpoints hold; notices of what they lack
tracked_loader.py      a DataLoader whose position is what the loop took
group_calls.py         text all-gathers and broadcasts outside of steps; fork safety
startup_checks.py      fingerprints compared before step one; rank 0's parameters handed out
first_batch.py         notices ranks that begin with the same batch
validation.py          models and optimizers that cannot be served
transport_setup.py     which transport this job uses
ddp_guard.py            refuses DistributedDataParallel around an attached model
gradient_guards.py     clipping, and runs of non-finite gradients
scaler_hook.py         hears of optimizer steps that a GradScaler leaves out
momentum_transfer.py   SGD's or Adam's momentum applied by the compressor
foreign_optimizers.py  other optimizers that step in the same parameters
uneven_inputs.py       parameters and optimizer state for ranks that missed steps
lifecycle_events.py    the events Attached and Closed, and logged numbers
average.py, ddp_hook.py  gossamer.average_ and gossamer.ddp_hook, without a session
"""
