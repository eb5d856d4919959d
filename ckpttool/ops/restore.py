"""Opens a checkpoint as an agent: tree, layout, canonical agent and the sidecar that belongs to it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ckpttool import plugins, sidecar
from ckpttool.agents.components import widths
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import (
    ChecksumError,
    CkpttoolError,
    FormatError,
    MappingError,
    UnsupportedError,
    UsageError,
    some,
)
from ckpttool.formats import onnx
from ckpttool.formats.probe import Format
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.layouts import joints, policy_alone, statistics
from ckpttool.layouts.canonical import NETWORKS, NO_LAYOUT, RUN, Binding, Part
from ckpttool.layouts.fronts import Front
from ckpttool.layouts.recognise import recognise, recognised
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display
from ckpttool.ledger import Entries
from ckpttool.mapping.report import Moves
from ckpttool.mapping.rules import ToValue
from ckpttool.ops import evidence, knowledge, side_files
from ckpttool.ops.agent_facts import GIVEN, NO_FACTS, AgentFacts
from ckpttool.ops.digest import digest_of
from ckpttool.ops.findings import command
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

# Canonical tensors that are no layer's, which a conversion puts beside a model's layers.
_LONE = frozenset(("log_std", "std", "log_alpha", "alpha", "q_support"))


@dataclass(frozen=True, slots=True)
class Agent:
    """A checkpoint recognised as an agent; `tree` is the canonical one, its leaves unread.

    `known` is what its sidecar and its own files say of it, each fact with its provenance; `sidecar` is
    only the former. `ledger` lists what of it is used, assumed and not used; whoever builds a network of it
    adds bounds of an environment (ops/wiring.py).
    """

    checkpoint: Checkpoint
    binding: Binding
    tree: Tree
    sidecar: Sidecar | None
    known: Sidecar
    notes: tuple[str, ...]
    ledger: Entries = ()

    @property
    def framework(self) -> str:
        """The backend that runs what this checkpoint's format usually holds."""
        plugin = plugins.find("formats", self.checkpoint.format)
        return cast(Format, plugin.load()).FRAMEWORK

    def title(self, network: str) -> str:
        """Return the canonical title of the network that is asked for; a policy alone has but one."""
        return "actor" if self.binding.layout == NO_LAYOUT else network

    def part(self, title: str) -> Part | None:
        """Return the network of that title (`actor`, `critic/q1`), or None."""
        return next((part for part in self.binding.parts if part.title == title), None)

    def front(self, title: str) -> Front | None:
        """Return what the policy of that title computes before its layers, None where that is nothing."""
        return self.binding.fronts.get(title)

    def playable(self, title: str) -> Part | None:
        """Return the policy of that title, which may stand behind a front; raise as `runnable` does."""
        front = self.front(title)
        return self.runnable(title, front.covers if front is not None else frozenset())

    def runnable(self, title: str, covered: frozenset[str] = frozenset()) -> Part | None:
        """Return the network of that title; raise UnsupportedError if a part of it is of no known kind.

        `covered` are tensors that somebody else takes care of.
        """
        part = self.part(title)
        # A network of which nothing can be run is no part at all, and still was in the file.
        left = [n for n in self.binding.unplaced.get(title.partition("/")[0], ()) if n not in covered]
        if left:
            front = self.front(title)
            if front is not None and front.covers.issuperset(left):
                reason = "has more than layers (an encoder, memory, norms): it is played, and nothing else"
            elif any("discrete" in each for each in left):
                reason = "chooses among discrete actions, which cannot be run yet"
            else:
                reason = "holds a layer of a kind that cannot be run yet"
            raise UnsupportedError(f"{title} {reason}", file=self.checkpoint.path, found=some(left, 3))
        return part


def restore(
    path: str, layout: str | None = None, facts: AgentFacts = NO_FACTS, network: str = "actor"
) -> Agent:
    """Open the path as an agent that can be run: the canonical tree holds its networks only.

    A checkpoint that no layout recognises may be a policy alone; of several chains of layers `network` names
    one. Raise UsageError when there is neither.
    """
    checkpoint = open_checkpoint(path)
    side_files.require_shards(checkpoint.tree)
    binding = playable_binding(checkpoint, layout, network)
    if binding is None:
        raise no_agent(checkpoint)
    return agent_of(checkpoint, binding, own_sidecar(checkpoint), facts)


def playable_binding(
    checkpoint: Checkpoint, layout: str | None = None, network: str = "actor"
) -> Binding | None:
    """Return the agent that a layout recognises, else the policy that the checkpoint is alone."""
    binding = recognised(checkpoint, layout)
    if binding is not None or layout not in (None, NO_LAYOUT):
        return binding
    return policy_alone.policy_alone(checkpoint, network)


