"""Verdicts on the names and calls of a pickle, by allow lists: lists of dangerous names are never complete.

A standard library name outside the lists can act on the world (os, subprocess, builtins.eval, uuid.getnode,
...). It makes no difference that it is only referenced, since a pickle can pass it to code that calls it. A
name outside the standard library belongs to whatever is installed: a reference to it imports a module, an
instance of an unlisted class runs that class's code, and a call of an unlisted function runs the function.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckpttool.core.code_references import CLASSES, CODE, PLAIN, UNKNOWN, Verdict, unsafe_references
from ckpttool.encodings.pickle_values import RENAMED, Dict, Global, PickleObject, Set, StoredBytes

_METACLASSES = frozenset(("abc.ABCMeta", "builtins.type", "enum.EnumMeta", "enum.EnumType"))
_BUILTIN_ERRORS = ("Error", "Exception", "Warning", "Interrupt", "Iteration")


def _read_allowlist() -> dict[str, set[str]]:
    """Return the names in each section of the list."""
    sections: dict[str, set[str]] = {}
    names: set[str] = set()
    with open(os.path.join(os.path.dirname(__file__), "pickle_allowlist.txt"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    for line in lines:
        if line.startswith("["):
            names = sections.setdefault(line.strip("[]"), set())
        elif line and not line.startswith("#"):
            modules, colon, listed = line.partition(": ")
            homes = [f"{module}." for module in modules.split(", ")] if colon else [""]
            names.update(f"{home}{name}" for home in homes for name in (listed if colon else line).split())
    return sections


_SECTIONS = _read_allowlist()
_DATA, _NAMED_ONLY, _LIBRARIES = (_SECTIONS[name] for name in ("data", "types", "tensors"))
_CALLED = _SECTIONS["called"]
_INSTANCES = _CALLED | _SECTIONS["instances"]
# Names that a function by value may use, and modules of the standard library that it may import. A library
# calls such functions when it loads its file (learning rate schedules, feature extractors).
_USED = _SECTIONS["code"]
_COMPUTING = _SECTIONS["modules"]
_CLOUDPICKLES = tuple(
    f"{home}.{module}"
    for home in ("cloudpickle", "ray.cloudpickle", "joblib.externals.cloudpickle")
    for module in ("cloudpickle", "cloudpickle_fast")
)

# Builtin types that cloudpickle creates by name without running code (cloudpickle.py, _builtin_type).
_MADE = frozenset(
    (
        "CellType",
        "CodeType",
        "FunctionType",
        "GenericAlias",
        "LambdaType",
        "MappingProxyType",
        "MethodType",
        "ModuleType",
        "SimpleNamespace",
    )
)
# Standard library modules of older and newer Python versions (from the release notes).
_OLD_AND_NEW = (
    "__builtin__ _interpreters _pyrepl _xxsubinterpreters asynchat asyncore audioop binhex cgi cgitb crypt "
    "distutils httplib imghdr imp lib2to3 macpath mailcap msilib nis nntplib ossaudiodev pipes popen2 smtpd "
    "sndhdr spwd sunau telnetlib urllib2 uu xdrlib"
)
_OTHER_VERSIONS = frozenset(_OLD_AND_NEW.split())


def is_stdlib_name(target: Global) -> bool:
    """Return whether a name belongs to the standard library of any Python version and platform."""
    return _is_stdlib_module(target.module)


def _is_stdlib_module(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in RENAMED or top in _OTHER_VERSIONS


def judge_name(target: Global, *, rebuilt: bool) -> Verdict:
    """Return the verdict on a name that is not called; `rebuilt`: calls of it become data here."""
    full = target.full
    if _is_indirect_name(target.name):
        return CODE
    if rebuilt or full in _DATA or full in _LIBRARIES:
        return PLAIN
    if not is_stdlib_name(target):
        return CLASSES
    return PLAIN if full in _NAMED_ONLY or _is_exception_class(target) else CODE


def is_listed(target: Global) -> bool:
    """Return whether a list names the function or class."""
    full = target.full
    return full in _DATA or full in _LIBRARIES or full in _INSTANCES


def judge_call(target: Global, args: tuple[Any, ...], *, new: bool = False) -> Verdict:
    """Return the verdict on a call, which is never executed; what it would call itself is judged apart.

    `new` means a call of the class's `__new__` alone, as pickle creates instances.
    """
    full = target.full
    if _is_indirect_name(target.name) or (full == _EMBEDDED and _holds_code(args)):
        return CODE
    if not is_stdlib_name(target):
        return _judge_library_call(full, args, new=new)
    if full in _DATA:
        return CODE if _needs_outside_data(full, args) else PLAIN
    return PLAIN if _is_exception_class(target) or _is_harmless_lookup(full, args) else CODE


def _judge_library_call(full: str, args: tuple[Any, ...], *, new: bool) -> Verdict:
    if full in _LIBRARIES:
        return PLAIN
    if full in _CALLED:
        return CLASSES
    if not new or args:
        return CODE
    # TorchScript's own classes are defined by the code in the archive, which is reported itself.
    return CLASSES if full in _INSTANCES or full.startswith(_TORCHSCRIPT) else UNKNOWN


_TORCHSCRIPT = "__torch__."


# torch/storage.py: torch.load of its argument's bytes; torch pickles every storage this way.
_EMBEDDED = "torch.storage._load_from_bytes"
_PICKLES, _WINDOW = 5, 1 << 16  # pickles before the numbers of such a storage (torch/serialization.py)


def _holds_code(args: tuple[Any, ...]) -> bool:
    """Return whether the pickles in a storage's own bytes run code or cannot be judged."""
    from ckpttool.encodings.pickle_reader import scan_pickle

    data = bytes(args[0]) if len(args) == 1 and isinstance(args[0], bytes | StoredBytes) else b""
    at = 0
    for _ in range(_PICKLES):
        scan = scan_pickle(data[at : at + _WINDOW])
        scan = scan_pickle(data[at:]) if scan.cut else scan
        if scan.end is None or unsafe_references(scan.code_references):
            return True
        at += scan.end
    return False


