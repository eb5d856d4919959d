"""tf2rl's SAC in the names of its versions, and the arguments beside its checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import Leaf, Tree, UsageError, display
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.libraries import recognize_tree, td3, tf2rl
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.networks import NetworkSettings, numpy_backend, policy_network
from tests.conftest import TF_SAMPLE
from tests.golden_texts import Golden
from tests.restored import observations, same
from tests.test_layouts import LayoutContract
from tests.trees import attributes, dense, leaf, tensorflow_tree

# Until 1.0 there is a value of the state, since then there are targets of both critics.
NEW = {"qf1": 5, "qf2": 5, "qf1_target": 5, "qf2_target": 5}
OLD = {"qf1": 5, "qf2": 5, "vf": 3, "vf_target": 3}


def sac(critics: dict[str, int], log_std: str = "out_logstd") -> Tree:
    generator = np.random.default_rng(0)
    arrays = dense(generator, "policy/actor/base_layers/0", 3, 16) | dense(
        generator, "policy/actor/base_layers/1", 16, 8
    )
    arrays |= dense(generator, "policy/actor/out_mean", 8, 2) | dense(
        generator, f"policy/actor/{log_std}", 8, 2
    )
    for name, width in critics.items():
        for number, sizes in enumerate([(width, 16), (16, 8)]):
            arrays |= dense(generator, f"policy/{name}/base_layers/{number}", *sizes)
        arrays |= dense(generator, f"policy/{name}/out_layer", 8, 1)
    arrays["policy/log_alpha"] = np.float32(0.5).reshape(())
    if "vf" in critics:
        arrays["policy/alpha"] = np.exp(arrays["policy/log_alpha"])
    return tensorflow_tree(arrays)


def with_optimizers(tree: Tree, steps: dict[str, int]) -> Tree:
    """Add Keras's Adams as 2.0 to 2.10 store them: moments as slots of their variables."""
    leaves = dict(tree.leaves)
    for number, (network, step) in enumerate(steps.items()):
        top = f"policy/{network}_optimizer"
        counter = leaf(np.array(step, np.int64), f"{top}/iter", role="counter")
        leaves[attributes(f"{top}/iter")] = counter
        leaves[attributes(f"{top}/learning_rate")] = leaf(np.array(3e-4, np.float32), f"{top}/learning_rate")
        for path, variable in tree.tensors():
            if path[1].value == network:
                for slot in "mv":
                    name = f"{top}/slots/{slot}/{tree.names[path]}"
                    moment = leaf(np.full(variable.shape, number, np.float32), name)
                    leaves[attributes(name)] = replace(moment, role="slot", slot=slot, of=path)
    return Tree(leaves)


class TestTf2rl(LayoutContract):
    name = "tf2rl"

    @pytest.fixture
    def tree(self) -> Tree:
        return with_optimizers(sac(NEW), {"actor": 3, "qf1": 5, "qf2": 5})


def agent_of(tree: Tree) -> dict[str, object]:
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    assert binding.layout == "tf2rl"
    assert {move.source for move in binding.moves.moves} | binding.consumed == set(tree)
    return {display(path): result for path, result in canonical_tree(tree, binding.moves).items()}


@pytest.mark.parametrize("log_std", ["out_logstd", "out_log_std"])
@pytest.mark.parametrize("critics", [NEW, OLD], ids=["1.1", "1.0"])
def test_its_actions_are_tanh_of_the_mean(critics: dict[str, int], log_std: str) -> None:
    tree = sac(critics, log_std)
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    wiring = NetworkSettings(("relu",), binding.facts.head, 1e-3, (-2.0, -2.0), (2.0, 2.0))
    policy = next(part for part in binding.parts if part.title == "actor")
    actions, _ = numpy_backend.build(policy_network(agent, policy, wiring)).step(observations())
    x = observations()
    for name in ("base_layers/0", "base_layers/1", "out_mean"):
        kernel, bias = (tree[attributes(f"policy/actor/{name}/{part}")] for part in ("kernel", "bias"))
        assert isinstance(kernel, Leaf)
        assert isinstance(bias, Leaf)
        x = x @ kernel.array() + bias.array()
        x = np.maximum(x, 0) if name != "out_mean" else x
    same(np.asarray(actions), 2 * np.tanh(x))
    assert {part.title for part in binding.parts} >= {"actor", "critic/q1", "critic/q2"}
    assert "temperature/log_alpha" in agent_of(tree)


def test_two_optimizers_of_the_critics_become_one() -> None:
    tree = with_optimizers(sac(NEW), {"actor": 3, "qf1": 5, "qf2": 5})
    agent = agent_of(tree)
    for number, head in enumerate(("q1", "q2"), start=1):
        moment = agent[f"critic_optimizer/m/{head}/0/kernel"]
        assert isinstance(moment, Leaf)
        assert set(moment.array().reshape(-1)) == {float(number)}
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    whole = canonical_tree(tree, binding.moves)
    plan = td3.plan_torch(binding, whole, {})
    assert not plan.missing
    written = apply_plan(whole, plan)
    again = recognize_tree(written, "a.pt")
    assert again is not None
    back = {display(path) for path in canonical_tree(written, again.moves)}
    assert {name for name in agent if "/m/" in name or name.startswith("actor/")} <= back


def test_optimizers_that_differ_are_not_made_one(golden: Golden) -> None:
    from ckpttool.core import MappingError

    with pytest.raises(MappingError) as caught:
        agent_of(with_optimizers(sac(NEW), {"qf1": 5, "qf2": 6}))
    golden(caught.value)


def test_td3_is_not_its_layout() -> None:
    generator = np.random.default_rng(0)
    tree = tensorflow_tree(dense(generator, "policy/actor/l1", 3, 2))
    assert tf2rl.recognise(tree, "ckpt-1") is None


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ('{"env_name": "Pendulum-v1", "max_steps": 1000}', "Pendulum-v1"),
        ("max_steps: 1000\nenv_name: Pendulum-v1\n", "Pendulum-v1"),
        ('{"env_name": "os:Pendulum-v1"}', None),
        ('{"max_steps": 1000}', None),
        ("--lr 3e-4 {[ no settings at all", None),
        ("", None),
    ],
    ids=["json", "yaml", "unsafe", "no name", "no settings", "empty"],
)
def test_the_arguments_name_the_environment(
    tmp_path: Path, text: str, env: str | None, golden: Golden
) -> None:
    for end in (".index", ".data-00000-of-00001"):
        shutil.copy(f"{TF_SAMPLE}{end}", tmp_path / f"ckpt-1{end}")
    (tmp_path / "args.txt").write_text(text)
    known = restore_agent(str(tmp_path / "ckpt-1"))
    assert known.known.env == ({"id": env} if env else None)
    if env:
        assert "args.txt" in "\n".join(known.notes)
        assert evaluate(str(tmp_path / "ckpt-1"), protocol=Protocol(episodes=1)).env == env
    else:
        with pytest.raises(UsageError) as caught:
            evaluate(str(tmp_path / "ckpt-1"), protocol=Protocol(episodes=1))
        golden(caught.value)
