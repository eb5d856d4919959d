"""RLlib's agents of the old API stack: the weights of one policy (SAC, PPO, DDPG, TD3), on PyTorch.

Sources, in github.com/ray-project/ray: rllib/models/torch/fcnet.py (`_hidden_layers`, `_logits`, a value
branch that SAC does not use), rllib/algorithms/sac/sac_torch_model.py (`action_model`, `q_net`, `twin_q_net`,
`log_alpha`), rllib/algorithms/ddpg/ddpg_torch_model.py (`policy_model`, `q_model`, `twin_q_model`: sigmoid of
twice the last layer from 0 to 1 is tanh of it from -1 to 1), rllib/models/torch/torch_action_dist.py,
rllib/utils/filter.py (`MeanStdFilter`: `(x - mean) / (std + 1e-8)`), rllib/utils/serialization.py (spaces: an
array is zlib of a .npy file in base64), rllib/utils/spaces/space_utils.py (`unsquash_action`).
"""

from __future__ import annotations

import binascii
import zlib
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.layouts import activations, optimizers
from ckpttool.layouts.canonical import Binding, Facts, Norm, settings_stay
from ckpttool.layouts.small_arrays import numbers, tensor, unpacked
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.ledger import NO_BOUNDS, NO_ENVIRONMENT, NO_STATISTICS, unknown
from ckpttool.tree import Tree

TABLE = Table(
    name="rllib_policy",
    title="RLlib policy of the old API stack (SAC, PPO; DDPG, TD3)",
    framework="torch",
    components={},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5),
    optimizer=optimizers.from_torch,
    seen="SAC and PPO as Ray 2.60 saves them",
)
_PPO = Facts(head="clip_affine", hidden="tanh", epsilon=1e-5)
_LARGEST = 1 << 16  # bytes of an unpacked bound
_DTYPES = {"<f4": "float32", "<f8": "float64"}
_SMALL = 1e-8  # rllib/utils/numpy.py, SMALL_NUMBER

Said = Mapping[str, Leaf | ValueLeaf]


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the folder's name says nothing
    """Return the way to the canonical agent of a checkpoint with one policy's weights."""
    names = [tree.names[path].split("/") for path, _ in tree.tensors()]
    roots = {"/".join((*n[:2], "")) for n in names if n[0] == "policies" and n[2:3] == ["weights"]}
    # A policy's own folder has its weights at the top.
    roots = roots or {"" for n in names if n[0] == "weights"}
    if len(roots) != 1:
        return None
    (policy,) = roots
    said = {tree.names[path]: leaf for path, leaf in tree.items()}
    table = _table(f"{policy}weights", said)
    binding = bind(tree, table) if table is not None else None
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    facts = _statistics(_bounds(_settings(binding.facts, said, policy), said, policy), said, policy)
    return _without_settings(_own_activations(replace(binding, facts=facts), said, policy), tree)


def _own_activations(binding: Binding, said: Said, policy: str) -> Binding:
    """Refuse Q-functions whose activation is another one than the policy's: an agent has one for both."""
    for config in ("algorithm_state/config", f"{policy}policy_spec/config"):
        names = ("q_model_config/fcnet_activation", "critic_hidden_activation")
        theirs = next((name for each in names if (name := _text(said, f"{config}/{each}"))), None)
        if binding.facts.head == "affine" and theirs not in (None, binding.facts.hidden):
            reason = f"hidden layers with {theirs}, where the policy has {binding.facts.hidden}"
            return binding.refused("critic", reason)
    return binding


def _table(weights: str, said: Said) -> Table | None:
    """Return the table of the algorithm whose networks the weights are, by their names."""

    def dense(network: str, layers: str = "_hidden_layers", last: str = "_logits") -> str:
        return f"{weights}/{network}{layers}+{weights}/{network}{last}"

    if any(name.startswith(f"{weights}/action_model/") for name in said):
        q = {"q_net": "q1", "twin_q_net": "q2"}
        critics = {dense(f"{name}/"): f"critic/{head}" for name, head in q.items()}
        return replace(
            TABLE,
            components={dense("action_model/"): "actor", **critics},
            tensors={f"{weights}/log_alpha": "temperature/log_alpha"},
            joined=True,
        )
    if any(name.startswith(f"{weights}/policy_model/") for name in said):
        names = {"policy_model": "actor", "q_model": "critic/q1", "twin_q_model": "critic/q2"}
        return replace(TABLE, components={f"{weights}/{n}": ours for n, ours in names.items()})
    if f"{weights}/_logits/_model/0/weight" in said:
        value = f"{weights}/_value_branch_separate+{weights}/_value_branch"
        names = {dense(""): "actor", value: "value"}
        free = f"{weights}/_append_free_log_std/log_std"  # misc.py, AppendBiasLayer
        tensors = {free: "actor/log_std"} if free in said else {}
        return replace(TABLE, components=names, facts=_PPO, joined=not tensors, tensors=tensors)
    return None


