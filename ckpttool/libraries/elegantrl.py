"""ElegantRL networks since 0.3.5: act.pth, cri.pth, actor__N.pt, each a module or a state_dict.

Source: github.com/AI4Finance-Foundation/ElegantRL, elegantrl/agents/AgentBase.py
(`save_or_load_agent`), elegantrl/train/evaluator.py, elegantrl/agents/net.py: observations become
`(x - state_avg) / state_std`, an action is tanh of the last layer (TD3, DDPG, PPO, A2C) or of the
mean, the first half of the output of SAC's last layer, ReLU between layers. Files of earlier
versions (actor.pth) have no distinguishing names.

Discrete actions: ActorDiscretePPO's largest logit, and the largest value of QNet, QNetDuel, QNetTwin and
QNetTwinDuel, whose `forward` uses the first of two networks. No activation follows `net_state`
(`build_mlp`, `if_raw_out`); values become `value * value_std + value_avg`, 1 and 0 by default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from ckpttool.core import deferred
from ckpttool.core.tree import Leaf, Tree, attr, key
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable, PickledModule, read_pickled_module
from ckpttool.libraries.schema import LEFT_OPEN, AgentMetadata, RecognizedAgent, read_numbers
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    StatisticsRow,
    WritingTable,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

TABLE = LayoutTable(
    name="elegantrl",
    statistics="in the file",
    plays=("TD3", "DDPG", "SAC", "PPO", "A2C", "DQN", "double DQN", "dueling DQN", "D3QN"),
    writes=("TD3", "DDPG", "SAC", "continuous PPO"),
    title="ElegantRL's act.pth, cri.pth, actor__N.pt (since 0.3.5): one network per file",
    framework="torch",
    components={"actor": "actor", "critic": "critic/q1", "value": "value"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=LEFT_OPEN["elegantrl"]),
    tensors={
        **{
            f"{name}/state_{statistic}": f"normalizer/{canonical}"
            for name in ("actor", "critic", "value")
            for statistic, canonical in {"avg": "mean", "std": "std"}.items()
        },
        "actor/action_std_log": "actor/log_std",
    },
    seen="written by ElegantRL 0.3.6: TD3, DDPG, SAC, PPO, A2C, discrete PPO, four classes of DQN",
)

_STATISTICS = {"state_avg", "state_std"}
_SCALES = ("value_avg", "value_std")
# ActorSAC: an encoder and one layer that outputs the mean and the log standard deviation.
_SAC = replace(TABLE, components={"actor/net_s+actor/net_a": "actor"}, joined=True)
_SOFT = "net_s.0.weight"
# QNetDuel, QNetTwin and QNetTwinDuel: an encoder, then values or advantages, and the state's value.
_ENCODED = "net_state.0.weight"
_STREAMS = deferred.compile(r"(net_(val|adv)1?)\.0\.weight")
_HEADS = {"val": "q1", "adv": "q2"}
_SECOND = deferred.compile(r"net_(val|adv)2\..*")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # what a network is stands in it
    """Return the recognised agent of a network that has ElegantRL's statistics beside its layers."""
    module = read_pickled_module(tree)
    state = tree if module is None else module.state
    names = {str(path[0].value): leaf for path, leaf in state.tensors() if len(path) == 1}
    if not names.keys() >= _STATISTICS or not names.keys() & {"net.0.weight", _SOFT, _ENCODED}:
        return None
    component, chooses = _find_component(names)
    binding = bind(state.under((key(component),)), _choose_table(names))
    if binding is None:
        return None
    second = frozenset(path for path in state if path and _SECOND.fullmatch(str(path[0].value)))
    binding = replace(
        binding.moved(lambda path: path[1:]),
        evidence=f"one {component} with state_avg and state_std",
        unplaced=_list_refusals(names, component, chooses=chooses),
    )
    if second:
        binding = replace(binding, consumed=binding.consumed | second)
        binding = binding.noted(
            "the second Q-function of double DQN, which only training uses, was not converted"
        )
    record = tree.containers.get(())
    if chooses:
        binding = replace(binding, consumed=binding.consumed | {(key(name),) for name in _SCALES})
        dueling = any(part.head == "q2" for part in binding.parts)
        binding = binding.choosing(state, "dueling" if dueling else "values", where="net_adv")
        binding = _add_encoded_activations(binding, module)
        return binding if module is None else module.bound(binding)
    if record is not None and "Discrete" in str(record.name):
        binding = binding.choosing(state)
    return binding if module is None else _add_activations(module.bound(binding), module)


