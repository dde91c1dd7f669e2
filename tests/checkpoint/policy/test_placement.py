from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint.policy.placement import Node, Placement, place, replication_groups
from outlast.errors import UsageError


def racks(layout: str, **more: str) -> list[Node]:
    """Return nodes n0, n1, ...; a letter a node names its rack, or other domains the same way."""
    kinds = {"rack": layout, **more}
    return [
        Node(f"n{i}", {kind: names[i] for kind, names in kinds.items() if names[i] != "."})
        for i in range(len(layout))
    ]


def loads(placement: Placement) -> list[int]:
    return [len(placement.held_by(node)) for node in placement.holders]


def lost_with(nodes: Sequence[Node], placement: Placement, gone: set[str]) -> list[str]:
    """Return the nodes whose shards nobody holds when some nodes are gone."""
    return [node.name for node in nodes if {node.name, *placement.holders[node.name]} <= gone]


def domains(nodes: Sequence[Node]) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for node in nodes:
        for kind, name in node.domains.items():
            found.setdefault((kind, name), set()).add(node.name)
    return found


def drawn(letters: str, count: int) -> st.SearchStrategy[list[Node]]:
    """Draw nodes that are in a rack, on a feed and in a group each; a dot stands for none of a kind."""
    names = st.lists(st.text(letters, min_size=3, max_size=3), min_size=count, max_size=count)
    kinds = ("rack", "power", "pipeline")
    return names.map(
        lambda each: [
            Node(f"n{i}", {kind: name for kind, name in zip(kinds, three, strict=True) if name != "."})
            for i, three in enumerate(each)
        ]
    )


NODES = st.tuples(st.sampled_from(["ab", "abc", "ab.", "abcd."]), st.integers(1, 8)).flatmap(
    lambda how: drawn(*how)
)


