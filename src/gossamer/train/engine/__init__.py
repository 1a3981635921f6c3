"""Engine: averages named flat tensors over all ranks, as one transaction a step.

    bucket               flat buffers per device and dtype: which parameters share one, gradients on their way in, sums
                         of several backward passes, inputs kept to be sent again
    reduction            one step's reduction: begin, send, wait, commit in the training thread (PendingReduction);
                         encode, travel, decide on the communication thread (StepReduction)
    report               what a rank reports at a step's end, and the decision of all ranks from all reports
    loop                 the training loop as the engine sees it: source of gradients, values of a step, reports
    torch_hooks          autograd as a source of gradients, and not within CUDA graphs; arrays: gradients from the loop
    extension            features of a session that act in its steps, registered only while they are on
    participation        poll before a sync round: which ranks take part, with what weight
    parameter_check      finds out whether parameters or steps of the ranks have parted, from those reports; refuses
                         parameters that were cast, moved or resized
    sparse_gradients     gradients of embeddings, which travel as rows beside the buckets
    tensor_sampler       measures now and then what each tensor costs, and what of it waits
    unsent_gradients     what compressors still owe, from one recipe's buckets to another's
    device_failures      names the bucket for which memory ran out, or over which a driver failed
    averaged_state       uncompressed state averaged along; model_buffers: BatchNorm's statistics and the like
    frozen_parameters    parameters without gradients that the training script changes itself
    weight_copies        what an optimizer keeps of parameters besides them: fp32 masters, slow weights
    parameter_views      parameters of a model by name

One step: a hook marks a gradient in its Bucket. At the first gradient of a pass a PendingReduction begins with the
loop's StepContext. A full bucket goes to the communication thread, where StepReduction copies fresh gradients in,
multiplies them by this rank's weight and runs the compressor's script in a Pipeline beside those of other buckets. The
last bucket takes a StepReport along. Every rank makes the same StepDecision; `commit` swaps states and shows the means
to the optimizer.
"""
