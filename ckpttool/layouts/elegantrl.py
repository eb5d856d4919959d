"""ElegantRL's networks since 0.3.5: act.pth, cri.pth, actor__N.pt, each one whole module, or its state_dict.

Source: github.com/AI4Finance-Foundation/ElegantRL, elegantrl/agents/AgentBase.py (`save_or_load_agent`),
elegantrl/train/evaluator.py, elegantrl/agents/net.py: observations become `(x - state_avg) / state_std`, an
action is tanh of the last layer (TD3, DDPG, PPO, A2C), ReLU between layers. SAC's last layer gives the mean
and its deviation. Earlier versions' files (actor.pth) hold nothing that tells them from another Sequential.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.layouts import adam
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.whole_module import Whole, whole
from ckpttool.leaf import Leaf, key
from ckpttool.tree import Tree

TABLE = Table(
    name="elegantrl",
    title="ElegantRL's act.pth, cri.pth, actor__N.pt (since 0.3.5): one network a file",
    framework="torch",
    components={"actor": "actor", "critic": "critic/q1", "value": "value"},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5, lacks=("the action bounds",)),
    optimizer=adam.from_torch,
    tensors={
        **{
            f"{name}/state_{theirs}": f"normalizer/{ours}"
            for name in ("actor", "critic", "value")
            for theirs, ours in {"avg": "mean", "std": "std"}.items()
        },
        "actor/action_std_log": "actor/log_std",
    },
    seen="written by ElegantRL 0.3.6: TD3, DDPG, SAC, PPO, A2C",
)

_STATISTICS = {"state_avg", "state_std"}


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # what a network is stands in it
    """Return the way to the canonical agent of a network with ElegantRL's statistics beside its layers."""
    module = whole(tree)
    state = tree if module is None else module.state
    names = {str(path[0].value): leaf for path, leaf in state.tensors() if len(path) == 1}
    if not names.keys() >= _STATISTICS or not names.keys() & {"net.0.weight", "net_s.0.weight"}:
        return None
    component = _component(names)
    binding = bind(state.under((key(component),)), TABLE)
    if binding is None:
        return None
    binding = replace(
        binding.moved(lambda path: path[1:]),
        evidence=f"one {component} with state_avg and state_std",
        unplaced=_strange(tree, names, component),
    )
    return binding if module is None else _activated(module.bound(binding), module)


def _component(names: dict[str, Leaf]) -> str:
    if "value_avg" not in names:
        return "actor"
    first = names.get("net.0.weight")
    alone = first is not None and first.shape[-1:] == (names["state_avg"].size,)
    return "value" if alone else "critic"


def _strange(tree: Tree, names: dict[str, Leaf], component: str) -> dict[str, tuple[str, ...]]:
    """Return why a network cannot be run as its layers say."""
    made = tree.containers.get(())
    if "net_s.0.weight" in names:
        return {component: ("a last layer that gives the mean and its deviation",)}
    if made is not None and "Discrete" in str(made.name):
        return {component: ("the choice among discrete actions",)}
    scaled = [name for name in ("value_avg", "value_std") if name in names]
    return {component: (f"what follows the last layer: {', '.join(scaled)}",)} if scaled else {}


def _activated(binding: Binding, module: Whole) -> Binding:
    """Return the binding with the activations that the module's classes say."""
    parts = [each for each in module.children("net") if not module.classes[each].endswith(".Linear")]
    found = [module.activation(each) for each in parts]
    known = tuple(name for name in found if name is not None)
    if not known or len(known) != len(found):
        return binding
    return replace(binding, facts=binding.facts.read("net", activations=known))
