"""Recognition of libraries by their tables."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from ckpttool.core import deferred, filesystem, plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATION_KINDS, TORCH_ACTIVATIONS
from ckpttool.core.sidecar import format_activation
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries.schema import (
    NO_LAYOUT,
    AgentMetadata,
    RecognizedAgent,
)
from ckpttool.mapping import wrappers
from ckpttool.mapping.layer_kinds import LayerKind, Name
from ckpttool.mapping.rules import (
    KEEP,
    Plan,
    Settings,
)

if TYPE_CHECKING:
    from ckpttool.libraries.optimizers_read import OptimizerMoves, StoredOptimizer


class NamedLeaf(NamedTuple):
    """A leaf with its name relative to the agent, split into segments."""

    path: Path
    segments: Name
    leaf: Leaf


class ComponentLayer(NamedTuple):
    """One layer of a component: its name within the component, its kind, its tensors by stored name."""

    name: Name
    kind: LayerKind
    tensors: Mapping[str, NamedLeaf]

    @property
    def width_in(self) -> int | None:
        """The number of inputs of a dense layer."""
        return self._kernel_shape()[0] if self.kind.name == "dense" else None

    @property
    def width_out(self) -> int | None:
        """The number of outputs of a dense layer."""
        return self._kernel_shape()[1] if self.kind.name == "dense" else None

    @property
    def width_norm(self) -> int:
        """The width of a norm, whose tensors are all as long."""
        return next(iter(self.tensors.values())).leaf.shape[0]

    def _kernel_shape(self) -> tuple[int, ...]:
        first = self.kind.weights[0]
        shape = self.tensors[first.name].leaf.shape
        return shape if first.to_canonical == KEEP else shape[::-1]


_NUMBERS = deferred.compile(r"\d+")
_TRIES = 20_000


def find_orders(
    names: Sequence[Name], widths: Sequence[tuple[int, int]], extra: int | None = None
) -> tuple[list[tuple[int, ...]], bool]:
    """Return up to two orders that the sizes of dense layers, and then the numbers in their names, allow.

    Orders are positions in `names`; `widths` are the inputs and outputs. With the orders comes whether sizes
    alone decide. Several orders mean that nothing does: the order of a file is no evidence. `extra` is the
    width of an action that enters at any layer.
    """
    by_size = _find_chains(names, widths, {}, extra=extra)
    if len(by_size) < 2:
        return by_size, True
    before = _list_predecessors(names)
    by_number = _find_chains(names, widths, before, extra=extra)
    if len(by_number) > 1:
        by_number = _find_chains(names, widths, before, together=True, extra=extra)
    return by_number or by_size, False


def _split_numbers(name: Name, names: frozenset[Name]) -> tuple[str, tuple[int, ...]]:
    """Return a name without its numbers, and the numbers; Keras omits the first layer's number."""
    text = "/".join(name)
    if not _NUMBERS.search(name[-1] if name else "") and any(
        other[:-1] == name[:-1] and re.fullmatch(re.escape(name[-1]) + r"_\d+", other[-1])
        for other in names
        if name and other
    ):
        text += "_0"
    return _NUMBERS.sub("#", text), tuple(int(n) for n in _NUMBERS.findall(text)[:9] if len(n) < 10)


def _list_predecessors(names: Sequence[Name]) -> dict[int, frozenset[int]]:
    """Return for each layer those with the same name and lower numbers, which precede it."""
    every = frozenset(names)
    keys = [_split_numbers(name, every) for name in names]
    return {
        n: frozenset(m for m, (stem, number) in enumerate(keys) if stem == mine and number < own)
        for n, (mine, own) in enumerate(keys)
    }


def _find_chains(
    names: Sequence[Name],
    widths: Sequence[tuple[int, int]],
    before: Mapping[int, frozenset[int]],
    *,
    together: bool = False,
    extra: int | None = None,
) -> list[tuple[int, ...]]:
    """Return up to two orders in which every layer's input size equals the previous output size.

    `before` are the layers that precede each; `together` keeps a module's layers adjacent. An input may have
    `extra` values more.
    """
    owners = [name[:-1] for name in names]
    chains: list[tuple[int, ...]] = []
    stack: list[tuple[int, ...]] = [(n,) for n in range(len(names) - 1, -1, -1) if not before.get(n)]
    tries = 0
    while stack and len(chains) < 2 and tries < _TRIES:
        tries += 1
        done = stack.pop()
        if len(done) == len(names):
            chains.append(done)
            continue
        width = widths[done[-1]][1]
        for n in range(len(names) - 1, -1, -1):
            fits = n not in done and widths[n][0] in (width, width + (extra or 0))
            left = together and owners[n] != owners[done[-1]]
            if left and any(owner == owners[done[-1]] for m, owner in enumerate(owners) if m not in done):
                continue
            if fits and before.get(n, frozenset()) <= frozenset(done):
                stack.append((*done, n))
    # An order is the only one if all were tried.
    return chains * 2 if stack and len(chains) == 1 else chains