def no_agent(checkpoint: Checkpoint) -> CkpttoolError:
    """Return the error that a checkpoint holds no agent that a layout knows; raise that of a lost shard."""
    side_files.require_shards(checkpoint.tree)
    return side_files.refusal(checkpoint, "eval") or UsageError(
        "no layout recognises an agent in this checkpoint",
        file=checkpoint.path,
        found=next((note for note in checkpoint.notes if note.startswith("policy ")), None),
        hint="ckpttool inspect shows its tensors, ckpttool layouts the namings that are known",
    )


def agent_of(checkpoint: Checkpoint, binding: Binding, own: Own, facts: AgentFacts = NO_FACTS) -> Agent:
    """Return the checkpoint as the agent that a layout recognised, with what its own sidecar says.

    Given `facts` win over the sidecar's and the files'; a note names each contradiction.
    """
    require_layers(binding, own.sidecar, sidecar.beside(checkpoint.path))
    binding = as_computed(binding, own.sidecar, checkpoint)
    binding = with_names(binding, checkpoint.tree, own.sidecar)
    binding, used = knowledge.with_companions(binding, checkpoint)
    binding = joints.joined(with_records(binding, checkpoint.tree, checkpoint))
    tree = networks(checkpoint.tree, binding)
    contradicted = knowledge.contradicted(own.sidecar, knowledge.of_files(binding, tree))
    wrong = {name: entry for name, entry in contradicted.items() if name not in facts.known}
    binding = binding.entered(*wrong.values())
    own = _without(own, [name for name, entry in wrong.items() if entry.decides])
    if facts:
        if "activations" in facts.known and any(part.program is not None for part in binding.parts):
            raise UsageError(
                "the activations are those of the model's graph, and none is given",
                file=checkpoint.path,
                hint="leave out --activation",
            )
        facts = facts.sized(*policy_sizes(binding, tree))
        held = knowledge.merged(own.sidecar, knowledge.of_files(binding, tree))
        used = (*used, f"given: {facts.described()}", *facts.contradictions(held))
        own = replace(own, sidecar=facts.over(own.sidecar))
    own = _spread(own, binding, tree)
    notes = (*own.notes, *used)
    if binding.layout == NO_LAYOUT:
        notes = (*notes, *binding.moves.notes)
    other = sorted({leaf.dtype for path, leaf in tree.tensors() if path[0].value in NETWORKS} - {"float32"})
    if other:
        notes = (*notes, f"weights stored as {', '.join(other)} are run as float32")
    known = knowledge.merged(own.sidecar, knowledge.of_files(binding, tree))
    fronts = tuple(move for front in binding.fronts.values() for move in front.moves)
    before = canonical_tree(checkpoint.tree, Moves(fronts))
    ledger = ledger_of(checkpoint, binding, own.sidecar, known, tree, facts.known)
    return Agent(checkpoint, binding, Tree({**tree, **before}), own.sidecar, known, notes, ledger)


def as_computed(binding: Binding, told: Sidecar | None, checkpoint: Checkpoint) -> Binding:
    """Return the binding of converted weights with what their receipt records of the source's computation.

    Raise UnsupportedError where that is more than a chain of the weights.
    """
    found = None if told is None else told.computation
    if told is None or found is None:
        return binding
    code = found.get("code")
    if code and (code == policy_alone.HOOK or "refused" not in found):
        said = f"the source's own code, {code}, computes nothing but its layers, one after another"
        return replace(binding, moves=replace(binding.moves, assumed=(*binding.moves.assumed, said)))
    if policy_alone.computation(checkpoint) is not None:
        return binding
    name = os.path.basename(str((told.source or {}).get("path") or "SOURCE"))
    source = os.path.join(os.path.dirname(checkpoint.path), name)
    source = source if os.path.exists(source) else name
    way = f"play the source: {command('eval', source, '--env', 'ID')}"
    if "refused" in found:
        way = "load the weights into the model's own code (ckpttool.load_into), and export that to ONNX"
    raise UnsupportedError(
        f"these are the weights of a model whose computation is not in this file: {found['origin']} holds it",
        file=checkpoint.path,
        expected="a chain of layers",
        found=found.get("refused", "a source that computes more, by the receipt of the conversion"),
        hint=way,
    )


