"""Classes and regular expressions that are compiled, and modules that are imported, when they are used.

A command uses few of those that its modules define. For each class `dataclasses.dataclass` compiles up to
eight functions, about a millisecond, and `typing.NamedTuple` every annotation; `re.compile` takes a fifth of
that. But for the time they are the standard library's: its `fields`, `replace` and `asdict` take these
dataclasses, and type checkers see the originals.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections import namedtuple
from dataclasses import MISSING, Field, FrozenInstanceError, field
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from dataclasses import dataclass
    from re import compile  # noqa: A004
    from typing import NamedTuple
else:

    class _NamedTupleType(type):
        """What `typing.NamedTuple` does, which also compiles the annotation of every field."""

        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:  # noqa: ARG004
            types = namespace["__annotations__"]
            defaults = [namespace.pop(annotation) for annotation in types if annotation in namespace]
            record = namedtuple(name, types, defaults=defaults, module=namespace["__module__"])
            record.__new__.__annotations__ = types
            for key in namespace.keys() - {"__module__", "__weakref__"}:
                setattr(record, key, namespace[key])
            return record

    NamedTuple = type.__new__(_NamedTupleType, "NamedTuple", (), {})

    def dataclass(cls: type | None = None, **options: bool) -> Any:
        """Return the class as a dataclass, or a decorator with the options of the standard library's."""
        return (lambda cls_: _make_record(cls_, **options)) if cls is None else _make_record(cls, **options)

    class _Pattern:
        """A `re.Pattern` that compiles its expression at the first use; errors show then."""

        def __init__(self, expression: str | bytes, flags: int = 0) -> None:
            self._arguments = expression, flags

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = getattr(re.compile(*self._arguments), name)
            setattr(self, name, value)
            return value

        def __repr__(self) -> str:
            return repr(re.compile(*self._arguments))

    compile = _Pattern  # noqa: A001


class DeferredModule:
    """A module that is imported when one of its names is used first: a listing needs no NumPy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


__all__ = ["DeferredModule", "NamedTuple", "compile", "dataclass", "field"]


def _make_record(
    cls: type,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,  # noqa: A002  # the standard library's name
    kw_only: bool = False,
) -> type:
    own = vars(cls)
    explicit = {*own} - ({"__hash__"} if "__eq__" in own and own["__hash__"] is None else set())
    cls.__doc__ = cls.__doc__ or cls.__name__  # or the standard library describes its signature
    # This collects the fields with their defaults, sets `__match_args__`, and compiles nothing.
    # Python 3.7 to 3.9, which run users' models, have no `kw_only`.
    more = {"kw_only": True} if kw_only else {}
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, **more)(cls)
    fields = dataclasses.fields(cls)
    names = [field_.name for field_ in fields]
    constructor = _Constructor(fields, frozen=frozen, slots=slots)
    methods: dict[str, Any] = {"__init__": constructor}
    if repr:
        methods["__repr__"] = _represent([field_.name for field_ in fields if field_.repr])
    if eq:
        methods.update(_compare([field_.name for field_ in fields if field_.compare], frozen=frozen))
    if slots and frozen:
        methods.update(_pickle(names))
    for name in methods.keys() - explicit:
        setattr(cls, name, methods[name])
    if slots:
        cls = _add_slots(cls, names)
    if frozen:
        _freeze(cls, set(names))
    constructor.cls = cls
    return cls


class _Factory:
    """Default of a parameter that a function makes; signatures show it as the standard library's do."""

    def __repr__(self) -> str:
        return "<factory>"


