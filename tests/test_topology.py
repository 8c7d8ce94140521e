import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl import topology
from aedfl.errors import UserError

FORMULAS = ("exponential", "ring", "star", "torus", "full")


def test_the_appendix_example() -> None:
    graph = topology.make("exponential", 8)
    assert graph.in_neighbours(0) == (7, 6, 4)
    assert graph.out_neighbours(0) == (1, 2, 4)


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [
        ("exponential", 1, ()),
        ("exponential", 2, (1,)),
        ("exponential", 3, (2, 1)),
        ("ring", 1, ()),
        ("ring", 2, (1,)),
        ("ring", 5, (4, 1)),
        ("star", 1, ()),
        ("star", 4, (1, 2, 3)),
        ("torus", 4, (1, 2)),
        ("torus", 9, (2, 1, 6, 3)),
        ("torus", 12, (3, 1, 8, 4)),
        ("torus", 7, (6, 1)),
        ("full", 3, (1, 2)),
    ],
)
def test_in_neighbours_of_device_0(kind: str, devices: int, expected: tuple[int, ...]) -> None:
    assert topology.make(kind, devices).in_neighbours(0) == expected


@given(kind=st.sampled_from(FORMULAS), devices=st.integers(1, 70))
def test_formulas_hold_their_promises(kind: str, devices: int) -> None:
    check(topology.make(kind, devices))


def check(graph: topology.Topology) -> None:
    """No self, no duplicates, in and out agree, everybody can be reached."""
    edges = {(j, i) for i in range(graph.devices) for j in graph.in_neighbours(i)}
    assert edges == {(i, j) for i in range(graph.devices) for j in graph.out_neighbours(i)}
    for i in range(graph.devices):
        for near in (graph.in_neighbours(i), graph.out_neighbours(i)):
            assert i not in near and len(set(near)) == len(near)
            assert all(0 <= j < graph.devices for j in near)
    assert topology.is_strongly_connected(graph)


@st.composite
def regular(draw: st.DrawFn) -> tuple[int, int]:
    devices = draw(st.integers(3, 40))
    degree = draw(st.integers(2, devices - 1).filter(lambda d: d * devices % 2 == 0))
    return devices, degree


@given(problem=regular(), seed=st.integers(0, 3))
@settings(deadline=None)
def test_random_regular_graphs(problem: tuple[int, int], seed: int) -> None:
    devices, degree = problem
    graph = topology.make("random", devices, seed, degree)
    check(graph)
    assert all(len(graph.in_neighbours(i)) == degree for i in range(devices))
    assert all(graph.in_neighbours(i) == graph.out_neighbours(i) for i in range(devices))
    assert graph == topology.make("random", devices, seed, degree)


def test_random_regular_graphs_are_random() -> None:
    graphs = [topology.make("random", 200, seed, 6) for seed in range(3)]
    assert graphs[0] != graphs[1]
    # Friedman: the adjacency's second eigenvalue is near 2 sqrt(d - 1); that of a lattice is far larger.
    for graph in graphs:
        assert topology.spectral_gap(graph) == pytest.approx(1 - (1 + 2 * 5**0.5) / 7, abs=0.04)


def test_ten_thousand_devices() -> None:
    graph = topology.make("exponential", 10_000)
    assert len(graph.in_neighbours(9_999)) == 14
    assert topology.is_strongly_connected(graph)
    check(topology.make("random", 3000, 0, 5))


def test_small_regular_graphs_and_impossible_ones() -> None:
    assert topology.make("random", 2, degree=1).in_neighbours(0) == (1,)
    assert topology.make("random", 1, degree=0).in_neighbours(0) == ()
    for devices, degree in ((5, 3), (4, 4), (6, 1), (6, 0), (6, -2)):
        with pytest.raises(UserError, match=f"degree = {degree} for {devices} devices"):
            topology.make("random", devices, degree=degree)


def test_degree_is_4_where_that_is_possible() -> None:
    degrees = [len(topology.make("random", n).in_neighbours(0)) for n in range(1, 9)]
    assert degrees == [0, 1, 2, 2, 4, 4, 4, 4]


