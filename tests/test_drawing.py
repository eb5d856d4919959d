"""`inspect --graph`: which modules and edges there are, where they are drawn, and that names stay names."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from ckpttool.cli import drawings
from ckpttool.cli.columns import ColumnLine
from ckpttool.cli.drawings import render_dot, render_page, render_svg
from ckpttool.commands.inspect import summary
from ckpttool.conversion.write import save
from ckpttool.core import Container, TargetExistsError, UsageError, limits
from ckpttool.listing.module_graph import COMFORTABLE, MOST, ModuleGraph, build_module_graph
from ckpttool.pages.computation import Computation, DrawnBox
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_inspect import listing, rows
from tests.trees import torch_tree

SVG = "{http://www.w3.org/2000/svg}"


def edges(graph: ModuleGraph, kind: str) -> set[tuple[str, str, str]]:
    paths = [node.module.path for node in graph.nodes]
    return {(paths[e.source], paths[e.target], e.label) for e in graph.edges if e.kind == kind}


@pytest.fixture(scope="module")
def td3() -> ModuleGraph:
    return build_module_graph(summary(str(TF_SAMPLE)))


# --- What is drawn ----------------------------------------------------------------------------------


def test_every_module_is_one_box_held_by_one_other(td3: ModuleGraph) -> None:
    paths = [node.module.path for node in td3.nodes]
    assert len(paths) == len(set(paths)) == 30
    children = [(a, b) for a, b, _ in edges(td3, "child")]
    assert len(children) == 29
    assert all(b.rpartition("/")[0] == a for a, b in children)
    (layer,) = (node for node in td3.nodes if node.module.path == "policy/critic/q2/l1")
    assert [tuple(v) for v in layer.variables] == [
        ("kernel", "float32", (4, 64)),
        ("bias", "float32", (64,)),
    ]
    assert not td3.notes


@pytest.mark.parametrize(
    ("path", "prefix", "slots"), [(TF_SAMPLE, "policy/", "m, v"), (TORCH_SAMPLE, "", "exp_avg, exp_avg_sq")]
)
def test_an_optimizer_leads_to_the_network_that_it_trains(path: Path, prefix: str, slots: str) -> None:
    graph = build_module_graph(summary(str(path)))
    assert edges(graph, "slot") == {
        (f"{prefix}{name}_optimizer", f"{prefix}{name}", slots) for name in ("actor", "critic")
    }
    (optimizer,) = (n for n in graph.nodes if n.module.path == f"{prefix}critic_optimizer")
    assert optimizer.slots == 24
    assert not any(v.name.isdigit() for v in optimizer.variables)


def test_a_shared_module_is_drawn_once() -> None:
    graph = build_module_graph(
        listing(
            rows(
                ("a/encoder/l1/w", (2,), {"aliases": ("b/trunk/l1/w", "opt/_list/0")}),
                ("a/encoder/l2/w", (2,), {"aliases": ("b/trunk/l2/w",)}),
                ("a/head/w", (2,), {"aliases": ("b/tied",)}),
                ("b/head/w", (2,), {}),
            )
        )
    )
    assert edges(graph, "alias") == {("b", "a/encoder", "trunk"), ("b", "a/head", "tied")}
    assert [node.module.path for node in graph.nodes].count("a/encoder") == 1


def test_a_module_of_which_only_a_part_is_shared_is_not_the_same() -> None:
    graph = build_module_graph(
        listing(
            rows(
                ("a/l1/w", (2,), {"aliases": ("b/l1/w",)}), ("a/l1/b", (2,), {}),
                ("a/l2/w", (2,), {"aliases": ("b/l2/w",)}), ("b/l3/w", (2,), {}),
            )
        )
    )  # fmt: skip
    assert edges(graph, "alias") == {("b", "a/l1", "l1/w"), ("b", "a/l2", "l2")}


def test_slots_beside_their_variable_are_no_optimizer() -> None:
    graph = build_module_graph(
        listing(
            rows(
                ("dense/kernel", (2,), {}),
                ("dense/kernel/Adam", (2,), {"role": "slot", "slot": "Adam", "of": "dense/kernel"}),
                ("dense/bias", (2,), {}),
                ("dense/bias_Adam", (2,), {"role": "slot", "slot": "Adam", "of": "dense/bias"}),
            )
        )
    )
    assert [node.module.path for node in graph.nodes] == ["", "dense"]
    assert not edges(graph, "slot")
    assert [v.name for v in graph.nodes[1].variables] == ["kernel", "bias"]


def test_what_is_folded_is_said() -> None:
    result = summary(str(TF_SAMPLE))
    shallow = build_module_graph(result, 2)
    assert {node.level for node in shallow.nodes} == {0, 1, 2}
    folded = {node.name: node.folded for node in shallow.nodes if node.folded}
    assert folded == {"actor": 6, "actor_target": 6, "critic": 12, "critic_target": 12}
    assert "36 tensors" in shallow.notes[0]
    assert {target for _, target, _ in edges(shallow, "slot")} == {"policy/actor", "policy/critic"}


@pytest.mark.long
def test_a_large_checkpoint_is_drawn_in_seconds(tmp_path: Path, golden: Golden) -> None:
    names = [f"block{n // 100}/layer{n // 2}/{'bias' if n % 2 else 'kernel'}" for n in range(10_000)]
    result = listing(rows(*((name, (4,), {}) for name in names)))
    start = time.process_time()
    small, large = build_module_graph(result), build_module_graph(result, 9)
    text = render_svg(large)
    assert time.process_time() - start < 20
    assert len(small.nodes) == 101 <= COMFORTABLE
    golden(small.notes[0])
    assert len(large.nodes) == MOST
    golden(large.notes[0])
    assert len(text) < 10_000_000


def test_a_level_with_too_many_is_begun(golden: Golden) -> None:
    graph = build_module_graph(listing(rows(*((f"layers/{n}/w", (1,), {}) for n in range(1000)))))
    assert len(graph.nodes) == COMFORTABLE
    golden(graph.notes[0])


@pytest.mark.long
def test_a_deep_tree_needs_no_recursion() -> None:
    with limits.using(replace(limits.Limits(), path_depth=1500)):
        result = listing(rows(*((f"{'s/' * n}w", (1,), {}) for n in range(1500))))
    assert len(build_module_graph(result, 5000).nodes) == 1500
    render_svg(build_module_graph(result, 5000))


def test_an_empty_listing_is_one_box() -> None:
    drawn = build_module_graph(listing([]))
    assert len(drawn.nodes) == 1
    ET.fromstring(render_svg(drawn))


# --- Where it stands --------------------------------------------------------------------------------


def shared_and_strange() -> ModuleGraph:
    """A graph with every kind of edge, in all directions, and long and wide names."""
    return build_module_graph(
        listing(
            rows(
                ("a/x/y/w", (2,), {"aliases": ("top", "b/w", "a/z/q/w")}),
                ("a/z/w", (3, 4), {"aliases": ("b/other",)}),
                ("b/v", (1,) * 40, {}),
                ("b/" + "long" * 60, (1,), {}),
                ("b/漢字漢字漢字漢字/" + "字" * 50, (1,), {}),
                ("opt/s/0", (2,), {"role": "slot", "slot": "m" * 99, "of": "a/x/y/w"}),
                ("deep/er/opt/0", (2,), {"role": "slot", "slot": "v", "of": "b/v"}),
                ("c/w", (2,), {"aliases": tuple(f"b/name{n}" for n in range(30))}),
                *((f"many/w{n}", (n,), {}) for n in range(60)),
            ),
            {"a/x/y": Container("module", "Dense" * 20, {"activation": "relu"})},
        )
    )


@pytest.mark.parametrize("which", ["td3", "torch", "strange", "folded"])
def test_lines_are_below_one_another_and_inside(which: str) -> None:
    graph = {
        "td3": lambda: build_module_graph(summary(str(TF_SAMPLE))),
        "torch": lambda: build_module_graph(summary(str(TORCH_SAMPLE))),
        "strange": shared_and_strange,
        "folded": lambda: build_module_graph(summary(str(TF_SAMPLE)), 1),
    }[which]()
    root = ET.fromstring(render_svg(graph))
    width, height = (float(root.get(side, "")) for side in ("width", "height"))
    lines = list(root.iter(SVG + "text"))
    heights = [float(line.get("y", "")) for line in lines]
    assert all(below - above >= 12 for above, below in itertools.pairwise(heights))
    assert 0 < heights[0] < heights[-1] < height
    for line in lines:
        cells = sum(cell_len(part.text or "") for part in line)
        assert float(line.get("x", "")) + cells * 7.3 < width
    names = [part.text for part in root.iter(SVG + "tspan") if part.get("class") == "name"]
    assert len(names) == len(graph.nodes)


def test_modules_are_below_what_contains_them(td3: ModuleGraph) -> None:
    root = ET.fromstring(render_svg(td3))
    rows = [
        (float(line.get("x", "")), line[0].text)
        for line in root.iter(SVG + "text")
        if line[0].get("class") == "name"
    ]
    chain: list[tuple[float, str | None]] = []
    paths = []
    for x, name in rows:
        chain = [*(item for item in chain if item[0] < x), (x, name)]
        paths.append("/".join(str(step) for _, step in chain[1:]))
    assert sorted(paths) == sorted(node.module.path for node in td3.nodes)


# --- What is written --------------------------------------------------------------------------------

HOSTILE = (
    "</title><script>alert(1)</script>",
    "\x1b[31m\0\x07",
    "\"];evil[label=\"",
    "\\N\\G\\",
    "]]>&amp;<!--",
    "\u202egnp\ufffe\ud800",
    "javascript:alert(1)",
)  # fmt: skip


def hostile() -> ModuleGraph:
    named = [(f"{name.replace('/', '')}/{name.replace('/', '')}", (1,), {}) for name in HOSTILE]
    named.append(("shared/w", (1,), {"aliases": (f"{HOSTILE[2]}/{HOSTILE[3]}",)}))
    return build_module_graph(
        listing(rows(*named), {"shared": Container("module", HOSTILE[0], {"activation": HOSTILE[2]})})
    )


def test_an_svg_is_xml_with_its_modules_and_no_script(td3: ModuleGraph) -> None:
    for graph in (td3, hostile(), shared_and_strange()):
        root = ET.fromstring(render_svg(graph))
        tags = {element.tag for element in root.iter()}
        assert tags <= {SVG + t for t in ("svg", "title", "style", "path", "rect", "text", "tspan")}
        assert not [a for e in root.iter() for a in e.attrib if a.startswith("on") or "href" in a]
        urls = re.findall(r"url\([^)]*\)|https?:[^\"' ]*", ET.tostring(root, "unicode"))
        assert set(urls) <= {"http://www.w3.org/2000/svg"}
        kinds = Counter(part.get("class") for part in root.iter(SVG + "tspan"))
        for kind in ("alias", "slot"):
            assert kinds[kind] == sum(edge.kind == kind for edge in graph.edges)
        style = root.find(SVG + "style")
        assert style is not None
        assert "prefers-color-scheme" in (style.text or "")


class Page(html.parser.HTMLParser):
    """The tags of a page and what is in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


