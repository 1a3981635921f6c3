import torch

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import Layout
from gossamer.base.ops import AllGather, Coalesced
from gossamer.train.traffic.op_trace import trace_bucket, trace_ops

LAYOUT = Layout.of({"weight": (64, 64), "bias": (64,)})


def test_a_bucket_is_traced_once_and_lists_of_it_are_ones_own():
    recipe = resolve("PowerSGD(rank=2)", 4)
    once = trace_bucket(recipe.compressor, LAYOUT, torch.float32, 4)
    ops = trace_ops(recipe, LAYOUT, torch.float32, 4)
    assert trace_bucket(resolve("PowerSGD(rank=2)", 4).compressor, LAYOUT, torch.float32, 4) is once
    ops.clear()
    assert len(trace_ops(recipe, LAYOUT, torch.float32, 4)) == len(once.ops) == 2
    assert trace_bucket(recipe.compressor, LAYOUT, torch.float32, 8) is not once
    assert sum(nbytes for key, nbytes in once.remembered if "residual" in key) == 4 * 64 * 64


def test_the_control_report_travels_with_the_first_operation():
    recipe = resolve("PowerSGD(rank=2)", 4)
    first, second = trace_ops(recipe, LAYOUT, torch.float32, 4, control_bytes=100)
    plain, also = trace_ops(recipe, LAYOUT, torch.float32, 4)
    assert isinstance(first, Coalesced)
    assert isinstance(first.ops[-1], AllGather)
    assert first.bytes_sent(4, 0) == plain.bytes_sent(4, 0) + 3 * 100
    assert second.bytes_sent(4, 0) == also.bytes_sent(4, 0)