def test_edge_list(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("from,to\n# a comment\n0,1\n1; 2   # there\n\n2 0\n")
    graph = topology.make("file", 3, path=path)
    check(graph)
    assert graph.in_neighbours(0) == (2,) and graph.out_neighbours(0) == (1,)
    path.write_text("0,1\n")
    one_way = topology.make("file", 2, path=path)
    assert not topology.is_strongly_connected(one_way)
    assert topology.diameter(one_way) is None
    assert "infinite" in topology.describe(one_way)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,1\n1,x", "line 2: '1,x' is not an edge"),
        ("0,1,2", "line 1: '0,1,2' is not an edge"),
        ("0,-1", "line 1: '0,-1' is not an edge"),
        ("# c\n0,3", "line 2: there is no device 3, they run from 0 to 2"),
        ("1,1", "line 1: device 1 cannot be its own neighbour"),
        ("0,1\n1,0\n0 1", "line 3: the edge '0 1' was already on line 1"),
    ],
)
def test_bad_edge_lists_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(UserError) as error:
        topology.make("file", 3, path=tmp_path / "e.csv")
    assert f"e.csv, {words}" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for arguments, words in (
        ({"kind": "rng", "devices": 3}, "did you mean 'ring'?"),
        ({"kind": "ring", "devices": 0}, "devices = 0"),
        ({"kind": "exponential", "devices": 3, "degree": 2}, "degree = 2 is for topology 'random', and 'exponential'"),
        ({"kind": "ring", "devices": 3, "path": "x"}, "path = x is for topology 'file', and 'ring' takes none"),
        ({"kind": "random", "devices": 3, "path": "x"}, "path = x is for topology 'file', and 'random' takes none"),
        ({"kind": "file", "devices": 3}, "needs the path"),
        ({"kind": "file", "devices": 3, "path": tmp_path / "no"}, "cannot be read: No such file"),
        ({"kind": "file", "devices": 3, "path": tmp_path / "binary"}, "cannot be read: it is not text"),
    ):
        with pytest.raises(UserError) as error:
            topology.make(**arguments)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("kind", "devices", "hops", "gap"),
    [
        ("full", 6, 1, 1.0),
        ("star", 6, 2, 0.5),
        ("ring", 6, 3, 1 - (1 + 2 * np.cos(np.pi / 3)) / 3),
        ("exponential", 8, 3, 0.5),  # gap 2 / (1 + log2 n) for powers of two (Ying et al. 2021)
        ("torus", 16, 4, 0.4),
        ("ring", 1, 0, 1.0),
    ],
)
def test_diameter_and_gap(kind: str, devices: int, hops: int, gap: float) -> None:
    graph = topology.make(kind, devices)
    assert topology.diameter(graph) == hops
    assert topology.spectral_gap(graph) == pytest.approx(gap)


def test_gap_of_a_graph_without_symmetry() -> None:
    graph = topology.from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
    mixing = np.array([[1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    second = sorted(abs(np.roots(np.poly(mixing))))[-2]
    assert topology.spectral_gap(graph) == pytest.approx(1 - second)


def test_describe_is_text() -> None:
    text = topology.describe(topology.make("torus", 12))
    assert "devices             12" in text
    assert "in-neighbours       4\n" in text
    assert "grid                3 x 4" in text
    assert "1 to 11, mean 1.83" in topology.describe(topology.make("star", 12))
    assert "diameter" not in topology.describe(topology.make("ring", 2001))


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_drawing() -> None:
    ring = topology.draw_svg(topology.make("ring", 10))
    assert len(elements(ring, "circle")) == 10
    assert (
        len([e for e in elements(ring, "path") if "marker-end" not in e.attrib]) == 10 + 1
    )  # and the arrow itself
    assert [e.text for e in elements(ring, "text")][:3] == ["0", "1", "2"]
    arrows = topology.draw_svg(topology.make("exponential", 8))
    assert (
        len([e for e in elements(arrows, "path") if "marker-end" in e.attrib]) == 16
    )  # 4 apart goes both ways
    assert len(elements(topology.draw_svg(topology.make("ring", 1)), "circle")) == 1


def test_large_drawings_are_thin_and_small() -> None:
    svg = topology.draw_svg(topology.make("full", 300))
    assert len(elements(svg, "circle")) == 300
    assert len(elements(svg, "text")) == 1  # the caption
    assert "those of every 5th device shown" in svg
    assert len(svg) < 1_000_000
    spans = topology.draw_svg(topology.make("ring", 100)).count("M") - 1
    assert spans == 100
