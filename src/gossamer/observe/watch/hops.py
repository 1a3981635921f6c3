"""Hops of a collective as a drawing: who sends to whom, round by round; rounds that look alike are one picture."""

from __future__ import annotations

import ast
from typing import Any

from gossamer.algorithms.collectives import COLLECTIVES, Collective, Does

MOST_RANKS = 64
MOST_CHARACTERS = 1000
MAKERS = {getattr(make, "__name__", ""): make for make in COLLECTIVES.values()}
MEANS = {Does.ADD: "add", Does.KEEP: "copy"}

Drawing = dict[str, Any]


def drawn(text: str, world: int) -> list[Drawing] | None:
    """Pictures of a collective among `world` ranks, in order: {first, last: rounds; does: "add" or "copy"; hops: pairs
    of who sends and who receives; share: of the tensor, that the largest message of a round carries}.

    text: its repr, which is parsed and never evaluated. None of what is no collective, and of more than 64 ranks.
    """
    made = _made(text)
    if made is None or not 1 < world <= MOST_RANKS:
        return None
    try:
        return _pictures(made, world)
    except (TypeError, ValueError):  # settings of another world
        return None


def _pictures(made: Collective, world: int) -> list[Drawing]:
    pieces = made.pieces(world)
    rounds: dict[tuple[int, str], dict[tuple[int, int], int]] = {}
    for rank in range(world):
        for hop in made.hops(rank, world):
            if hop.does in MEANS:
                pairs = rounds.setdefault((hop.round, MEANS[hop.does]), {})
                pairs[hop.peer, rank] = pairs.get((hop.peer, rank), 0) + len(hop.pieces)
    found: list[Drawing] = []
    for (number, does), pairs in sorted(rounds.items()):
        drawing = {"first": number, "last": number, "does": does, "hops": sorted(map(list, pairs))}
        if found and all(found[-1][name] == drawing[name] for name in ("does", "hops")):
            found[-1]["last"] = number
        else:
            found.append(drawing | {"share": max(pairs.values()) / pieces})
    return found


def _made(text: str) -> Collective | None:
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        settings = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return MAKERS[call.func.id](**settings)
    except (SyntaxError, KeyError, TypeError, ValueError, RecursionError, MemoryError):
        return None