def _is_exception_class(target: Global) -> bool:
    # Exception classes are data too, but share the module builtins with eval and open.
    return target.module == "builtins" and target.name.endswith(_BUILTIN_ERRORS) and "." not in target.name


def _is_indirect_name(name: str) -> bool:
    """Return whether a dotted name reaches another module, e.g. `os.system` of a module importing os."""
    steps = name.split(".")
    if len(steps) < 2:
        return False
    inner = any(step in sys.stdlib_module_names for step in steps[:-1])
    return inner or any(step.startswith("__") and step.endswith("__") for step in steps)


# Iterators without an end, or with one that their arguments choose.
_ENDLESS = ("builtins.range", "builtins.xrange", "itertools.")


def _needs_outside_data(full: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call of a data class creates data that no file contains, or calls another object.

    `bytearray(2**36)` creates that many zeros, `list(count())` never ends; an object that copyreg
    creates from a class by value then receives its state from that class.
    """
    if not args:
        return False
    if full in ("builtins.bytes", "builtins.bytearray") and type(args[0]) is int:
        return True
    if not full.startswith(_ENDLESS) and any(
        isinstance(argument, PickleObject) and argument.name.startswith(_ENDLESS) for argument in args
    ):
        return True
    return full.startswith("copyreg.") and isinstance(args[0], PickleObject)


Inner = tuple[object, tuple[Any, ...], bool]


def _from_function(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the call of `function(*arguments)` (jax._src.array._reconstruct_array, dill's _create_array)."""
    if len(args) < 2 or type(args[1]) is not tuple:
        yield None, (), False
    else:
        yield args[0], args[1], False


def _from_type(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the calls of torch/_tensor.py, _rebuild_from_type: `function(*arguments)` as another class."""
    if len(args) < 3 or type(args[2]) is not tuple:
        yield None, (), False
    else:
        yield args[0], args[2], False
        yield args[1], (), True


def _first_class(args: tuple[Any, ...]) -> Iterator[Inner]:
    yield args[0] if args else None, (), True


def _masked(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the classes of a masked array and of its data (numpy/ma/core.py, _mareconstruct)."""
    for argument in args[:2] or (None,):
        yield argument, (), True


def _bit_generator(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the class that numpy/random/_pickle.py, __bit_generator_ctor, calls if it is not a name."""
    if args and not isinstance(args[0], str):
        yield args[0], (), False


def _random_state(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the constructor that numpy.random's __randomstate_ctor calls with the first argument."""
    yield from _bit_generator(tuple(argument for argument in args[:1] if isinstance(argument, Global)))
    for argument in args[1:2]:
        yield argument, args[:1], False


def _new_object(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the class whose `__new__` copyreg.__newobj_ex__ calls with arguments and keyword arguments."""
    if len(args) != 3 or not isinstance(args[1], tuple):
        yield None, (), True
    else:
        yield args[0], (*args[1], args[2]) if args[2] else args[1], True


def _reconstructed(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the base class whose `__new__` and `__init__` copyreg._reconstructor calls."""
    for argument in args[1:2]:
        yield argument, args[2:], False


def _skeleton(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the metaclass that cloudpickle's _make_skeleton_class calls, unless it runs nothing."""
    for argument in args[:1]:
        if not (isinstance(argument, Global) and argument.full in _METACLASSES):
            yield argument, args[1:], False


def _imported(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the module that cloudpickle's subimport returns, if it may act on the world."""
    name = args[0] if args else None
    if not isinstance(name, str) or (_is_stdlib_module(name) and name.partition(".")[0] not in _COMPUTING):
        yield Global("", name) if isinstance(name, str) else None, (), False


def _universal(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield what numpy's _ufunc_reconstruct imports, unless it is a function of numbers."""
    if args[:1] != ("numpy",) or len(args) != 2 or args[1] not in _UNIVERSAL:
        yield None, (), False


_UNIVERSAL = _SECTIONS["ufuncs"]


def _class_with_arguments(args: tuple[Any, ...]) -> Iterator[Inner]:
    """Yield the class that pandas' _new_Index creates with the settings in the second argument."""
    yield args[0] if args else None, args[1:], True


_INNER: Mapping[str, Callable[[tuple[Any, ...]], Iterator[Inner]]] = {
    "copyreg.__newobj_ex__": _new_object,
    "copyreg._reconstructor": _reconstructed,
    "dill._dill._create_array": _from_function,
    "jax._src.array._reconstruct_array": _from_function,
    "numpy.ma.core._mareconstruct": _masked,
    "numpy.random._pickle.__generator_ctor": _random_state,
    "pandas._libs.arrays.__pyx_unpickle_NDArrayBacked": _first_class,
    "pandas.core.indexes.base._new_Index": _class_with_arguments,
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_wrapper_subclass": _first_class,
    "torch.tensor._rebuild_from_type": _from_type,
    **{f"numpy.{core}._ufunc_reconstruct": _universal for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _first_class for core in ("core", "_core")},
    **{f"{home}._make_skeleton_class": _skeleton for home in _CLOUDPICKLES},
    **{f"{home}.subimport": _imported for home in _CLOUDPICKLES},
}


# Attributes that nothing calls while it loads.
_ATTRIBUTES = _SECTIONS["attributes"]
_DEPTH = 4  # containers within containers that are searched for functions


def is_function(value: object) -> bool:
    """Return whether a name may be that of a function: calling a listed class only creates data."""
    if not isinstance(value, Global):
        return False
    full = value.full
    if full in _VALUES or (value.module == "numpy" and value.name in _UNIVERSAL):
        return False
    listed = is_listed(value) or full in _NAMED_ONLY or _is_exception_class(value)
    kind = value.module in _HOMES_OF_TYPES or value.name.lstrip("_")[:1].isupper()
    return not (listed and kind) or value.module.startswith(_ACTIVE_HOMES)


_VALUES = _SECTIONS["named"]
_HOMES_OF_TYPES = frozenset(
    ("array", "builtins", "collections", "datetime", "itertools", "numpy", "time", "torch")
)
# Listed classes whose creation does more than their empty instances do.
_ACTIVE_HOMES = ("accelerate.", "transformers.")


def reach_functions(
    value: object, spend: Callable[[int], None], reach: Callable[[Global], None], depth: int = 0
) -> None:
    """Call `reach` with the functions in a value of plain containers, except under a name that nothing calls.

    `spend` gets the number of items that are visited. Loading looks up methods on what a pickle has made:
    `append` of a list's opcodes, `__setstate__`, `keys` of a dict's argument. An attribute of that name would
    be called.
    """
    if type(value) is Global:
        if is_function(value):
            reach(value)
    elif depth < _DEPTH and isinstance(value, _CONTAINERS):
        spend(len(value))
        inner: Iterable[object] = value
        if isinstance(value, dict):
            inner = [item for name, item in value.items() if type(name) is not str or name not in _ATTRIBUTES]
        # Nearly every call of a checkpoint has only numbers.
        if not _SEARCHED.isdisjoint(map(type, inner)):
            for item in inner:
                if type(item) in _SEARCHED:
                    reach_functions(item, spend, reach, depth + 1)


_CONTAINERS = (tuple, list, dict)


_SEARCHED = frozenset((Global, tuple, list, dict, Dict, Set))


def created_from(full: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a listed function in which a function would be a value, not what is created.

    What `inner_calls` judges, the classes of new objects and the bases of new classes are left out.
    """
    if full in ("copyreg.__newobj__", "copyreg.__newobj_ex__", "builtins.type"):
        return args[1:]
    if full in _SKELETONS:
        return args[3:]
    if full in _INNER:
        return tuple(argument for argument in args if not isinstance(argument, Global))
    return args


_SKELETONS = frozenset(f"{home}._make_skeleton_class" for home in _CLOUDPICKLES)


def inner_calls(full: str) -> Callable[[tuple[Any, ...]], Iterable[Inner]] | None:
    """Return the function that yields what a listed function would call: target, arguments, `__new__` alone.

    A target that is not a Global cannot be judged. None if the listed function calls none of its arguments.
    """
    return _INNER.get(full)


def called_target(target: PickleObject) -> Global | None:
    """Return what a call of a call's result would run; None if it creates a value and runs nothing.

    Such a result is not data: `functools.partial(os.system, "...")()`,
    `attrgetter("system")(...)()`, a function or class by value. The result of a result was reported
    when the first was called.
    """
    made_by = target.function
    if not isinstance(made_by, Global):
        return None
    if made_by.name == "_builtin_type" and "cloudpickle" in made_by.module and target.args:
        kind = target.args[0]
        if len(target.args) == 1 and type(kind) is str and kind in _MADE:
            return None
    inner = target.args[0] if made_by.full == "functools.partial" and target.args else None
    return inner if isinstance(inner, Global) and target.state is None else made_by


_SHOWN_NAME = 40


def is_code_type(function: object) -> bool:
    """Return whether a call of this object creates the code of a function."""
    if isinstance(function, Global):
        return function.full == "dill._dill._create_code"
    return isinstance(function, PickleObject) and function.args == ("CodeType",)


def used_names(args: tuple[Any, ...]) -> Iterator[Global]:
    """Yield the names in a function's code that may act on the world; `args` are those of types.CodeType.

    The names of globals, attributes and imported modules follow the constants, which follow the bytecode
    (Objects/codeobject.c, code_new; the same order in every version of Python).
    """
    at = next((n for n, argument in enumerate(args) if isinstance(argument, bytes | StoredBytes)), None)
    names = args[at + 2] if at is not None and len(args) > at + 2 else None
    if type(names) is not tuple or not all(type(name) is str for name in names):
        yield Global("types", "CodeType")
        return
    for name in names:
        if name not in _USED and name not in _COMPUTING:
            # Attributes and globals look alike: a name of the standard library is reported as that.
            if name in sys.stdlib_module_names:
                yield Global("", name)
            else:
                yield Global("builtins" if hasattr(builtins, name) else _function_name(args, at or 0), name)


def _function_name(args: tuple[Any, ...], at: int) -> str:
    """Return a name for a function's code: its own follows the names, the variables and the file."""
    name = args[at + 5] if len(args) > at + 5 else None
    words = re.sub(r"\W", "", name)[:_SHOWN_NAME] if isinstance(name, str) else ""
    return f"{words or 'lambda'}<code>"


def _is_harmless_lookup(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call only looks up an object that leads nowhere else.

    Pickler.save_type (Lib/pickle.py) stores the type of None as a call of `type`; cloudpickle stores
    classes by value, and with them `tuple.__new__` of named tuples and the annotation
    `Optional[int]` (by getitem).
    """
    if not args:
        return False
    first = args[0]
    if name == "builtins.getattr":
        # Of any object it gives access to everything: `getattr(method, "__globals__")`.
        return args in _MAKERS
    if name == "builtins.type":
        return len(args) == 1 and (first is None or isinstance(first, Global))
    return name == "_operator.getitem" and isinstance(first, Global) and first.module == "typing"


_MAKERS = (
    *((Global("builtins", kind), "__new__") for kind in ("object", "tuple", "int", "str", "float")),
    # A static method that BasePolicy.save stores as the learning rate: it returns 0.
    (Global("stable_baselines3.common.policies", "BasePolicy"), "_dummy_schedule"),
)
