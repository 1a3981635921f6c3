"""Collective calls of gossamer.horovod.tensorflow, by ranks in threads: eagerly, in graphs, and their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from support.horovod_workers import horovod  # noqa: E402
from support.paths import ROOT  # noqa: E402

import gossamer.horovod.tensorflow as hvd  # noqa: E402
import gossamer.horovod.tensorflow.keras as hvd_keras  # noqa: E402


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


MODES = pytest.mark.parametrize("mode", [eagerly, tf.function], ids=["eager", "graph"])


@MODES
def test_reductions_have_the_dtype_and_the_values_of_all_ranks(mode: Any) -> None:
    def work(rank: int) -> list[Any]:
        @mode  # type: ignore[untyped-decorator]
        def call(x: Any) -> list[Any]:
            found = [hvd.allreduce(x, op=op) for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)]
            return [*found, hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)]

        return [
            each for dtype in (tf.float32, tf.bfloat16, tf.int32) for each in call(tf.constant([2 + 2 * rank], dtype))
        ]

    for found in horovod(work):
        assert [each.dtype for each in found] == [tf.float32] * 6 + [tf.bfloat16] * 6 + [tf.int32] * 6
        assert [float(each[0]) for each in found] == [6, 3, 2, 4, 8, 12] * 3


@MODES
def test_calls_with_rows_give_each_rank_its_rows(mode: Any) -> None:
    def work(rank: int) -> list[Any]:
        @mode  # type: ignore[untyped-decorator]
        def call(x: Any) -> list[Any]:
            rows, counts = hvd.alltoall(x, splits=tf.constant([1, rank + 1]))
            return [
                hvd.allgather(x),
                rows,
                counts,
                hvd.alltoall(tf.range(2) + 10 * rank),
                hvd.reducescatter(tf.range(3.0), op=hvd.Sum),
                hvd.broadcast(tf.constant(float(rank)), root_rank=1),
            ]

        return [each.numpy().tolist() for each in call(tf.range(2 + rank) + 10 * rank)]

    first, second = horovod(work)
    assert first == [[0, 1, 10, 11, 12], [0, 10], [1, 1], [0, 10], [0.0, 2.0], 1.0]
    assert second == [[0, 1, 10, 11, 12], [1, 11, 12], [1, 2], [1, 11], [4.0], 1.0]


def gradient(function: Callable[[Any], Any], x: Any) -> list[float]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x))
    found: list[float] = tape.gradient(loss, x).numpy().tolist()
    return found


def test_gradients_flow_through_calls_as_in_horovod() -> None:
    def work(rank: int) -> list[list[float]]:
        x, scale = tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0, 3.0, 4.0])
        return [
            gradient(lambda x: hvd.allreduce(x, op=hvd.Sum) * (1.0 + rank), x),
            gradient(lambda x: hvd.allgather(x) * scale, x),
            gradient(lambda x: hvd.broadcast(x, 0) * (1.0 + rank), x),
            gradient(lambda x: hvd.alltoall(x) * scale[:2], x),
            gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum) * (1.0 + rank), x),
        ]

    first, second = horovod(work)
    assert first == [[3, 3], [1, 2], [1.5, 1.5], [1, 1], [2, 4]]
    assert second == [[3, 3], [3, 4], [0, 0], [2, 2], [2, 4]]


def test_a_graph_of_tensorflow_1_reduces_the_gradient_of_a_broadcast_on_every_rank() -> None:
    def work(rank: int) -> list[float]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([1.0, 2.0])
            found = tf.gradients(hvd.broadcast(x, 0) * (1.0 + rank), [x])
            result: list[float] = session.run(found[0]).tolist()
        return result

    assert horovod(work) == [[1.5, 1.5], [0, 0]]


def test_rows_of_indexed_slices_are_gathered_and_divided_by_the_ranks() -> None:
    def work(rank: int) -> Any:
        slices = tf.IndexedSlices(tf.constant([[2.0 + rank]]), tf.constant([rank]), tf.constant([3, 1]))
        dense, mean = hvd.grouped_allreduce([tf.constant(float(rank)), slices])
        with pytest.raises(NotImplementedError, match="convert_to_tensor"):
            hvd.allreduce(slices, op=hvd.Min)
        return float(dense), tf.convert_to_tensor(mean).numpy().tolist()

    assert horovod(work) == [(0.5, [[1.0], [1.5], [0.0]])] * 2


def test_half_compression_rounds_what_is_sent() -> None:
    found = horovod(lambda rank: hvd.allreduce(tf.constant([1.0001]), compression=hvd.Compression.fp16))
    assert [(each.dtype, float(each[0])) for each in found] == [(tf.float32, 1.0)] * 2


def test_variables_of_the_root_are_assigned_in_a_graph_too() -> None:
    def work(rank: int) -> list[float]:
        variables = [tf.Variable(float(rank)), tf.Variable(10.0 + rank)]
        hvd.broadcast_variables(variables[:1], root_rank=1)

        @tf.function  # type: ignore[untyped-decorator]
        def call() -> None:
            hvd.broadcast_variables(variables[1:], root_rank=1)

        call()
        return [float(each) for each in variables]

    assert horovod(work) == [[1.0, 11.0]] * 2


def test_objects_and_ranks_are_those_of_the_job() -> None:
    def work(rank: int) -> Any:
        assert hvd.broadcast_object({"rank": rank}, root_rank=1) == {"rank": 1}
        assert hvd.broadcast_object_fn(root_rank=1)([rank]) == [1]
        assert hvd.allgather_object(rank) == [0, 1]
        pair = hvd.add_process_set([1])
        found = [hvd.rank_op(), hvd.size_op(), hvd.size_op(pair.process_set_id), hvd.local_rank_op()]
        return [int(each) for each in (*found, hvd.process_set_included_op(pair.process_set_id))]

    assert horovod(work) == [[0, 2, 1, 0, 0], [1, 2, 1, 1, 1]]


def test_a_call_that_differs_between_ranks_is_also_tensorflows_error() -> None:
    def work(rank: int) -> None:
        with pytest.raises(tf.errors.FailedPreconditionError, match="different calls") as raised:
            hvd.allreduce(tf.zeros([1 + rank]), name="differs")
        assert isinstance(raised.value, hvd.HorovodInternalError)
        with pytest.raises(tf.errors.InvalidArgumentError, match="splits") as refused:
            hvd.alltoall(tf.zeros([3]), splits=[1, 7])
        assert isinstance(refused.value, ValueError)

    horovod(work)


@pytest.mark.parametrize("session", [True, False], ids=["session", "eager"])
def test_a_call_of_another_ranks_process_set_is_an_invalid_argument(session: bool) -> None:
    def work(rank: int) -> None:
        sets = hvd.add_process_set([0]), hvd.add_process_set([1])
        own, other = sets[rank], sets[1 - rank]
        invented = hvd.ProcessSet([rank])
        invented.process_set_id = 10

        def value(process_set: Any) -> Any:
            if not session:
                return hvd.allreduce(tf.ones(2), process_set=process_set).numpy()
            with tf.Graph().as_default(), tf.compat.v1.Session() as run:
                return run.run(hvd.allreduce(tf.ones(2), process_set=process_set))

        assert value(own).tolist() == [1, 1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="included"):
            value(other)
        with pytest.raises(ValueError, match="add_process_set"):
            value(invented)

    horovod(work)


def test_names_that_need_sessions_of_tensorflow_1_name_the_alternative() -> None:
    with pytest.raises(RuntimeError, match=r"hvd\.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(AttributeError, match=r"hvd\.broadcast_variables"):
        _ = hvd.BroadcastGlobalVariablesHook
    with pytest.raises(ValueError, match="TensorFlowState"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(NotImplementedError, match=r"tf\.keras\.optimizers"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=2)


def test_dtypes_that_do_not_travel_name_the_call_to_write() -> None:
    def work(rank: int) -> None:
        with pytest.raises(ValueError, match=r"tf\.math\.real"):
            hvd.allreduce(tf.constant([1j]))
        with pytest.raises(ValueError, match="broadcast_object"):
            hvd.broadcast(tf.constant("text"), 0)

    horovod(work)


def test_synchronized_statistics_equal_those_of_the_joined_batch() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)

    def work(rank: int) -> tuple[Any, Any, Any]:
        layer = hvd.SyncBatchNormalization()
        own = tf.Variable(x[:2] if rank == 0 else x[2:])  # batches of 2 and 4
        with tf.GradientTape() as tape:
            found = layer(own, training=True)
            loss = tf.reduce_sum(found**3)
        return found.numpy(), tape.gradient(loss, own).numpy(), layer.moving_variance.numpy()

    plain = tf.keras.layers.BatchNormalization()
    whole = tf.Variable(x)
    with tf.GradientTape() as tape:
        expected = plain(whole, training=True)
        loss = tf.reduce_sum(expected**3)
    gradients = tape.gradient(loss, whole).numpy()
    first, second = horovod(work)
    for place, known in enumerate((expected.numpy(), gradients)):
        np.testing.assert_allclose(np.concatenate([first[place], second[place]]), known, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(first[2], plain.moving_variance.numpy(), rtol=1e-5)


def test_every_name_of_the_page_is_there() -> None:
    text = (ROOT / "docs" / "how-to" / "integrations" / "horovod.md").read_text()
    page = text.partition("## TensorFlow and Keras")[2].partition("## Names for torch")[0].partition("| names")[2]
    table = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    homes = [hvd, hvd_keras, hvd_keras.callbacks, hvd_keras.elastic, hvd.elastic]
    methods = {"register_local_source", "register_local_var", "backward_passes_per_step"}
    named = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", table)} - methods
    assert {name for name in named if not any(hasattr(home, name) for home in homes)} == set()
