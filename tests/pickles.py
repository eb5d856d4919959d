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
    made: dict[str, types.ModuleType] = {}
    for one in classes:
        parts = one.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            made.setdefault(name, types.ModuleType(name))
        setattr(made[one.__module__], one.__name__, one)
    hidden = {name: sys.modules[name] for name in made if name in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(hidden)


def instance(kind: type, **attributes: Any) -> Any:
    """Return an object of the class with these attributes, as unpickling would make it."""
    made = kind()
    made.__dict__.update(attributes)
    return made


def damaged(whole: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Give `count` copies with one to three flipped bits each."""
    import random

    choose = random.Random(seed)
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        yield bytes(data)