def _choose_table(names: Mapping[str, Leaf]) -> LayoutTable:
    """Return the table of a network's class: with one chain, or with an encoder and heads."""
    if _ENCODED not in names:
        return _SAC if _SOFT in names else TABLE
    streams = filter(None, map(_STREAMS.fullmatch, names))
    heads = {f"critic/net_state+critic/{stream[1]}": f"critic/{_HEADS[stream[2]]}" for stream in streams}
    return replace(TABLE, components=heads)


def _find_component(names: Mapping[str, Leaf]) -> tuple[str, bool]:
    """Return the kind of the network, and whether it is a Q-network of discrete actions."""
    if "value_avg" not in names:
        return "actor", False
    kernels = [
        leaf for name, leaf in names.items() if re.fullmatch(r"net\..*weight", name) and len(leaf.shape) == 2
    ]
    if not kernels:
        return "critic", _ENCODED in names
    alone = kernels[0].shape[-1:] == (names["state_avg"].size,)
    return ("value" if alone and kernels[-1].shape[0] == 1 else "critic"), alone and kernels[-1].shape[0] > 1


def _list_refusals(names: Mapping[str, Leaf], component: str, *, chooses: bool) -> dict[str, tuple[str, ...]]:
    """Return why a network cannot be run from its layers alone."""
    scaled = [name for name in _SCALES if name in names]
    if chooses and [read_numbers(names[name]) for name in scaled] == [(0.0,), (1.0,)]:
        return {}
    return {component: (f"operations after the last layer: {', '.join(scaled)}",)} if scaled else {}


def _add_encoded_activations(binding: RecognizedAgent, module: PickledModule | None) -> RecognizedAgent:
    """Return the binding with the activation after each hidden layer, by its module's class or number."""
    acting = next(part for part in binding.parts if part.acts)
    names: list[str] = []
    for layer, follower in pairwise(acting.layers):
        inside = layer.name[:-1] == follower.name[:-1]
        after = ".".join((*layer.name[:-1], str(int(layer.name[-1]) + 1)))
        if module is None or after not in module.classes:
            names.append("relu" if inside else "linear")
        elif (activation := module.activation(after)) is None:
            return binding.refused("critic", f"{module.classes[after]} ({after})")
        else:
            names.append(activation)
    if module is None:
        return replace(binding, facts=binding.facts._replace(activations=tuple(names)))
    return replace(binding, facts=binding.facts.read("the module's classes", activations=tuple(names)))


def _add_activations(binding: RecognizedAgent, module: PickledModule) -> RecognizedAgent:
    """Return the binding with the activations of the module's classes; refuse other classes."""
    net = "net" if "net" in module.classes else "net_s"
    parts = [child for child in module.children(net) if not module.classes[child].endswith(".Linear")]
    functions = {part: module.activation(part) for part in parts}
    known = tuple(name for name in functions.values() if name is not None)
    if len(known) != len(functions):
        strange = (f"{module.classes[part]} ({part})" for part, name in functions.items() if name is None)
        return binding.refused(binding.parts[0].component, *strange)
    if not known:
        return binding
    return replace(binding, facts=binding.facts.read(net, activations=known))


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the state_dict that Actor, ActorSAC or ActorPPO loads strictly.

    Only the policy is written: ElegantRL has a separate file for every network. Raise UnsupportedError
    for a policy that these classes cannot represent.
    """
    places = {canonical: (key(f"state_{name}"),) for name, canonical in (("avg", "mean"), ("std", "std"))}
    rows: list[NetworkRow | SingleTensorRow | StatisticsRow] = [
        StatisticsRow(places, "float32", required=True)
    ]
    if is_gaussian(binding):
        rows.append(NetworkRow("actor", (), LayerNames("net_s.{s}", "net_a.0", joined=True)))
    else:
        if isinstance(agent.get((attr("actor"), attr("log_std"))), Leaf):
            rows.append(SingleTensorRow("actor/log_std", (key("action_std_log"),), (1, -1)))
        rows.append(NetworkRow("actor", (), LayerNames("net.{s}")))
    return plan_torch_file(
        WritingTable("ElegantRL", rows, "affine", notes=(_POLICY,)), binding, agent, settings
    )


_POLICY = "the output is the policy's state_dict; ElegantRL itself pickles the whole policy (act.pth)"
