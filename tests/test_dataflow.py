"""The dataflow of networks: it has the stages that the network builder builds; drawings are well formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.inspect import summary
from ckpttool.core import CkpttoolError
from ckpttool.evaluation.agent_networks import ActionBounds, build_part_network, derive_network_settings
from ckpttool.evaluation.restore import Agent, restore_agent
from ckpttool.listing.dataflow import HEADS, build_agent_strips, build_listed_strips
from ckpttool.listing.strip_facts import find_recorded_facts
from ckpttool.listing.strips import FlowStage, FlowStrip, strip_lines
from ckpttool.networks import (
    Activation,
    Affine,
    Clip,
    Concat,
    Convolution,
    Dense,
    Flatten,
    LayerNorm,
    Network,
    policy_network,
)
from ckpttool.networks.build import HEADS as BUILT_HEADS
from ckpttool.pages.dataflow import render_dataflow
from tests.agent_truth import matrix
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden

NAMES = {
    Affine: "affine", Clip: "clip", Concat: "join", Flatten: "flatten", LayerNorm: "layer norm",
}  # fmt: skip
STAGES = {"normalize": ("affine", "affine"), "scale": ("affine",), "batch norm": ("affine", "affine")}


def built(network: Network) -> list[str]:
    """Return the layers of a network in words; transpositions only reorder."""
    names = []
    for node in network.nodes:
        match node.layer:
            case Dense(kernel, bias):
                size = kernel.size + (0 if bias is None else bias.size)
                names.append(f"dense {kernel.shape[1]} {size}")
            case Convolution(kernel, bias):
                size = kernel.size + (0 if bias is None else bias.size)
                names.append(f"conv {kernel.shape[3]} {size}")
            case Activation(name):
                names.append(name)
            case layer if type(layer) in NAMES:
                names.append(NAMES[type(layer)])
    return names


def drawn(strip: FlowStrip) -> Iterator[str]:
    """Yield the same words for the stages of a strip."""
    for stage in strip.every:
        match stage.kind:
            case "input" | "output":
                continue
            case "join":
                yield "join"
            case "layer" if stage.name == "dense" or stage.name.startswith("conv"):
                yield f"{stage.name.split()[0]} {stage.shape[0]} {stage.parameters}"
            case "normalizer" if stage.name.startswith(("/", "*")):
                yield "affine"
            case _:
                yield from STAGES.get(stage.name, (stage.name,))
                if stage.name == "normalize" and stage.detail:
                    yield "clip"


def require_agreement(agent: Agent) -> int:
    """Compare every strip with the network that is played; return the number of networks compared."""
    strips = build_agent_strips(agent)
    by_title = {title: strip for strip in strips for title in (strip.title, *strip.alike)}
    acting = next(part for part in agent.binding.parts if part.acts)
    width = next(strip for strip in strips if strip.title == acting.title).stages[-1].shape[0]
    settings, _ = derive_network_settings(agent, ActionBounds([-2.0] * width, [2.0] * width, "the test's"))
    compared = 0
    for title, strip in by_title.items():
        part = agent.part(title)
        assert part is not None
        try:
            if part.acts:
                playable = agent.playable(title)
                assert playable is not None
                network = policy_network(agent.tree, playable, settings, agent.front(title))
            elif agent.runnable(title) is not None:
                network = build_part_network(agent, part, settings)
        except CkpttoolError:
            assert not part.acts or strip.notes, title
            continue
        if not network.states:
            assert list(drawn(strip)) == built(network), title
            compared += 1
    return compared


@pytest.mark.parametrize("path", [TORCH_SAMPLE, TF_SAMPLE], ids=["torch", "tf"])
def test_a_sample_is_drawn_as_it_is_played(path: Path) -> None:
    assert require_agreement(restore_agent(str(path))) == 6


@pytest.mark.torch
def test_agents_of_programs_are_drawn_as_they_are_played(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert matrix.make(tmp_path, ["programs"]) == []
    compared = 0
    for file in sorted(tmp_path.glob("*.json")):
        stored = json.loads(file.read_text())
        if file.name == "absent.json" or dict(stored["known"]):
            continue
        compared += require_agreement(restore_agent(stored["file"]))
    assert compared >= 10


def test_action_maps_are_those_of_the_builder() -> None:
    low, high = np.full(2, -1.5, np.float32), np.full(2, 1.5, np.float32)
    assert HEADS.keys() == BUILT_HEADS.keys()
    for name, build in BUILT_HEADS.items():
        words = {Affine: "scale", Clip: "clip"}
        layers = [words.get(type(layer), getattr(layer, "name", "")) for layer in build(low, high)]
        assert layers == [stage for stage, _ in HEADS[name]], name


def test_a_listing_needs_no_tensor_and_agrees_with_the_agent() -> None:
    listing = summary(str(TORCH_SAMPLE))
    listed = build_listed_strips(listing.binding, listing.checkpoint.tree)
    restored = build_agent_strips(restore_agent(str(TORCH_SAMPLE)))
    assert [(s.title, s.alike, s.parameters) for s in listed] == [
        (s.title, s.alike, s.parameters) for s in restored
    ]
    # The sidecar records what the listing would assume.
    assert any(strip.assumptions for strip in listed)
    assert not any(strip.assumptions for strip in restored)
    assert (
        build_listed_strips(listing.binding, listing.checkpoint.tree, find_recorded_facts(listing.checkpoint))
        == restored
    )


def test_a_damaged_sidecar_does_not_stop_a_listing(tmp_path: Path) -> None:
    target = tmp_path / "agent.pt"
    target.write_bytes(TORCH_SAMPLE.read_bytes())
    (tmp_path / "agent.pt.ckpttool.json").write_text("{")
    listing = summary(str(target))
    assert find_recorded_facts(listing.checkpoint) is None
    assert in_process("inspect", str(target)).status == 0


def test_lines(golden: Golden) -> None:
    listing = summary(str(TORCH_SAMPLE))
    strips = build_listed_strips(listing.binding, listing.checkpoint.tree)
    for width in (80, 140):
        lines = list(strip_lines(strips, width))
        assert max(map(len, lines)) <= width
        golden("\n".join(lines))


def test_the_command_draws_and_describes(tmp_path: Path) -> None:
    target = tmp_path / "flow.svg"
    ran = in_process("inspect", str(TORCH_SAMPLE), "--graph", str(target), "--dataflow", "--json")
    flow = json.loads(ran.out)["dataflow"]
    assert flow["file"] == str(target)
    assert [one["title"] for one in flow["networks"]] == ["actor", "critic/q1"]
    actor = flow["networks"][0]
    assert sum(stage["parameters"] for stage in actor["stages"]) == actor["parameters"] == 4481
    assert [stage["kind"] for stage in actor["stages"]][-3:] == ["activation", "map", "output"]
    ElementTree.parse(target)


@pytest.mark.parametrize(
    ("words", "status"),
    [(["--dataflow"], 2), (["--dataflow", "--graph", "x.pdf"], 2)],
)
def test_refusals(words: list[str], status: int, golden: Golden, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ran = in_process("inspect", str(TORCH_SAMPLE), *words)
    assert ran.status == status
    golden(ran.err)


# --- Drawings: inside the frame, without overlaps ----------------------------------------------------------

HOSTILE = "<script>\u202e" + "a" * 200


def chain(n: int, name: str = "dense") -> tuple[FlowStage, ...]:
    layers = [
        FlowStage(*stage)
        for number in range(n)
        for stage in (("layer", name, (256 + number,), 65536), ("activation", "relu", (256 + number,)))
    ]
    return (FlowStage("input", "obs", (3,)), *layers, FlowStage("output", "action", (1,), detail="-2 to 2"))


def stream(name: str) -> tuple[FlowStage, ...]:
    return (FlowStage("input", name, (4, 84, 84)), FlowStage("layer", "conv 8x8/4", (32, 20, 20), 8224))


STRIPS = {
    "short": FlowStrip("actor", chain(2)),
    "wrapped": FlowStrip("actor", chain(12), alike=("actor_target",), notes=("a note",)),
    "deep": FlowStrip("actor", chain(500)),
    "hostile": FlowStrip(HOSTILE, chain(3, HOSTILE)),
    "streams": FlowStrip("actor", chain(9), streams=(stream("camera"), stream("depth"), stream("state"))),
}


@pytest.mark.parametrize("name", STRIPS)
def test_boxes_do_not_overlap(name: str) -> None:
    text = render_dataflow([STRIPS[name], STRIPS["short"]], HOSTILE)
    root = ElementTree.fromstring(text)
    wide, high = float(root.attrib["width"]), float(root.attrib["height"])
    assert wide < 1300
    boxes = [
        tuple(float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        for box in root.iter("{http://www.w3.org/2000/svg}rect")
        if "stage" in box.attrib["class"]
    ]
    edge = float(root.attrib["viewBox"].split()[0])
    wide, high = wide + edge, high + edge
    assert all(x >= edge and y >= edge and x + w <= wide and y + h <= high for x, y, w, h in boxes)
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(boxes, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert "\u202e" not in text
