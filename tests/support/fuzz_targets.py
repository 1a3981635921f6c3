"""Fuzz targets: the readers of frames, payloads, invitations, recipes, networks, checkpoints, traces and stores."""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import random
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from support.fuzz import FuzzTarget, damaged
from support.synthetic_store import SyntheticRun, fill
from support.virtual_traces import CLOCKS, Rounds
from support.wire_fuzz import CHANGES, Rehearsed, ops

import gossamer
from gossamer.algorithms.compressors import OneBit, PowerSGD, TopK
from gossamer.algorithms.compressors import point_to_point as messages
from gossamer.algorithms.compressors.float4 import Float4
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.recipes.catalog import NOUNS, describe
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.peer_ops import Push, Stamp
from gossamer.comm.membership import invitations as links
from gossamer.comm.membership.journal import MemoryJournal
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.comm.network import read_network
from gossamer.errors import CheckpointError, ConnectError, GossamerError, MalformedError, RecipeError, StoreError
from gossamer.events import Attached, Logged, StepEnded
from gossamer.observe.event_log import EventLog
from gossamer.observe.telemetry.batches import BatchReader, pack
from gossamer.observe.telemetry.ingest import Ingest
from gossamer.observe.telemetry.rows import NewRows
from gossamer.observe.telemetry.store import STORE_FILE, open_store
from gossamer.observe.trace import chrome
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import build
from gossamer.observe.watch.summary import read_ranks
from gossamer.observe.watch.summary import read_run as read_facts
from gossamer.plan.simulate import NetworkSchedule
from gossamer.train import checkpoint
from gossamer.train.checkpoint import files


def _folder() -> Path:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="gossamer-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# -- from peers --------------------------------------------------------------------------------------------------------


def frames() -> FuzzTarget:
    """Changed streams of authenticated frames: a prefix of the unchanged frames is accepted, and nothing else."""
    rehearsed = Rehearsed()
    stream = b"".join(rehearsed.frames)

    def changed(number: int) -> bytes:
        return CHANGES[number % len(CHANGES)](random.Random(number), list(rehearsed.frames))

    def check(data: bytes) -> None:
        accepted = ops(rehearsed.hear(data))
        assert accepted == rehearsed.ops[: len(accepted)], "a changed frame was accepted"

    return FuzzTarget(st.one_of(st.integers(0, 2**40).map(changed), damaged(st.just(stream))), check)


LAYOUT = Layout.of({"matrix": (12, 20), "vector": (33,)})
COMPRESSORS = (Int8(), Float4(), OneBit(), TopK(density=0.1), PowerSGD(rank=2))


def payloads() -> FuzzTarget:
    """Tensors of a message with changed bytes, sizes, dtypes and counts: MalformedError, or finite numbers."""
    at = AggregationContext(step=3, rank=1, world=2, seed=5)
    torch.manual_seed(0)
    valid = []
    for compressor in COMPRESSORS:
        full = resolve(repr(compressor)).compressor
        x = FlatTensors(torch.randn(LAYOUT.numel), LAYOUT)
        sent = messages.encode(full, x, messages.begin(full, x, at), at).payload
        valid.append((full, [tensor.clone() for tensor in sent]))

    @st.composite
    def inputs(draw: st.DrawFn) -> tuple[int, tuple[torch.Tensor, ...]]:
        number = draw(st.integers(0, len(valid) - 1))
        tensors = list(valid[number][1])
        for place in draw(st.lists(st.integers(0, len(tensors) - 1), max_size=3)):
            tensor = tensors[place]
            match draw(st.sampled_from(["bytes", "bytes", "bytes", "size", "dtype", "shape"])):
                case "bytes":
                    data = draw(damaged(st.just(tensor.numpy().tobytes())))
                    size = tensor.numel() * tensor.element_size()
                    if size:
                        whole = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
                        tensors[place] = whole.view(tensor.dtype).view(tensor.shape)
                case "size":
                    tensors[place] = tensor.reshape(-1)[: draw(st.integers(0, tensor.numel()))]
                case "dtype":
                    tensors[place] = tensor.to(draw(st.sampled_from([torch.float32, torch.uint8, torch.int64])))
                case "shape":
                    tensors[place] = tensor.reshape(1, -1)
        if draw(st.integers(0, 9)) == 0:
            tensors = tensors[:-1] if draw(st.booleans()) else [*tensors, torch.zeros(3)]
        return number, tuple(tensors)

    def check(value: tuple[int, tuple[torch.Tensor, ...]]) -> None:
        number, payload = value
        out = torch.empty(LAYOUT.numel)
        try:
            messages.decode(valid[number][0], payload, LAYOUT, at, out)
        except MalformedError:
            return
        assert out.isfinite().all(), "numbers that are not finite were decoded"

    return FuzzTarget(inputs(), check)


# -- from users --------------------------------------------------------------------------------------------------------


