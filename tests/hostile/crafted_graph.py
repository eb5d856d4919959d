"""Object graphs that are circular, deep, broad or wrong."""

from __future__ import annotations

from tests.bundle_writer import entry, field, node, shape, variable
from tests.hostile.bundles import CRC, FLOATS, GRAPH, Make, file, index_of, linked, stored
from tests.hostile.case import Case

_LINE = "object graph"
_KEY = "v/.ATTRIBUTES/VARIABLE_VALUE"
_V = {_KEY: FLOATS}


def _case(name: str, make: Make) -> Case:
    """A case that is refused when it is listed."""
    return Case(f"graph-{name}", _LINE, make, digest=None)


def _reads(name: str, make: Make, shows: str = "v") -> Case:
    return Case(f"graph-{name}", _LINE, make, 0, 0, 0, shows=shows)


def _chain(depth: int) -> tuple[bytes, ...]:
    return (*(node([("next", at + 1)]) for at in range(depth)), variable("v"))


def _fan(levels: int, width: int = 4) -> tuple[bytes, ...]:
    """Each object holds the next by `width` names: width^levels ways to the variable."""
    return (*(node([(f"e{n}", at + 1) for n in range(width)]) for at in range(levels)), variable("v"))


CASES = (
    _reads("self", linked(node([("self", 0), ("v", 1)]), variable("v"), values=_V)),
    _reads("cycle", linked(node([("a", 1)]), node([("b", 0), ("v", 2)]), variable("v"), values=_V)),
    _reads("50000-deep", lambda folder: linked(*_chain(50_000), values=_V)(folder)),
    _reads("4-to-the-30", linked(*_fan(30), values=_V)),
    _reads("broad", linked(*_fan(4, 40), values=_V)),
    _case("id-77", linked(node([("a", 77)]), values=_V)),
    _case("id-minus-1", linked(node([("a", -1)]), values=_V)),
    _reads(
        "key-absent",
        linked(node([("u", 1), ("v", 2)]), variable("u"), variable("v"), values=_V),
    ),
    _reads("key-unnamed", linked(node(), values=_V)),
    _reads("empty", linked(values=_V)),
    _case("child-twice", linked(node([("a", 1), ("a", 2)]), variable("v"), node(), values=_V)),
    *(
        _case(f"slot-{name}", linked(node(slots=[slot]), variable("v"), values=_V))
        for name, slot in (("of-9", (9, "m", 1)), ("variable-9", (1, "m", 9)), ("of-minus-1", (-1, "m", 1)))
    ),
    _reads("slot-of-itself", linked(node([("v", 1)], slots=[(1, "m", 1)]), variable("v"), values=_V)),
    _case("garbage", stored(b"\xff" * 40, _V)),
    _case("groups", stored(b"\x0b" * 5000, _V)),
    _case("number-for-a-node", stored(field(1, 5), _V)),
    Case(
        *("graph-parts", _LINE, linked(node([(f"{n}", 0) for n in range(1200)]), values=_V)),
        digest=None,
        options=("--limit", "graph_parts=1000"),
    ),
    _case("no-string", file(index_of({GRAPH: entry(1, shape(4), 0, 16, CRC)}))),
    _case("strings", file(index_of({GRAPH: entry(7, shape(2), 0, 16, CRC)}))),
    _case("checksum", file(index_of({GRAPH: entry(7, b"", 0, 16, CRC)}))),
    _reads("escape", linked(node([("\x1b[2J\n‮", 1)]), variable("v"), values=_V), shows="v"),
    _reads("up", linked(node([("../../etc/passwd", 1)]), variable("v"), values=_V), shows="passwd"),
)
