"""Stand-ins for classes of libraries that are not here, so that pickles name them as real files do."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any


def stand_in(full: str, **attributes: Any) -> type:
    """Return a class that pickles under the dotted name `full`."""
    module, _, name = full.rpartition(".")
    return type(name, (), {"__module__": module, "__qualname__": name, **attributes})


@contextlib.contextmanager
def importable(*classes: type) -> Iterator[None]:
    """Make the classes importable by their names, as pickle demands of what it writes."""
    modules: dict[str, types.ModuleType] = {}
    for one in classes:
        parts = one.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            modules.setdefault(name, types.ModuleType(name))
        setattr(modules[one.__module__], one.__name__, one)
    hidden = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(hidden)


def instance(kind: type, **attributes: Any) -> Any:
    """Return an object of the class with these attributes, as unpickling would make it."""
    instance = kind()
    instance.__dict__.update(attributes)
    return instance


def damaged(whole: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Give `count` copies with one to three flipped bits each."""
    import random

    choose = random.Random(seed)
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        yield bytes(data)


def short(text: str) -> bytes:
    return b"\x8c" + bytes((len(text),)) + text.encode()


# What each asks to call; every name is harmless if it were called after all.
ACTING = {
    "GLOBAL + REDUCE": (b"cos\ngetcwd\n)R.", "os.getcwd"),
    "posix": (b"cposix\ngetcwd\n)R.", "posix.getcwd"),
    "nt": (b"cnt\ngetcwd\n)R.", "nt.getcwd"),
    "STACK_GLOBAL": (short("os") + short("getcwd") + b"\x93)R.", "os.getcwd"),
    "dotted name": (
        short("collections") + short("OrderedDict.fromkeys") + b"\x93)R.",
        "collections.OrderedDict.fromkeys",
    ),
    "names in the memo": (short("getcwd") + b"\x940" + short("os") + b"h\x00\x93)R.", "os.getcwd"),
    "INST": (b"(ios\ngetcwd\n.", "os.getcwd"),
    "OBJ": (b"(cos\ngetcwd\no.", "os.getcwd"),
    "NEWOBJ": (b"csubprocess\nPopen\n)\x81.", "subprocess.Popen"),
    "NEWOBJ_EX": (b"csubprocess\nPopen\n)}\x92.", "subprocess.Popen"),
    "eval": (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "builtins.eval"),
    "eval of Python 2": (b"c__builtin__\neval\n(X\x01\x00\x00\x001tR.", "builtins.eval"),
    "getattr of a module": (b"cbuiltins\ngetattr\n(cos\npath\nX\x04\x00\x00\x00jointR.", "builtins.getattr"),
    "import": (b"cbuiltins\n__import__\n(X\x02\x00\x00\x00ostR.", "builtins.__import__"),
    "importlib": (b"cimportlib\nimport_module\n(X\x02\x00\x00\x00ostR.", "importlib.import_module"),
    "runpy": (b"crunpy\nrun_path\n)R.", "runpy.run_path"),
    "pickle in bytes": (b"cpickle\nloads\n(C\x01.tR.", "pickle.loads"),
    "reconstructor": (
        b"ccopy_reg\n_reconstructor\n(csubprocess\nPopen\nc__builtin__\nobject\nNtR.",
        "subprocess.Popen",
    ),
    "inside a dict": (b"}X\x01\x00\x00\x00acos\ngetcwd\n)Rs.", "os.getcwd"),
    "result dropped": (b"cos\ngetcwd\n)R0N.", "os.getcwd"),
    "partial": (b"cfunctools\npartial\n(cos\ngetcwd\ntR)R.", "os.getcwd"),
    "attrgetter": (
        b"coperator\nattrgetter\n(X\x06\x00\x00\x00getcwdtR(cos\npath\ntR.",
        "operator.attrgetter",
    ),
    "attribute of a class": (
        b"cbuiltins\ngetattr\n(cbuiltins\nobject\nX\x0e\x00\x00\x00__subclasses__tR.",
        "builtins.getattr",
    ),
    "item of a module's dict": (
        b"c_operator\ngetitem\n(csys\nmodules\nX\x02\x00\x00\x00ostR.",
        "_operator.getitem",
    ),
    "a result of a library": (b"cmy.net\nmake\n)R)R.", "my.net.make"),
    "a new class": (b"cbuiltins\ntype\n(X\x01\x00\x00\x00a)}tR.", "builtins.type"),
}
