"""Acme's TensorFlow agents: Sonnet networks by the names of a learner's checkpoint and of a snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import Leaf, Tree, display
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import acme, recognize_tree, td3
from ckpttool.mapping.rules import canonical_tree
from tests.golden_texts import Golden
from tests.restored import HIGH, LOW, actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.tensorflow_agents import Arrays, layers, run, tensorflow_tree, written
from tests.test_layouts import LayoutContract
from tests.trees import attributes, leaf

SONNET = ("w", "b")


def torso(top: str, widths: tuple[int, ...]) -> tuple[list[str], str]:
    """Return the names of LayerNormMLP's layers below `top`, and that of its norm."""
    names = [f"{top}/_network/_layers/0"]
    names += [f"{top}/_network/_layers/3/_layers/{number}" for number in range(len(widths) - 2)]
    return names, f"{top}/_network/_layers/1"


def network(top: str, widths: tuple[int, ...], last: str | None = None) -> Arrays:
    """Return a LayerNormMLP with the norm's scale and offset, and `last` as another layer after it."""
    names, norm = torso(top, widths if last is None else widths[:-1])
    arrays = layers([*names, *([last] if last else [])], widths, SONNET)
    generator = np.random.default_rng(3)
    norms = {f"{norm}/{name}": generator.normal(size=widths[1]).astype("f4") for name in ("scale", "offset")}
    first = {name: array for name, array in arrays.items() if name.startswith(f"{names[0]}/")}
    return {**first, **norms, **arrays}


def ran(
    arrays: Arrays, top: str, widths: tuple[int, ...], x: np.ndarray, last: str | None = None
) -> np.ndarray:
    """Return what LayerNormMLP and the last layer make of `x` (acme/tf/networks/continuous.py)."""
    names, norm = torso(top, widths if last is None else widths[:-1])
    for number, name in enumerate([*names, *([last] if last else [])]):
        if number > 1:
            x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
        x = x.astype("f8") @ arrays[f"{name}/w"] + arrays[f"{name}/b"]
        if number == 0:
            x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
            x = np.tanh(x * arrays[f"{norm}/scale"] + arrays[f"{norm}/offset"])
    return x


POLICY, CRITIC = (3, 16, 12, 2), (5, 16, 12, 1)


def d4pg(critic: tuple[int, ...] = CRITIC) -> Arrays:
    """The default networks: NearZeroInitializedLinear after the policy's torso, a head after the critic's."""
    arrays: Arrays = {}
    for prefix in ("", "target_"):
        arrays |= network(f"{prefix}policy/_layers/0", POLICY, f"{prefix}policy/_layers/1")
        last = "2/_distributional_layer" if critic[-1] > 1 else "2"
        arrays |= network(f"{prefix}critic/_layers/1", critic, f"{prefix}critic/_layers/{last}")
    return arrays


def learner(arrays: Arrays) -> Tree:
    """Add Sonnet's Adam: moments by number, in the order of a module's variables, sorted by name."""
    tree = tensorflow_tree(arrays)
    leaves = {path: replace(f, name=tree.names[path].split("/_layers/", 1)[1]) for path, f in tree.tensors()}
    for network in ("policy", "critic"):
        top = f"{network}_optimizer"
        leaves[attributes(f"{top}/step")] = leaf(np.array(3, np.int64), "", role="counter", name="adam/t")
        mine = sorted((path for path in tree if path[0].value == network), key=lambda path: tree.names[path])
        for slot in "mv":
            for number, path in enumerate(mine):
                moment = np.full(leaves[path].shape, number, "f4")
                name = f"adam/{slot}/{leaves[path].name}"
                location = attributes(f"{top}/{slot}/{number}")
                leaves[location] = leaf(moment, name, role="slot", slot=slot, name=name)
    leaves[attributes("num_steps")] = leaf(np.array(3, np.int32), "num_steps", role="counter")
    return Tree(leaves)


def plain() -> Arrays:
    """Networks of Sonnet's own MLP."""
    arrays: Arrays = {}
    for prefix in ("", "target_"):
        for name, widths in (("policy", POLICY), ("critic", CRITIC)):
            arrays |= layers([f"{prefix}{name}/_layers/1/_layers/{n}" for n in range(3)], widths, SONNET)
    return arrays


class TestAcme(LayoutContract):
    name = "acme"

    @pytest.fixture
    def tree(self) -> Tree:
        return learner(plain())