ANY = ("every recognised agent",)
"""Of a layout that writes the agents of every library."""


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """One library's naming of its agents.

    `components`, `optimizers` and `counters` map its names to the canonical ones: a name with several
    segments has slashes ("policy/actor"), and a component that is one head of a network includes the
    head ("critic/q1"), as does a separate optimizer per head ("critic_optimizer/q1"). `branches` map
    the module names of further heads (`fc_logstd`) to the canonical branch, in every policy; `tensors`
    map whole names of single tensors outside layers to their canonical path ("temperature/log_alpha");
    with `matrices` a weight [out, in] without a bias is a dense layer, which elsewhere may be an
    embedding; with `late` a Q-function without its policy may receive the action after its first layer.
    `rooted` means that the agent may be an attribute of the saved object; `optimizer` binds an
    optimizer's state if that is not its framework's own; `seen` names the real files (from other people, or
    written by the library itself) used to test the layout; it is empty if no real file was available.
    `statistics` names the place of the observation statistics that the layout reads; it is empty if it reads
    none. `user_written` means that users write the networks: the library's code shows neither the order of
    their layers nor whether it adds outputs to others; `joined` that a policy's last layer has the
    means, then the logarithms of the deviations. `plays` are the algorithms whose policies are played,
    `reads` those that are only read, and `writes` those that a conversion writes, or ANY; "PPO" includes
    discrete actions, "continuous PPO" does not.
    """

    name: str
    title: str
    framework: str
    facts: AgentMetadata
    components: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    rooted: bool = False
    seen: str = ""
    plays: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    statistics: str = ""
    branches: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False
    matrices: bool = False
    late: bool = False
    user_written: bool = False
    optimizer: Callable[[StoredOptimizer], OptimizerMoves] | None = None


class Layout(Protocol):
    """Interface of every layout module; its names are module-level."""

    TABLE: LayoutTable

    def recognise(self, tree: Tree, name: str) -> RecognizedAgent | None:
        """Return the recognised agent, or None; `name` is the checkpoint's file name."""
        ...