def _settings(facts: Facts, said: Said, policy: str) -> Facts:
    """Return the facts with the environment and the activation of the algorithm's or the policy's config."""
    for config in ("algorithm_state/config", f"{policy}policy_spec/config"):
        env = _text(said, f"{config}/env")
        if env is not None and ":" not in env and facts.env is None:
            facts = facts.read(config, env=env)
        model = "policy_model_config" if facts.head == "affine" else "model"
        # fcnet.py: of a network of post layers alone, theirs counts.
        post = not any(name.startswith(f"{config}/{model}/fcnet_hiddens/") for name in said)
        post = post and any(name.startswith(f"{config}/{model}/post_fcnet_hiddens/") for name in said)
        activation = _text(said, f"{config}/{model}/{'post_' if post else ''}fcnet_activation")
        # DDPG's and TD3's (rllib/algorithms/ddpg/ddpg.py).
        activation = activation or _text(said, f"{config}/actor_hidden_activation")
        if activation is not None and "hidden" not in facts.said:
            facts = facts.read(config, hidden=activations.RLLIB.get(activation, activation))
    return facts if facts.env is not None else facts.lacking(NO_ENVIRONMENT)


def _text(said: Said, name: str) -> str | None:
    found = said.get(name)
    return found.value if isinstance(found, ValueLeaf) and isinstance(found.value, str) else None


def _bounds(facts: Facts, said: Said, policy: str) -> Facts:
    space = f"{policy}policy_spec/action_space/space"
    low, high = (
        _array(_text(said, f"{space}/{end}"), _text(said, f"{space}/dtype")) for end in ("low", "high")
    )
    return facts.bounded(space, low, high) or facts.lacking(NO_BOUNDS)


def _array(text: str | None, dtype: str | None) -> tuple[float, ...]:
    """Return the numbers of an array as RLlib serializes it; none if it is anything else."""
    if text is None or dtype not in _DTYPES:
        return ()
    try:
        data = zlib.decompressobj().decompress(binascii.a2b_base64(text), _LARGEST)
    except (zlib.error, ValueError):
        return ()
    # numpy/lib/format.py, version 1: the header's length stands behind the magic and the version.
    if not data.startswith(b"\x93NUMPY\x01\x00") or len(data) < 10:
        return ()
    start = 10 + int.from_bytes(data[8:10], "little")
    if f"'{dtype}'".encode() not in data[10:start]:
        return ()
    return unpacked(data[start:], _DTYPES[dtype])


def _statistics(facts: Facts, said: Said, policy: str) -> Facts:
    """Return the facts with the running statistics of a MeanStdFilter, if there is one."""
    place = f"algorithm_state/worker/filters/{policy.rstrip('/').rpartition('/')[2]}/running_stats"
    if f"{place}/mean_array" not in said:
        return facts
    pushes = said.get(f"{place}/num_pushes")
    if not isinstance(pushes, ValueLeaf) or not pushes.value:
        return facts.lacking(
            unknown("observation statistics", "statistics of observations: the filter saw none")
        )
    norm = mean_std(said, place)
    return facts.lacking(NO_STATISTICS) if norm is None else facts.read(place, norm=norm)


def mean_std(said: Said, place: str) -> Norm | None:
    """Return the statistics of a RunningStat at `place`: arrays, or the texts that RLlib makes of them.

    None if it is incomplete or of no observation.
    """
    rows = [said.get(f"{place}/{name}") for name in ("mean_array", "sum_sq_diff_array")]
    pushes = said.get(f"{place}/num_pushes")
    texts = [leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in rows]
    mean, squares = (
        _array(text, "<f8") if isinstance(text, str) else numbers(leaf)
        for text, leaf in zip(texts, rows, strict=True)
    )
    count = pushes.value if isinstance(pushes, ValueLeaf) and isinstance(pushes.value, int) else 0
    if count < 1 or not mean or len(mean) != len(squares):
        return None
    variances = [s / (count - 1) for s in squares] if count > 1 else [m * m for m in mean]
    return Norm(tensor(mean, place), tensor(variances, place), epsilon=_SMALL, outside=True)


def _without_settings(binding: Binding, tree: Tree) -> Binding:
    """Leave what only training reads, and SAC's value branches, which nothing does."""
    moved = {move.source for move in binding.moves.moves}
    idle = {path for path, _ in tree.tensors() if "/_value_branch/" in tree.names[path]} - moved
    left = {path for path, _ in tree.plain()}
    left |= {path for path, leaf in tree.tensors() if leaf.role in ("other", "buffer")}
    left |= {path for path, _ in tree.tensors() if tree.names[path].endswith("/weights/target_entropy")}
    binding = binding.without({tree.names[path] for path in idle})
    consumed = binding.consumed | frozenset((idle | left) - moved)
    return replace(binding.noted(settings_stay(len(left - moved))), consumed=consumed)
