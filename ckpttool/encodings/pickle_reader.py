"""Pickle machine that reads data only: it imports and calls nothing."""

from __future__ import annotations

import codecs
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ckpttool.core import deferred, limits
from ckpttool.core.code_references import CODE, PLAIN, CodeReference, Verdict, dangerous_calls, worse_verdict
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.core.text import clean
from ckpttool.encodings.pickle_audit import (
    called_target,
    created_from,
    inner_calls,
    is_code_type,
    is_listed,
    judge_call,
    judge_name,
    reach_functions,
    used_names,
)
from ckpttool.encodings.pickle_values import (
    CONTAINERS,
    MADE_BY_NEW,
    METHODS,
    RENAMED,
    SPREAD,
    Builder,
    Dict,
    Global,
    KeyTracker,
    OpaqueKey,
    PickleObject,
    Set,
    StatefulValue,
    StoredBytes,
    has_spread_hash,
    is_hashable,
    is_plain,
)

PersistentLoader = Callable[[object], object]
# Values that a builder may traverse; StoredBytes may be pickles themselves.
_COPIED = frozenset((str, bytes, list, tuple, dict, Set, StoredBytes))
_INLINED = frozenset(b"h\x4b(tqr.")
_MEMO = 1 << 16  # entries that earlier pickles of the same pickler may have left
_SHOWN = 100  # Python's messages quote the whole invalid number
_NESTED = 8  # listed functions that call listed functions that call ...


class NameUsage:
    """Uses of one name in the order of the pickle; `worst` is the worst verdict of its calls.

    `names` is the verdict on the name alone, `builder` the function that makes data of its calls, `inner`
    the function that yields what its calls call. `listed`: calls of it create data, as far as their arguments
    are data.
    """

    __slots__ = ("builder", "calls", "full", "inner", "listed", "names", "position", "worst")

    def __init__(self, target: Global, builder: Builder | None, position: int) -> None:
        """Start without calls."""
        self.full = target.full
        self.builder = builder
        self.inner = inner_calls(self.full)
        self.listed = builder is not None or is_listed(target)
        self.names = judge_name(target, rebuilt=builder is not None)
        self.position = position
        self.calls = 0
        self.worst: Verdict = PLAIN

    def judge(self, verdict: Verdict) -> None:
        """Count the verdict on a call."""
        self.worst = worse_verdict(self.worst, verdict)

    def reference(self, base: int) -> CodeReference:
        """Return the record; a dangerous name has one even if only its harmless calls were counted."""
        return CodeReference(
            self.full, self.worst if self.calls else self.names, self.calls, base + self.position
        )