COMPUTATION = Computation((DrawnBox("layer", (HOSTILE[0],), (), ((HOSTILE[2], HOSTILE[6]),)),), (HOSTILE[0],))


@pytest.mark.parametrize("computation", [None, COMPUTATION])
def test_a_page_needs_nothing_and_runs_only_its_own_script(computation: Computation | None) -> None:
    strange = "</script><img src=x onerror=alert(1)>\"'"
    rows = [ColumnLine(level, strange, strange, "1", "4 B", strange, below=(strange,)) for level in (0, 1, 0)]
    text = render_page(strange, rows, strange, computation=computation).decode()
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1
    assert not set(names) & {"img", "link", "iframe", "object", "a", "image", "use"}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    (policy,) = (a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[0] for tag in ("style", "script"))
    digests = [base64.b64encode(hashlib.sha256(item.encode()).digest()).decode() for item in (style, script)]
    assert dict(part.split() for part in str(policy).split(";")) == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digests[0]}'",
        "script-src": f"'sha256-{digests[1]}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


DOT_LINE = re.compile(
    r'  (?:label="(?:[^"\\]|\\.)*"; *'
    r"|labelloc=t; rankdir=LR; ranksep=0\.8;|(?:node|edge) \[[^\]]*\];"
    r'|n\d+ \[label="(?:[^"\\]|\\.)*"\];'
    r'|n\d+ -> n\d+ \[style=(?:solid|dashed|dotted)(?:, constraint=false)?(?:, label="(?:[^"\\]|\\.)*")?\];)'
)


