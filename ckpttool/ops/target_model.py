"""The user's model as the target: built beside this process, its skeleton, and the proof that it loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from ckpttool.activations import from_document
from ckpttool.agents.skeleton.beside import Beside, Like
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import MappingError, UnsupportedError, UsageError, some
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import Path
from ckpttool.mapping.modules import DENSE_OUT_IN, LINEAR_IN_OUT, OWN_CALL
from ckpttool.mapping.skeleton import Part, Skeleton
from ckpttool.ops.targets import TARGETS, TargetKind
from ckpttool.source import Shape
from ckpttool.tree import Tree

# The words of `--to` that a framework loads into a model of its own.
FORMS = ("torch", "tf", "keras")
WEIGHTS = ".weights.h5"
_FRAMEWORKS = {"torch": "torch", "keras": "tensorflow", "tensorflow": "tensorflow"}


def form_of(kind: TargetKind) -> str:
    """Return which form a model would load a target of the kind from; raise UsageError if from none."""
    found = next((form for form in FORMS if TARGETS[form] == kind), None)
    if found is None:
        words = ", ".join(FORMS)
        raise UsageError(f"--like writes what a model of a framework loads: {words}", found=kind.format)
    return found


class TargetModel:
    """The model that a `Like` names, in its process; a context manager that ends it and removes its files.

    Without a `form` it is saved as its framework does it by itself.
    """

    def __init__(self, wanted: Like, form: str | None = None) -> None:
        self._wanted, self._form = wanted, form or ""
        self._beside = Beside(wanted)
        self._folder = tempfile.TemporaryDirectory(prefix="ckpttool-")

    def __enter__(self) -> TargetModel:
        self._beside.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beside.__exit__(kind, error, trace)
        self._folder.cleanup()

    def skeleton(self, guessed: Sequence[Shape]) -> Skeleton:
        """Build the model and return its skeleton; `guessed` are its inputs' shapes if nobody says them.

        Raise UsageError when there is no such model or it is not loaded from this form, MappingError when the
        form does not hold all of its weights.
        """
        built = self._beside.build()
        framework = str(built["framework"])
        self._form = self._form or str(built["forms"][-1])
        if self._form not in built["forms"]:
            raise UsageError(
                f"{self._wanted.factory} makes a {framework} model, which is not loaded from {self._form}",
                hint=" or ".join(f"--to {form}" for form in built["forms"]),
            )
        modules = self._beside.describe(guessed)
        first = self._beside.save(os.path.join(self._folder.name, "first"), self._form)
        tree = open_checkpoint(first).tree
        if self._form == "keras" and all("vars/" not in leaf.key for _, leaf in tree.tensors()):
            raise UnsupportedError("the model's Keras is too old for .weights.h5 files", hint="--to tf")
        places: dict[str | int, Path]
        if self._beside.number():
            second = self._beside.save(os.path.join(self._folder.name, "second"), self._form)
            places = dict(_numbers(tree, open_checkpoint(second).tree))
        else:
            places = {leaf.key: path for path, leaf in tree.tensors()}
            places |= {a.key: path for path, others in tree.aliases.items() for a in others if a.key}
        self._require_all(modules, places)
        return skeleton_of(tree, modules, places, framework)

    def prove(self, written: Checkpoint) -> None:
        """Load what was written into the model strictly, have it saved again, and compare every tensor.

        Raise WorkerError if the model does not load it, MappingError if it holds other values then.
        """
        file = os.path.abspath(written.path)
        if self._form == "keras":
            # Keras goes by the suffix, which a file has only when it gets its name.
            os.symlink(file, file := os.path.join(self._folder.name, f"written{WEIGHTS}"))
        self._beside.load(file, self._form)
        again = self._beside.save(os.path.join(self._folder.name, "again"), self._form)
        held = dict(open_checkpoint(again).tree.tensors())
        for path, leaf in written.tree.tensors():
            if leaf.role == "counter":  # TensorFlow counts each time it saves
                continue
            if path not in held or bytes(leaf.read()) != bytes(held[path].read()):
                name = written.tree.names[path]
                raise MappingError("the model holds other values than were written", path=name)

    def _require_all(self, modules: Sequence[Mapping[str, Any]], places: Mapping[str | int, Path]) -> None:
        lost = [
            "/".join((*module["path"], name))
            for module in modules
            for name, number in module["tensors"]
            if number not in places
        ]
        if lost:
            raise MappingError(
                f"{self._form} keeps no place for {len(lost)} of the model's weights",
                path=some(lost, 3),
                hint="--to keras" if self._form == "tf" else None,
            )


def _numbers(first: Tree, second: Tree) -> Iterator[tuple[int, Path]]:
    """Go through the weights by number: every element of a tensor has its weight's number plus one as bits.

    A tensor that did not change is no weight's: the state of a random generator.
    """
    for path, leaf in second.tensors():
        before = first.get(path)
        data = bytes(leaf.read())
        width = len(data) // leaf.size if leaf.size else 0
        if not width or before is None or leaf.role in ("counter", "slot"):
            continue
        number = int.from_bytes(data[:width], "little")
        if data == data[:width] * leaf.size and number:
            yield number - 1, path


def skeleton_of(
    tree: Tree, modules: Sequence[Mapping[str, Any]], places: Mapping[str | int, Path], framework: str
) -> Skeleton:
    """Return the skeleton of a model of a framework (torch, keras, tensorflow).

    `modules` are as agents.skeleton describes them, `places` says where the tensors that they name lie in
    `tree`.
    """
    parts = [_part(module, places, framework) for module in modules]
    return Skeleton(_FRAMEWORKS[framework], tree, parts)


def _call(module: Mapping[str, Any]) -> tuple[int, int]:
    return int(module.get("call", -1)), int(module.get("after", "0"), 16)


def _part(module: Mapping[str, Any], places: Mapping[str | int, Path], framework: str) -> Part:
    flatten = module.get("flatten")
    if flatten and framework == "torch":  # channels first
        flatten = [*flatten[1:], flatten[0]]
    tensors = {name: places[number] for name, number in module["tensors"]}
    shape = None if flatten is None else tuple(flatten)
    orders = {side: from_document(order) for side, order in module.get("orders", {}).items()}
    cls, facts = _class_of(module, framework)
    return Part(tuple(module["path"]), cls, facts, tensors, shape, orders, *_call(module))


# What a module of a program's own class computes, by the class of the framework that computes the same.
_COMPUTES = {
    ("torch", "dense", "out_in"): "Linear",
    ("torch", "dense", "in_out"): LINEAR_IN_OUT,
    ("torch", "layer_norm", ""): "LayerNorm",
    ("torch", "rms_norm", ""): "RMSNorm",
    ("keras", "dense", "in_out"): "Dense",
    ("keras", "dense", "out_in"): DENSE_OUT_IN,
    ("keras", "layer_norm", ""): "LayerNormalization",
    ("keras", "rms_norm", ""): "RMSNormalization",
}
_OWN_CLASS = {"torch": "Module", "keras": "Layer"}


def _class_of(module: Mapping[str, Any], framework: str) -> tuple[str, Mapping[str, Any]]:
    """Return a module's class and settings: by what it computed where its own class defines the call."""
    own, computes = module.get("own"), module.get("computes")
    if not own:
        return module["class"], module["facts"]
    facts = {**module["facts"], OWN_CALL: own}
    if computes is None:
        return module["class"], facts
    cls = _COMPUTES.get((framework, computes.get("kind"), computes.get("form", "")))
    if "epsilon" in computes:
        facts["epsilon" if framework == "keras" else "eps"] = computes["epsilon"]
    # It computes what none of these classes does, or what cannot be told.
    return cls or _OWN_CLASS[framework], {**facts, OWN_CALL: ""}
