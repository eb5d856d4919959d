"""TorchRL's policies: state_dicts of its actors, alone or in a loss module.

Sources, in github.com/pytorch/rl: torchrl/modules/tensordict_module (ProbabilisticActor, QValueActor: of a
sequence of modules, `module.0.module` is the network; DistributionalQValueActor adds a log-softmax over the
atoms, the first axis of its outputs [atoms, actions], and their values `support`; EGreedyModule follows an
actor; TanhModule: tanh mapped to the buffers action_low and action_high), torchrl/modules/models/models.py
(MLP: Linear, then norm and activation, numbered as in a Sequential), tensordict/nn/distributions
(NormalParamExtractor: the last layer's outputs are the means, then the deviations;
AddStateIndependentNormalScale: they are the means),
torchrl/objectives (`actor_network_params`, `value_network_params` and their targets).

The distribution, the activations and the bounds are arguments of a program, in no file. A network alone may
be a Q-network, logits, an action, or means and deviations: the number of the environment's actions shows it.
TanhNormal is tanh mapped to the bounds without tanh_loc, TanhDelta where the bounds are symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.sidecar import NO_ACTION_MAP, NO_ACTIVATIONS, NO_BOUNDS
from ckpttool.core.tree import Leaf, Path, Tree, attr
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind, list_leaves
from ckpttool.libraries.recognize import MODULE_LAYER, LayoutTable
from ckpttool.libraries.schema import AgentMetadata, AgentNetwork, RecognizedAgent, read_numbers
from ckpttool.mapping.rules import KEEP, Move, Permute, Reshape, chain_rules

TABLE = LayoutTable(
    name="torchrl",
    plays=("TD3", "SAC", "PPO", "DQN", "C51"),
    title="TorchRL's actors: module.0.module, alone or in a loss module",
    framework="torch",
    facts=AgentMetadata(head="", hidden="", epsilon=1e-5, lacks=(NO_ACTIVATIONS, NO_ACTION_MAP, NO_BOUNDS)),
    seen="written by TorchRL 0.14.1: ProbabilisticActor, QValueActor, DistributionalQValueActor, TanhModule, "
    "DQNLoss, SACLoss, TD3Loss, ClipPPOLoss",
)

# Loss modules' parameters: what their networks are where the module shows it.
_LOSS = {
    "actor_network_params": "actor",
    "target_actor_network_params": "actor_target",
    "value_network_params": "critic/q1",
    "target_value_network_params": "critic_target/q1",
}
# Buffers of exploration, coefficients of losses, and targets of entropy: no action depends on them.
_IDLE = deferred.compile(
    r"(.*/)?(eps|eps_init|eps_end|sigma|sigma_init|sigma_end|annealing_num_steps|spec/.*|entropy_coeff|critic_coeff"
    r"|clip_epsilon|log_alpha|alpha_init|_target_entropy|max_action|min_action|_?eps_threshold)"
)
# ObservationNorm and VecNorm (torchrl/envs/transforms), whose formula is in no file.
_STATISTICS = deferred.compile(r"(^|[/_])(loc|scale|sum|ssq|mean|var|std)$")
_SLOW = deferred.compile(r"(^|[_/])target_")
_SCALE = "state_independent_scale"


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a state_dict whose network is `module.0.module`."""
    numbers_by_root: dict[str, list[int]] = {}
    for path, _ in tree.tensors():
        if (match := MODULE_LAYER.fullmatch(tree.names[path])) is not None:
            numbers_by_root.setdefault(match[1], []).append(int(match[2]))
    if not numbers_by_root:
        return None
    roles = {root: _LOSS.get(root.removesuffix("/").rpartition("/")[2]) for root in numbers_by_root}
    lone = [root for root, role in roles.items() if role is None and not _SLOW.search(root)]
    numbers = {"/".join(leaf.segments): leaf.path for leaf in list_leaves(tree)}
    supports = [path for name, path in numbers.items() if name.rpartition("/")[2] == "support"]
    chooses = bool(supports) or any(name.rpartition("/")[2] == "eps_init" for name in numbers)
    if lone:
        roles = {lone[0]: "critic/q1" if chooses else "actor"}
    table = replace(
        TABLE, components={f"{root}module/0/module": role for root, role in roles.items() if role is not None}
    )
    binding = bind(tree, table)
    if binding is None or not {"actor", "critic/q1"} & {part.title for part in binding.parts}:
        return None
    component = binding.parts[0].component
    if len(lone) > 1 or (lone and len(numbers_by_root) > len(lone) + 1):
        binding = binding.refused(component, f"one of several networks: {', '.join(lone)}")
    for root in roles:
        order = list(dict.fromkeys(numbers_by_root[root]))
        if order != list(range(0, 2 * len(order), 2)):
            reason = f"other modules than one activation between layers {', '.join(map(str, order))}"
            binding = binding.refused(component, reason)
    binding = _add_outputs(binding, tree, numbers, supports, chooses="critic/q1" in roles.values())
    idle = frozenset(path for path in tree if _IDLE.fullmatch(tree.names[path]))
    used = binding.consumed | idle | {move.source for move in binding.moves.moves}
    behind = [
        name
        for name, path in numbers.items()
        if path not in used and (_STATISTICS.search(name) or any(_follows(root, name) for root in roles))
    ]
    binding = replace(binding, consumed=binding.consumed | idle)
    return binding.refused(component, *behind) if behind else binding


