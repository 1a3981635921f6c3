import math
import os
import sys
from itertools import pairwise

import pytest
import torch

from gossamer import events
from gossamer.control import WEIGHT_BYTES, control_bytes
from gossamer.drive import simulate
from gossamer.errors import AttachError
from gossamer.events import Attached, emit
from gossamer.forecast import assumed, assumed_shapes, attached_by, conversation, forecast
from gossamer.kernels import coded_bytes
from gossamer.layout import Layout, Packed
from gossamer.recipe import resolve
from gossamer.words import At, Gather, Mean, Together, bytes_sent

WORKERS = 4
SHAPES = {"a": (64, 32), "b": (7,), "c": (10, 20), "d": (16, 3, 5, 5), "e": (300,), "f": ()}
MATRICES = {"a": (64, 32), "d": (16, 75)}  # "c" has fewer than 256 entries
REST = 7 + 200 + 300 + 1


def said_of(text, shapes=SHAPES, workers=WORKERS, dtype="float32", buffer_bytes=0, control_bytes=0):
    recipe = resolve(text)
    model = Attached(
        recipe=text,
        layouts=((dtype, Layout.of(shapes)),),
        parameters=sum(map(math.prod, shapes.values())),
        buffer_bytes=buffer_bytes,
        control_bytes=control_bytes,
        rank=0,
        world=1,
    )
    return forecast(recipe, model, workers=workers)


def ring(nbytes, workers=WORKERS):
    return 2 * (workers - 1) / workers * nbytes


def gathers(text):
    return [(word.word, word.bytes_sent) for word in said_of(text).buckets[0]]


def test_dense_is_the_ring():
    numel = sum(map(math.prod, SHAPES.values()))
    assert gathers("Dense") == [("Mean", ring(4 * numel))]
    assert gathers("lan") == [("Mean", ring(2 * numel))]
    assert said_of("Dense").dense_bytes_sent == ring(4 * numel)


def test_topk_sends_values_and_places_of_the_largest():
    kept = sum(max(1, round(0.05 * math.prod(shape))) for shape in MATRICES.values())
    code = coded_bytes(kept, sum(math.prod(shape) for shape in MATRICES.values()))
    assert gathers("TopK(0.05)") == [("Gather", (WORKERS - 1) * (4 * kept + code)), ("Mean", ring(4 * REST))]


def test_int8_sends_a_byte_each_and_a_scale_per_block():
    sizes = [math.prod(shape) for shape in MATRICES.values()]
    sent = (WORKERS - 1) * sum(size + 4 * math.ceil(size / 100) for size in sizes)
    assert gathers("Int8(block=100)") == [("Gather", sent), ("Mean", ring(4 * REST))]


def test_powersgd_sends_two_factors():
    rows, cols = (sum(sides) for sides in zip(*MATRICES.values(), strict=True))
    first, second = ring(4 * (2 * rows + REST)), ring(4 * 2 * cols)
    assert gathers("PowerSGD(rank=2)") == [("Mean", first), ("Mean", second)]


def test_memory_is_a_residual_per_compressed_entry_and_the_factor():
    numel = sum(map(math.prod, MATRICES.values()))
    assert (said_of("TopK(0.05)").residual_bytes, said_of("TopK(0.05)").other_state_bytes) == (4 * numel, 0)
    said = said_of("Sharded(Int8)")
    assert (said.residual_bytes, said.other_state_bytes) == (4 * (numel + math.ceil(numel / WORKERS)), 0)
    said = said_of("PowerSGD(rank=2)")
    assert (said.residual_bytes, said.other_state_bytes) == (4 * numel, 4 * 2 * (32 + 75))
    said = said_of("PowerSGD(rank=2, feedback=False)")
    assert (said.residual_bytes, said.other_state_bytes) == (0, 4 * 2 * (32 + 75))
    assert said_of("TopK(0.05)", dtype="torch.bfloat16").residual_bytes == 4 * numel


def test_the_total_has_control_and_buffers():
    said = said_of("TopK(0.05)", buffer_bytes=400, control_bytes=22)
    assert said.control_bytes_sent == (WORKERS - 1) * (22 + WEIGHT_BYTES)
    assert said_of("Dense", control_bytes=22).control_bytes_sent == (WORKERS - 1) * 22
    assert said.buffer_bytes_sent == 3 / 4 * 400
    words = sum(sent for _, sent in gathers("TopK(0.05)"))
    assert said.bytes_sent == words + said.control_bytes_sent + 300
    assert said.share_of_dense == said.bytes_sent / said.dense_bytes_sent


def test_a_world_of_one_sends_nothing():
    said = said_of("TopK(0.05)", workers=1, buffer_bytes=400, control_bytes=22)
    assert (said.bytes_sent, said.share_of_dense) == (0, None)


@pytest.mark.parametrize(
    "text",
    ["Dense", "lan", "TopK(0.05)", "Int8", "PowerSGD(rank=2)", "home", "Sharded(Int8(block=7))", "Sharded(OneBit)"],
)
def test_the_forecast_is_what_real_tensors_send(text):
    layout, compressor = Layout.of(SHAPES), resolve(text).compressor
    sent = []

    def worker(rank):
        at = At(rank=rank, world=WORKERS)
        x = Packed(torch.arange(float(layout.numel)), layout)
        script, answer = compressor.aggregate(x, compressor.init(x, at), at), None
        while True:
            try:
                word = script.send(answer)
            except StopIteration as stop:
                return stop.value
            sent.append(bytes_sent(word, WORKERS, rank))
            answer = yield word

    simulate([worker(rank) for rank in range(WORKERS)])
    assert sum(sent) / WORKERS == sum(word.bytes_sent for word in said_of(text).buckets[0])


