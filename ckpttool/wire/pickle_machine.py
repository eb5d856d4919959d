"""The data-only pickle machine: its stack, memo and limits; nothing is imported, nothing is called.

Every opcode takes at least one byte and does work in proportion to what it pushes or pops, so time and
memory are linear in the input; what no input size bounds has a limit (ckpttool/limits.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ckpttool import limits
from ckpttool.errors import FormatError, TruncatedError
from ckpttool.wire import pickle_known
from ckpttool.wire.asked import CODE, PLAIN, Asked, Verdict
from ckpttool.wire.pickle_values import (
    MADE_BY_NEW,
    METHODS,
    SPREAD,
    Builder,
    Dict,
    Global,
    Keys,
    Object,
    Opaque,
    Set,
    Stored,
    is_hashable,
    is_plain,
    is_spread,
)

Persistent = Callable[[object], object]
# What a builder may go through in full; Stored bytes may be pickles of their own.
_COPIED = frozenset((str, bytes, list, tuple, dict, Set, Stored))
_STOP = 0x2E
_MEMO = 1 << 16  # entries that earlier pickles of the same writer may have left
_SHOWN = 100  # Python's messages quote the whole text that is no number


class Name:
    """What one name of a pickle is asked for, in the order of the pickle; `worst` is of all its calls.

    `names` is the verdict on the name alone, `builder` what makes data of its calls.
    """

    __slots__ = ("builder", "calls", "full", "names", "position", "worst")

    def __init__(self, target: Global, builder: Builder | None, position: int) -> None:
        """Know nothing of calls yet."""
        self.full = target.full
        self.builder = builder
        self.names = pickle_known.named(target, rebuilt=builder is not None)
        self.position = position
        self.calls = 0
        self.worst: Verdict = PLAIN

    def judge(self, found: Verdict) -> None:
        """Count the verdict on a call."""
        if self.worst is not CODE and found is not PLAIN:
            self.worst = found

    def asked(self, base: int) -> Asked:
        """Return the record; a name that acts is one even where only harmless calls of it were seen not."""
        return Asked(self.full, self.worst if self.calls else self.names, self.calls, base + self.position)


class Machine:
    """One run over one pickle; `position` is where it stands.

    `names` are all that the pickle refers to. Nothing is called: calls become Objects.
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
        persistent: Persistent | None,
        builders: Mapping[str, Builder],
        inline: int,
        file: str | None,
        base: int,
    ) -> None:
        """Stand at the first opcode; bytes longer than `inline` are given as Stored."""
        self.data = data
        self.persistent = persistent
        self.builders = builders
        self.inline = inline
        self.limits = limits.current()
        self.file = file
        self.base = base
        self.position = 0
        self.spent = 0
        self.keys: dict[int, Keys] = {}
        self.end = len(data)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[Global, Name] = {}

    def fail(self, message: str, at: int) -> NoReturn:
        """Raise FormatError at this position of the pickle."""
        raise FormatError(message, file=self.file, offset=self.base + at)

    def exceed(self, limit: str, what: str, found: int) -> NoReturn:
        """Raise LimitError at the opcode that stands here."""
        raise limits.exceeded(limit, what, found, file=self.file, offset=self.base + self.position)

    def cut(self) -> NoReturn:
        """Raise TruncatedError: the bytes end where the pickle goes on."""
        raise TruncatedError(
            "the pickle ends before its STOP", file=self.file, offset=self.base + len(self.data)
        )

    def run(self, table: Sequence[Opcode]) -> Any:
        """Read up to STOP, one function of the table per opcode, and return the value on the stack."""
        try:
            self._loop(table)
            value = self.stack.pop()
        except IndexError:
            if self.position + 1 >= len(self.data):
                self.cut()
            self.fail("the pickle takes from an empty stack", self.position)
        except (ValueError, OverflowError, struct.error) as error:
            self.fail(f"the pickle's arguments make no sense: {str(error)[:_SHOWN]}", self.position)
        if self.stack or self.outer:
            self.fail("the pickle leaves more than one value", self.position)
        return value

    def _loop(self, table: Sequence[Opcode]) -> None:
        # The four opcodes that make up half of a checkpoint are done in place; the rest go by table.
        data, memo = self.data, self.memo
        at = 0
        while True:
            if at >= self.end:
                self._frame_end(at)
            self.position = at
            code = data[at]
            if code == 0x71:  # BINPUT
                memo[data[at + 1]] = self.stack[-1]
                at += 2
            elif code == 0x68:  # BINGET
                self.stack.append(self.recall(data[at + 1]))
                at += 2
            elif code == 0x4B:  # BININT1
                self.stack.append(data[at + 1])
                at += 2
            elif code == 0x72:  # LONG_BINPUT
                number = int.from_bytes(data[at + 1 : at + 5], "little")
                memo[number if number <= at else self.memo_number(number)] = self.stack[-1]
                at += 5
            elif code == _STOP:
                self.position = at + 1
                return
            else:
                at = table[code](self, at + 1)

    def _frame_end(self, at: int) -> None:
        total = len(self.data)
        if at > self.end and at <= total:
            # CPython's two picklers read such an argument differently (CPython issue 154848).
            self.fail("an opcode's argument crosses the end of its frame", self.position)
        if at >= total:
            self.cut()
        self.end = total

    def memo_number(self, number: int) -> int:
        """Return the number of a new memo entry; raise FormatError where no pickler has come to it yet."""
        # Every pickler counts its entries. Numbers that a file could choose could all fall into one slot.
        if not 0 <= number <= self.position + _MEMO:
            self.fail("a number of the pickle's memo is out of range", self.position)
        return number

    def recall(self, number: int) -> Any:
        """Return the memo's entry."""
        try:
            return self.memo[number]
        except KeyError:
            self.fail(f"the pickle recalls memo entry {number:,}, which was never stored", self.position)

    def number(self, at: int, width: int) -> int:
        """Return the unsigned little-endian number at a position."""
        return int.from_bytes(self.data[at : at + width], "little")

    def since_mark(self) -> list[Any]:
        """Return what was pushed since the last MARK, and go back to the stack before it."""
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
        """Return a key for `target` that hashes in constant time, and equals another where Python's does."""
        if type(value) is Stored:
            self._spend((value,))
            return bytes(value)
        if not is_hashable(value):
            self.fail(f"a {type(value).__name__} is used as a dict's key", self.position)
        if is_spread(value, len(target)):
            return value
        if not is_plain(value):
            unhashable = next((each for each in value if not is_hashable(each)), None)
            if unhashable is not None:
                self.fail(
                    f"a tuple with a {type(unhashable).__name__} is used as a dict's key", self.position
                )
            return Opaque(value)
        if len(target) < SPREAD:
            return value
        known = self.keys.get(id(target))
        if known is None:
            known = self.keys[id(target)] = Keys(target)
        return self.built(lambda key: known.keep(key, self.limits.pickle_hashed_keys), value)

    def name(self, target: Global) -> Name:
        """Return what is known of a name; it is new where it was not seen before."""
        found = self.names.get(target)
        if found is None:
            found = Name(target, self.builders.get(target.full), self.position)
            self.names[target] = found
        return found

    def call(self, function: Any, args: Any, kwargs: Any = None, *, new: bool = False) -> Any:
        """Return the inert result of a call: data where a builder knows it, else an Object.

        `new` says that it is one of the class's `__new__` alone, which may do less than a call of the class.
        """
        if type(args) is not tuple:
            self.fail("the pickle makes a call whose arguments are no tuple", self.position)
        if type(function) is Global:
            name = self.name(function)
            name.calls += 1
            if new and name.builder is not None and args and function.full not in MADE_BY_NEW:
                self.fail(
                    f"the pickle makes a {function.full} by __new__ alone, with arguments", self.position
                )
            if name.builder is not None and not kwargs:
                self._spend(args)
                value = self.built(name.builder, args)
                if value is not NotImplemented:
                    if type(value) is Object:
                        self._made(name, function, value)
                    return value
            name.judge(pickle_known.called(function, args))
        elif type(function) is Object:
            led = pickle_known.led_to(function)
            if led is not None:
                self._led(led)
        else:
            self.fail(f"the pickle calls a {type(function).__name__}", self.position)
        return Object(function, args, self.base + self.position, kwargs or None)

    def _made(self, name: Name, function: Global, value: Object) -> None:
        # copyreg's helpers call the class that they are given; other builders keep the name of their own.
        name.judge(pickle_known.named(function, rebuilt=True))
        target = value.function
        if type(target) is Global and target != function:
            inner = self.name(target)
            inner.calls += 1
            inner.judge(pickle_known.called(target, value.args))

    def _led(self, target: Global) -> None:
        name = self.name(target)
        name.calls += 1
        name.judge(CODE)

    def restated(self, target: Any, state: Any) -> Any:
        """Return the state of what BUILD is done to: attributes are added to those that it has already."""
        if type(target) is Dict:
            self._require_attributes(state)
        if type(target) not in (Object, Dict) or target.state is None:
            return state
        if type(target.state) is not dict or type(state) is not dict:
            self.fail("the pickle sets the state of an object a second time", self.position)
        self._spend((target.state, state))
        return {**target.state, **state}

    def _require_attributes(self, state: Any) -> None:
        # Of a dict's class they are data only where they do not hide what the class does.
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            if part is None:
                continue
            self._spend((part,))
            if not isinstance(part, dict) or not all(type(n) is str and n not in METHODS for n in part):
                self.fail("the state of a dict is not made of attributes", self.position)

    def asked(self) -> tuple[Asked, ...]:
        """Return what the pickle asks for, up to where it was read."""
        return tuple(name.asked(self.base) for name in self.names.values())

    def _spend(self, args: tuple[Any, ...]) -> None:
        self.spent += len(args)
        most = self.limits.pickle_copies + 4 * len(self.data)
        if self.spent <= most:
            for arg in args:
                if type(arg) in _COPIED:
                    self.spent += len(arg)
                if type(arg) is tuple and len(arg) == 2:
                    # A state: attributes, and those that have slots.
                    self.spent += sum(len(part) for part in arg if isinstance(part, dict))
        if self.spent > most:
            self.exceed("pickle_copies", "the pickle copies its values again and again", self.spent)

    def built(self, build: Callable[[Any], Any], argument: Any) -> Any:
        """Return what a caller's function makes of the argument; its errors get file and offset."""
        try:
            return build(argument)
        except FormatError as error:
            if error.offset is None:
                error.offset = self.base + self.position
            error.located(file=self.file)
            raise


Opcode = Callable[[Machine, int], int]
