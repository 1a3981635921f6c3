from math import cos, pi

import pytest

from gossamer.algorithms.compressors import TopK
from gossamer.algorithms.recipes import parse, resolve
from gossamer.algorithms.topologies import Complete, Hierarchy, Ring
from gossamer.errors import RecipeError

NODES_OF_THREE = {
    3: [(1, 2), (0, 2), (0, 1)],
    4: [(1, 2, 3), (0, 2), (0, 1), (0,)],
    6: [(1, 2, 3), (0, 2, 4), (0, 1, 5), (0, 4, 5), (1, 3, 5), (2, 3, 4)],
    8: [(1, 2, 3, 6), (0, 2, 4, 7), (0, 1, 5), (0, 4, 5, 6), (1, 3, 5, 7), (2, 3, 4), (0, 3, 7), (1, 4, 6)],
}


@pytest.mark.parametrize("world", NODES_OF_THREE)
def test_all_of_a_node_and_the_same_place_in_those_next_to_it(world):
    assert [Hierarchy(per_node=3).sends_to(rank, world, 0) for rank in range(world)] == NODES_OF_THREE[world]


def test_four_nodes_are_a_ring_in_every_place():
    assert Hierarchy(per_node=4).sends_to(5, 16, 0) == (1, 4, 6, 7, 9)
    assert Hierarchy(per_node=4).sends_to(0, 16, 0) == (1, 2, 3, 4, 12)
    assert Hierarchy(per_node=4).sends_to(15, 16, 0) == (3, 11, 12, 13, 14)


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_one_node_is_complete(world):
    for rank in range(world):
        assert Hierarchy().peers(rank, world) == Complete().peers(rank, world)
    assert Hierarchy().second_eigenvalue(world) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_nodes_of_one_are_a_ring(world):
    for rank in range(world):
        assert Hierarchy(per_node=1).peers(rank, world) == Ring().peers(rank, world)


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 4), (1, 9), (2, 4), (2, 7), (4, 5), (8, 4), (8, 6)])
def test_the_second_eigenvalue_is_known(per_node, nodes):
    wanted = 1 - 2 * (1 - cos(2 * pi / nodes)) / (per_node + 2)
    assert Hierarchy(per_node=per_node).second_eigenvalue(per_node * nodes) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("per_node", [0, -1])
def test_a_node_has_somebody_in_it(per_node):
    with pytest.raises(ValueError, match="per_node must be a number of workers, 1 or more"):
        Hierarchy(per_node=per_node)


def test_means_are_taken_within_nodes_of_that_size():
    assert Hierarchy(per_node=3).collective == "hierarchical(3)"


# -- compressed between nodes ------------------------------------------------------------------------------------------

TOP_K = "Hierarchy(per_node=2, between=TopK(density=0.01))"
FED_BACK = "Hierarchical(Route(Feedback(TopK(density=0.01))), per_node=2) + Hierarchy(per_node=2)"


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("Hierarchy(per_node=2)", "EveryStep() + Dense() + Hierarchy(per_node=2)"),
        ("Int8() + Hierarchy(2)", "EveryStep() + Route(Feedback(Sharded(Int8()))) + Hierarchy(per_node=2)"),
        (TOP_K, f"EveryStep() + {FED_BACK}"),
        (f"Dense() + DiLoCo(period=10) + {TOP_K}", f"DiLoCo(period=10) + {FED_BACK}"),
        (f"PostLocalSGD(period=8, start=10) + {TOP_K}", f"PostLocalSGD(period=8, start=10) + {FED_BACK}"),
        ("Hierarchy(4, between=Dense())", "EveryStep() + Hierarchical(Dense(), per_node=4) + Hierarchy(per_node=4)"),
        ("Hierarchical(TernGrad())", "EveryStep() + Hierarchical(Route(TernGrad())) + Complete()"),
        (
            "Hierarchical(Hierarchical(Int8(), per_node=2), per_node=4)",
            "EveryStep() + Hierarchical(Hierarchical(Route(Feedback(Int8())), per_node=2), per_node=4) + Complete()",
        ),
    ],
)
def test_what_a_topology_compresses_between_nodes_becomes_the_compressor(text, resolved):
    assert repr(resolve(text, 8)) == resolved
    assert repr(resolve(resolved, 8)) == resolved  # twice changes nothing


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            f"Int8() + {TOP_K}",
            r"Write EveryStep\(\) \+ Hierarchy.* alone, or EveryStep\(\) \+ Int8\(\) \+ Hierarchy\(per",
        ),
        (f"Gossip() + {TOP_K}", r"CHOCO.*Write Gossip\(\) \+ TopK\(density=0.01\) \+ Hierarchy\(per_node=2\)\."),
        (f'Gossip("pairwise") + {TOP_K}', "CHOCO"),
        ("Gossip() + Hierarchical(Int8())", r"single sender and receiver. Write Int8\(\) instead"),
        ("ParameterServer() + Hierarchical(Int8())", r"single sender and receiver. Write Int8\(\) instead"),
        ("ParameterServer(push=Route(Hierarchical(Int8())))", r"Write Int8\(\) instead"),
        (f"ParameterServer() + {TOP_K}", "workers exchange messages with servers only"),
        ("Hierarchy(2, between=Ring())", r"between must be a compressor.*Write Hierarchy\(per_node=2, between=TopK"),
        ("Hierarchy(2, between=DGC(0.01))", "Hierarchical, may be around it"),
        ("Hierarchy(2, between=0.5)", "between of Hierarchy must be"),
        ("Feedback(Hierarchical(Feedback(TopK(0.1))))", "Feedback inside Feedback"),
    ],
)
def test_what_cannot_be_compressed_so_is_refused(text, line):
    with pytest.raises(RecipeError, match=line):
        resolve(text, 8)


def test_its_text_rebuilds_it():
    topology = Hierarchy(per_node=2, between=TopK(density=0.01))
    assert repr(topology) == TOP_K
    (read,) = parse(TOP_K).terms
    assert read == topology
    assert (topology.crossing.by, topology.crossing.per_node) == (TopK(density=0.01), 2)
    assert topology.plain == Hierarchy(per_node=2)
    assert topology.plain.crossing is None


def test_neighbours_are_the_same_with_and_without():
    topology = Hierarchy(per_node=2, between=TopK(density=0.01))
    assert [topology.sends_to(rank, 8, 0) for rank in range(8)] == [
        Hierarchy(2).sends_to(rank, 8, 0) for rank in range(8)
    ]
