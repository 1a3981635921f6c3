"""Session: the training loop's one stateful object, which synchronizes a model around its optimizer's steps.

arrays.py              gossamer.engine: sessions of arrays, without a model, an optimizer and hooks
array_exchange.py      the same as functions of lists of arrays, which Keras and TensorFlow call
attach.py              gossamer.attach: checks what it is given, then opens a session
auto_recipe.py         looks at what all ranks measured, and switches the recipe where it is to be chosen while training
recipe_choice.py       the command line's recipe before the script's; a compressor alone
session.py             Session: what the loop calls: epochs, weights, stopping, saving
step_hooks.py          what happens around every optimizer step
stop_blocks.py         what a loop leaves that goes on after training was stopped
checkpointing.py       its saves and loads: options, the run's name, parts put back
session_checkpoint.py  its part of a checkpoint; what a reset keeps
group_changes.py       what a session does when workers of an elastic run are lost, come or are asked to leave
global_batch.py        attach's global_batch in the recipe; workers that are too many for it
elastic_recipes.py     recipes whose workers cannot come and go
layout_change.py       reset_compressor_state and add_parameters: a synchronizer for other shapes or more parameters
added_parameters.py    which parameters a model has gained, the same on all ranks, and which are refused
model_watch.py         whether a model was given parameters since attach
recipe_switch.py       another recipe from one step to the next; what is owed goes along
local_merge.py         one model and optimizer state for ranks that trained apart
owed_gradients.py      what a recipe before had not sent, for the next step's gradients
tracked_parts.py       schedulers, further optimizers and whatever else checkpoints hold; notices of what they lack
schedule_functions.py  compares the functions of schedulers, which no state_dict() holds, between newcomers and others
tracked_loader.py      a DataLoader whose position is what the loop took
group_calls.py         text all-gathers and broadcasts outside of steps; fork safety
startup_checks.py      fingerprints compared before step one; rank 0's parameters handed out
tensor_hash.py         hashes of tensors on all cores, for that comparison
operator_profile.py    torch.profiler around the traced steps of chosen ranks
step_spans.py          forward, backward and the optimizer's step, for the trace
first_batch.py         notices ranks that begin with the same batch
validation.py          models and optimizers that cannot be served
device_check.py        models that do not lie where their worker computes
transport_setup.py     which transport this job uses
loop_state.py          what synchronizers ask its training loop
model_parts.py         the part of the model on this rank, and what is decided with the ranks that hold the rest
ddp_guard.py            refuses DistributedDataParallel around an attached model
gradient_guards.py     clipping, and runs of non-finite gradients
parameter_form.py      refuses a model that is cast, moved or resized after attach
loop_scaler.py         the loop's GradScaler, given to attach or found
scaler_hook.py         hears of optimizer steps that a GradScaler leaves out
untold_scaler.py       finds a GradScaler that attach was not given
manual_updates.py      parameters that a loop writes by hand
foreign_optimizers.py  other optimizers that step in the same parameters
uneven_inputs.py       parameters and optimizer state for ranks that missed steps
lifecycle_events.py    the events Attached and Closed
closing_comparison.py  whether ranks on all machines end with the same model
session_status.py      the event StepEnded, what was sent so far, and what print(session) shows
scalars.py             numbers that the loop tells: metrics and weights; deferred_metrics.py: those on a GPU
average.py, ddp_hook.py  gossamer.average_ and gossamer.ddp_hook, without a session
metrics.py             gossamer.mean and gossamer.gather: numbers, texts and small tensors of all workers
named_values.py        how these travel, by collectives or by a roll call of the workers that are left
world_calls.py         barrier, broadcast, all_gather and all_reduce of gossamer.World
"""
