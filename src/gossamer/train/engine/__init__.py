"""Engine: averages named flat tensors over all ranks, as one transaction per step.

One step passes through these, in this order:

    loop                 the training loop as seen by the engine: source of gradients, values of a step, reports
    autograd_hooks       autograd as a source of gradients; refuses CUDA graphs
    extension            features of a session that act in its steps, registered only while they are on
    bucket               flat buffers per device and dtype: assignment of parameters, copying gradients in, sums over
                         several backward passes, copies of inputs for a repeated exchange
    bucket_reduction     one step's reduction: begin, send, wait, commit on the training thread (PendingReduction);
                         encode, communicate, decide on the communication thread (StepReduction)
    step_decision        a rank's report at the end of a step, and the common decision derived from all reports
    parameter_check      detects from the reports that parameters or step counts of the ranks differ; refuses parameters
                         that were cast, moved or resized

Other sources of gradients, and rounds that average parameters:

    arrays               gradients that the loop passes in as arrays
    participation        poll before a sync round: participating ranks and their weights
    averaged_state       uncompressed state that is averaged as well
    frozen_parameters    parameters without gradients that the training script changes itself
    weight_copies        copies of parameters in an optimizer: fp32 masters, slow weights

Called only if a model or an event needs them:

    model_buffers        buffers of the model, such as BatchNorm's statistics
    sparse_gradients     gradients of embeddings, exchanged as rows and not in the buckets
    tensor_sampler       samples the bytes and residuals of individual tensors
    unsent_gradients     moves residuals from one recipe's buckets to another's
    device_failures      names the bucket on which memory ran out or a driver failed
    parameter_views      parameters of a model by name

One step: a hook marks a gradient in its Bucket. At the first gradient of a pass a PendingReduction begins with the
loop's StepContext. A full bucket goes to the communication thread, where StepReduction copies new gradients in,
multiplies them by this rank's weight and runs the compressor's script in a Pipeline, interleaved with those of other
buckets. The last bucket carries a StepReport. Every rank makes the same StepDecision; `commit` swaps states and assigns
the means to the optimizer's gradients.
"""
