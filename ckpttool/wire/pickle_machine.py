"""The data-only pickle machine: its stack, memo and limits; nothing is imported, nothing is called.

Every opcode takes at least one byte and does work in proportion to what it pushes or pops, so time and
memory are linear in the input; what no input size bounds is in Limits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ckpttool.errors import FormatError, TruncatedError
from ckpttool.wire.pickle_values import Builder, Global, Limits, Object, Opaque, Set, Stored, acts

Persistent = Callable[[object], object]
ATOMS = frozenset((str, int, bool, float, type(None), bytes, complex))
# What a builder may go through in full; Stored bytes may be pickles of their own.
_COPIED = frozenset((str, bytes, list, tuple, dict, Set, Stored))
_STOP = 0x2E
_SHOWN = 100  # Python's messages quote the whole text that is no number


class Machine:
    """One run over one pickle; `position` is where it stands.

    `calls` names what unpickling would call of the standard library that can act, each with the position of
    the first such call. Nothing is called: they become Objects as all others do.
    """

    __slots__ = (
        "base",
        "builders",
        "calls",
        "data",
        "end",
        "file",
        "limits",
        "memo",
        "outer",
        "persistent",
        "position",
        "spent",
        "stack",
        "tuple_keys",
    )

    def __init__(
        self,
        data: bytes,
        persistent: Persistent | None,
        builders: Mapping[str, Builder],
        limits: Limits,
        file: str | None,
        base: int,
    ) -> None:
        """Stand at the first opcode."""
        self.data = data
        self.persistent = persistent
        self.builders = builders
        self.limits = limits
        self.file = file
        self.base = base
        self.position = 0
        self.spent = 0
        self.tuple_keys = 0
        self.end = len(data)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.calls: dict[str, int] = {}

    def fail(self, message: str, at: int) -> NoReturn:
        """Raise FormatError at this position of the pickle."""
        raise FormatError(message, file=self.file, offset=self.base + at)

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
                memo[int.from_bytes(data[at + 1 : at + 5], "little")] = self.stack[-1]
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

    def key(self, value: Any) -> Any:
        """Return a dict's key that hashes in constant time, equal where the stored keys are equal."""
        kind = type(value)
        if kind is int:
            # An integer's hash is its remainder by 2**61 - 1: only large ones collide at will.
            return value if -(1 << 63) <= value < 1 << 64 else Opaque(value)
        if kind in ATOMS:
            return value
        if isinstance(value, list | dict):
            self.fail(f"a {kind.__name__} is used as a dict's key", self.position)
        if not isinstance(value, tuple) or isinstance(value, Global):
            return value
        self.tuple_keys += 1
        few = self.tuple_keys <= self.limits.tuple_keys
        return value if few and self._shallow(value) else Opaque(value)

    def _shallow(self, value: tuple[Any, ...]) -> bool:
        todo, seen = [value], 0
        while todo:
            items = todo.pop()
            seen += len(items)
            if seen > self.limits.key_items:
                return False
            for item in items:
                if isinstance(item, tuple):
                    todo.append(item)
                elif type(item) not in ATOMS:
                    return False
        return True

    def call(self, function: Any, args: Any, kwargs: Any = None) -> Any:
        """Return the inert result of a call: data where a builder knows it, else an Object."""
        if type(args) is not tuple:
            self.fail("the pickle makes a call whose arguments are no tuple", self.position)
        if not isinstance(function, Global | Object):
            self.fail(f"the pickle calls a {type(function).__name__}", self.position)
        builder = self.builders.get(function.full) if isinstance(function, Global) and not kwargs else None
        if builder is not None:
            self._spend(args)
            value = self.built(builder, args)
            if value is not NotImplemented:
                if isinstance(value, Object):
                    self._note(value.function, value.args)
                return value
        self._note(function, args)
        return Object(function, args, self.base + self.position, kwargs or None)

    def _note(self, function: Any, args: tuple[Any, ...]) -> None:
        # Once for each name: the pickle may ask for the same call a million times.
        name = acts(function, args)
        if name is not None:
            self.calls.setdefault(name, self.position)

    def _spend(self, args: tuple[Any, ...]) -> None:
        for arg in args:
            if type(arg) in _COPIED:
                self.spent += len(arg)
        if self.spent > self.limits.copies + 4 * len(self.data):
            self.fail("the pickle copies its values again and again", self.position)

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
