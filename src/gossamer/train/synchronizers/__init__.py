"""Synchronizers: one class for each way of synchronizing; a session calls it around every optimizer step.

    stages               builds the synchronizer of a strategy's stage, and switches to the next stage
    base                 Synchronizer, the interface; SyncContext, its dependencies; SoloSynchronizer: one worker
    gradients            GradientSynchronizer: averages gradients during backward (EveryStep)
    scheduled            ScheduledSynchronizer: rounds that overlap with training; a RoundTask defines the content
    parameter_averaging  the task of LocalSGD, DiLoCo and DelayedAveraging
    delayed_gradients    the task of EveryStep(delay=...)
    in_flight            one round: outgoing tensors, reduction on the communication thread, result
    local_step_counter   counts optimizer steps between rounds and reports their costs; replaces non-finite gradients
                         on a GPU by zeros without blocking the host
    speed_balance        shares of a step, and local steps per round, from the workers' compute times
    hierarchical         HierarchicalLocalSGD: gradients within a site, scheduled rounds among all workers
    gossip               GossipAveraging, in lock step; gossip_round: one of its rounds
    pairwise_gossip      PairwiseGossip, asynchronous; lost workers can return
    termination          the end of pairwise gossip: leader, final mean, dismissal
    parameter_server     ServerSynchronizer: push and pull; peer_endpoints: opens and connects endpoints
    server_averaging     ServerAveraging: local steps, with changes that servers merge in the background (AsyncDiLoCo)

One round of parameters: LocalStepCounter counts an optimizer step; ScheduledSynchronizer then finds that a round is due
and calls `offer` of its task for each bucket; on the communication thread OutgoingRound polls the participants, reduces
(see train/engine) and commits; when the round lands, the task applies the result or reverts its offer.

Methods: `before_step`, `after_step`: around the optimizer; `use`: before another optimizer's step; `step_skipped`: by a
GradScaler. `offer`, `apply`, `revert`: of a round. `flush`: wait for rounds in flight and apply them. `end_epoch`,
`end_run`: called on all ranks. `continue_from`: after the previous stage; `take_over_from`: same stage, other layout.
`resume`: from a checkpoint; `restart`: after parameters were overwritten. `merge`: the parameters that all workers
agree on; a collective call where they are the mean of the workers' own parameters.
"""
