"""All layouts pairwise: what both hold survives there and back bit for bit, the rest is listed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.conversion.options import ConversionOptions, ConversionRequest
from ckpttool.conversion.plan import ConversionPlan, plan_conversion
from ckpttool.conversion.targets import TARGETS, TargetKind
from ckpttool.core import (
    Checkpoint,
    Leaf,
    Sidecar,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    attr,
    display,
    plugins,
)
from ckpttool.core import Path as Place
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import select_network_leaves
from ckpttool.formats import open_checkpoint, sb3
from ckpttool.libraries import RecognizedAgent, keras_rl, recognize_tree, schema
from ckpttool.mapping import MappingReport
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.layouts import contents
from tests import warm_sb3

torch = pytest.importorskip("torch")

from tests import test_layout_cleanrl as cleanrl  # noqa: E402
from tests import test_layout_fasttd3 as fasttd3  # noqa: E402  # they need torch
from tests import test_layout_rsl_rl as rsl_rl  # noqa: E402
from tests.torch_agents import agent, mlp, saved  # noqa: E402

BOUNDS = Sidecar("", action_low=(-2.0, -2.0), action_high=(2.0, 2.0))


def _one_each() -> dict[str, TargetKind]:
    """Return a target for every layout but two.

    Stable-Baselines3 writes through a process of its own. The action maps of rl_games' targets are those of
    the agents in test_moved_agents.py.
    """
    kinds: dict[str, TargetKind] = {}
    for name, kind in TARGETS.items():
        if kind.layout not in {*(kind.layout for kind in kinds.values()), "stable_baselines3", "rl_games"}:
            kinds[name] = kind
    return kinds


FORMS = _one_each()
# What a layout is known by.
SUFFIXES = {"keras_rl": keras_rl.SUFFIX}


class Held:
    """An agent as one layout holds it: as if it had been written and read again."""

    def __init__(self, checkpoint: Checkpoint, layout: str, known: Sidecar) -> None:
        self.checkpoint, self.layout, self.known = checkpoint, layout, known

    @cached_property
    def binding(self) -> RecognizedAgent:
        tree, name = self.checkpoint.tree, self.checkpoint.path
        try:
            result = recognize_tree(tree, name, self.layout)
        except UsageError:
            # Without its targets nothing tells some layouts' agents from others'.
            result = recognize_tree(tree, name)
        assert result is not None
        return result

    @cached_property
    def agent(self) -> Tree:
        return canonical_tree(self.checkpoint.tree, self.binding.moves)

    def names(self) -> dict[Place, set[str]]:
        """Return the names in the file of every canonical leaf."""
        names: dict[Place, set[str]] = {}
        for move in self.binding.moves.moves:
            names.setdefault(move.target, set()).add(self.checkpoint.tree.names[move.source])
        return names


def passed(content: Held, to: str) -> tuple[Held, ConversionPlan]:
    """Return the agent in another form, and the way there."""
    kind = FORMS[to]
    way = plan_conversion(
        content.checkpoint,
        ConversionRequest(kind, ConversionOptions(layout=content.binding.layout)),
        content.known,
    )
    writer = plugins.find("formats", kind.format).load()
    options: dict[str, Any] = dict(kind.options)
    if options.get("graph"):
        options["counter"] = 1
    as_stored = getattr(writer, "stored", None)
    stored = way.tree if as_stored is None else as_stored(way.tree, **options)
    known = restore.merge_metadata(
        content.known,
        restore.read_metadata(content.binding, select_network_leaves(way.ready.tree, content.binding)),
    )
    checkpoint = replace(
        content.checkpoint, path=f"{to}_agent{SUFFIXES.get(to, '')}", format=kind.format, tree=stored
    )
    return Held(checkpoint, kind.layout, replace(known, optimizers=way.settings or None)), way


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    yield "td3", agent(folder / "td3", 3, 2)[0]
    yield "ddpg", agent(folder / "ddpg", 3, 2, critics=1)[0]
    yield "sac", agent(folder / "sac", 3, 2, gaussian=True)[0]
    torch.manual_seed(0)
    actor, critic = (mlp(6, 8, n, activation=torch.nn.ELU) for n in (rsl_rl.ACT, 1))
    yield "ppo", saved(folder, "model_9.pt", rsl_rl.file(5, actor, critic, norm=True, log=True))
    yield "atoms", saved(folder, "fast.pt", fasttd3.agent()[0])


@cache
def sources() -> Mapping[str, Held]:
    """Return agents of several algorithms, each in the form in which it was saved."""
    with TemporaryDirectory() as folder:
        agents = {}
        for name, file in _files(Path(folder)):
            checkpoint = open_checkpoint(file)
            tree = Tree(
                {p: _kept(leaf) for p, leaf in checkpoint.tree.items()}, {}, checkpoint.tree.containers
            )
            binding = recognize_tree(tree, name)
            assert binding is not None
            known = Sidecar("") if name in ("ppo", "atoms") else BOUNDS
            agents[name] = Held(replace(checkpoint, tree=tree), binding.layout, known)
    return agents


def _kept(leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    from ckpttool.core import Inline

    return replace(leaf, source=Inline(bytes(leaf.read()))) if isinstance(leaf, Leaf) else leaf


@cache
def written(kind: str, form: str) -> Held | str:
    """Return the agent of an algorithm in a form, or why there is none."""
    try:
        return passed(sources()[kind], form)[0]
    except (UnsupportedError, UsageError) as error:
        return error.message


def _same(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf) -> bool:
    """Compare without shapes, which libraries ask for: [1, n] and [n] are one row."""
    if isinstance(one, Leaf) and isinstance(other, Leaf) and one.size > 1:
        return bytes(one.read()) == bytes(other.read())
    first, second = contents(one), contents(other)
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.float32(first) == np.float32(second))
    return first == second


def held_by_both(first: Held, second: Held, report: MappingReport) -> set[Place]:
    """Return the canonical paths of what the conversion carried; statistics may be computed anew."""
    computed = any("recomputed" in note for note in report.notes)
    both = first.agent.keys() & second.agent.keys()
    return {path for path in both if not (computed and path[0] == attr(schema.NORMALIZER))}


def require_same(first: Held, second: Held, paths: Collection[Place]) -> None:
    for path in paths:
        assert _same(first.agent[path], second.agent[path]), display(path)


def stays_known(path: Place, there: Tree) -> bool:
    """Say whether a leaf that was neither mapped nor listed is told by the sidecar, or says nothing."""
    if schema.mapped_by_sidecar(path) or path == (attr("save_counter"),):
        return True
    if path == (attr("actor"), attr("std")):
        return (attr("actor"), attr("log_std")) in there
    # Settings that are no variables in TensorFlow.
    return (
        len(path) == 2
        and str(path[0].value) in schema.OPTIMIZERS
        and any(other[0] == path[0] for other in there)
    )


PAIRS = list(permutations(FORMS, 2))


@pytest.mark.parametrize(("form", "other"), PAIRS)
def test_there_and_back(form: str, other: str) -> None:
    """One algorithm that both can hold for each pair; which one is asked first changes from pair to pair."""
    kinds = deque(sources())
    kinds.rotate(PAIRS.index((form, other)))
    refused = []
    for kind in kinds:
        before = written(kind, form)
        if isinstance(before, str):
            continue
        try:
            there, way = passed(before, other)
            back, _ = passed(there, form)
        except (UnsupportedError, UsageError) as error:
            refused.append(error.message)
            continue
        both = held_by_both(before, there, way.report)
        assert both, kind
        require_same(before, there, both)
        require_same(before, back, both)
        listed = {*way.report.unused, *way.kept}
        for path, names in before.names().items():
            if path not in there.agent and not stays_known(path, there.agent):
                # A count that the file repeats is listed once.
                assert names & listed, f"{kind}: {display(path)} is neither there nor listed"
        return
    assert all(refused)
    assert refused


def test_every_form_holds_some_agent_and_no_pair_is_forgotten() -> None:
    can = {form: {kind for kind in sources() if not isinstance(written(kind, form), str)} for form in FORMS}
    assert all(can.values())
    assert can["torch"] == sources().keys()
    assert can["rsl_rl"] == {"ppo"}
    assert {"td3", "ddpg", "sac"} <= can["tianshou"] & can["d3rlpy"] & can["spinningup"]
    assert can["fasttd3"] == {"sac", "atoms"}


def test_stable_baselines3_and_back_through_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself writes its zips, in a process of its own: one way for all of them."""
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(sb3, "subprocess", warm_sb3.FORKING)
    cleanrl.saved(tmp_path / "a.cleanrl_model", gaussian=True)
    for number, form in enumerate(("sb3", "d3rlpy", "sb3")):
        source = tmp_path / (f"{number - 1}.zip" if number else "a.cleanrl_model")
        convert(str(source), str(tmp_path / f"{number}.zip"), to=form, allow_missing=True, sync=False)
    first, _, last = (open_checkpoint(str(tmp_path / f"{n}.zip")) for n in range(3))
    before, back = (Held(checkpoint, "stable_baselines3", Sidecar("")) for checkpoint in (first, last))
    assert before.agent.keys() == back.agent.keys()
    require_same(before, back, before.agent.keys())
