"""Tables run without any network, and what must hold for every one of them."""

from collections import Counter

import torch

from gossamer.algorithms.collectives import Does


def tables_of(collective, world):
    return [collective.hops(rank, world) for rank in range(world)]


def rounds_of(tables):
    return sorted({hop.round for table in tables for hop in table})


def run(tables, pieces, hold, add):
    """hold[rank][piece] after all rounds. What is sent in a round was held before it; who hears takes what was sent."""
    for number in rounds_of(tables):
        now = [[hop for hop in table if hop.round == number] for table in tables]
        post = {}
        for rank, hops in enumerate(now):
            for hop in hops:
                if hop.does is Does.SEND:
                    place = (rank, hop.peer, hop.first, hop.stop)
                    assert place not in post
                    post[place] = [hold[rank][piece] for piece in hop.pieces]
        for rank, hops in enumerate(now):
            for hop in hops:
                if hop.does is not Does.SEND:
                    heard = post.pop((hop.peer, rank, hop.first, hop.stop))
                    for piece, value in zip(hop.pieces, heard, strict=True):
                        hold[rank][piece] = add(hold[rank][piece], value) if hop.does is Does.ADD else value
        assert not post
    return hold


def summed(tables, pieces, tensors):
    """What each rank has in the end, as one tensor. tensors[r]: (n,)."""
    hold = [list(tensor.clone().tensor_split(pieces)) for tensor in tensors]
    return [torch.cat(parts) for parts in run(tables, pieces, hold, torch.add)]


def check_form(tables, pieces):
    """Rounds ascend, nobody tells itself, pieces exist, and within a round what is heard is not sent."""
    for rank, table in enumerate(tables):
        assert [hop.round for hop in table] == sorted(hop.round for hop in table)
        for hop in table:
            assert 0 <= hop.first < hop.stop <= pieces
            assert hop.peer in range(len(tables))
            assert hop.peer != rank
        for number in rounds_of(tables):
            here = [hop for hop in table if hop.round == number]
            sent = {piece for hop in here if hop.does is Does.SEND for piece in hop.pieces}
            added = {piece for hop in here if hop.does is Does.ADD for piece in hop.pieces}
            kept = [piece for hop in here if hop.does is Does.KEEP for piece in hop.pieces]
            assert sent.isdisjoint(added | {*kept})
            assert added.isdisjoint(kept)
            assert len(kept) == len({*kept})


def check_partners(tables):
    """Every SEND has its ADD or KEEP, of the same round and pieces, and the other way round; no pair meets twice."""
    sends = [
        (hop.round, rank, hop.peer, hop.first, hop.stop)
        for rank, table in enumerate(tables)
        for hop in table
        if hop.does is Does.SEND
    ]
    heard = [
        (hop.round, hop.peer, rank, hop.first, hop.stop)
        for rank, table in enumerate(tables)
        for hop in table
        if hop.does is not Does.SEND
    ]
    assert len({*sends}) == len(sends)
    assert sorted(sends) == sorted(heard)


def check_owners(tables, pieces):
    """Whose numbers are in a piece: nobody's twice; complete first at one rank, which never keeps it; then kept."""
    world = len(tables)
    everyone = Counter(range(world))

    def add(held, heard):
        assert not held & heard
        return held + heard

    hold = [[Counter([rank]) for _ in range(pieces)] for rank in range(world)]
    assert run(tables, pieces, hold, add) == [[everyone] * pieces] * world
    for piece in range(pieces):
        does = [[hop.does for hop in table if piece in hop.pieces] for table in tables]
        assert sum(Does.KEEP not in each for each in does) == 1
        assert all(Does.ADD not in each[each.index(Does.KEEP) :] for each in does if Does.KEEP in each)


def check_sums(tables, pieces, numel):
    """Integers, so that every order of adding gives the same bits, if each is added once."""
    source = torch.Generator().manual_seed(numel)
    tensors = [torch.randint(-99, 100, (numel,), generator=source).float() for _ in tables]
    total = torch.stack(tensors).sum(0)
    for found in summed(tables, pieces, tensors):
        assert found.equal(total)


def check_same_bytes(tables, pieces):
    """Numbers whose sum depends on the order of adding."""
    source = torch.Generator().manual_seed(1)
    tensors = [torch.randn(257, generator=source) * 10.0**rank for rank in range(len(tables))]
    first, *others = summed(tables, pieces, tensors)
    for other in others:
        assert other.view(torch.int32).equal(first.view(torch.int32))


def check_table(tables, pieces):
    check_form(tables, pieces)
    check_partners(tables)
    check_owners(tables, pieces)