def test_groups_are_those_of_nvrx() -> None:
    assert replication_groups(8, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert replication_groups(8, 2, 4) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert replication_groups(4, 1, 1) == ((0,), (1,), (2,), (3,))
    assert replication_groups(1, 1, 1) == ((0,),)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_is_in_one_group(jump: int, factor: int, blocks: int) -> None:
    groups = replication_groups(jump * factor * blocks, jump, factor)
    assert sorted(itertools.chain(*groups)) == list(range(jump * factor * blocks))
    for group in groups:
        assert len(group) == factor
        assert {b - a for a, b in itertools.pairwise(group)} <= {jump}


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    for ranks, jump, factor, named in (
        (12, 4, 2, "4.*2.*8.*12"),
        (0, 1, 1, "0"),
        (4, 0, 2, "replication_jump"),
        (4, 2, 0, "replication_factor"),
    ):
        with pytest.raises(UsageError, match=named):
            replication_groups(ranks, jump, factor)


def test_without_domains_each_node_copies_to_the_next() -> None:
    placement = place([Node(f"n{i}") for i in range(4)])
    assert placement == Placement({"n0": ("n1",), "n1": ("n2",), "n2": ("n3",), "n3": ("n0",)}, ())


def test_copies_leave_the_rack_and_the_pipeline_group() -> None:
    nodes = racks("aabb", pipeline="xyxy")
    placement = place(nodes)
    assert placement.holders == {"n0": ("n3",), "n1": ("n2",), "n2": ("n1",), "n3": ("n0",)}
    assert placement.gaps == ()


def test_several_copies_leave_what_one_cannot() -> None:
    """No node is outside of both the rack and the pipeline group of n0, n1 and n2."""
    nodes = racks("aab", pipeline="xyx")
    assert [(gap.kind, gap.name, gap.nodes) for gap in place(nodes).gaps]
    two = place(nodes, copies=2)
    assert two.gaps == ()
    assert {frozenset(peers) for peers in two.holders.values()} == {
        frozenset({"n1", "n2"}),
        frozenset({"n0", "n2"}),
        frozenset({"n0", "n1"}),
    }


def test_of_peers_that_leave_as_much_those_are_chosen_of_which_there_are_more() -> None:
    """One node leaves the power feed of n0, two leave its rack, and none leaves both."""
    placement = place(racks("aabc", power="xyxx"))
    assert placement.holders["n0"][0] in ("n2", "n3")
    assert [(gap.kind, gap.nodes) for gap in placement.gaps if "n0" in gap.nodes] == [("power", ("n0",))]


def test_what_cannot_be_survived_is_named() -> None:
    def gaps(nodes: list[Node], copies: int = 1) -> list[tuple[str, str, tuple[str, ...]]]:
        return [(gap.kind, gap.name, gap.nodes) for gap in place(nodes, copies).gaps]

    assert gaps(racks("aaa")) == [("rack", "a", ("n0", "n1", "n2"))]
    assert gaps([Node("n0")]) == [("node", "n0", ("n0",))]
    assert gaps([]) == []
    for nodes, words in (
        (racks("aab", pipeline="xyx"), ("n0", "pipeline x", "rack a")),
        (racks("abb", power="xxy"), ("n1", "power x", "rack b")),
    ):
        assert all(word in place(nodes).gaps[0].reason for word in words)
        assert gaps(nodes, 2) == []


def least_load(slots: list[list[tuple[str, ...]]]) -> int:
    """Return the smallest possible largest load, by trying every choice of peers for every node."""
    return min(
        max(Counter(itertools.chain(*choice)).values(), default=0) for choice in itertools.product(*slots)
    )


@pytest.mark.parametrize(("count", "copies", "examples"), [(5, 1, 60), (4, 2, 60), (5, 2, 15)])
def test_no_node_holds_more_than_it_must(count: int, copies: int, examples: int) -> None:
    seen: Counter[int] = Counter()

    @settings(max_examples=examples)
    @given(drawn("ab.", count).filter(lambda nodes: not place(nodes).gaps))
    def check(nodes: list[Node]) -> None:
        choices = [
            [
                peers
                for peers in itertools.combinations([n.name for n in nodes if n is not owner], copies)
                if lost_nothing(owner, [n for n in nodes if n.name in peers])
            ]
            for owner in nodes
        ]
        placement = place(nodes, copies)
        seen[max(loads(placement))] += 1
        assert max(loads(placement)) == max(copies, least_load(choices))

    check()
    assert len(seen) > 0, seen


def lost_nothing(owner: Node, peers: list[Node]) -> bool:
    """Say whether one of the peers is outside of everything that the owner is in."""
    return any(all(p.domains.get(kind) != name for kind, name in owner.domains.items()) for p in peers)


def test_nodes_and_copies_must_make_sense() -> None:
    with pytest.raises(UsageError, match="n1"):
        place([Node("n1"), Node("n0"), Node("n1")])
    with pytest.raises(UsageError, match="0"):
        place([Node("n0")], 0)


def survivable(owner: Node, nodes: Sequence[Node], copies: int) -> int:
    """Return how many of a node's domains the best choice of peers leaves, by trying all of them."""
    others = [node for node in nodes if node is not owner]
    best = 0
    for peers in itertools.combinations(others, min(copies, len(others))):
        left = [
            kind for kind, name in owner.domains.items() if any(p.domains.get(kind) != name for p in peers)
        ]
        best = max(best, len(left))
    return best


def test_any_single_domain_can_be_lost_or_it_is_said_which_cannot() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(NODES, st.integers(1, 3))
    def check(nodes: list[Node], copies: int) -> None:
        placement = place(nodes, copies)
        said = {(gap.kind, gap.name): list(gap.nodes) for gap in placement.gaps}
        for node in nodes:
            peers = placement.holders[node.name]
            assert len(peers) == len(set(peers)) == min(copies, len(nodes) - 1)
            assert node.name not in peers
            if len(nodes) > 1:
                assert lost_with(nodes, placement, {node.name}) == []
            missed = [kind for kind, name in node.domains.items() if node.name in said.get((kind, name), [])]
            assert len(node.domains) - len(missed) == survivable(node, nodes, copies)
        for domain, members in domains(nodes).items():
            assert lost_with(nodes, placement, members) == said.get(domain, [])
            seen["survived"] += domain not in said and len(members) > 1
            seen["all in it"] += domain in said and len(members) == len(nodes)
            seen["too few copies"] += domain in said and len(members) < len(nodes)
        seen["forced load"] += max(loads(placement)) > copies + 1

    check()
    assert min(seen[one] for one in ("survived", "all in it", "too few copies", "forced load")) > 0, seen


def test_the_load_is_balanced_where_every_domain_is_small() -> None:
    """With each rack at most half of the nodes, one copy a node is always enough (Hall's condition)."""
    seen: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(
        st.lists(st.integers(1, 4), min_size=2, max_size=6),
        st.randoms(use_true_random=False),
        st.integers(1, 2),
    )
    def check(sizes: list[int], random: object, copies: int) -> None:
        while 2 * max(sizes) > sum(sizes):
            sizes[sizes.index(max(sizes))] -= 1
        names = [chr(97 + i) for i, size in enumerate(sizes) for _ in range(size)]
        random.shuffle(names)  # type: ignore[attr-defined]
        placement = place(racks("".join(names)), copies)
        assert placement.gaps == ()
        assert set(loads(placement)) == {min(copies, len(names) - 1)}
        seen["tight"] += 2 * max(sizes) == sum(sizes)
        seen["racks"] += len([size for size in sizes if size]) > 2

    check()
    assert min(seen["tight"], seen["racks"]) > 0, seen


def test_two_hundred_nodes_are_placed_at_once() -> None:
    nodes = [Node(f"n{i}", {"rack": str(i // 16), "pipeline": str(i % 8)}) for i in range(208)]
    placement = place(nodes, 2)
    assert placement.gaps == ()
    assert set(loads(placement)) == {2}
