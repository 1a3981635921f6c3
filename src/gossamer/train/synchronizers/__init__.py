"""Synchronizers: what a session runs around every step of the optimizer, one class per way of synchronizing.

    stages               builds the synchronizer of a strategy's stage, and switches to the next stage's
    base                 Synchronizer, and SyncContext, from which all are built; SoloSynchronizer: a world of one
    gradients            GradientSynchronizer: averages gradients during backward (EveryStep)
    scheduled            ScheduledSynchronizer: rounds that travel while training goes on; asks a round_task
    parameter_averaging  the task of LocalSGD, DiLoCo and DelayedAveraging; delayed_gradients: of EveryStep(delay=...)
    in_flight            one round: what leaves, its reduction on the communication thread, its result
    local_step_counter   counts the optimizer's steps between rounds and reports what they took; gradients on a GPU
                         that are not finite become zeros there, without a wait of the host
    hierarchical         HierarchicalLocalSGD: gradients within a site, scheduled rounds between all
    gossip               GossipAveraging, in lock step; gossip_round: one round of it
    pairwise_gossip      PairwiseGossip, without lock step; lost workers that come back
    termination          how pairwise workers end together: leader, final mean, dismissal
    parameter_server     ServerSynchronizer: push and pull; peer_endpoints: opens and connects endpoints

A parameter's round: LocalStepCounter counts a step of the optimizer; after it ScheduledSynchronizer finds that a
round is due and lets its task `offer` each bucket; on the communication thread OutgoingRound polls who takes part,
reduces (see train/engine) and commits; when the round lands the task applies the result, or reverts its offer.

Verbs: `before_step`, `after_step` around the optimizer; `use`: another one's; `step_skipped`: by a GradScaler. `offer`,
`apply`, `revert`: a round. `flush`: wait for rounds in flight and apply them. `end_epoch`, `end_run`: with all ranks.
`continue_from`: the stage before; `take_over_from`: the same stage with another layout. `resume`: a checkpoint;
`restart`: new parameters. `merge`: what all agree on, together where it is the mean of the workers' own.
"""
