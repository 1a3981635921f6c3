"""Reducer: averages flat buffers over all ranks as one transaction, and what it needs of gradients and models.

    bucket, bucketing    flat buffers per device and dtype; which parameters share one
    reduction            StepReduction, on the communication thread; kept_inputs: what it would be made again from
    pending_reduction    PendingReduction, in the training thread
    step_report          what a rank reports at a step's end, and what all ranks decide from all reports
    tensor_sampler       measures now and then what each tensor costs, and what of it waits
    parameter_check      finds out whether parameters or steps of the ranks have parted, from those reports
    unsent_gradients     what compressors still owe, from one recipe's buckets to another's
    participation        poll before a sync round: which ranks take part, with what weight
    sparse_gradients     gradients of embeddings, which travel as rows beside the buckets
    accumulation         sums of gradients over several backward passes; backward_hooks: when a pass is over
    device_failures      names the bucket for which memory ran out, or over which a driver failed
    silenced_gradients   gradients on a GPU that are not finite become zeros there, and who waits is not the host
    averaged_state       uncompressed state averaged along; model_buffers: BatchNorm's statistics and the like
    frozen_parameters    parameters without gradients that the training script changes itself
    weight_copies        what an optimizer keeps of parameters besides them: fp32 masters, slow weights
    optimizer_settings   compares learning rates between ranks; parameter_views: parameters by name

A gradient: a hook marks it in its Bucket; at the first of a pass a PendingReduction begins with the loop's StepContext;
a full bucket is sent to the communication thread, where StepReduction copies fresh gradients in, multiplies by this
rank's weight and runs the compressor's script in a Pipeline beside those of other buckets; the last bucket takes along
a StepReport; every rank makes the same StepDecision, and `commit` swaps states and shows the means to the optimizer.
"""
