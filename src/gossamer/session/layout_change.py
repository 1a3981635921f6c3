"""Layout change: makes a synchronizer anew for parameters of other shapes, which remembers what it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch.nn import Parameter

from gossamer.compressors.sharded import settle
from gossamer.core.aggregation import AggregationContext
from gossamer.session.group_calls import GroupCalls
from gossamer.session.session_checkpoint import copy_kept
from gossamer.synchronizers.base import Synchronizer
from gossamer.synchronizers.stages import StageSequence


def laid_out_anew(
    before: Synchronizer,
    names: Collection[str],
    now: Mapping[str, Parameter],
    stages: StageSequence,
    group: GroupCalls,
    at: AggregationContext,
    adopt: Callable[[], None],
) -> tuple[Synchronizer, str]:
    """The synchronizer that goes on where `before` ends, and its layout's fingerprint. All ranks call it.

    names: parameters about which nothing is remembered any more; now: all of them, as they are; adopt: called once what
    `before` remembers is safe.
    """
    if group.alone:
        adopt()
        return before, stages.layout_text(now, stages.fragments(now))
    before.flush()
    group.broadcast_([now[name].detach() for name in names], 0)  # where they were trained apart, or made anew
    for bucket in before.buckets:
        settle(bucket.state, at)  # parts will lie elsewhere
    old = before.remembered()
    adopt()
    before.close()
    following = stages.begin(now, fragments := stages.fragments(now))
    copy_kept(old, following.remembered(), without=names)
    following.take_over_from(before)
    return following, stages.layout_text(now, fragments)
