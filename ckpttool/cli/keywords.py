"""Errors and results in the words of a Python program: keywords where the command line has options.

Messages and hints are written once, for the command line. What public functions raise or return passes
through here.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import ckpttool
from ckpttool.cli.panels import option_fields
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import deferred
from ckpttool.core.errors import CkpttoolError
from ckpttool.evaluation.protocol import Protocol
from ckpttool.pages.options import ReportOptions
from ckpttool.verification.options import VerificationOptions

# Options of records that a function takes, by the fields of these.
_FACTS = {"activation": "activations", "head": "head", "obs-norm": "obs_norm"}
_PROTOCOL = {
    **{field.name.replace("_", "-"): field.name for field in fields(Protocol)},
    "wrapper": "wrappers",
}
_RECORDS = ("facts=ckpttool.AgentFacts(", "protocol=ckpttool.Protocol(")
# Words of a sentence that follow an option, and are no value.
_PROSE = (
    "and|applies|cannot|compares|does|draws|for|if|in|instead|is|needs|of|only|or|out|permits|require|requires"
    "|selects|set|sets|supports|that|to|turns|undo|was|with|writes"
)
_OPTION = deferred.compile(
    r"(?<![\w-])--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
    rf"(?:[ =](?P<value>'[^']*'|(?!(?:{_PROSE})\b|-[a-z-])[^\s,;()'](?:[^\s;()']*[^\s,;().':])?"
    r"(?: HIGH|(?<=\d) -?\d+(?:\.\d+)?)?))?"
)
# Options with a space between them, which are used together.
_OPTIONS = deferred.compile(rf"{_OPTION.pattern}(?: {re.sub('P<.*?>', ':', _OPTION.pattern)})*")
_OPENING = deferred.compile(r"(?:ckpttool\.\w+)?[\[{(]")


def use_keywords(
    error: CkpttoolError,
    function: Callable[..., Any],
    arguments: Sequence[object] = (),
    keywords: Collection[str] = (),
) -> None:
    """Replace options by keywords of the function in an error's sentences; a traceback shows the hint.

    `arguments` and the names of `keywords` are those of the call that raised the error.
    """
    known = _keywords(function)
    for part in ("message", "expected", "found", "hint"):
        if getattr(error, part):
            setattr(error, part, _translate(getattr(error, part), known))
    if error.hint:
        # It takes the same path and environment to act in.
        if function.__name__ == "load_agent":
            error.hint = error.hint.replace("ckpttool.evaluate(", "ckpttool.load_agent(")
        error.hint = _without_call(error.hint, function, arguments, keywords)
    error.args = (error.message,)
    if error.hint and not hasattr(error, "__notes__"):
        error.add_note(f"hint: {error.hint}")


def closest_option(keyword: str, function: Callable[..., Any]) -> str:
    """Return the option that a wrong keyword means: of the function, or of a record that it takes."""
    name, known = keyword.replace("_", "-"), _keywords(function)
    records = {"facts": _FACTS, "protocol": _PROTOCOL}
    options = [option for record, names in records.items() if record in known for option in names]
    return next(iter(difflib.get_close_matches(name, [*options, *known], 1)), name)


def translate_sentence(sentence: str, function: Callable[..., Any]) -> str:
    """Return a sentence of a result with keywords of the function that returned it."""
    return _translate(sentence, _keywords(function))


def _without_call(
    hint: str, function: Callable[..., Any], arguments: Sequence[object], keywords: Collection[str]
) -> str:
    """Return the keywords that a hint adds to the call that was refused, if its call lacks others of that."""
    prefix = f"ckpttool.{function.__name__}({', '.join(map(repr, arguments))}, "
    if not (arguments and keywords and hint.startswith(prefix) and hint.endswith(")")):
        return hint
    with contextlib.suppress(SyntaxError):  # the hint continues behind the call
        call = ast.parse(hint, mode="eval").body
        if isinstance(call, ast.Call) and not {*keywords} <= {word.arg for word in call.keywords}:
            return f"add {hint[len(prefix) : -1]}"
    return hint


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's keywords, those of its record of options included, with their defaults.

    The default of one that takes pairs is {}: load_into's, which may also be a mapping.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {entry.name: {} if entry.annotation == "Pairs" else entry.default for entry in parameters}
    record = getattr(function, "record", None)
    return known if record is None else {field.name: field.default for field in fields(record)} | known


def _translate(text: str, known: Mapping[str, Any]) -> str:
    """Return the text with the function's keywords for options, and calls for whole commands."""
    parts = re.split(r"((?:, or |, |; |: |with )(?=ckpttool ))", text)
    return "".join(
        _translate_command(part)
        if part.startswith("ckpttool ")
        else _join_records(_OPTIONS.sub(lambda options: _translate_options(options[0], known), part))
        for part in parts
    )


