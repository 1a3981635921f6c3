"""Perfetto: writes a timeline as TrackEvents, whose few fields of protobuf are packed here.

The numbers of fields are those of protos/perfetto/trace/perfetto_trace.proto; Google's own classes read the result.
"""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.observe.trace.timeline import IN_FLIGHT, Slice, SpanTrack, Timeline

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
BYTES = 3  # CounterDescriptor.Unit: UNIT_SIZE_BYTES
SEQUENCE = 1
CAME = "answered"


def pack(timeline: Timeline) -> bytes:
    return b"".join(_packets(timeline))


def _packets(timeline: Timeline) -> Iterator[bytes]:
    uuid = 0
    for number, process in enumerate(timeline.processes, 1):
        uuid += 1
        parent = uuid
        about = _field(1, number) + _field(6, process.name) + _field(8, process.label)
        yield _packet(60, _field(1, parent) + _field(3, about))
        for track in process.tracks:
            uuid += 1
            yield _packet(60, _field(1, uuid) + _field(2, track.name) + _field(5, parent))
            yield from _track(track, uuid)
        uuid += 1
        yield _packet(60, _field(1, uuid) + _field(2, IN_FLIGHT) + _field(5, parent) + _field(8, _field(3, BYTES)))
        for moment, value in process.in_flight:
            yield _event(moment, COUNTER, uuid, _field(30, value))


def _track(track: SpanTrack, uuid: int) -> Iterator[bytes]:
    """A slice within another ends before that one does, and ends are told in that order."""
    open_: list[Slice] = []
    for each in track.slices:
        while open_ and open_[-1].end <= each.begin:
            yield from _ended(open_.pop(), uuid)
        open_.append(each)
        told = _field(22, each.category or "gossamer") + _field(23, each.name)
        told += b"".join(_annotation(name, value) for name, value in each.about.items())
        told += b"".join(_fixed(47, flow) for flow in each.sends)
        yield _event(each.begin, BEGIN, uuid, told)
    while open_:
        yield from _ended(open_.pop(), uuid)


def _ended(each: Slice, uuid: int) -> Iterator[bytes]:
    """Arrows come at the end, where a slice has no place for them: an instant within it has."""
    if each.receives:
        told = _field(22, "gossamer") + _field(23, CAME) + b"".join(_fixed(48, flow) for flow in each.receives)
        yield _event(each.end, INSTANT, uuid, told)
    yield _event(each.end, END, uuid, b"")


def _event(moment: float, kind: int, uuid: int, told: bytes) -> bytes:
    return _packet(11, _field(9, kind) + _field(11, uuid) + told, _field(8, round(1e9 * moment)) + _field(10, SEQUENCE))


def _annotation(name: str, value: int | str) -> bytes:
    return _field(4, _field(10, name) + (_field(4, value) if isinstance(value, int) else _field(6, value)))


def _packet(tag: int, body: bytes, before: bytes = b"") -> bytes:
    return _field(1, before + _field(tag, body))


def _field(tag: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(tag << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _fixed(tag: int, value: int) -> bytes:
    """Sixty-four bits, as flows have."""
    return _varint(tag << 3 | 1) + (value + 1).to_bytes(8, "little")


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # a negative number is its complement
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
