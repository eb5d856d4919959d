"""ElegantRL networks since 0.3.5: act.pth, cri.pth, actor__N.pt, each a module or a state_dict.

Source: github.com/AI4Finance-Foundation/ElegantRL, elegantrl/agents/AgentBase.py
(`save_or_load_agent`), elegantrl/train/evaluator.py, elegantrl/agents/net.py: observations become
`(x - state_avg) / state_std`, an action is tanh of the last layer (TD3, DDPG, PPO, A2C) or of the
mean, the first half of the output of SAC's last layer, ReLU between layers. Files of earlier
versions (actor.pth) have no distinguishing names.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.tree import Leaf, Tree, attr, key
from ckpttool.libraries import optimizers_read
from ckpttool.libraries.recognize import LayoutTable, PickledModule, bind, read_pickled_module
from ckpttool.libraries.schema import DISCRETE_CHOICE, LEFT_OPEN, AgentMetadata, RecognizedAgent
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
    title="ElegantRL's act.pth, cri.pth, actor__N.pt (since 0.3.5): one network per file",
    framework="torch",
    components={"actor": "actor", "critic": "critic/q1", "value": "value"},
    optimizers={},
    counters={},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=LEFT_OPEN["elegantrl"]),
    optimizer=optimizers_read.from_torch,
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
# ActorSAC: an encoder and one layer that outputs the mean and the log standard deviation.
_SAC = replace(TABLE, components={"actor/net_s+actor/net_a": "actor"}, joined=True)
_SOFT = "net_s.0.weight"


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # what a network is stands in it
    """Return the recognised agent of a network that has ElegantRL's statistics beside its layers."""
    module = read_pickled_module(tree)
    state = tree if module is None else module.state
    names = {str(path[0].value): leaf for path, leaf in state.tensors() if len(path) == 1}
    if not names.keys() >= _STATISTICS or not names.keys() & {"net.0.weight", _SOFT}:
        return None
    component = _find_component(names)
    binding = bind(state.under((key(component),)), _SAC if _SOFT in names else TABLE)
    if binding is None:
        return None
    binding = replace(
        binding.moved(lambda path: path[1:]),
        evidence=f"one {component} with state_avg and state_std",
        unplaced=_list_refusals(tree, names, component),
    )
    return binding if module is None else _add_activations(module.bound(binding), module)


def _find_component(names: dict[str, Leaf]) -> str:
    if "value_avg" not in names:
        return "actor"
    first = names.get("net.0.weight")
    alone = first is not None and first.shape[-1:] == (names["state_avg"].size,)
    return "value" if alone else "critic"


def _list_refusals(tree: Tree, names: dict[str, Leaf], component: str) -> dict[str, tuple[str, ...]]:
    """Return why a network cannot be run from its layers alone."""
    made = tree.containers.get(())
    if made is not None and "Discrete" in str(made.name):
        return {component: (DISCRETE_CHOICE,)}
    scaled = [name for name in ("value_avg", "value_std") if name in names]
    return {component: (f"operations after the last layer: {', '.join(scaled)}",)} if scaled else {}


def _add_activations(binding: RecognizedAgent, module: PickledModule) -> RecognizedAgent:
    """Return the binding with the activations of the module's classes; refuse other classes."""
    net = "net" if "net" in module.classes else "net_s"
    parts = [each for each in module.children(net) if not module.classes[each].endswith(".Linear")]
    found = {each: module.activation(each) for each in parts}
    known = tuple(name for name in found.values() if name is not None)
    if len(known) != len(found):
        strange = (f"{module.classes[each]} ({each})" for each, name in found.items() if name is None)
        return binding.refused(binding.parts[0].component, *strange)
    if not known:
        return binding
    return replace(binding, facts=binding.facts.read(net, activations=known))


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the state_dict that Actor, ActorSAC or ActorPPO loads strictly.

    Only the policy is written: ElegantRL has a separate file for every network. Raise UnsupportedError
    for a policy that these classes cannot represent.
    """
    places = {ours: (key(f"state_{theirs}"),) for theirs, ours in (("avg", "mean"), ("std", "std"))}
    rows: list[NetworkRow | SingleTensorRow | StatisticsRow] = [
        StatisticsRow(places, "float32", required=True)
    ]
    if is_gaussian(binding):
        rows.append(NetworkRow("actor", (), LayerNames("net_s.{s}", "net_a.0", joined=True)))
    else:
        if isinstance(agent.get((attr("actor"), attr("log_std"))), Leaf):
            rows.append(SingleTensorRow("actor/log_std", (key("action_std_log"),), (1, -1)))
        rows.append(NetworkRow("actor", (), LayerNames("net.{s}", "net.{s}")))
    return plan_torch_file(
        WritingTable("ElegantRL", rows, "affine", notes=(_POLICY,)), binding, agent, settings
    )


_POLICY = "the output is the policy's state_dict; ElegantRL itself pickles the whole policy (act.pth)"
