"""TorchScript's archives: which attributes are parameters, the constants, what code there is; none is run.

Sources: torch/csrc/jit/serialization/export_module.cpp (ScriptModuleSerializer: `data.pkl`, `constants.pkl`,
`code/`, `bytecode.pkl`), python_print.cpp (`__parameters__`, `__buffers__`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ckpttool.formats.listed import Listed
from ckpttool.formats.torch_pickle.tree import Members
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr
from ckpttool.shown import count
from ckpttool.source import Storage
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire import asked
from ckpttool.wire.asked import CODE, Asked

_CLASS = re.compile(r"class (\w+)\(Module\):")
_NAMES = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_QUOTED = re.compile(r'"([^"\\]*)"')
# More of a class than its first lines is not needed, and no real file comes near this.
_FILE, _ALL = 4 << 20, 64 << 20
# Code whose steps are followed (layouts/script_steps.py).
_FOLLOWED = 256 << 10
_CONSTANTS = attr("CONSTANTS")


def is_script(members: Collection[str], top: str) -> bool:
    """Say whether the archive below the folder `top` is TorchScript's."""
    return f"{top}/constants.pkl" in members


def classes(members: Collection[str], top: str, source: Callable[[str], Storage]) -> dict[str, Members]:
    """Return for each class of the archive's code which attributes are parameters and which are buffers."""
    found: dict[str, Members] = {}
    left = _ALL
    for name in _code(members, top):
        if not name.endswith(".py"):
            continue
        held = source(name)
        left -= held.length
        if held.length > _FILE or left < 0:
            continue
        module = name.removeprefix(f"{top}/code/").removesuffix(".py").replace("/", ".")
        _read_classes(bytes(held.read()).decode("utf-8", "replace"), module, found)
    return found


def _read_classes(text: str, module: str, found: dict[str, Members]) -> None:
    name = ""
    for line in text.splitlines():
        begins = _CLASS.match(line)
        if begins is not None:
            name = f"{module}.{begins[1]}"
        names = _NAMES.match(line) if name else None
        if names is not None:
            told = frozenset(_QUOTED.findall(names[2]))
            before = found.get(name, Members(frozenset(), None))
            found[name] = before._replace(**{names[1]: told})


def _code(members: Collection[str], top: str) -> list[str]:
    return [name for name in members if name.startswith(f"{top}/code/")]


def facts(members: Collection[str], top: str, source: Callable[[str], Storage]) -> dict[str, Any]:
    """Return `code` and `extra`, the names and sizes of files, as a part of a checkpoint's details."""
    found = {}
    for kind in ("code", "extra"):
        names = [name for name in members if name.startswith(f"{top}/{kind}/")]
        found[kind] = [
            {"name": name.removeprefix(f"{top}/"), "nbytes": source(name).length} for name in sorted(names)
        ]
    return found


def notes(members: Collection[str], top: str) -> tuple[str, ...]:
    """Return what a person should know of the code, and of what it was compiled for."""
    files = sum(name.endswith(".py") for name in _code(members, top))
    told = [f"TorchScript code in {count(files, 'file')}, listed by --json; nothing was run"]
    if f"{top}/bytecode.pkl" in members:
        told.append("bytecode for PyTorch's mobile interpreter, which is not listed")
    return tuple(told)


def joined(module: Listed, constants: Listed) -> Listed:
    """Return the module's tree with the constants of its code, as the code calls them: `CONSTANTS.c0`."""

    def placed(path: Path) -> Path:
        return (_CONSTANTS, attr(f"c{path[0].value}"), *path[1:])

    tree = constants.tree
    leaves: dict[Path, Leaf | ValueLeaf] = {
        placed(p): replace(leaf, key=_native(placed(p)), role="other") if isinstance(leaf, Leaf) else leaf
        for p, leaf in tree.items()
        if p
    }
    if not leaves:
        return module
    whole = module.tree
    top = whole.leaves.get(())
    if isinstance(top, ValueLeaf) and isinstance(top.value, Record):
        # A frozen module keeps nothing of its own: its weights became constants of its code.
        rest = {path: leaf for path, leaf in whole.items() if path}
        whole = Tree(rest, {}, {(): Container("record", top.value.name)})
    aliases = {
        placed(p): tuple(Alias(placed(a.path), _native(placed(a.path))) for a in others)
        for p, others in tree.aliases.items()
    }
    containers = {placed(p): c for p, c in tree.containers.items() if p}
    containers[_CONSTANTS,] = Container("record", "CONSTANTS")
    merged = Tree({**whole, **leaves}, {**whole.aliases, **aliases}, {**whole.containers, **containers})
    asks = asked.merged(module.asks, constants.asks)
    return replace(module, tree=merged, notes=(*module.notes, *constants.notes), asks=asks)


def _native(path: Path) -> str:
    return ".".join(str(step.value) for step in path)


def asks(members: Collection[str], top: str) -> tuple[Asked, ...]:
    """Return the files of code, which torch.jit.load compiles; it runs their `__setstate__`."""
    return tuple(Asked(name.removeprefix(f"{top}/"), CODE, by="torchscript") for name in _code(members, top))


def texts(members: Collection[str], top: str, source: Callable[[str], Storage]) -> dict[str, str]:
    """Return the archive's code by its module's name (`__torch__.torch.nn.functional`), unparsed.

    Code of a large file is left out: no policy's is.
    """
    found: dict[str, str] = {}
    left = _FOLLOWED
    for name in _code(members, top):
        held = source(name) if name.endswith(".py") else None
        if held is None or held.length > left:
            continue
        left -= held.length
        module = name.removeprefix(f"{top}/code/").removesuffix(".py").replace("/", ".")
        found[module] = bytes(held.read()).decode("utf-8", "replace")
    return found
