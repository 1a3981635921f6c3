from gossamer.algorithms.topologies import Complete


def test_everyone_hears_everyone():
    assert [Complete().sends_to(rank, 3, 0) for rank in range(3)] == [(1, 2), (0, 2), (0, 1)]
    assert Complete().peers(2, 5) == (0, 1, 3, 4)
    assert Complete().weights(1, 4, 0) == ((0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25))


def test_one_round_is_the_mean():
    assert [Complete().second_eigenvalue(world) for world in range(1, 17)] == [0.0] * 16