@pytest.mark.parametrize("root", ["", "wrapped/"])
def test_actions_and_values_are_its_networks(root: str, tmp_path: Path) -> None:
    arrays = d4pg()
    path = written(tensorflow_tree({root + name: a for name, a in arrays.items()}), tmp_path / "ckpt-1")
    last = ran(arrays, "policy/_layers/0", POLICY, observations(), "policy/_layers/1")
    low, high = np.array(LOW), np.array(HIGH)
    same(actions(path), 0.5 * (np.tanh(last) + 1) * (high - low) + low)
    inputs = np.concatenate([observations(), chosen()], 1)
    same(q_values(path), ran(arrays, "critic/_layers/1", CRITIC, inputs, "critic/_layers/2"))
    assert without_a_way(path) == []
    assert recognised(path).facts.activations == ("tanh", "elu")


def test_every_moment_finds_its_weight_by_name() -> None:
    tree = learner(d4pg())
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    assert {display(move.source) for move in binding.moves.moves} == set(tree.names.values())
    for slot, of in binding.of.items():
        moment, weight = tree[slot], tree[of]
        assert isinstance(moment, Leaf)
        assert isinstance(weight, Leaf)
        assert moment.shape == weight.shape
        assert str(moment.name).endswith(str(weight.name))


def test_a_critic_of_atoms_gives_no_value(golden: Golden) -> None:
    binding = recognize_tree(tensorflow_tree(d4pg((5, 16, 12, 11))), "ckpt-1")
    assert binding is not None
    golden("\n".join(binding.moves.notes))
    assert not binding.unplaced


def test_plain_layers_have_relu(tmp_path: Path) -> None:
    names = [f"policy/_layers/0/_layers/{number}" for number in range(3)]
    arrays = layers(names, POLICY, SONNET)
    targets = {f"target_{name}": array for name, array in arrays.items()}
    path = written(tensorflow_tree(arrays | targets), tmp_path / "ckpt-1")
    low, high = np.array(LOW), np.array(HIGH)
    same(
        actions(path),
        (high + low) / 2 + (high - low) / 2 * np.tanh(run(arrays, names, observations(), SONNET)),
    )


def test_a_mean_is_limited_by_the_environments_wrapper(tmp_path: Path) -> None:
    arrays = network("policy/_layers/0", POLICY, "policy/_layers/1/_mean_layer")
    arrays |= layers(["policy/_layers/1/_scale_layer"], (12, 2), SONNET)
    arrays |= {f"target_{name}": array for name, array in arrays.items()}
    path = written(tensorflow_tree(arrays), tmp_path / "ckpt-1")
    mean = ran(arrays, "policy/_layers/0", POLICY, observations(), "policy/_layers/1/_mean_layer")
    low, high = np.array(LOW), np.array(HIGH)
    same(actions(path), (high + low) / 2 + (high - low) / 2 * np.clip(mean, -1, 1))
    agent = canonical_tree(open_checkpoint(path).tree, recognised(path).moves)
    assert "actor/std/kernel" in {display(path) for path in agent}


def snapshot(name: str = "policy") -> Tree:
    """A snapshot keeps its variables in a list, which its SavedModel names again."""
    widths = POLICY if name == "policy" else CRITIC
    top = "_variables/feedforward_mlp_torso"
    arrays = layers(
        [f"{top}/linear", f"{top}/mlp/linear_0", "_variables/near_zero_initialized_linear"], widths, SONNET
    )
    arrays |= {f"{top}/layer_norm/{suffix}": np.ones(16, "f4") for suffix in ("offset", "scale")}
    return tensorflow_tree(
        dict(sorted(arrays.items(), key=lambda one: ("near" in one[0], "mlp/" in one[0], "norm" in one[0])))
    )


@pytest.mark.parametrize(("name", "title"), [("policy", "actor"), ("critic", "critic/q1")])
def test_a_snapshot_is_what_its_folder_is_called(name: str, title: str) -> None:
    binding = acme.recognise(snapshot(name), name)
    assert binding is not None
    ((part_title, kinds),) = [(part.title, [layer.kind for layer in part.layers]) for part in binding.parts]
    assert (part_title, kinds) == (title, ["dense", "layer_norm", "dense", "dense"])
    assert recognize_tree(snapshot(name), "something") is None


def test_other_sonnet_models_are_no_agents(tmp_path: Path) -> None:
    path = written(tensorflow_tree(layers(["model/_layers/0"], (3, 2), SONNET)), tmp_path / "ckpt-1")
    assert recognize_tree(open_checkpoint(path).tree, "ckpt-1") is None


def test_settings_that_no_file_holds_are_sonnets() -> None:
    tree = learner(d4pg())
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    plan = td3.plan_torch(binding, canonical_tree(tree, binding.moves), {})
    assumed = [line for line in plan.assumed if "epsilon" in line or "eps" in line]
    assert assumed
    assert all("1e-08" in line and "Sonnet" in line for line in assumed)
