"""A model of this very program as the target: its skeleton, without a file, its tensors by their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool import live
from ckpttool.agents.skeleton import factory, tensorflow_modules
from ckpttool.agents.skeleton.child import OWNERS
from ckpttool.errors import UsageError
from ckpttool.leaf import Leaf, Path, Role, ValueLeaf, attr
from ckpttool.live import roles
from ckpttool.live.tensors import Live, described
from ckpttool.mapping.skeleton import Skeleton
from ckpttool.ops.target_model import skeleton_of
from ckpttool.source import Shape
from ckpttool.tree import Tree


class LiveModel:
    """A torch.nn.Module, tf.Module, Keras model or layer; `shapes` are its inputs' without the batch."""

    def __init__(self, model: Any, shapes: Sequence[Shape] = ()) -> None:
        """Take the model; raise UsageError for what is none."""
        framework = factory.framework(model)
        if framework is None or isinstance(model, type):
            kind = model.__name__ if isinstance(model, type) else type(model).__name__
            raise UsageError(
                "this is no model", expected="a torch.nn.Module, a keras.Model or a tf.Module", found=kind
            )
        self.model, self.framework, self._shapes = model, framework, [list(each) for each in shapes]
        self.shapes = tuple(tuple(each) for each in shapes)
        self.tensors: dict[Path, Any] = {}

    @property
    def title(self) -> str:
        """What the model is called in reports: its class."""
        return f"a live {type(self.model).__name__}"

    def skeleton(self, guessed: Sequence[Shape] = (), *, foreign: bool = False) -> Skeleton:
        """Return the skeleton, whose tree has the present values; afterwards `tensors` has what it names.

        The model is called once, with zeros, if it has no weights before (`guessed` is its input's shape
        then, if the user told none), if shapes were told, or, of Keras, if what fills it is `foreign`: how
        that orders what is flattened, only a call shows. Raise UsageError when it cannot be called, has no
        tensors, or still has some without a shape.
        """
        owner = OWNERS[self.framework]
        called: Mapping[int, Mapping[str, Any]] = {}
        if foreign or self._shapes or self._is_unbuilt():
            called = owner.build(self.model, self._shapes, [list(shape) for shape in guessed])
        modules = owner.describe(self.model)
        for module in modules:
            module.update(called.get(module["id"], {}))
        tree, places = self._torch() if self.framework == "torch" else self._numbered(modules)
        self._require_shapes(tree)
        if not self.tensors:
            raise UsageError("the model has no tensors to fill", found=type(self.model).__name__)
        return skeleton_of(tree, modules, places, self.framework)

    def _is_unbuilt(self) -> bool:
        # Of the other frameworks' models `build` itself calls only those without weights.
        return self.framework != "keras" or not (self.model.weights and getattr(self.model, "built", True))

    def _torch(self) -> tuple[Tree, dict[str | int, Path]]:
        tree = live.state_dict(self.model)
        places: dict[str | int, Path] = {leaf.key: path for path, leaf in tree.tensors()}
        places |= {a.key: path for path, others in tree.aliases.items() for a in others if a.key}
        for path, leaf in tree.tensors():
            assert isinstance(leaf.source, Live)  # noqa: S101 - what live.state_dict makes
            self.tensors[path] = leaf.source.tensor
        return tree, places

    def _numbered(self, modules: Sequence[Mapping[str, Any]]) -> tuple[Tree, dict[str | int, Path]]:
        """Return TensorFlow's or Keras's variables by the modules that hold them, others by their names."""
        keras = self.framework == "keras"
        variables = list(self.model.weights) if keras else tensorflow_modules.variables(self.model)
        places: dict[str | int, Path] = {}
        for module in modules:
            for name, number in module["tensors"]:
                places.setdefault(number, tuple(map(attr, (*module["path"], name))))
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        for number, variable in enumerate(variables):
            own = roles.name(variable) or f"variable {number}"
            path = places.setdefault(number, (attr(own),))
            said = described(variable)
            if said is None:
                raise _shapeless(own)
            trained = bool(getattr(variable, "trainable", False))
            role: Role = "parameter" if trained else "buffer"
            leaves[path] = Leaf(*said, Live(variable), own, role, trainable=trained, name=own)
            self.tensors[path] = variable
        return Tree(leaves), places

    def _require_shapes(self, tree: Tree) -> None:
        for path, leaf in tree.plain():
            if leaf.role == "other":
                raise _shapeless(tree.names[path])


def _shapeless(name: str) -> UsageError:
    return UsageError(
        "the model has tensors without a shape before its first call",
        path=name,
        hint="call it once, or tell the shapes of its inputs",
    )