def _without(own: Own, names: Sequence[str]) -> Own:
    """Return what is known without facts of the sidecar that the checkpoint contradicts."""
    if own.sidecar is None or not names:
        return own
    more = ["action_high"] if "action_low" in names else []
    gone: dict[str, Any] = dict.fromkeys([*names, *more])
    provenance = {name: said for name, said in own.sidecar.provenance.items() if name not in gone}
    return replace(own, sidecar=replace(own.sidecar, **gone, provenance=provenance))


def with_records(binding: Binding, tree: Tree, checkpoint: Checkpoint) -> Binding:
    """Return the binding with what the checkpoint holds besides what its layout reads.

    That is statistics of observations, activations that a graph or a configuration records, and settings.
    """
    binding = joints.recorded(with_statistics(binding, tree), checkpoint)
    part = next((part for part in binding.parts if part.acts), None)
    if part is None or binding.layout == NO_LAYOUT:
        return binding
    return evidence.stated(binding, tree, widths(networks(tree, binding), part)[1])


def with_statistics(binding: Binding, tree: Tree) -> Binding:
    """Return the binding with statistics of observations that its layout does not read."""
    part = next((part for part in binding.parts if part.acts), None)
    if part is None or binding.layout == NO_LAYOUT or part.component in binding.fronts:
        return binding
    return statistics.applied(binding, tree, widths(networks(tree, binding), part)[0])


def ledger_of(
    checkpoint: Checkpoint,
    binding: Binding,
    own: Sidecar | None,
    known: Sidecar,
    tree: Tree,
    given: Collection[str] = (),
) -> Entries:
    """Return the ledger of an agent with the canonical tree `tree` (ops/knowledge.py)."""
    part = next((part for part in binding.parts if part.acts), binding.parts[0])
    sizes = widths(tree, part)
    front = binding.fronts.get(part.component)
    if front is not None:
        sizes = (sum(stream.size for stream in front.streams), sizes[1])
    return knowledge.ledger_of(checkpoint, binding, own, known, sizes, given)


def with_names(binding: Binding, tree: Tree, known: Sidecar | None) -> Binding:
    """Return the binding with the variables that Keras numbers and the conversion's receipt names.

    keras/src/saving/saving_lib.py: a model's own variables besides layers are `vars/0`, `vars/1`, ...
    """
    stored = set(tree.names.values())
    numbered: dict[str, str] = {}
    for name in tree.names.values():
        owner, _, number = f"/{name}".rpartition("/vars/")
        # Of several variables the numbers do not name the one.
        if number == "0" and f"{owner}/vars/1".lstrip("/") not in stored:
            numbered[name] = owner
    if not numbered:
        return binding
    lone: dict[str, set[str]] = {}
    for rule in known.rules if known is not None else ():
        target = rule.get("target") if isinstance(rule, Mapping) else None
        above, _, last = str(target).rpartition("/")
        if last in _LONE:
            lone.setdefault(above, set()).add(last)
    named: dict[str, str] = {}
    for name, owner in numbered.items():
        own = [last for last in lone.get(f"policy{owner}", ()) if f"{owner}/{last}".lstrip("/") not in stored]
        if len(own) == 1:
            named[name] = own[0]

    def place(path: Path) -> Path:
        name = tree.names.get(path, "")
        ends = (own for own in named if f"/{name}".endswith(f"/{own}"))
        whole = max(ends, key=len, default=None)
        return path if whole is None else (*path[:-2], attr(named[whole]))

    if not named:
        return binding
    back = {place(path): path for path in tree}
    leaves = {
        place(path): replace(leaf, of=place(leaf.of)) if isinstance(leaf, Leaf) and leaf.of else leaf
        for path, leaf in tree.items()
    }
    found = recognise(Tree(leaves, containers=tree.containers), "", binding.layout)
    return found.moved(lambda path: back[path]) if found is not None else binding


def _spread(own: Own, binding: Binding, tree: Tree) -> Own:
    """Return what is known with one pair of bounds for each action, where one pair was given for all."""
    told = own.sidecar
    if told is None or told.action_low is None or told.action_high is None or len(told.action_low) != 1:
        return own
    _, actions = policy_sizes(binding, tree)
    low, high = list(told.action_low) * actions, list(told.action_high) * actions
    given = told.provenance.get("action_low") == GIVEN
    return replace(own, sidecar=replace(told, action_low=low, action_high=high)) if given else own


def policy_sizes(binding: Binding, tree: Tree) -> tuple[int, int]:
    """Return the numbers of hidden layers and of actions of the policy, or of what there is without one."""
    acting = [part for part in binding.parts if part.acts] or list(binding.parts)
    hidden = max(max(sum(layer.kind == "dense" for layer in part.layers) - 1, 0) for part in acting)
    return hidden, widths(tree, acting[0])[1]


