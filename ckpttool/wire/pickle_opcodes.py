"""What each pickle opcode does to the machine (Lib/pickletools.py describes them, protocols 0 to 5)."""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import Any

from ckpttool.wire.pickle_machine import Machine, Opcode
from ckpttool.wire.pickle_values import RENAMED, Global, Object, Set, Stateful, Stored

_UNPACK_FLOAT = struct.Struct(">d").unpack_from


# Python's own reader takes more spellings (octal and hexadecimal ones, spaces, underscores), C's another set.
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)L?")
_REAL = re.compile(rb"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:inf|nan)")


def _put(machine: Machine, number: int) -> None:
    machine.memo[machine.memo_number(number)] = machine.stack[-1]


def _append(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif isinstance(target, Object):
        target.items = target.items or []
        target.items.extend(items)
    else:
        machine.fail(f"the pickle appends to a {type(target).__name__}", machine.position)


def _add(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    target = machine.stack[-1]
    if type(target) is Set and target.name == "builtins.set":
        machine.built(target.add, items)
    elif isinstance(target, Object):
        target.items = target.items or []
        target.items.extend(items)
    else:
        machine.fail(f"the pickle adds to a {type(target).__name__}", machine.position)
    return at


def _set_items(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Object):
        target.entries = target.entries if target.entries is not None else {}
        target = target.entries
    elif not isinstance(target, dict):
        machine.fail(f"the pickle sets an item of a {type(target).__name__}", machine.position)
    if len(items) % 2:
        machine.fail("a dict's items do not come in pairs", machine.position)
    for at in range(0, len(items), 2):
        key = items[at]
        target[key if type(key) is str else machine.key(key, target)] = items[at + 1]


# Each function takes the position after the opcode, returns the position after its argument.
# Slices past the end are short, and the loop then finds itself beyond the end: nothing is allocated for
# a length that the file does not have.


def _proto(machine: Machine, at: int) -> int:
    if machine.data[at] > 5:
        machine.fail(f"the pickle's protocol is {machine.data[at]}, newer than 5", at)
    return at + 1


def _frame(machine: Machine, at: int) -> int:
    size = machine.number(at, 8)
    if machine.end != len(machine.data):
        machine.fail("a frame begins inside another", at)
    if at + 8 + size > len(machine.data):
        machine.cut()
    machine.end = at + 8 + size
    return at + 8


def _mark(machine: Machine, at: int) -> int:
    machine.outer.append(machine.stack)
    machine.stack = []
    return at


def _pop(machine: Machine, at: int) -> int:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()
    return at


def _pop_mark(machine: Machine, at: int) -> int:
    machine.since_mark()
    return at


def _dup(machine: Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _constant(value: object) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _new(kind: Callable[[], object]) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return push


def _integer(width: int, *, signed: bool) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(int.from_bytes(machine.data[at : at + width], "little", signed=signed))
        return at + width

    return push


def _long(width: int) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        size = int.from_bytes(machine.data[at : at + width], "little", signed=width == 4)
        if size < 0:
            machine.fail("an integer of negative length", at)
        if size > machine.limits.pickle_integer:
            machine.exceed("pickle_integer", "an integer is too long", size)
        at += width
        machine.stack.append(int.from_bytes(machine.data[at : at + size], "little", signed=True))
        return at + size

    return push


def _int_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    if text in (b"00", b"01"):
        machine.stack.append(text == b"01")
    elif _INTEGER.fullmatch(text):
        machine.stack.append(int(text.removesuffix(b"L")))
    else:
        machine.fail("an integer of the pickle is not written as picklers write it", at)
    return after


def _float_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    if not _REAL.fullmatch(text):
        machine.fail("a number of the pickle is not written as picklers write it", at)
    machine.stack.append(float(text))
    return after


def _float(machine: Machine, at: int) -> int:
    machine.stack.append(_UNPACK_FLOAT(machine.data, at)[0])
    return at + 8


def _text(width: int) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        stop = at + width + int.from_bytes(machine.data[at : at + width], "little")
        if stop > len(machine.data):
            # A character that the end cuts would look like a wrong one.
            machine.cut()
        machine.stack.append(machine.data[at + width : stop].decode("utf-8", "surrogatepass"))
        return stop

    return push


def _bytes(width: int) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        start = at + width
        size = int.from_bytes(machine.data[at:start], "little")
        long = size > machine.inline
        machine.stack.append(
            Stored(machine.data, start, size) if long else machine.data[start : start + size]
        )
        return start + size

    return push


def _old_string(width: int) -> Opcode:
    """Python 2's str: text where it is ASCII, else bytes."""

    def push(machine: Machine, at: int) -> int:
        size = int.from_bytes(machine.data[at : at + width], "little", signed=width == 4)
        if size < 0:
            machine.fail("a string of negative length", at)
        raw = machine.data[at + width : at + width + size]
        machine.stack.append(raw.decode("ascii") if raw.isascii() else raw)
        return at + width + size

    return push


def _string_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
        machine.fail("a string without quotes", at)
    raw = codecs.escape_decode(text[1:-1])[0]
    machine.stack.append(raw.decode("ascii") if raw.isascii() else raw)
    return after


def _unicode_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(text.decode("raw-unicode-escape"))
    return after


def _tuple(machine: Machine, at: int) -> int:
    items = tuple(machine.since_mark())
    machine.stack.append(items)
    return at


def _tuple_of(count: int) -> Opcode:
    def push(machine: Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return push


def _list(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(items)
    return at


def _dict(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append({})
    _set_items(machine, items)
    return at


def _frozenset(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    made = Set("builtins.frozenset")
    machine.built(made.add, items)
    machine.stack.append(made)
    return at


def _append_one(machine: Machine, at: int) -> int:
    _append(machine, [machine.stack.pop()])
    return at


def _append_many(machine: Machine, at: int) -> int:
    _append(machine, machine.since_mark())
    return at


def _set_one(machine: Machine, at: int) -> int:
    value = machine.stack.pop()
    _set_items(machine, [machine.stack.pop(), value])
    return at


def _set_many(machine: Machine, at: int) -> int:
    _set_items(machine, machine.since_mark())
    return at


def _named(machine: Machine, module: Any, name: Any) -> Global:
    if type(module) is not str or type(name) is not str:
        machine.fail("the pickle names something by other than text", machine.position)
    if len(module) + len(name) > machine.limits.pickle_name:
        machine.exceed("pickle_name", "a name is too long", len(module) + len(name))
    found = Global(RENAMED.get(module, module), name)
    machine.name(found)
    return found


def _global(machine: Machine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    machine.stack.append(_named(machine, module.decode("utf-8"), name.decode("utf-8")))
    return at


def _stack_global(machine: Machine, at: int) -> int:
    name = machine.stack.pop()
    machine.stack.append(_named(machine, machine.stack.pop(), name))
    return at


def _reduce(machine: Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)
    return at


def _new_object(machine: Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args, new=True)
    return at


def _new_object_ex(machine: Machine, at: int) -> int:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not isinstance(kwargs, dict):
        machine.fail("the pickle makes a call whose named arguments are no dict", machine.position)
    machine.stack[-1] = machine.call(machine.stack[-1], args, kwargs, new=True)
    return at


def _instance(machine: Machine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    args = tuple(machine.since_mark())
    target = _named(machine, module.decode("utf-8"), name.decode("utf-8"))
    machine.stack.append(machine.call(target, args))
    return at


def _object(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(machine.call(items[0], tuple(items[1:])))
    return at


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Stateful):
        machine.built(target.set_state, state)
    elif not hasattr(target, "state"):
        what = (
            f"the class or function {target.full}" if type(target) is Global else f"a {type(target).__name__}"
        )
        machine.fail(f"the pickle sets the state of {what}", machine.position)
    else:
        target.state = machine.restated(target, state)
    return at


def _persistent_id(machine: Machine, value: Any) -> Any:
    if machine.persistent is None:
        machine.fail("the pickle refers to something outside itself", machine.position)
    return machine.built(machine.persistent, value)


def _persistent_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(_persistent_id(machine, text.decode("ascii")))
    return after


def _persistent(machine: Machine, at: int) -> int:
    machine.stack[-1] = _persistent_id(machine, machine.stack[-1])
    return at


def _get_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(machine.recall(int(text)))
    return after


def _get_long(machine: Machine, at: int) -> int:
    machine.stack.append(machine.recall(machine.number(at, 4)))
    return at + 4


def _put_text(machine: Machine, at: int) -> int:
    text, after = machine.line(at)
    _put(machine, int(text))
    return after


def _memoize(machine: Machine, at: int) -> int:
    _put(machine, len(machine.memo))
    return at


def _refused(what: str) -> Opcode:
    def refuse(machine: Machine, at: int) -> int:
        machine.fail(f"the pickle {what}", at - 1)

    return refuse


def _registered(width: int) -> Opcode:
    def refuse(machine: Machine, at: int) -> int:
        number = machine.number(at, width)
        machine.fail(f"the pickle names a class by number {number:,} of its writer's registry", at - 1)

    return refuse


def _unknown(machine: Machine, at: int) -> int:
    machine.fail(f"no pickle opcode is {machine.data[at - 1]:#04x}", at - 1)


_OPCODES: dict[bytes, Opcode] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b")": _constant(()),
    b"]": _new(list),
    b"}": _new(dict),
    b"\x8f": _new(lambda: Set("builtins.set")),
    b"I": _int_text,
    b"L": _int_text,
    b"J": _integer(4, signed=True),
    b"M": _integer(2, signed=False),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"F": _float_text,
    b"G": _float,
    b"S": _string_text,
    b"T": _old_string(4),
    b"U": _old_string(1),
    b"V": _unicode_text,
    b"X": _text(4),
    b"\x8c": _text(1),
    b"\x8d": _text(8),
    b"B": _bytes(4),
    b"C": _bytes(1),
    b"\x8e": _bytes(8),
    b"\x96": _bytes(8),
    b"t": _tuple,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"l": _list,
    b"d": _dict,
    b"\x91": _frozenset,
    b"a": _append_one,
    b"e": _append_many,
    b"\x90": _add,
    b"s": _set_one,
    b"u": _set_many,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"\x92": _new_object_ex,
    b"i": _instance,
    b"o": _object,
    b"b": _build,
    b"P": _persistent_text,
    b"Q": _persistent,
    b"g": _get_text,
    b"j": _get_long,
    b"p": _put_text,
    b"\x94": _memoize,
    b"\x82": _registered(1),
    b"\x83": _registered(2),
    b"\x84": _registered(4),
    b"\x97": _refused("keeps data in buffers outside itself"),
    b"\x98": _refused("keeps data in buffers outside itself"),
}
TABLE = [_OPCODES.get(bytes((code,)), _unknown) for code in range(256)]
