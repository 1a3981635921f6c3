"""Session: the training loop's one stateful object, which synchronizes a model around its optimizer's steps.

In every step:

    core.py                what both kinds of sessions have: the group, stages, epochs, stopping, ending
    session.py             Session: a torch model: weights, switching, saving, and its loop's values
    arrays.py              gossamer.engine: sessions of arrays, without a model, an optimizer and hooks
    array_exchange.py      the same as functions of lists of arrays, which Keras and TensorFlow call
    step_hooks.py          what happens around every optimizer step
    foreign_optimizers.py  other optimizers that step in the same parameters
    session_status.py      the event StepEnded, what was sent so far, and what print(session) shows

Extensions, which are called in steps only while they are on:

    gradient_guards.py     clipping, and runs of non-finite gradients
    loop_scaler.py         the loop's GradScaler, given to attach or found
    owed_gradients.py      what a recipe before had not sent, for the next step's gradients
    manual_updates.py      parameters that a loop writes by hand
    step_spans.py          forward, backward and the optimizer's step, for the trace; torch.profiler on chosen ranks

To begin and to end:

    attach.py              gossamer.attach: checks its arguments, then opens a session
    recipe_choice.py       the command line's recipe before the script's; global_batch; recipes for elastic runs
    validation.py          models, optimizers and devices that cannot be served
    transport_setup.py     which transport this job uses
    startup_checks.py      fingerprints compared before step one; rank 0's parameters handed out; hashes of tensors
    first_batch.py         notices ranks that begin with the same batch
    ddp_guard.py           refuses DistributedDataParallel around an attached model
    lifecycle_events.py    the events Attached and Closed; whether ranks on all machines end with the same model

Between steps:

    session_checkpoint.py  saves and loads, and the session's part of a checkpoint
    tracked_parts.py       schedulers, further optimizers, loaders and other parts that checkpoints hold
    recipe_switch.py       another recipe from one step to the next; owed gradients go along
    auto_recipe.py         looks at what all ranks measured, and switches the recipe while training
    layout_change.py       reset_compressor_state and add_parameters: a synchronizer for other shapes or more parameters
    model_watch.py         whether a model was given parameters since attach
    model_parts.py         the part of the model on this rank, and decisions with the ranks that hold the rest
    group_changes.py       workers of an elastic run are lost, join or are asked to leave
    group_calls.py         text all-gathers and broadcasts outside of steps; fork safety
    uneven_inputs.py       parameters and optimizer state for ranks that missed steps
    scalars.py             numbers from the loop: metrics, also those on a GPU, and weights of batches

Without a session:

    average.py, ddp_hook.py  gossamer.average_ and gossamer.ddp_hook
    metrics.py             gossamer.mean and gossamer.gather: numbers, texts and small tensors of all workers
    named_values.py        how these travel, by collectives or by a roll call of the remaining workers
    world_calls.py         barrier, broadcast, all_gather and all_reduce of gossamer.World
"""