def require_layers(binding: Binding, told: Sidecar | None, file: str | None = None) -> None:
    """Raise FormatError for more activations in a sidecar than any network has hidden layers."""
    layers = [sum(1 for layer in part.layers if layer.kind == "dense") - 1 for part in binding.parts]
    most = max(layers, default=0)
    # What stands before the layers, an encoder, may have activations of its own.
    if told is None or not told.activations or binding.fronts or len(told.activations) <= max(most, 1):
        return
    raise FormatError(
        "the sidecar names more activations than the networks have hidden layers",
        file=file,
        path="activations",
        expected=f"at most {most}",
        found=str(len(told.activations)),
    )


def networks(tree: Tree, binding: Binding) -> Tree:
    """Return the canonical agent without its optimizers, temperature and counters: what running it needs."""
    moves = tuple(move for move in binding.moves.moves if move.target[0].value in RUN)
    return canonical_tree(tree, Moves(moves))


def canonical_tree(tree: Tree, moves: Moves) -> Tree:
    """Return the canonical agent: every bound leaf under its canonical path, unread.

    Several leaves with one target are one number that the source repeats (an update count per
    parameter); raise MappingError if it is not the same number everywhere.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for move in moves.moves:
        leaf = move.rule.leaf(tree[move.source])
        if move.target in leaves:
            _require_equal(leaves[move.target], leaf, display(move.target), tree.names[move.source])
        else:
            leaves[move.target] = (
                replace(leaf, of=None) if isinstance(leaf, Leaf) and leaf.of is not None else leaf
            )
    return Tree(leaves)


def _require_equal(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf, target: str, source: str) -> None:
    first, second = (ToValue().leaf(leaf) for leaf in (one, other))
    if first != second:
        raise MappingError(
            f"{target} is one number, and the checkpoint holds several",
            path=source,
            expected=str(getattr(first, "value", first)),
            found=str(getattr(second, "value", second)),
        )


@dataclass(frozen=True, slots=True)
class Own:
    """The sidecar that was written for these very weights, if there is one.

    `sha256` is the checkpoint's digest where it had to be computed to know; `notes` name the sidecar's file
    if that is not the usual one.
    """

    sidecar: Sidecar | None = None
    sha256: str | None = None
    notes: tuple[str, ...] = ()


def _of_model(checkpoint: Checkpoint, found: Sidecar | None) -> Own:
    """Return what the sidecar of an ONNX model adds to its graph: the environment.

    The graph computes what the other facts describe. The digest that an export records is that of the file.
    """
    if found is None:
        return Own()
    file = checkpoint.files[0]
    digests = (hashlib.sha256(file.read(0, file.size)).hexdigest(), digest_of(checkpoint).sha256)
    if found.target_sha256 not in digests:
        raise _of_others(checkpoint, found, digests[0])
    said = {name: text for name, text in found.provenance.items() if name == "env"}
    return Own(Sidecar(found.target_sha256, env=found.env, provenance=said), digests[1])


def own_sidecar(checkpoint: Checkpoint, sha256: str | None = None) -> Own:
    """Return the sidecar beside the checkpoint; the weights are read if there is one and no `sha256` of them.

    Raise ChecksumError if it was written for other weights: what it says of bounds and statistics is wrong
    for these, and to go on without would be wrong in silence.
    """
    found = sidecar.load(checkpoint.path)
    if checkpoint.format == onnx.NAME:
        return _of_model(checkpoint, found)
    waiting = sidecar.waiting(checkpoint.path) if found is None else {}
    if found is None and not waiting:
        return Own()
    sha256 = sha256 or digest_of(checkpoint).sha256
    if found is not None and found.target_sha256 == sha256:
        return Own(found, sha256)
    for file, each in (waiting or sidecar.waiting(checkpoint.path)).items():
        if each.target_sha256 == sha256:
            note = f"facts from {file}, the sidecar of an interrupted conversion (the digest matches)"
            return Own(each, sha256, (note,))
    if found is None:
        return Own(sha256=sha256)
    raise _of_others(checkpoint, found, sha256)


def _of_others(checkpoint: Checkpoint, found: Sidecar, sha256: str) -> ChecksumError:
    return ChecksumError(
        "the sidecar beside the checkpoint was written for other weights",
        file=sidecar.beside(checkpoint.path),
        expected=f"weights of sha256 {found.target_sha256[:12]}",
        found=sha256[:12],
        hint="remove it if the weights are right, or put back the checkpoint that it belongs to",
    )
