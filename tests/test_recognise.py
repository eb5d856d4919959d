"""An agent is recognised under wrappers of its modules, and inside a dict of other things."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from ckpttool import convert
from ckpttool.core import Inline, Leaf, Path, Tree, UsageError, ValueLeaf, key, plugins
from ckpttool.libraries import binding, recognize, recognize_tree, repeated_structures, single_networks
from ckpttool.listing.processes import one_checkpoint
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.layouts import canonical_names, same
from tests.golden_texts import Golden
from tests.test_layouts import gaussian_agent, torch_agent
from tests.trees import tensorflow_tree, torch_tree


def wrapped(tree: Tree, prefix: str) -> Tree:
    """The agent's networks as torch.compile or DataParallel names them."""

    def named(path: Path) -> Path:
        if path[0].value in ("actor", "actor_target") and len(path) == 2:
            return (path[0], key(f"{prefix}{path[1].value}"))
        return path

    return Tree({named(path): leaf for path, leaf in tree.items()})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_of_modules_hide_nothing(prefix: str) -> None:
    plain, tree = torch_agent(["l1", "l2", "l3"]), wrapped(torch_agent(["l1", "l2", "l3"]), prefix)
    one, other = recognize_tree(plain, "agent"), recognize_tree(tree, "agent")
    assert one is not None
    assert other is not None
    assert other.parts == one.parts
    assert {move.source for move in other.moves.moves} <= set(tree)
    assert set(tree) == {move.source for move in other.moves.moves} | other.consumed
    names, others = canonical_names(plain, one), canonical_names(tree, other)
    assert names.keys() == others.keys()
    assert all(same(names[name], others[name]) for name in names)


def test_an_agent_in_an_entry_is_found_and_the_rest_is_left() -> None:
    agent = gaussian_agent()
    rest = torch_tree({"epoch": 3})
    tree = Tree({**{(key("model"), *path): leaf for path, leaf in agent.items()}, **rest.leaves})
    binding, alone = recognize_tree(tree, "agent"), recognize_tree(agent, "agent")
    assert binding is not None
    assert alone is not None
    assert binding.evidence.startswith("model/: ")
    assert set(tree) - {move.source for move in binding.moves.moves} - binding.consumed == set(rest)
    there, here = canonical_tree(tree, binding.moves), canonical_tree(agent, alone.moves)
    assert there.keys() == here.keys()
    assert all(same(there[path], here[path]) for path in here)


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_critics_beside_networks_of_other_names_are_no_agent(framework: str) -> None:
    weight, shape = ("kernel", (3, 4)) if framework == "tensorflow" else ("weight", (4, 3))
    names = [f"{name}/l1" for name in ("pi", "oldpi", "critic")]
    arrays = {f"{name}/{weight}": np.ones(shape, "f4") for name in names}
    arrays |= {f"{name}/bias": np.ones(4, "f4") for name in names}
    make_tree = tensorflow_tree if framework == "tensorflow" else torch_tree
    assert recognize_tree(make_tree(arrays), "model") is None
    lone = {name: array for name, array in arrays.items() if name.startswith("critic")}
    agent = recognize_tree(make_tree(lone), "model")
    assert agent is None or {part.component for part in agent.parts} == {"critic"}


def test_two_agents_side_by_side_are_no_single_one() -> None:
    agent = torch_agent(["l1", "l2", "l3"])
    both = {(key(top), *path): leaf for top in ("model", "ema") for path, leaf in agent.items()}
    assert recognize_tree(Tree(both), "agent") is None


def test_a_layout_that_is_named_is_asked_alone_and_everywhere(golden: Golden) -> None:
    tree = wrapped(torch_agent(["l1", "l2", "l3"]), "module.")
    binding = recognize_tree(tree, "agent", "td3_torch")
    assert binding is not None
    assert binding.layout == "td3_torch"
    with pytest.raises(UsageError) as caught:
        recognize_tree(tree, "agent", "td3_tf")
    golden(caught.value)


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(plugins, "installed", lambda kind: calls.append(kind) or ())
    agent = torch_tree({f"m{n}/w": np.zeros(1, np.float32) for n in range(5)})
    assert recognize_tree(agent, "nothing") is None
    assert calls == ["layouts"]
    assert recognize_tree(torch_agent(["l1", "l2", "l3"]), "agent") is not None
    assert calls == ["layouts"]