@pytest.mark.parametrize("text", ["Dense", "lan", "TopK(0.05)", "PowerSGD(rank=2)", "home"])
def test_a_conversation_is_what_is_priced(text):
    recipe, layout = resolve(text), Layout.of(SHAPES)
    words = conversation(recipe, layout, torch.float32, WORKERS)
    priced = said_of(text).buckets[0]
    assert sum(bytes_sent(word, WORKERS) for word in words) == sum(word.bytes_sent for word in priced)
    with_control = conversation(recipe, layout, torch.float32, WORKERS, control_bytes=23)
    assert len(with_control) == len(words)
    assert bytes_sent(with_control[0], WORKERS) == bytes_sent(words[0], WORKERS) + 3 * 23
    assert all(tensor.is_meta for tensor in tensors_of(words[0]))


def tensors_of(word):
    match word:
        case Mean(tensor):
            return [tensor]
        case Gather(payload):
            return list(payload)
        case Together(words):
            return [tensor for each in words for tensor in tensors_of(each)]


@pytest.mark.parametrize("parameters", [1, 63, 64, 65, 50_000, 66_000, 1_000_003, 124_000_000, 10**11])
def test_assumed_shapes_have_exactly_the_size_asked_for(parameters):
    shapes = assumed_shapes(parameters)
    assert sum(map(math.prod, shapes.values())) == parameters
    assert all(math.prod(shape) > 0 for shape in shapes.values())


def test_assumed_shapes_look_like_a_known_model():
    shapes = assumed_shapes(124_000_000)
    assert shapes["layer.11.up.weight"] == (3072, 768)
    assert "layer.12.up.weight" not in shapes
    assert shapes["embedding.weight"][1] == 768


def test_assumed_buckets_are_those_of_a_session():
    model = assumed(20_000_000, resolve("home"))
    assert len(model.layouts) > 1
    assert sum(layout.numel for _, layout in model.layouts) == model.parameters == 20_000_000
    assert model.control_bytes == control_bytes(sum(len(layout) for _, layout in model.layouts))
    for dtype, layout in model.layouts:
        assert dtype == "float32"
        ways = [len(slot.shape) < 2 for slot in layout]
        assert all(before <= after for before, after in pairwise(ways))  # dense ones last


ATTACHES = """
import os, sys
from gossamer import events
from gossamer.layout import Layout
import neighbour
print("chatter")
size = int(sys.argv[sys.argv.index("--size") + 1])
try:
    events.emit(events.Attached(
        recipe=os.environ["GOSSAMER_RECIPE"], layouts=(("float32", Layout.of({"w": (size, size)})),),
        parameters=size * size, buffer_bytes=size, control_bytes=1, rank=0, world=1))
except Exception:
    pass
raise AssertionError("the script went on after it attached")
"""


def write(folder, text, name="train.py"):
    (folder / "neighbour.py").write_text("")
    (folder / name).write_text(text)
    return folder / name


def test_a_script_runs_until_it_attaches(tmp_path, capsys):
    before = sys.argv, sys.path, dict(os.environ), list(events._listeners)
    seen = attached_by(write(tmp_path, ATTACHES), ["--size", "30"], resolve("home"))
    assert seen.parameters == 900
    assert seen.recipe == repr(resolve("home"))
    assert (sys.argv, sys.path, dict(os.environ), events._listeners) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["x = 1", "raise SystemExit(2)"])
def test_a_script_that_never_attaches_is_refused(tmp_path, text):
    with pytest.raises(AttachError, match=r"train\.py ended before it called gossamer\.attach.*--parameters"):
        attached_by(write(tmp_path, text), [], resolve(None))


def test_other_events_do_not_stop_a_script(tmp_path):
    emits = "from gossamer import events\nevents.emit(events.Noticed(message='hello'))\n"
    script = write(tmp_path, emits + ATTACHES)
    assert attached_by(script, ["--size", "3"], resolve(None)).parameters == 9


def test_a_failing_script_shows_its_own_error_and_leaves_no_trace(tmp_path):
    before = sys.argv, dict(os.environ), list(events._listeners)
    with pytest.raises(ZeroDivisionError):
        attached_by(write(tmp_path, "1 / 0"), [], resolve(None))
    assert (sys.argv, dict(os.environ), events._listeners) == before
    emit(events.Noticed(message="nobody listens any more"))


def test_a_real_attach_is_priced(tmp_path):
    script = write(
        tmp_path,
        "import gossamer, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))\n"
        "gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), 'Dense')\n"
        "raise AssertionError('the script went on after it attached')\n",
    )
    recipe = resolve("TopK(0.1)")
    seen = attached_by(script, [], recipe)
    assert seen.recipe == repr(recipe)
    said = forecast(recipe, seen, workers=2)
    assert [word.bytes_sent for words in said.buckets for word in words] == [
        120 * 4 + coded_bytes(120, 1200),
        ring(4 * 120, 2),
    ]
    assert said.control_bytes_sent == control_bytes(4, 1) + WEIGHT_BYTES
    assert said.buffer_bytes_sent == seen.buffer_bytes / 2 >= 4 * 80 / 2


def test_a_warm_up_is_over_when_a_step_is_priced():
    assert gathers("Warmup(TopK(0.05), steps=1000)") == gathers("TopK(0.05)")
    assert gathers("DGC(0.05, warmup=1000)") == gathers("DGC(0.05)")
