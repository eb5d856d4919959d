"""Functions that take a record of options, its fields as keywords, or both.

The record declares each option once: the command line, the function's signature and its help are made from,
or compared with, the record's fields and its docstring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from ckpttool.core import deferred
from ckpttool.core.errors import did_you_mean

_Options = TypeVar("_Options")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_ENTRY = deferred.compile(r" *(\w+)(?: \(.*?\))?:")


def takes_options(
    record: type, moved: Mapping[str, str] | None = None, whole: type | None = None
) -> Callable[[_Function], _Function]:
    """Return a decorator of functions whose keywords are fields of a record of options.

    The decorated function declares `options`, its last positional parameter, and fields as keywords, for
    editors and for `help`, which shows what the record's docstring states about each. It is called with a
    record in `options` that has the keywords as its fields, those in `**further` included. A keyword in
    `moved`, a field of the record `whole`, warns (DeprecationWarning) and names the function that it
    belongs to.
    """

    def decorate(function: _Function) -> _Function:
        code = function.__code__
        positional = code.co_varnames[: code.co_argcount]
        keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        position = positional.index("options")

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            names = {field.name for field in fields(whole or record)} - {*positional}
            own = {*positional, *keyword_only} - names
            changes = {name: keywords.pop(name) for name in [*keywords] if name not in own}
            for name in changes.keys() & (moved or {}).keys():
                import warnings

                better = f"use ckpttool.{(moved or {})[name]}()"
                text = f"{name!r} of ckpttool.{function.__name__}() is deprecated; {better}"
                warnings.warn(text, DeprecationWarning, stacklevel=3)  # the caller of `ckpttool.convert`
            options = arguments[position] if len(arguments) > position else keywords.pop("options", None)
            if not isinstance(options, record | None):
                raise TypeError(f"options of {function.__name__}() is a {record.__name__}")
            options = record() if options is None else options
            if whole is not None and changes.keys() & (moved or {}).keys():
                options = whole(**vars(options))
            options = with_keywords(options, changes, function.__name__)
            if len(arguments) > position:
                return function(*arguments[:position], options, *arguments[position + 1 :], **keywords)
            return function(*arguments, options=options, **keywords)

        call.record = whole or record  # type: ignore[attr-defined]
        call.__doc__ = _describe_keywords(function.__doc__, keyword_only, record)
        return cast(_Function, call)

    return decorate


def _describe_keywords(text: str | None, names: tuple[str, ...], record: type) -> str | None:
    """Return the function's docstring with the fields' descriptions: those that it lists, and the others."""
    declared = {}
    for base in reversed(record.__mro__[:-1]):
        declared.update(_entries(vars(base)["__doc__"] or ""))
    if text is None or not declared:
        return text  # python -OO
    own = _entries(text)
    listed = [declared[name] for name in names if name in declared]
    others = [lines for name, lines in declared.items() if name not in names and name not in own]
    for name, lines in (("options", listed), ("further", others)):
        if name in own:
            text = text.replace(own[name], "\n".join([own[name], *lines]), 1)
    return text


def _entries(docstring: str) -> dict[str, str]:
    """Return the lines of a docstring that describe each argument or field."""
    lines = docstring.splitlines()
    depths = [len(line) - len(line.lstrip()) for line in lines]
    # Python 3.13 removes the common indentation when it compiles.
    base = min((d for line, d in zip(lines[1:], depths[1:], strict=False) if line.strip()), default=0)
    entries: dict[str, str] = {}
    name = ""
    for line, depth in zip(lines, depths, strict=True):
        entry = _ENTRY.match(line) if depth == base + 4 else None
        if entry is not None:
            name = entry[1]
            entries[name] = line
        elif name and depth > base + 4:
            entries[name] += f"\n{line}"
        else:
            name = ""
    return entries


def with_keywords(options: _Options, keywords: Mapping[str, Any], function: str) -> _Options:
    """Return the options record with the keywords as its fields.

    Raise TypeError for an unknown keyword, with the most similar field.
    """
    names = [field.name for field in fields(cast(Any, options)) if field.init]
    for name in keywords:
        if name not in names:
            import difflib

            close = difflib.get_close_matches(name, names, 1)
            meant = f"; {did_you_mean(repr(close[0]))}" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    return cast(_Options, replace(cast(Any, options), **keywords)) if keywords else options