def _follows(root: str, name: str) -> bool:
    """Return whether a tensor is of a module behind the network at this root."""
    return re.match(rf"{re.escape(root)}module/[1-9]\d*/", name) is not None


def _add_outputs(
    binding: RecognizedAgent, tree: Tree, numbers: Mapping[str, Path], supports: list[Path], *, chooses: bool
) -> RecognizedAgent:
    """Return the binding with what the file states of the outputs: values, bounds, a deviation."""
    if supports:
        support = read_numbers(tree[supports[0]])
        own = {path for path in supports if read_numbers(tree[path]) == support}
        if own != {*supports} or not any(re.fullmatch(r"(.*/)?module/2/support", name) for name in numbers):
            reason = "a support without the log-softmax of DistributionalQValueActor"
            return binding.choosing(tree).refused("critic", reason)
        binding = binding.choosing(tree, "atoms", support, len(support), tree.names[supports[0]])
        move = Move(supports[0], (attr("critic"), attr("q_support")), KEEP)
        moves = tuple(_turn_atoms(move, tree, binding, len(support)) for move in binding.moves.moves)
        moves = (*moves, move)
        binding = replace(binding, moves=replace(binding.moves, moves=moves))
        return replace(binding, consumed=binding.consumed | {*supports[1:]})
    if chooses:
        return binding.choosing(tree)
    low, high = (
        next(
            (path for name, path in numbers.items() if re.fullmatch(rf"(.*/)?module/1/action_{end}", name)),
            None,
        )
        for end in ("low", "high")
    )
    scale = next((path for name, path in numbers.items() if name.rpartition("/")[2] == _SCALE), None)
    facts, policy = binding.facts, binding.policy
    if low is None and scale is None and policy is not None and _last_width(binding, policy, tree) % 2 == 0:
        facts = facts.lacking(schema.HALVES)
    if low is not None and high is not None:
        where = tree.names[low].rpartition("/")[0]
        facts = facts.bounded(where, read_numbers(tree[low]), read_numbers(tree[high])) or facts
        facts = facts.without_lack("action bounds", "action map").read(where, head="affine")
        ends = {
            path for name, path in numbers.items() if re.fullmatch(r"(.*/)?module/1/action_(low|high)", name)
        }
        binding = replace(binding, consumed=binding.consumed | ends)
    if scale is not None:
        binding = binding.noted("the deviation state_independent_scale was not converted")
        scales = {path for name, path in numbers.items() if name.rpartition("/")[2] == _SCALE}
        binding = binding.without({tree.names[path] for path in scales})
        binding = replace(binding, consumed=binding.consumed | scales)
    return replace(binding, facts=facts)


def _last_width(binding: RecognizedAgent, part: AgentNetwork, tree: Tree) -> int:
    kernel = schema.canonical_weight_path(part, len(part.layers) - 1, "kernel")
    leaf = next(tree[move.source] for move in binding.moves.moves if move.target == kernel)
    return leaf.shape[0] if isinstance(leaf, Leaf) else 0


def _turn_atoms(move: Move, tree: Tree, binding: RecognizedAgent, atoms: int) -> Move:
    """Return the move with the atoms of each action together, which the library has by their numbers."""
    part = next(part for part in binding.parts if part.title == "critic/q1")
    last = len(part.layers) - 1
    for name, rank in (("kernel", 2), ("bias", 1)):
        if move.target == schema.canonical_weight_path(part, last, name):
            leaf = move.rule.leaf(tree[move.source])
            if isinstance(leaf, Leaf):
                before, width = leaf.shape[:-1], leaf.shape[-1]
                order = (*range(rank - 1), rank, rank - 1)
                split = Reshape((*before, atoms, width // atoms))
                return replace(
                    move, rule=chain_rules(move.rule, split, Permute(order), Reshape((*before, width)))
                )
    return move