class CompanionReader(Protocol):
    """Additional interface of a layout that reads agent metadata from files beside the checkpoint."""

    def companions(self, location: str) -> Sequence[str]:
        """Return the files that may contain metadata of the checkpoint at `location`, even if missing."""
        ...

    def read_companion(self, binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
        """Return the binding with the facts in `tree`, which was read from one of those files."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryPlugin:
    """One of several layouts in a module, with the names of a single-layout module."""

    TABLE: LayoutTable
    recognise: Callable[[Tree, str], RecognizedAgent | None]
    plan: Callable[[RecognizedAgent, Tree, Settings], Plan] | None = None
    companions: Callable[[str], Sequence[str]] | None = None
    read_companion: Callable[[RecognizedAgent, str, Tree], RecognizedAgent] | None = None
    COPIES_TARGETS: str | None = None


def as_companion_reader(layout: object) -> CompanionReader | None:
    """Return the layout as a companion reader, None if it reads no companions."""
    return cast(CompanionReader, layout) if getattr(layout, "companions", None) else None


def can_write(layout: object) -> bool:
    """Return whether the layout can write an agent (has `plan(binding, canonical, told) -> Plan`)."""
    return getattr(layout, "plan", None) is not None


def list_never_run_components(layout: object) -> frozenset[str]:
    """Return the components whose networks cannot be run from any file of the layout (its `NEVER_RUN`)."""
    return cast(frozenset[str], getattr(layout, "NEVER_RUN", frozenset()))


_Asked = Callable[[Tree, str], RecognizedAgent | None]
# More entries than this with tensors are a model's modules, not separately saved objects.
_ENTRIES = 32
_MOST = 50_000


# Answers and errors of recognition in a block of `remembering`, with the tree, which must live as long.
_ANSWERS: ContextVar[dict[tuple[Any, ...], tuple[Any, Any, Tree]]] = ContextVar("answers")


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Recognize every tree once in the block; meanwhile the files beside a checkpoint must not change."""
    token = _ANSWERS.set({})
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def remember(
    recognize: Callable[..., RecognizedAgent | None], tree: Tree, *words: str | None, **more: Any
) -> RecognizedAgent | None:
    """Return what the function answers for the tree; in a block of `remembering`, what it answered before."""
    known, question = _ANSWERS.get({}), (recognize, id(tree), *words)
    if question not in known:
        try:
            known[question] = recognize(tree, *words, **more), None, tree
        except (UsageError, UnsupportedError) as refusal:
            known[question] = None, refusal, tree
    result, error, _ = known[question]
    if error is not None:
        raise copy.copy(error) from error.__cause__  # callers add to it
    return cast(RecognizedAgent | None, result)


def recognize_checkpoint(checkpoint: Checkpoint, layout: str | None = None) -> RecognizedAgent | None:
    """Return the agent in the checkpoint, None if no layout matches; raise UsageError as `recognize_tree`."""
    if checkpoint.format == ONNX_FORMAT:
        # Constant names come from an exporter: the graph defines the computation, not a layout.
        if layout not in (None, NO_LAYOUT):
            raise UsageError(
                "--layout does not apply to ONNX models", file=checkpoint.path, hint="leave out --layout"
            )
        return None
    return recognize_tree(checkpoint.tree, os.path.basename(checkpoint.path), layout)


def recognize_tree(tree: Tree, name: str, layout: str | None = None) -> RecognizedAgent | None:
    """Return the recognised agent, or None if no layout matches.

    An agent may have been saved with wrappers around its modules (`module.`), or inside a dict of other
    things ("model", "epoch"): its names are also matched without wrapper prefixes, and in the only
    entry that is an agent. `name` is the checkpoint's file name; `layout` restricts the search to one
    layout, `none` skips all of them. Raise UsageError if the requested layout does not match, or if two
    layouts match the tree. A tree with very many entries is only matched against a requested layout: no
    agent has so many, and every layout reads all of them.
    """
    return remember(_recognize_tree, tree, name, layout)


def _recognize_tree(tree: Tree, name: str, layout: str | None) -> RecognizedAgent | None:
    # The code of a TorchScript archive defines the computation; a layout's defaults may contradict it.
    if layout == NO_LAYOUT or (layout is None and (is_script(tree) or len(tree) > _MOST)):
        return None
    # Scanning installed packages takes as long as importing numpy: at most once, and after the built-in
    # layouts.
    requested = (
        partial(_recognize_any, strangers=cache(_installed_layouts))
        if layout is None
        else cast(Layout, plugins.find("layouts", layout).load()).recognise
    )
    agent = (
        _recognize_unwrapped(tree, name, requested)
        or requested(tree, name)
        or _recognize_entry(tree, name, requested)
    )
    if agent is not None or layout is None:
        return agent
    raise UsageError(f"the checkpoint does not match layout {layout}")


def _recognize_any(
    tree: Tree, name: str, strangers: Callable[[], Sequence[plugins.Plugin]]
) -> RecognizedAgent | None:
    claims = _collect_claims(plugins.BUILT_IN["layouts"], tree, name) or _collect_claims(
        strangers(), tree, name
    )
    if len(claims) > 1:
        names = " and ".join(binding.layout for binding in claims)
        raise UsageError(f"the checkpoint matches several layouts: {names}", hint="choose one with --layout")
    return claims[0] if claims else None


def _collect_claims(layouts: Iterable[plugins.Plugin], tree: Tree, name: str) -> list[RecognizedAgent]:
    names = tuple(list_display_names(tree))
    modules = (cast(Layout, row.load()) for row in layouts if may_recognize(row, names, name))
    return [binding for layout in modules if (binding := layout.recognise(tree, name)) is not None]


def may_recognize(plugin: plugins.Plugin, names: Sequence[str], file: str) -> bool:
    """Return whether a library's row can match a tree with these names from a file of that name.

    Most trees belong to no library, and checking the row first avoids importing its module.
    """
    if not plugin.names and not plugin.files:
        return True
    of_file = plugin.files and re.compile(plugin.files, re.DOTALL).fullmatch(file)
    return bool(of_file or (plugin.names and _has_match(plugin.names, tuple(names))))


@lru_cache(maxsize=128)
def _has_match(pattern: str, names: tuple[str, ...]) -> bool:
    """Return whether a pattern matches a name: the checkpoints of a run have the same names."""
    return any(map(re.compile(pattern, re.DOTALL).fullmatch, names))


def list_display_names(tree: Tree) -> Iterator[str]:
    """Yield the names of all entries and their aliases, including those that share one."""
    yield from tree.displayed.values()
    for aliases in tree.aliases.values():
        yield from (display(alias.path) for alias in aliases)


def _installed_layouts() -> list[plugins.Plugin]:
    names = {plugin.name for plugin in plugins.BUILT_IN["layouts"]}
    return [p for p in plugins.installed("layouts") if p.name not in names]


# A layer of TorchRL's modules: root, number, tensor. Their `module` is no prefix of a wrapper.
_MODULE_LAYER = r"(|.*/)module/0/module/(?:0/)?(\d+)/(weight|bias)"
MODULE_LAYER = deferred.compile(_MODULE_LAYER)


def has_module_layer(tree: Tree) -> bool:
    """Return whether a tensor is named like one of TorchRL's modules."""
    return _has_match(_MODULE_LAYER, tuple(tree.names.values()))


def _recognize_unwrapped(tree: Tree, name: str, requested: _Asked) -> RecognizedAgent | None:
    """Match the tree under its module names without wrapper prefixes."""
    if has_module_layer(tree):
        return None
    plain = wrappers.strip_to_plain_names(tree)
    if plain is None:
        return None
    binding = requested(plain[0], name)
    return binding.moved(lambda path: plain[1].get(path, path)) if binding is not None else None


def _recognize_entry(tree: Tree, name: str, requested: _Asked) -> RecognizedAgent | None:
    """Match every entry of a dict that is itself a dict; None unless exactly one is an agent."""
    tops = {path[:1] for path, _ in tree.tensors() if len(path) > 1}
    if not 0 < len(tops) <= _ENTRIES:
        return None
    agents = [(top, binding) for top in tops if (binding := requested(tree.below(top), name)) is not None]
    if len(agents) != 1:
        return None
    top, binding = agents[0]
    evidence = f"{display(top)}/: {binding.evidence}"
    return replace(binding.moved(lambda path: (*top, *path)), evidence=evidence)


# Formats of Keras that may contain the configuration of a model.
KERAS_FORMATS = frozenset(("keras_h5", "keras_zip"))
# What TensorFlow 1's Saver writes: variables by name, and the graph of the program beside them.
SAVER_FORMATS = frozenset(("tensor_bundle", "tensorflow_v1"))
ONNX_FORMAT = "onnx"  # its reader is imported for such files only


def has_saver_graph(checkpoint: Checkpoint) -> bool:
    """Return whether a Saver of TensorFlow 1 stored its program's graph beside the checkpoint."""
    if checkpoint.format not in SAVER_FORMATS:
        return False
    from ckpttool.formats.tf_common import saver_graph_file

    return filesystem.isfile(saver_graph_file(checkpoint.path))


def is_script(tree: Tree) -> bool:
    """Return whether the tree is that of a TorchScript archive."""
    # The names of all classes in such an archive (torch/csrc/jit/frontend/name_mangler.h).
    root = tree.containers.get(())
    return root is not None and (root.name or "").startswith("__torch__.")


PICKLED_MODULES = attr("_modules")
PICKLED_TENSORS = (attr("_parameters"), attr("_buffers"))
TORCH_CLASSES = "torch.nn.modules."
_ACTIVATION, _IDENTITY = f"{TORCH_CLASSES}activation.", f"{TORCH_CLASSES}linear.Identity"


@dataclass(frozen=True, slots=True)
class PickledModule:
    """A whole module: its `state` with state_dict keys, their paths in the file, classes by module."""

    tree: Tree
    state: Tree
    sources: Mapping[Path, Path]
    classes: Mapping[str, str]

    @property
    def title(self) -> str:
        """The name of the module's class, without its package."""
        top = self.tree.containers.get(())
        return ((top.name if top is not None else None) or "module").rpartition(".")[2]

    def value(self, module: str, name: str) -> object:
        """Return a plain attribute of the module (`pi`, `pi.net.1`), None if it is missing."""
        leaf = self.tree.get((*_parse_module_path(module), attr(name)))
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    def has(self, module: str, name: str) -> bool:
        """Return whether the module has an attribute, a buffer or a parameter of that name."""
        ways = ((attr(name),), *((kind, key(name)) for kind in PICKLED_TENSORS))
        places = [(*_parse_module_path(module), *way) for way in ways]
        return any(path[: len(location)] == location for path in self.tree for location in places)

    def children(self, module: str) -> list[str]:
        """Return the names of a Sequential's parts in the order of use, which is file order."""
        return [name for name in self.classes if name.rpartition(".")[0] == module]

    def activation(self, module: str) -> str | None:
        """Return the canonical name of the activation module, None for other modules."""
        return activation_of(self.classes.get(module, ""), lambda name: self.value(module, name))

    def bound(self, binding: RecognizedAgent) -> RecognizedAgent:
        """Return a binding of the state as one of the file; other leaves describe the module's structure."""
        moved = binding.moved(self.sources.__getitem__)
        plain = frozenset(path for path, _ in self.tree.plain())
        return replace(moved, consumed=moved.consumed | plain)


def activation_of(name: str, value: Callable[[str], object]) -> str | None:
    """Return the canonical activation for a class name; `value` returns its attributes.

    None for another class, and for one with a non-default limit or approximation.
    """
    if name == _IDENTITY:
        return "linear"
    short = name.removeprefix(_ACTIVATION)
    slope = value("negative_slope") if name == f"{_ACTIVATION}LeakyReLU" else None
    if isinstance(slope, float | int) and not isinstance(slope, bool) and math.isfinite(slope):
        return format_activation("leaky_relu", float(slope))
    if any(value(argument) != default for argument, default in _arguments_of(short).items()):
        return None
    return TORCH_ACTIVATIONS.get(short) if name.startswith(_ACTIVATION) else None


def _arguments_of(cls: str) -> Mapping[str, object]:
    """Return the arguments of an activation of policies that change the function, with their defaults."""
    return ACTIVATION_KINDS[TORCH_ACTIVATIONS[cls]].arguments if cls in TORCH_ACTIVATIONS else {}


def called_activation(name: str, listed: Sequence[object], named: Mapping[str, object]) -> str | None:
    """Return the canonical activation that a class makes of arguments by position and by name.

    None for another class, and for arguments that are unknown or that `activation_of` does not represent.
    """
    known = _arguments_of(name.removeprefix(_ACTIVATION))
    # Every class with numbers takes these first, in this order; then `inplace`, which changes no result.
    positional = dict(zip((*known, "inplace"), listed, strict=False))
    if len(listed) > len(known) + 1 or not {*named} <= {"inplace", *known} - {*positional}:
        return None
    return activation_of(name, {**known, **positional, **named}.get)


def _parse_module_path(module: str) -> Path:
    return tuple(step for part in module.split(".") for step in (PICKLED_MODULES, key(part)))


def read_pickled_module(tree: Tree) -> PickledModule | None:
    """Return the tree as a whole module, None if it is not one.

    Source: torch/nn/modules/module.py, Module.__setstate__: a module's attributes are its state; its parts
    are in `_modules`, its tensors in `_parameters` and `_buffers`.
    """
    sources: dict[Path, Path] = {
        (key(name),): path for path in tree if (name := _tensor_name(path)) is not None
    }
    if not sources:
        return None
    state = Tree({target: tree[path] for target, path in sources.items() if isinstance(tree[path], Leaf)})
    classes = {
        ".".join(names): container.name
        for path, container in tree.containers.items()
        if container.name and (names := _module_path(path))
    }
    return PickledModule(tree, state, sources, classes)


def _tensor_name(path: Path) -> str | None:
    """Return a tensor's state_dict name: `pi.net.0.weight` for its path through modules' attributes."""
    if len(path) < 2 or path[-2] not in PICKLED_TENSORS:
        return None
    above = _module_path(path[:-2])
    return None if above is None else ".".join((*above, str(path[-1].value)))


def _module_path(path: Path) -> list[str] | None:
    if len(path) % 2 or any(step != PICKLED_MODULES for step in path[::2]):
        return None
    return [str(step.value) for step in path[1::2]]