def recipes() -> FuzzTarget:
    """Texts of recipes: RecipeError, or a recipe whose text is read as the same recipe."""
    terms = [example for example, _ in describe()]
    names = sorted(NOUNS)
    number = st.one_of(st.integers(-3, 300), st.floats(), st.sampled_from([0.01, 1e400, 10**30]))
    values = st.recursive(
        st.one_of(number.map(repr), st.sampled_from([*terms, "True", "None", "'async'", "()", "[1]", "{}", "x"])),
        lambda inner: st.builds("{}({})".format, st.sampled_from(names), inner),
        max_leaves=4,
    )
    keywords = ["density", "rank", "period", "compressor", "feedback", "block", "x"]
    named = st.builds("{}={}".format, st.sampled_from(keywords), values)
    made = st.builds(
        "{}({})".format, st.sampled_from(names), st.lists(st.one_of(values, named), max_size=3).map(", ".join)
    )
    whole = st.lists(st.one_of(st.sampled_from(terms), made), min_size=1, max_size=4).map(" + ".join)
    broken = damaged(whole.map(str.encode)).map(lambda data: data.decode(errors="replace"))

    def check(text: str) -> None:
        try:
            found = resolve(text, 4)
        except RecipeError:
            return
        assert resolve(repr(found), 4) == found, "its text is another recipe"
        gossamer.recipe(text)

    return FuzzTarget(st.one_of(whole, broken, st.text(max_size=60)), check)


TOML = """
[default]
rate = "20mbit"
round_trip = "40ms"
[[hosts]]
count = 3
rate = "100mbit"
[[hosts]]
rate = "1gbit"
[[paths]]
between = [0, 1]
round_trip = "80ms"
"""


def networks() -> FuzzTarget:
    """Texts and TOML files of networks, and schedules: GossamerError, or a network with a host for each worker."""
    parts = st.sampled_from(
        [
            "20mbit",
            "1gbit",
            "unlimited",
            "40ms",
            "1e400ms",
            "-1mbit",
            "nanmbit",
            "jitter=3ms",
            "loss=0.1%",
            "loss=2",
            "0",
        ]
    )
    spec = st.lists(parts, min_size=1, max_size=5).map(",".join)
    schedule = st.lists(st.builds("{} at {}s".format, spec, st.integers(-1, 90)), max_size=3).map("; ".join)
    whole = st.one_of(spec, st.builds("{}; {}".format, spec, schedule))
    broken = damaged(whole.map(str.encode)).map(lambda data: data.decode(errors="replace"))
    file = _folder() / "network.toml"

    def check(value: str | bytes) -> None:
        with suppress(GossamerError):
            if isinstance(value, bytes):
                file.write_bytes(value)
                assert len(read_network(str(file), 2).hosts) == 2
            elif ";" in value:
                NetworkSchedule.read(value, 4).at(30.0)
            elif not value.endswith(".toml"):
                assert len(read_network(value, 4).hosts) == 4

    examples = [path.read_bytes() for path in (Path(__file__).parents[2] / "examples" / "networks").glob("*.toml")]
    return FuzzTarget(st.one_of(whole, broken, damaged(st.sampled_from([TOML.encode(), *examples]))), check)


# -- from files --------------------------------------------------------------------------------------------------------


def checkpoints() -> FuzzTarget:
    """Damaged parts and manifests: CheckpointError, or a tree. A part may have the digest that its manifest names."""
    folder = _folder()
    tree = {
        "model": {"weight": torch.randn(3, 4), "half": torch.ones(2).bfloat16()},
        "step": 7,
        "rest": [1.5, "a", None],
    }
    digest = checkpoint.stage(folder, 5, 0, tree)
    checkpoint.complete(folder, 5, 0, [digest], {"recipe": "Dense()"})
    data, manifest = files.part_files(folder, 5, 0)
    part, about = data.read_bytes(), manifest.read_bytes()

    def check(value: tuple[bytes, bytes, bool]) -> None:
        written, text, honest = value
        data.write_bytes(written)
        manifest.write_bytes(text)
        if honest:
            manifest.write_bytes(about.replace(digest.encode(), files._file_digest(data).encode()))
        with suppress(CheckpointError):
            checkpoint.read(folder, 5, 0)

    whole_part, whole_manifest = st.just(part), st.just(about)
    return FuzzTarget(
        st.one_of(
            st.tuples(damaged(whole_part), whole_manifest, st.just(True)),
            st.tuples(whole_part, damaged(whole_manifest), st.just(False)),
            st.tuples(damaged(whole_part), damaged(whole_manifest), st.booleans()),
        ),
        check,
    )


def traces() -> FuzzTarget:
    """Damaged span files of two ranks: GossamerError, or a timeline that can be written."""
    folder = _folder()
    Rounds(count=4).record(folder, CLOCKS[:2])
    first = sorted(folder.glob("*.spans"))[0]

    def check(data: bytes) -> None:
        first.write_bytes(data)
        with suppress(GossamerError):
            json.loads(_unzipped(chrome.pack(build(read_run(folder)))))

    return FuzzTarget(damaged(st.just(first.read_bytes())), check)


def _unzipped(data: bytes) -> bytes:
    return zlib.decompress(data, 31) if data[:2] == b"\x1f\x8b" else data