class PickleMachine:
    """One run over one pickle; `position` is the current offset.

    `names` are all names in the pickle. Nothing is called: calls become PickleObjects. Every opcode is at
    least one byte and does work in proportion to what it pushes or pops, so time and memory are linear in the
    input; what the input size does not bound has a limit (ckpttool/core/limits.py).
    """

    __slots__ = (
        "base",
        "builders",
        "data",
        "end",
        "file",
        "inline",
        "keys",
        "limits",
        "memo",
        "most_spent",
        "names",
        "outer",
        "persistent",
        "position",
        "spent",
        "stack",
    )

    def __init__(
        self,
        data: bytes,
        persistent: PersistentLoader | None,
        builders: Mapping[str, Builder],
        inline: int,
        file: str | None,
        base: int,
    ) -> None:
        """Start at the first opcode; bytes longer than `inline` become StoredBytes."""
        self.data = data
        self.persistent = persistent
        self.builders = builders
        self.inline = inline
        self.limits = limits.current()
        self.file = file
        self.base = base
        self.position = 0
        self.spent = 0
        self.most_spent = self.limits.pickle_copies + 4 * len(data)
        self.keys: dict[int, KeyTracker] = {}
        self.end = len(data)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[Global, NameUsage] = {}

    def fail(self, message: str, at: int) -> NoReturn:
        """Raise FormatError at this position of the pickle."""
        raise FormatError(message, file=self.file, offset=self.base + at)

    def exceed(self, limit: str, what: str, found: int) -> NoReturn:
        """Raise LimitError at the current opcode."""
        raise limits.limit_error(limit, what, found, file=self.file, offset=self.base + self.position)

    def cut(self) -> NoReturn:
        """Raise TruncatedError: the bytes end before the pickle does."""
        raise TruncatedError(
            "the pickle ends before its STOP opcode", file=self.file, offset=self.base + len(self.data)
        )

    def run(self, table: Sequence[Opcode]) -> Any:
        """Run up to STOP, one function of the table per opcode, and return the value on the stack."""
        try:
            self._loop(table)
            value = self.stack.pop()
        except IndexError:
            if self.position + 1 >= len(self.data):
                self.cut()
            self.fail("the pickle pops from an empty stack", self.position)
        except (ValueError, OverflowError, struct.error) as error:
            self.fail(f"invalid opcode argument in the pickle: {str(error)[:_SHOWN]}", self.position)
        if self.stack or self.outer:
            self.fail("the pickle leaves more than one value on the stack", self.position)
        return value

    def _loop(self, table: Sequence[Opcode]) -> None:
        # The opcodes that make up three quarters of a checkpoint are inlined; the rest use the table.
        data, memo, outer = self.data, self.memo, self.outer
        stack, end, at = self.stack, self.end, 0
        while True:
            if at >= end:
                self._frame_end(at)
                end = self.end
            self.position = at
            code = data[at]
            if code not in _INLINED:
                at = table[code](self, at + 1)
                stack, end = self.stack, self.end
            elif code == 0x68:  # BINGET
                number = data[at + 1]
                stack.append(memo[number] if number in memo else self.recall(number))
                at += 2
            elif code == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif code == 0x28:  # MARK
                outer.append(stack)
                stack = self.stack = []
                at += 1
            elif code == 0x74:  # TUPLE
                items = tuple(stack)
                stack = self.stack = outer.pop()
                stack.append(items)
                at += 1
            elif code == 0x71:  # BINPUT
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == 0x72:  # LONG_BINPUT
                number = int.from_bytes(data[at + 1 : at + 5], "little")
                memo[number if number <= at else self.memo_number(number)] = stack[-1]
                at += 5
            else:  # STOP
                self.position = at + 1
                return

    def _frame_end(self, at: int) -> None:
        total = len(self.data)
        if at > self.end and at <= total:
            # CPython's two unpicklers read such an argument differently (CPython issue 154848).
            self.fail("the argument of an opcode extends beyond its frame", self.position)
        if at >= total:
            self.cut()
        self.end = total

    def memo_number(self, number: int) -> int:
        """Return the index of a new memo entry; raise FormatError for one that no pickler has reached."""
        # Every pickler counts its entries. Numbers chosen by a file could all fall into one hash slot.
        if not 0 <= number <= self.position + _MEMO:
            self.fail("a memo index of the pickle is out of range", self.position)
        return number

    def recall(self, number: int) -> Any:
        """Return a memo entry."""
        try:
            return self.memo[number]
        except KeyError:
            self.fail(f"the pickle reads memo entry {number:,}, which was never stored", self.position)

    def number(self, at: int, width: int) -> int:
        """Return the unsigned little-endian number at a position."""
        return int.from_bytes(self.data[at : at + width], "little")

    def since_mark(self) -> list[Any]:
        """Return the items since the last MARK, and restore the stack before it."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def line(self, at: int) -> tuple[bytes, int]:
        """Return the text up to the newline and the position after it."""
        stop = self.data.find(b"\n", at)
        if stop < 0:
            self.cut()
        return self.data[at:stop], stop + 1

    def key(self, value: Any, target: dict[Any, Any]) -> Any:
        """Return a key for `target` that hashes in constant time and has Python's equality."""
        if type(value) is StoredBytes:
            self._spend((value,))
            return bytes(value)
        if not is_hashable(value):
            self.fail(f"a {type(value).__name__} is used as a dict key", self.position)
        if has_spread_hash(value, len(target)):
            return value
        if not is_plain(value):
            unhashable = next((item for item in value if not is_hashable(item)), None)
            if unhashable is not None:
                self.fail(f"a tuple with a {type(unhashable).__name__} is used as a dict key", self.position)
            return OpaqueKey(value)
        if len(target) < SPREAD:
            return value
        tracker = self.keys.get(id(target))
        if tracker is None:
            tracker = self.keys[id(target)] = KeyTracker(target)
        return self.built(lambda key: tracker.keep(key, self.limits.pickle_hashed_keys), value)

    def name(self, target: Global) -> NameUsage:
        """Return the record of a name, creating it at its first occurrence."""
        usage = self.names.get(target)
        if usage is None:
            usage = NameUsage(target, self.builders.get(target.full), self.position)
            self.names[target] = usage
        return usage

    def call(self, function: Any, args: Any, kwargs: Any = None, *, new: bool = False) -> Any:
        """Return the inert result of a call: data if a builder supports it, otherwise a PickleObject.

        `new` means a call of the class's `__new__` alone, which may do less than a call of the class.
        """
        if type(args) is not tuple:
            self.fail("the pickle makes a call whose arguments are not a tuple", self.position)
        if type(function) is Global:
            name = self.name(function)
            name.calls += 1
            if new and name.builder is not None and args and function.full not in MADE_BY_NEW:
                self.fail(
                    f"the pickle creates a {function.full} by __new__ alone, with arguments", self.position
                )
            self._judge_inner(name, args)
            if name.listed and args:
                self._spend(args)
                self.judge_functions(created_from(name.full, args))
            if name.builder is not None and not kwargs:
                value = self.built(name.builder, args)
                if value is not NotImplemented:
                    if type(value) is PickleObject:
                        self._created(name, function, value)
                    return value
            name.judge(judge_call(function, (*args, kwargs) if kwargs else args, new=new))
        else:
            self._judge_result(function)
        if is_code_type(function):
            for used in used_names(args):
                self._judge_reached(used)
        return PickleObject(function, args, self.base + self.position, kwargs or None)

    def _judge_result(self, function: Any) -> None:
        """Judge the call of a call's result."""
        if type(function) is not PickleObject:
            self.fail(f"the pickle calls a {type(function).__name__}", self.position)
        reached = called_target(function)
        if reached is not None:
            self._judge_reached(reached)

    def _created(self, name: NameUsage, function: Global, value: PickleObject) -> None:
        # copyreg's helpers create an instance of the class in their arguments, as the opcode NEWOBJ does.
        helper = function.module == "copyreg"
        if not helper:
            name.judge(judge_call(function, value.args))
        target = value.function
        if type(target) is Global and target != function:
            inner = self.name(target)
            inner.calls += 1
            args = () if function.name == "_reconstructor" else value.args
            inner.judge(judge_call(target, args, new=helper))

    def _judge_inner(self, name: NameUsage, args: tuple[Any, ...]) -> None:
        """Judge what a listed function would call, and what that would call."""
        if name.inner is None:
            return
        waiting = [(name, args, 0)]
        while waiting:
            caller, arguments, depth = waiting.pop()
            for target, inner_args, new in caller.inner(arguments) if caller.inner is not None else ():
                if type(target) is not Global or depth >= _NESTED:
                    caller.judge(CODE)
                    continue
                usage = self.name(target)
                verdict = judge_call(target, inner_args, new=new)
                usage.calls += verdict is not PLAIN
                usage.judge(verdict)
                waiting.append((usage, inner_args, depth + 1))

    def judge_functions(self, value: object) -> None:
        """Record the functions in a value that loading may call: as an argument, an attribute or a method."""
        reach_functions(value, self._visit, self._judge_reached)

    def judge_later_change(self, target: PickleObject) -> None:
        """Record a change of an object after its attributes: a method that it calls may be one of these."""
        function: object = target
        while isinstance(function, PickleObject):
            function = function.function
        if isinstance(function, Global):
            self._judge_reached(function)

    def _visit(self, count: int) -> None:
        self.spent += count
        if self.spent > self.most_spent:
            self.exceed("pickle_copies", "the pickle repeats its values too often", self.spent)

    def _judge_reached(self, target: Global) -> None:
        """Record a call that no listed function makes: of a call's result, or inside a function's code."""
        name = self.name(target)
        name.calls += 1
        name.judge(CODE)

    def restated(self, target: Any, state: Any) -> Any:
        """Return the state of the target of BUILD: new attributes are added to the existing ones."""
        if type(target) is Dict:
            self._require_attributes(state)
        elif type(target) is PickleObject:
            self.judge_functions(state)
            if target.state is not None:
                self.judge_later_change(target)
        if type(target) not in (PickleObject, Dict) or target.state is None:
            return state
        if type(target.state) is not dict or type(state) is not dict:
            self.fail("the pickle sets the state of an object a second time", self.position)
        self._spend((target.state, state))
        return {**target.state, **state}

    def _require_attributes(self, state: Any) -> None:
        # For a dict class, the state is plain attributes only if none of them shadows a method.
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            if part is None:
                continue
            self._spend((part,))
            if not isinstance(part, dict) or not all(type(n) is str and n not in METHODS for n in part):
                self.fail("the state of a dict does not consist of attributes", self.position)

    def list_code_references(self) -> tuple[CodeReference, ...]:
        """Return the names and calls of the pickle up to the current position."""
        return tuple(name.reference(self.base) for name in self.names.values())

    def is_plain(self) -> bool:
        """Return whether all names are listed as data, whatever the builders make of their calls."""
        return all(
            name.reference(0).verdict == PLAIN and judge_name(target, rebuilt=False) == PLAIN
            for target, name in self.names.items()
        )

    def _spend(self, args: tuple[Any, ...]) -> None:
        self.spent += len(args)
        if self.spent <= self.most_spent:
            for arg in args:
                if type(arg) in _COPIED:
                    self.spent += len(arg)
                    if type(arg) is tuple and len(arg) == 2:
                        # A state: attributes, and those of objects with slots.
                        for part in arg:
                            self.spent += len(part) if isinstance(part, dict) else 0
        if self.spent > self.most_spent:
            self.exceed("pickle_copies", "the pickle copies its values too often", self.spent)

    def built(self, build: Callable[[Any], Any], argument: Any) -> Any:
        """Return the result of a caller's function; its errors get file and offset."""
        try:
            return build(argument)
        except FormatError as error:
            if error.offset is None:
                error.offset = self.base + self.position
            error.located(file=self.file)
            raise


