"""Scripts of pairwise gossip: the side that starts an exchange and the side that answers."""

from __future__ import annotations

from dataclasses import replace

from gossamer.algorithms.gossip.pairwise import AVERAGE, NO_EXCHANGE, Partner
from gossamer.algorithms.gossip.state_transfer import STATE, with_checksum
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerJoined, PeerLeft, PeerScript, Pull, Push, Reply
from gossamer.errors import NotFinite


def initiate(partner: Partner, peer: int, step: int, within_seconds: float | None = None) -> PeerScript:
    """Average with `peer`; return whether the exchange happened. Raises PeerLost, and the exchange stays open.

    One exchange at a time per worker. Parameters that are not finite are not sent. within_seconds: timeout, longer than
    a round trip and both messages; with a shorter one no reply ever arrives in time.
    """
    try:
        push = partner.ask(peer, step, within_seconds)
    except NotFinite:
        return False
    return partner.land(push, (yield push))


def answering(partner: Partner) -> PeerScript:
    """Answer all peers until the script is closed.

    It answers immediately and waits for no peer, not even for the end of this worker's own exchange. So every peer of a
    live worker receives an answer, and workers cannot deadlock.
    """
    while True:
        match (yield Await()):
            case Arrived(token=token, sender=sender, op=Push(key=key, stamp=stamp) as push):
                understood = key == AVERAGE and sender.number == stamp.worker
                yield Reply(token=token, answer=partner.hear(push) if understood else NO_EXCHANGE)
            case Arrived(token=token, op=Pull(key=key)) if key == STATE:
                shown = partner.snapshot(-1)
                yield Reply(
                    token=token, answer=with_checksum(replace(shown, payload=(*shown.payload, *partner.beside())))
                )
            case Arrived(token=token, op=Pull(known=known)):
                yield Reply(token=token, answer=partner.snapshot(known))
            case PeerLeft(peer=Peer(kind, number)) if kind == WORKER:
                partner.mark_left(number)
            case PeerJoined(peer=Peer(kind, number)) if kind == WORKER:
                partner.mark_here(number)
