"""Session: the stateful object of a training loop, which synchronizes a model around its optimizer's steps.

In every step:

    session_base.py        common part of both kinds of sessions: group, stages, epochs, stopping, ending
    session.py             Session: a torch model: weights, switching, saving, values of the loop
    arrays.py              gossamer.engine: sessions of arrays, without a model, an optimizer and hooks
    array_exchange.py      the same as functions of lists of arrays, called by Keras and TensorFlow
    keras_limits.py        what Keras and TensorFlow cannot do in these sessions
    step_hooks.py          hooks around every optimizer step
    foreign_optimizers.py  other optimizers of the same parameters; parameters that a loop writes by hand
    session_status.py      the event StepEnded, totals of traffic, and print(session)

Extensions, which are called in steps only while they are on:

    clipping_and_nonfinite.py  clipping, and runs of non-finite gradients
    loop_scaler.py         the loop's GradScaler, passed to attach or found
    loaded_weights.py      a notice about weights that the script loads after attach
    pending_gradients.py   unsent gradients of an earlier recipe, added to those of the next step
    step_spans.py          forward, backward and the optimizer's step, for the trace; torch.profiler on chosen ranks

To begin and to end:

    attach.py              gossamer.attach: checks its arguments, then opens a session
    recipe_choice.py       the launcher's recipe before the script's; global_batch; recipes for elastic runs
    validation.py          models, optimizers and devices that are not supported
    transport_setup.py     the transport of this job
    startup_checks.py      fingerprints compared before the first step; rank 0's parameters; hashes of tensors
    first_batch.py         a notice about ranks that begin with the same batch
    ddp_guard.py           refuses DistributedDataParallel around an attached model
    lifecycle_events.py    the events Attached and Closed; whether ranks on all machines end with the same model

Between steps:

    session_checkpoint.py  saves and loads, and the session's part of a checkpoint
    tracked_parts.py       schedulers, further optimizers, loaders and other objects in checkpoints
    recipe_switch.py       changes the recipe between two steps, and keeps unsent gradients
    auto_recipe.py         switches the recipe during training, by measurements of all ranks
    layout_change.py       reset_compressor_state and add_parameters: a synchronizer for other shapes or more parameters
    model_watch.py         whether a model has gained parameters since attach
    model_parts.py         the part of the model on this rank, and decisions with the ranks that hold the rest
    group_changes.py       workers of an elastic run are lost, join or are asked to leave; or those of servers
    group_calls.py         text all-gathers and broadcasts outside of steps; fork safety
    uneven_inputs.py       parameters and optimizer state for ranks that missed steps
    scalars.py             numbers from the loop: metrics, also those on a GPU, and weights of batches

Without a session:

    average.py, ddp_hook.py  gossamer.average_ and gossamer.ddp_hook
    metrics.py             gossamer.mean and gossamer.gather: numbers, texts and small tensors of all workers
    named_values.py        their transport, by collectives or by a roll call of the remaining workers
    world_calls.py         barrier, broadcast, all_gather and all_reduce of gossamer.World
"""