Opcode = Callable[[PickleMachine, int], int]


_UNPACK_FLOAT = struct.Struct(">d").unpack_from


# Python's own unpickler accepts more notations (octal and hexadecimal, spaces, underscores), the C one
# another set.
_INTEGER = deferred.compile(rb"-?(?:0|[1-9][0-9]*)L?")
_REAL = deferred.compile(rb"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:inf|nan)")


def _put(machine: PickleMachine, number: int) -> None:
    machine.memo[machine.memo_number(number)] = machine.stack[-1]


def _extend_list(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif isinstance(target, PickleObject):
        if target.state is not None:
            machine.judge_later_change(target)
        target.items = target.items or []
        target.items.extend(items)
    else:
        machine.fail(f"the pickle appends to a {type(target).__name__}", machine.position)


def _add_items(machine: PickleMachine, at: int) -> int:
    items = machine.since_mark()
    target = machine.stack[-1]
    if type(target) is Set and target.name == "builtins.set":
        machine.built(target.add, items)
    elif isinstance(target, PickleObject):
        if target.state is not None:
            machine.judge_later_change(target)
        target.items = target.items or []
        target.items.extend(items)
    else:
        machine.fail(f"the pickle adds to a {type(target).__name__}", machine.position)
    return at


def _are_texts(keys: list[Any]) -> bool:
    return all(type(key) is str for key in keys)


def _set_items(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, PickleObject):
        machine.judge_functions(
            dict(zip(items[::2], items[1::2], strict=False)) if _are_texts(items[::2]) else items
        )
        if target.state is not None:
            machine.judge_later_change(target)
        target.entries = target.entries if target.entries is not None else {}
        target = target.entries
    elif not isinstance(target, dict):
        machine.fail(f"the pickle sets an item of a {type(target).__name__}", machine.position)
    if len(items) % 2:
        machine.fail("the items of a dict do not come in pairs", machine.position)
    for at in range(0, len(items), 2):
        key = items[at]
        target[key if type(key) is str else machine.key(key, target)] = items[at + 1]


# Functions of opcodes (Lib/pickletools.py describes them, protocols 0 to 5) receive the position after the
# opcode and return the position after its argument. Slices past the end are short, and the loop then detects
# a position past the end: no memory is allocated for a length that the file does not have.
def _proto(machine: PickleMachine, at: int) -> int:
    if machine.data[at] > 5:
        machine.fail(f"unsupported pickle protocol {machine.data[at]}: the newest is 5", at)
    return at + 1


def _frame(machine: PickleMachine, at: int) -> int:
    size = machine.number(at, 8)
    if machine.end != len(machine.data):
        machine.fail("a frame starts inside another frame", at)
    if at + 8 + size > len(machine.data):
        machine.cut()
    machine.end = at + 8 + size
    return at + 8


def _pop(machine: PickleMachine, at: int) -> int:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()
    return at


def _pop_mark(machine: PickleMachine, at: int) -> int:
    machine.since_mark()
    return at


def _dup(machine: PickleMachine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _push_constant(value: object) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _push_new(kind: Callable[[], object]) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return push


def _push_integer(width: int, *, signed: bool) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        machine.stack.append(int.from_bytes(machine.data[at : at + width], "little", signed=signed))
        return at + width

    return push


def _push_long(width: int) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        size = int.from_bytes(machine.data[at : at + width], "little", signed=width == 4)
        if size < 0:
            machine.fail("an integer has a negative length", at)
        if size > machine.limits.pickle_integer:
            machine.exceed("pickle_integer", "an integer is too long", size)
        at += width
        machine.stack.append(int.from_bytes(machine.data[at : at + size], "little", signed=True))
        return at + size

    return push


def _int_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    if text in (b"00", b"01"):
        machine.stack.append(text == b"01")
    elif _INTEGER.fullmatch(text):
        machine.stack.append(int(text.removesuffix(b"L")))
    else:
        machine.fail("an integer in the pickle has a notation that no pickler writes", at)
    return after


def _float_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    if not _REAL.fullmatch(text):
        machine.fail("a number in the pickle has a notation that no pickler writes", at)
    machine.stack.append(float(text))
    return after


def _float(machine: PickleMachine, at: int) -> int:
    machine.stack.append(_UNPACK_FLOAT(machine.data, at)[0])
    return at + 8


def _push_text(width: int) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        stop = at + width + int.from_bytes(machine.data[at : at + width], "little")
        if stop > len(machine.data):
            # A character cut by the end would look like an invalid one.
            machine.cut()
        machine.stack.append(machine.data[at + width : stop].decode("utf-8", "surrogatepass"))
        return stop

    return push


def _push_bytes(width: int) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        start = at + width
        size = int.from_bytes(machine.data[at:start], "little")
        long = size > machine.inline
        machine.stack.append(
            StoredBytes(machine.data, start, size) if long else machine.data[start : start + size]
        )
        return start + size

    return push


def _push_python2_string(width: int) -> Opcode:
    """Python 2's str: text if it is ASCII, otherwise bytes."""

    def push(machine: PickleMachine, at: int) -> int:
        size = int.from_bytes(machine.data[at : at + width], "little", signed=width == 4)
        if size < 0:
            machine.fail("a string has a negative length", at)
        raw = machine.data[at + width : at + width + size]
        machine.stack.append(raw.decode("ascii") if raw.isascii() else raw)
        return at + width + size

    return push


def _string_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"'\"":
        machine.fail("a string has no quotes", at)
    raw = codecs.escape_decode(text[1:-1])[0]
    machine.stack.append(raw.decode("ascii") if raw.isascii() else raw)
    return after


def _unicode_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(text.decode("raw-unicode-escape"))
    return after


def _push_tuple(count: int) -> Opcode:
    def push(machine: PickleMachine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
        return at

    return push


def _list(machine: PickleMachine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(items)
    return at


def _dict(machine: PickleMachine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append({})
    _set_items(machine, items)
    return at


def _frozenset(machine: PickleMachine, at: int) -> int:
    items = machine.since_mark()
    values = Set("builtins.frozenset")
    machine.built(values.add, items)
    machine.stack.append(values)
    return at


def _append(machine: PickleMachine, at: int) -> int:
    _extend_list(machine, [machine.stack.pop()])
    return at


def _appends(machine: PickleMachine, at: int) -> int:
    _extend_list(machine, machine.since_mark())
    return at


def _set_one(machine: PickleMachine, at: int) -> int:
    value = machine.stack.pop()
    _set_items(machine, [machine.stack.pop(), value])
    return at


def _set_many(machine: PickleMachine, at: int) -> int:
    _set_items(machine, machine.since_mark())
    return at


def _register_global(machine: PickleMachine, module: Any, name: Any) -> Global:
    if type(module) is not str or type(name) is not str:
        machine.fail("the pickle contains a name that is not text", machine.position)
    if len(module) + len(name) > machine.limits.pickle_name:
        machine.exceed("pickle_name", "a name is too long", len(module) + len(name))
    target = Global(RENAMED.get(module, module), name)
    machine.name(target)
    return target


def _global(machine: PickleMachine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    machine.stack.append(_register_global(machine, module.decode("utf-8"), name.decode("utf-8")))
    return at


def _stack_global(machine: PickleMachine, at: int) -> int:
    name = machine.stack.pop()
    machine.stack.append(_register_global(machine, machine.stack.pop(), name))
    return at


def _reduce(machine: PickleMachine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)
    return at


def _new_object(machine: PickleMachine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args, new=True)
    return at


def _new_object_ex(machine: PickleMachine, at: int) -> int:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not isinstance(kwargs, dict):
        machine.fail("the pickle makes a call whose keyword arguments are not a dict", machine.position)
    machine.stack[-1] = machine.call(machine.stack[-1], args, kwargs, new=True)
    return at


def _instance(machine: PickleMachine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    args = tuple(machine.since_mark())
    target = _register_global(machine, module.decode("utf-8"), name.decode("utf-8"))
    machine.stack.append(machine.call(target, args))
    return at


def _object(machine: PickleMachine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(machine.call(items[0], tuple(items[1:])))
    return at


def _build(machine: PickleMachine, at: int) -> int:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, StatefulValue):
        machine.judge_functions(state)
        machine.built(target.set_state, state)
    elif not hasattr(target, "state"):
        what = (
            f"the class or function {target.full}" if type(target) is Global else f"a {type(target).__name__}"
        )
        machine.fail(f"the pickle sets the state of {what}", machine.position)
    else:
        target.state = machine.restated(target, state)
    return at


def _load_persistent(machine: PickleMachine, value: Any) -> Any:
    if machine.persistent is None:
        machine.fail("the pickle refers to external data by a persistent id", machine.position)
    return machine.built(machine.persistent, value)


def _persistent_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(_load_persistent(machine, text.decode("ascii")))
    return after


def _persistent(machine: PickleMachine, at: int) -> int:
    machine.stack[-1] = _load_persistent(machine, machine.stack[-1])
    return at


def _get_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    machine.stack.append(machine.recall(int(text)))
    return after


def _get_long(machine: PickleMachine, at: int) -> int:
    machine.stack.append(machine.recall(machine.number(at, 4)))
    return at + 4


def _put_text(machine: PickleMachine, at: int) -> int:
    text, after = machine.line(at)
    _put(machine, int(text))
    return after


def _memoize(machine: PickleMachine, at: int) -> int:
    _put(machine, len(machine.memo))
    return at


def _refuse_opcode(what: str) -> Opcode:
    def refuse(machine: PickleMachine, at: int) -> int:
        machine.fail(f"the pickle {what}", at - 1)

    return refuse


def _refuse_extension(width: int) -> Opcode:
    def refuse(machine: PickleMachine, at: int) -> int:
        number = machine.number(at, width)
        machine.fail(
            f"the pickle names a class by number {number:,} in its writer's extension registry", at - 1
        )

    return refuse


def _refuse_unknown(machine: PickleMachine, at: int) -> int:
    machine.fail(f"unknown pickle opcode {machine.data[at - 1]:#04x}", at - 1)


_OPCODES: dict[bytes, Opcode] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"N": _push_constant(None),
    b"\x88": _push_constant(True),
    b"\x89": _push_constant(False),
    b")": _push_constant(()),
    b"]": _push_new(list),
    b"}": _push_new(dict),
    b"\x8f": _push_new(lambda: Set("builtins.set")),
    b"I": _int_text,
    b"L": _int_text,
    b"J": _push_integer(4, signed=True),
    b"M": _push_integer(2, signed=False),
    b"\x8a": _push_long(1),
    b"\x8b": _push_long(4),
    b"F": _float_text,
    b"G": _float,
    b"S": _string_text,
    b"T": _push_python2_string(4),
    b"U": _push_python2_string(1),
    b"V": _unicode_text,
    b"X": _push_text(4),
    b"\x8c": _push_text(1),
    b"\x8d": _push_text(8),
    b"B": _push_bytes(4),
    b"C": _push_bytes(1),
    b"\x8e": _push_bytes(8),
    b"\x96": _push_bytes(8),
    b"\x85": _push_tuple(1),
    b"\x86": _push_tuple(2),
    b"\x87": _push_tuple(3),
    b"l": _list,
    b"d": _dict,
    b"\x91": _frozenset,
    b"a": _append,
    b"e": _appends,
    b"\x90": _add_items,
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
    b"\x82": _refuse_extension(1),
    b"\x83": _refuse_extension(2),
    b"\x84": _refuse_extension(4),
    b"\x97": _refuse_opcode("stores data in out-of-band buffers"),
    b"\x98": _refuse_opcode("stores data in out-of-band buffers"),
}
TABLE = [_OPCODES.get(bytes((code,)), _refuse_unknown) for code in range(256)]


_NAMED = 300
_ARGUMENT = 9  # bytes of the longest opcode with a fixed-size argument


class PickleContents(NamedTuple):
    """Contents of a pickle, and the position after its end.

    `asked` are the names that it refers to and calls, in file order. In `value`, names are
    Globals, and unknown calls are PickleObjects. With `plain`, any reader makes only data of it.
    """

    value: Any
    end: int
    code_references: tuple[CodeReference, ...]
    plain: bool = False


def parse_pickle(
    data: bytes,
    *,
    persistent: PersistentLoader | None = None,
    builders: Mapping[str, Builder] = CONTAINERS,
    inline: int = sys.maxsize,
    file: str | None = None,
    base: int = 0,
    trailing: bool = False,
) -> PickleContents:
    """Return the contents of a pickle; raise FormatError with the offset if it is invalid.

    Unknown calls become PickleObjects.

    Args:
        data: the pickle's bytes.
        persistent: returns the value of a persistent id.
        builders: return the values of known calls, by dotted name.
        inline: bytes longer than this are not copied but returned as StoredBytes.
        file: the file's name, for errors.
        base: the position of `data` in the file, in bytes.
        trailing: bytes after the pickle's end are no error.
    """
    machine = PickleMachine(data, persistent, builders, inline, file, base)
    try:
        value = machine.run(TABLE)
        if not trailing and machine.position != len(data):
            machine.fail("extra bytes after the end of the pickle", machine.position)
    except CkpttoolError as error:
        # Unpickling would have reached these calls: damage in the rest does not undo them.
        names = dangerous_calls(machine.list_code_references())
        if names:
            error.message += f"; before that, the pickle would call {clean(', '.join(names))[:_NAMED]}"
            error.message += "; nothing was run"
        raise
    return PickleContents(value, machine.position, machine.list_code_references(), machine.is_plain())


class PickleScan(NamedTuple):
    """Range of bytes that are valid opcodes of a pickle.

    `end` is the position after STOP, or None if the opcodes fail before it; `value` is then None
    too. `cut` means that more bytes could change the result. `asked` is what unpickling would import
    and call up to there.
    """

    value: Any
    end: int | None
    code_references: tuple[CodeReference, ...]
    cut: bool


def scan_pickle(data: bytes) -> PickleScan:
    """Run the opcodes at the start of `data` while they are valid; never raise."""
    machine = PickleMachine(data, OpaqueKey, CONTAINERS, sys.maxsize, None, 0)
    try:
        value = machine.run(TABLE)
    except CkpttoolError as error:
        # An argument cut by the end of the bytes may also look like an invalid one.
        cut = isinstance(error, TruncatedError) or machine.position > len(data) - _ARGUMENT
        return PickleScan(None, None, machine.list_code_references(), cut)
    return PickleScan(value, machine.position, machine.list_code_references(), cut=False)