class _Constructor:
    """The constructor of a class until it is needed: it compiles the function and puts it into its place.

    Two threads may both compile it: each uses its own function, and the last one stays.
    """

    cls: type

    def __init__(self, fields: Sequence[Field[Any]], *, frozen: bool, slots: bool) -> None:
        self._fields, self._frozen, self._slots = fields, frozen, slots

    def __get__(self, record: object, owner: type) -> Any:
        constructor = self._compile(self.cls)
        setattr(self.cls, "__init__", constructor)  # noqa: B010  # mypy refuses the assignment
        return constructor.__get__(record, owner)

    def _compile(self, cls: type) -> Any:
        last = {field_.name for field_ in self._fields if getattr(field_, "kw_only", False)}
        fields = sorted((item for item in self._fields if item.init), key=lambda field_: field_.name in last)
        values: dict[str, Any] = {"set_": object.__setattr__, "factory_": _Factory()}
        if self._frozen and self._slots:
            values.update((f"set_{item.name}", getattr(cls, item.name).__set__) for item in self._fields)
        parameters = ["self"]
        for field_ in fields:
            if field_.name in last and "*" not in parameters:
                parameters.append("*")
            parameters.append(field_.name)
            if field_.default is not MISSING:
                values[f"default_{field_.name}"] = field_.default
                parameters[-1] += f"=default_{field_.name}"
            elif field_.default_factory is not MISSING:
                parameters[-1] += "=factory_"
        lines = [*self._assignments(values), "return"]
        if hasattr(cls, "__post_init__"):
            lines.insert(-1, "self.__post_init__()")
        # Of identifiers only: the names of the fields, and those in `values`.
        exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines), values)  # noqa: S102
        constructor = values["__init__"]
        constructor.__module__, constructor.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
        constructor.__annotations__ = {**{field_.name: field_.type for field_ in fields}, "return": None}
        return constructor

    def _assignments(self, values: dict[str, Any]) -> Iterator[str]:
        """Yield the statements that fill the fields, and add the objects that they name to `values`."""
        for row in self._fields:
            value = row.name if row.init else f"default_{row.name}"
            if row.default_factory is not MISSING:
                values[f"make_{row.name}"] = row.default_factory
                maker = f"make_{row.name}()"
                value = f"{maker} if {row.name} is factory_ else {row.name}" if row.init else maker
            elif not row.init:
                if row.default is MISSING or not self._slots:
                    continue  # set by __post_init__, or the attribute of the class
                values[value] = row.default
            if self._frozen and self._slots:
                yield f"set_{row.name}(self, {value})"
            else:
                yield f"set_(self, {row.name!r}, {value})" if self._frozen else f"self.{row.name} = {value}"


def _represent(names: Sequence[str]) -> Callable[[Any], str]:
    def represent(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return recursive_repr()(represent)


def _compare(names: Sequence[str], *, frozen: bool) -> dict[str, Any]:
    """Return `__eq__` and `__hash__` of the values of these fields."""
    values: Callable[[Any], tuple[Any, ...]] = lambda self: tuple([getattr(self, name) for name in names])  # noqa: E731
    if len(names) > 1:
        values = attrgetter(*names)

    def equal(self: Any, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return {"__eq__": equal, "__hash__": (lambda self: hash(values(self))) if frozen else None}


def _pickle(names: Sequence[str]) -> dict[str, Any]:
    """Return the methods by which a frozen record with slots is copied and pickled."""

    def restore(self: Any, state: Sequence[Any]) -> None:
        for position, name in enumerate(names):
            object.__setattr__(self, name, state[position])

    return {"__getstate__": lambda self: [getattr(self, name) for name in names], "__setstate__": restore}


def _add_slots(cls: type, names: Sequence[str]) -> type:
    """Return the class made anew with these slots: Python takes them at its creation only."""
    inherited = {slot for name_ in cls.__mro__[1:-1] for slot in vars(name_).get("__slots__", ())}
    replaced = {*names, "__dict__", "__weakref__"}
    namespace = {key: value for key, value in vars(cls).items() if key not in replaced}
    namespace["__slots__"] = tuple(name for name in names if name not in inherited)
    namespace["__qualname__"] = cls.__qualname__
    return type(cls)(cls.__name__, cls.__bases__, namespace)


def _freeze(cls: Any, names: set[str]) -> None:
    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = assign, delete