def test_a_conversion_recognizes_each_tree_once(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two networks of other names: no layout, and no single policy either, which is an error each time.
    arrays = {f"{name}.{n}.weight": np.ones((4, 4), "f4") for name in ("one", "two") for n in range(2)}
    np.savez(tmp_path / "networks.npz", **arrays)
    calls: list[tuple[object, ...]] = []
    for module, name in ((recognize, "_recognize_tree"), (single_networks, "_recognize_policy")):
        function = getattr(module, name)

        def count(tree: Tree, *more: object, function: Any = function, **others: object) -> object:
            calls.append((function, tree, *more))
            return function(tree, *more, **others)

        monkeypatch.setattr(module, name, count)
    convert(str(tmp_path / "networks.npz"), str(tmp_path / "networks.safetensors"))
    assert len({(function, id(tree), *more) for function, tree, *more in calls}) == len(calls) > 1


def test_an_answer_is_remembered_in_its_block_only() -> None:
    agent, trees = gaussian_agent(), []

    def refuse(tree: Tree) -> None:
        trees.append(tree)
        raise UsageError("no agent")

    with recognize.remembering():
        errors = [catch_usage_error(refuse, agent) for _ in range(2)]
    assert len(trees) == 1
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])
    catch_usage_error(refuse, agent)
    assert len(trees) == 2


def use_rate_and_first(tree: Tree, scale: float) -> tuple[object, ...]:
    """Use one value, every name, and no tensor."""
    rate = tree[key("rate"),]
    assert isinstance(rate, ValueLeaf)
    return repr(rate.value), scale, *tree.names.values()


def use_bytes(tree: Tree, scale: float) -> tuple[object, ...]:
    weight = tree[key("weight"),]
    assert isinstance(weight, Leaf)
    return float(weight.array().sum()) * scale, *tree.names.values()


STRUCTURE = {"weight": np.ones(2, np.float32), "rate": 1, "epoch": 1}


@pytest.mark.parametrize(
    ("entries", "repeats"),
    [
        ({"weight": np.zeros(2, np.float32)}, True),
        ({"epoch": 2}, True),
        ({"rate": 2}, False),
        ({"rate": True}, False),
        ({"rate": 1.0}, False),
        ({"weight": np.ones(3, np.float32)}, False),
        ({"weight": np.ones(2, np.float64)}, False),
        ({"weight": 1}, False),
        ({"other": 1}, False),
    ],
    ids=str,
)
def test_what_differs_in_nothing_that_is_used_is_computed_once(
    entries: dict[str, object], repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_structures, "KNOWN", deque())
    trees = [torch_tree(STRUCTURE), torch_tree({**STRUCTURE, **entries})]
    results = [repeated_structures.compute_once(use_rate_and_first, tree, 1.0) for tree in trees]
    assert results == [use_rate_and_first(tree, 1.0) for tree in trees]
    assert (results[0] is results[1]) == repeats


@pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (1, 1.0)])
def test_keys_that_python_takes_as_equal_are_told_apart(one: int, other: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(repeated_structures, "KNOWN", deque())
    trees = [Tree({(key("rate"),): ValueLeaf(1), (key(name),): ValueLeaf(1)}) for name in (one, other)]
    results = [repeated_structures.compute_once(use_rate_and_first, tree, 1.0) for tree in trees]
    assert results == [use_rate_and_first(tree, 1.0) for tree in trees]


def test_what_uses_a_tensor_is_computed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_structures, "KNOWN", deque())
    trees = [torch_tree({**STRUCTURE, "weight": np.full(2, n, np.float32)}) for n in (1, 2)]
    assert [repeated_structures.compute_once(use_bytes, tree, 1.0)[0] for tree in trees] == [2, 4]
    assert not repeated_structures.KNOWN


@pytest.mark.parametrize("change", ["counter", "weights"])
def test_the_agents_of_a_run_are_bound_once(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_structures, "KNOWN", deque())
    bound: list[Tree] = []
    real = binding._bind
    monkeypatch.setattr(binding, "_bind", lambda tree, table: bound.append(tree) or real(tree, table))
    agent = torch_agent(["l1", "l2", "l3"])
    later = {
        path: replace(leaf, value=2) if path == (key("total_it"),) and change == "counter" else leaf
        for path, leaf in agent.items()
    }
    if change == "weights":
        later = {path: zeroed(leaf) for path, leaf in agent.items()}
    with one_checkpoint():
        first = recognize_tree(agent, "a")
        several = len(bound)  # a layout that does not match binds it, too
        assert recognize_tree(Tree(later, agent.aliases, agent.containers), "b") == first
    assert several == len(bound) > 0
    assert recognize_tree(agent, "a") == first
    assert len(bound) == 2 * several


def zeroed(leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
    return replace(leaf, source=Inline(bytes(leaf.nbytes))) if isinstance(leaf, Leaf) else leaf


def catch_usage_error(refuse: Callable[[Tree], None], agent: Tree) -> UsageError:
    with pytest.raises(UsageError) as caught:
        recognize.remember(refuse, agent)
    return caught.value
