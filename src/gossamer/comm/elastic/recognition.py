"""Recognizes transports of elastic runs without importing them: most runs have none, and start sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from gossamer.comm.elastic.served_member import ServedMember
    from gossamer.comm.elastic.transport import ElasticTransport


class InLockStep:
    """Base of ElasticTransport."""


class WithServers:
    """Base of ServedMember."""


def elastic(transport: Any) -> ElasticTransport | None:
    """Return the transport if it is elastic, with members in lock step, else None."""
    return cast("ElasticTransport", transport) if isinstance(transport, InLockStep) else None


def served(transport: Any) -> ServedMember | None:
    """Return the transport if it is the place of a worker of an elastic run with servers, else None."""
    return cast("ServedMember", transport) if isinstance(transport, WithServers) else None