def _translate_options(options: str, known: Mapping[str, Any]) -> str:
    """Return options with a space between them as keywords; those without a keyword unchanged."""
    words = [_keyword(option, known) for option in _OPTION.finditer(options)]
    if len(words) > 1 and None not in words:
        return ", ".join(_merge_keywords([*map(str, words)]))
    return _OPTION.sub(lambda option: _keyword(option, known) or option[0], options)


def _join_records(sentence: str) -> str:
    """Return a sentence in which a record that several keywords are in is named once, at the end."""
    for record in _RECORDS:
        if sentence.count(record) > 1:
            sentence = re.sub(rf"{re.escape(record)}([^()]*)\)", r"\1", sentence) + f"; in {record}...)"
    return sentence


def _merge_keywords(keywords: list[str]) -> list[str]:
    """Return each keyword once, with all values of a list, pairs or record; records are the last."""
    merged: dict[str, str] = {}
    for name, _, value in (keyword.partition("=") for keyword in keywords):
        opening = _OPENING.match(value) if name in merged else None
        merged[name] = value if opening is None else f"{merged[name][:-1]}, {value[opening.end() :]}"
    written = [f"{name}={value}" for name, value in merged.items()]
    return sorted(written, key=lambda keyword: keyword.startswith(_RECORDS))


def _translate_command(command: str) -> str:
    """Return the call of the public function that does what a command does; other text unchanged."""
    name = command.split()[1]
    if name == "convert" and "--like " in command:
        name = "fill"
    function = getattr(ckpttool, ckpttool.FUNCTIONS.get(name, name), None)
    if not callable(function):
        return command
    known = _keywords(function)
    with contextlib.suppress(ValueError, SyntaxError):  # a quote of a sentence, or a flag before a path
        paths = shlex.split(_OPTION.sub("", command))[2:]
        keywords = [_keyword(option, known) for option in _OPTION.finditer(command)]
        words = [*map(repr, paths), *_merge_keywords([*map(str, keywords)])]
        call = f"ckpttool.{function.__name__}({', '.join(words)})"
        ast.parse(call)
        return call if paths and len(paths) <= 2 and None not in keywords else command
    return command


def _keyword(option: re.Match[str], known: Mapping[str, Any]) -> str | None:
    """Return an option as a keyword, None if the function has none for it."""
    name, value = option["name"], option["value"] and option["value"].strip("'")
    if name == "like-args" and "like" in known:
        return f"like=ckpttool.networks.ModelSpec('MODULE:FACTORY', {value})"
    if "shapes" in known and name == "input-shape":
        return f"shapes=[({value.rstrip(',')},)]" if value else "shapes=[SHAPE]"
    if "facts" in known and name == "bounds" and value and " " in value:
        low, high = value.split()
        return f"facts=ckpttool.AgentFacts(action_low={low}, action_high={high})"
    if "facts" in known and name in _FACTS:
        fact = _assign(_FACTS[name], value, None)
        return fact if value is None else f"facts=ckpttool.AgentFacts({fact})"
    if "protocol" in known and name in _PROTOCOL:
        default = () if name == "wrapper" else None
        return f"protocol=ckpttool.Protocol({_assign(_PROTOCOL[name], value, default)})"
    records = ConversionOptions, VerificationOptions, ReportOptions
    names = {word: field for record in records for word, field in option_fields(record).items()}
    field = names.get(f"--{name}", name.replace("-", "_"))
    if field not in known:
        return None
    if isinstance(known[field], bool):
        return f"{field}={not known[field]}" + option[0][2 + len(name) :]
    return _assign(field, value, known[field])


def _assign(field: str, value: str | None, default: Any) -> str:
    """Return `field=value` for the option's text, which a field of several values has in a list."""
    if value is None:
        return f"{field}="
    number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value)
    shown = value if number else repr(value)
    if default == {}:
        name, equals, item = value.rpartition("=")
        shown = f"{{{name!r}: {item!r}}}" if equals else shown
    return f"{field}=[{shown}]" if default == () else f"{field}={shown}"