def test_dot_has_one_statement_for_each_node_and_edge(td3: ModuleGraph) -> None:
    for graph in (td3, hostile(), shared_and_strange()):
        first, *lines, last = render_dot(graph).splitlines()
        assert (first, last) == ("digraph checkpoint {", "}")
        assert [line for line in lines if not DOT_LINE.fullmatch(line)] == []
        assert sum("->" in line.split('"')[0] for line in lines) == len(graph.edges)
        labels = [line for line in lines if re.match(r"  n\d+ \[", line)]
        assert len(labels) == len(graph.nodes)
    # \N would be the node's name; a backslash of ours is doubled, and a line ends with \l.
    assert r"\\N\\G\\" in render_dot(hostile())
    assert "style=dotted" in render_dot(td3)


@pytest.mark.parametrize("suffix", [".svg", ".html", ".dot"])
def test_the_command_writes_a_new_file(tmp_path: Path, suffix: str, golden: Golden) -> None:
    target = tmp_path / f"agent{suffix}"
    ran = in_process("inspect", TF_SAMPLE, "--graph", target)
    golden(ran)
    content = target.read_text()
    assert "critic_optimizer" in content
    golden(refused(in_process("inspect", TF_SAMPLE, "--graph", target)))
    document = in_process("inspect", TF_SAMPLE, "--graph", target, "--force", "--depth", "2", "--json").json()
    notes = document["graph"].pop("notes")
    computed = {"computation": {"boxes": 19, "edges": 15}} if suffix == ".html" else {}
    assert document["graph"] == {"file": str(target), "modules": 8, "edges": 9, **computed}
    golden("\n".join(notes))
    assert len(document["tensors"]) == 78
    assert target.read_text() != content
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_what_cannot_be_drawn(tmp_path: Path, golden: Golden) -> None:
    result = summary(str(TF_SAMPLE))
    with pytest.raises(UsageError) as caught:
        drawings.write_drawing(result, str(tmp_path / "x.png"))
    golden(caught.value)
    with pytest.raises(UsageError) as caught:
        drawings.write_drawing(result, str(tmp_path / "none" / "x.svg"))
    golden(caught.value)
    (tmp_path / "d.svg").mkdir()
    with pytest.raises(TargetExistsError):
        drawings.write_drawing(result, str(tmp_path / "d.svg"), force=True)
    save(torch_tree({"x": np.zeros(1, np.float32)}), str(tmp_path / "x.svg"), "torch")
    before = (tmp_path / "x.svg").read_bytes()
    ran = in_process("inspect", tmp_path / "x.svg", "--graph", tmp_path / "x.svg", "--force")
    golden(refused(ran))
    assert (tmp_path / "x.svg").read_bytes() == before
    golden(refused(in_process("inspect", TORCH_SAMPLE.parent, "--graph", tmp_path / "y.svg")))