def batches() -> FuzzTarget:
    """Damaged batches of rows from another machine: MalformedError, or rows that the store accepts."""
    folder = _folder()
    db = open_store(folder / STORE_FILE)
    rows = NewRows()
    rows.know(0, host="a", pid=3)
    rows.event(1.0, 0, "attached", {"recipe": "Dense()"})
    rows.log(2.0, 1, 0, "stdout", "hello")
    rows.add("metric", rank=0, step=3, name="loss", value=0.5)
    rows.rewind(1, 2)
    text = zlib.decompress(pack(rows) or b"")
    reader = BatchReader(db)
    pairs = st.tuples(damaged(st.just(text)), st.booleans())

    def check(value: tuple[bytes, bool]) -> None:
        content, as_json = value
        try:
            found = reader.read(zlib.compress(content, 1) if as_json else content, lambda rank: rank + 4, 0.5)
        except MalformedError:
            return
        with suppress(sqlite3.Error), db:
            found.write(db)

    return FuzzTarget(pairs, check)


def logs() -> FuzzTarget:
    """Damaged event logs: every line is read or left out, by the store and by the record."""
    from gossamer.observe.event_log import read_entries
    from gossamer.observe.rank_record import replay

    folder = _folder()
    lines: list[str] = []
    log = EventLog(lambda entry: lines.append(json.dumps(entry)))
    about: Mapping[str, Any] = MappingProxyType({"layouts": (), "parameters": 3, "buffer_bytes": 0, "control_bytes": 0})
    log(Attached(moment=0.0, recipe="Dense()", rank=0, world=2, **about))
    for step in range(1, 4):
        log(StepEnded(moment=step / 10, step=step, seconds=0.1, waiting_seconds=0.03, data_seconds=0.02, bytes_sent=8))
        log(Logged(moment=step / 10, step=step, values={"loss": 1 / step}))
    log.end()
    whole = "".join(f"{line}\n" for line in lines).encode()
    path, store = folder / "events-0.jsonl", folder / STORE_FILE

    def check(data: bytes) -> None:
        for file in folder.glob(f"{STORE_FILE}*"):
            file.unlink()
        path.write_bytes(data)
        replay(read_entries(path))
        reader = Ingest(folder, store=store, directory=folder, clock=lambda: 1e9)
        with suppress(sqlite3.Error, OverflowError):  # a number or a list that SQLite cannot store
            reader.finish()
        reader.close()

    return FuzzTarget(damaged(st.just(whole)), check)


def stores() -> FuzzTarget:
    """Damaged files of a run's store: StoreError, an error of SQLite, or rows."""
    folder = _folder()
    path = fill(folder / STORE_FILE, SyntheticRun(ranks=2, steps=5))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            db = open_store(path, readonly=True)
        except StoreError:
            return
        with closing(db), suppress(sqlite3.Error, UnicodeDecodeError):  # sqlite3 raises both for text that is not UTF-8
            read_facts(db)
            read_ranks(db)

    return FuzzTarget(damaged(st.just(whole)), check)


def invitations() -> FuzzTarget:
    """Links, and answers of coordinators to them: ConnectError, MalformedError, or a link that is read back."""
    link = links.JoinLink(number=7, run="01" * 8, secret=bytes(32), addresses=(("10.0.0.1", 29700), ("::1", 443)))
    nonce = "ab" * links.NONCE_BYTES
    welcome = links.Welcome(token=bytes(64), addresses=link.addresses, settings={"recipe": "Int8()"})
    book = links.InvitationBook(bytes(32), "01" * 16, MemoryJournal(), welcome)
    made = book.create(None, None)
    push = Push(to=COORDINATOR, key=links.REDEEM, stamp=Stamp(1, 0), about=nonce)
    answer = book.answer_guest(links.guest_of(made.number), push).about.encode()
    encoded = link.link().removeprefix(links.PREFIX)
    body = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))[: -links.CHECKSUM_BYTES]

    def with_checksum(body: bytes) -> str:
        digest = hashlib.sha256(b"gossamer invitation" + body).digest()[: links.CHECKSUM_BYTES]
        return links.PREFIX + base64.urlsafe_b64encode(body + digest).decode().rstrip("=")

    texts = st.one_of(
        damaged(st.just(body)).map(with_checksum),
        damaged(st.just(link.link().encode())).map(lambda data: data.decode(errors="replace")),
    )
    answers = damaged(st.just(answer)).map(lambda data: data.decode(errors="replace"))

    def check(pair: tuple[str, str]) -> None:
        text, about = pair
        with suppress(ConnectError):
            found = links.read_invitation(text)
            assert links.read_invitation(found.link()) == found, "its text is another link"
        with suppress(ConnectError, MalformedError):
            assert links.read_redeemed(made, nonce, about).token == welcome.token, "another token was accepted"
        with suppress(ConnectError, MalformedError):
            links.read_issued(bytes(32), about)

    return FuzzTarget(st.tuples(texts, answers), check)


TARGETS: dict[str, Callable[[], FuzzTarget]] = {
    "invitations": invitations,
    "frames": frames,
    "payloads": payloads,
    "recipes": recipes,
    "networks": networks,
    "checkpoints": checkpoints,
    "traces": traces,
    "batches": batches,
    "logs": logs,
    "stores": stores,
}
