"""Text helpers: JSON documents, escaping, sizes, plurals, glob patterns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

from ckpttool.core import filesystem, limits
from ckpttool.core.errors import CkpttoolError, FormatError, NotFoundError, UsageError, did_you_mean

_PART = 1 << 16  # bytes of a JSON text that are split at a time


def load_json(file: str, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the JSON object in the file; raise FormatError if it is too large or not a JSON object.

    `what` names the document in the error ("the sidecar"), `limit` the limit on its bytes.
    """
    try:
        require_small(filesystem.getsize(file), what, limit, file)
        data = filesystem.read_bytes(file)
    except FileNotFoundError as error:
        raise NotFoundError(f"{what} does not exist", file=file) from error
    try:
        return parse_json(data, what, limit)
    except FormatError as error:
        raise error.located(file=file) from error.__cause__


def parse_json(data: bytes, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the JSON object in `data`; raise FormatError like `load_json`.

    No value is nested deeper than the limit allows, so it can be walked by recursion.
    """
    return _require_object(parse_json_value(data, what, limit), what)


def parse_json_value(data: bytes, what: str, limit: str = "json_bytes", *, once: bool = False) -> Any:
    """Return the JSON value in `data`; raise FormatError like `parse_json`.

    With `once`, also for a duplicate name in an object: readers differ in which value they use.
    """
    require_small(len(data), what, limit)
    most = limits.current()
    _require_few_values(data, what, most.json_values)
    with _json_errors(what):
        value = json.loads(data, object_pairs_hook=functools.partial(_unique_object, what) if once else None)
    _require_shallow(value, data, what, most.json_depth)
    return value


def parse_strict_json(data: bytes, what: str, limit: str = "json_bytes") -> dict[str, Any]:
    """Return the JSON object in `data`, with the meaning that all readers agree on.

    In addition to the errors of `parse_json`, raise FormatError for text that is not UTF-8, for a
    duplicate name in an object (readers differ in which value they use), for NaN and Infinity, and
    for half of a surrogate pair. The caller checks the nesting, with the expected
    structure.
    """
    require_small(len(data), what, limit)
    _require_few_values(data, what, limits.current().json_values)

    def constant(word: str) -> None:
        raise FormatError(f"{what} contains {word}, which is not valid JSON")

    def whole(word: str) -> int:
        # An integer in Python, but a float in other readers (serde_json, JavaScript).
        if word == "-0":
            raise FormatError(f"{what} contains -0, which JSON readers interpret differently")
        return int(word)

    with _json_errors(what):
        hook = functools.partial(_unique_object, what)
        integers = whole if b"-0" in data else None
        row = json.loads(data.decode(), object_pairs_hook=hook, parse_constant=constant, parse_int=integers)
        if b"\\u" in data:
            json.dumps(row, ensure_ascii=False).encode()
    return _require_object(row, what)


@contextlib.contextmanager
def _json_errors(what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise limits.limit_error("json_depth", f"{what} is nested too deeply", None) from error
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON") from error


def _require_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object", found=type(value).__name__)
    return value


def _unique_object(what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise FormatError(f"{what} has two entries named {_find_duplicate(pairs)!r}")
    return record


def require_small(size: int, what: str, limit: str = "json_bytes", file: str | None = None) -> None:
    """Raise LimitError if a document has more bytes than `limit` allows; call before reading it."""
    if size > getattr(limits.current(), limit):
        raise limits.limit_error(limit, f"{what} is too large", size, file=file)


def _require_few_values(data: bytes, what: str, most: int) -> None:
    """Raise LimitError for too many values: each needs about a hundred bytes of memory."""
    # A value is at least two bytes of text.
    if len(data) > 2 * most:
        count = _count_values(data)
        if count > most:
            raise limits.limit_error("json_values", f"{what} contains too many values", count)


def _count_values(data: bytes) -> int:
    """Return how many commas and opening brackets are outside of strings.

    The text is split in parts, so that a text of millions of strings takes no memory here.
    """
    # Without escaped backslashes and quotation marks, each remaining mark begins or ends a string.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    total = within = 0
    for start in range(0, len(plain), _PART):
        pieces = plain[start : start + _PART].split(b'"')
        outside = b"".join(pieces[within::2])
        total += sum(map(outside.count, (b",", b"[", b"{")))
        within ^= len(pieces) - 1 & 1
    return total


def _require_shallow(value: Any, data: bytes, what: str, most: int) -> None:
    if data.count(b"[") + data.count(b"{") <= most:
        return
    level: list[Any] = [value]
    for _ in range(most):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise limits.limit_error("json_depth", f"{what} is nested too deeply", most + 1)


def _find_duplicate(pairs: list[tuple[str, Any]]) -> str:
    keys: set[str] = set()
    for name, _ in pairs:
        if name in keys:
            return name[:200]
        keys.add(name)
    return ""


def json_number(value: float) -> float | str:
    """Return the number, or the word for one that JSON lacks: NaN, Infinity, -Infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def replace_nonfinite(value: Any) -> Any:
    """Return a document with non-finite numbers replaced; see `json_number`."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


# Number of paths whose steps are compared with a wrong one.
_COMPARED = 5_000


def compile_glob(glob: str | None) -> Callable[[str], bool]:
    """Return a predicate for display paths.

    A pattern may begin at any segment (`actor/**` finds `policy/actor/l1/kernel`); with a leading
    slash it begins at the root.
    """
    if glob is None:
        return lambda _: True
    pattern = re.compile(("" if glob.startswith("/") else "(?:.*/)?") + _glob_to_regex(glob.lstrip("/")))
    # Names of constants in ONNX graphs begin with a slash.
    return lambda path: pattern.fullmatch(path.removeprefix("/")) is not None


_NO_MATCH = "run ckpttool inspect to list the paths; * stands for one step of a path, ** for several"


def no_match_error(
    glob: str, known: Sequence[str], file: str | None = None, *, option: str = "--glob "
) -> UsageError:
    """Return the error for a pattern that matches none of these paths, with a suggested pattern."""
    hint = suggest_glob(glob, known, option=option) or _NO_MATCH
    return UsageError(f"no path matches the pattern '{glob}'", file=file, hint=hint)


def suggest_glob(glob: str, known: Sequence[str], *, option: str = "--glob ") -> str | None:
    """Return a hint with a similar pattern that matches one of these paths."""
    steps = sorted({step for path in known[:_COMPARED] for step in path.split("/")})
    near = "/".join(_closest_step(step, steps) for step in glob.split("/"))
    # The name of a module is not the name of a tensor.
    candidates = [near, *([] if near.endswith("*") else [f"{near}/**"])]
    meant = next((candidate for candidate in candidates if any(map(compile_glob(candidate), known))), None)
    return did_you_mean(f"{option}'{meant}'") if meant else None


def _closest_step(step: str, known: Sequence[str]) -> str:
    if not step or step in known or re.search(r"[*?]", step):
        return step
    import difflib

    return next(iter(difflib.get_close_matches(step, known, 1)), step)


def _glob_to_regex(glob: str) -> str:
    pieces = re.split(r"(\*\*/?|\*|\?)", glob)
    wild = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(wild.get(piece) or re.escape(piece) for piece in pieces)


_UNITS = ("B", "kB", "MB", "GB", "TB")
# Maximum length of an error message, whatever a hostile file puts into its names.
_LONGEST, _LONGEST_NAME = 600, 200


def clean(text: str) -> str:
    """Return the text with unprintable characters (control, bidi, surrogates) escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def shorten(text: str, width: int) -> str:
    """Return the text shortened to `width` characters in the middle; both ends carry the most meaning."""
    if len(text) <= width:
        return text
    if width < 3:
        return text[: max(0, width)]
    # The end of a path is more informative than its start.
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


_LONGEST_REPR, _LONGEST_FIELD, _FEW = 500, 60, 8


def describe_record(record: Any) -> str:
    """Return a record as one line of at most 500 characters: plain fields, and the sizes of the others.

    It is the `__repr__` of the records that users receive, whose fields may hold thousands of entries.
    """
    if (names := getattr(record, "_fields", None)) is None:
        names = [field.name for field in dataclasses.fields(record) if field.repr]
    shown = ", ".join(f"{name}={_describe_field(getattr(record, name))}" for name in names)
    return shorten(f"<{type(record).__name__} {shown}>", _LONGEST_REPR)


def render_record(record: Any) -> str:
    """Return a record as HTML for a notebook: the `_repr_html_` of the records that users receive."""
    from ckpttool.core import tree_views

    return tree_views.render_result(record)


# Fields of results that are sentences for people, and those that contain such fields. Names in files are
# in other fields.
_SENTENCES = ("assumed", "command", "fix", "hint", "notes", "reason", "sentence")
_CONTAINERS = ("findings", "ledger", "proof", "report")


def map_sentences(value: Any, translate: Callable[[str], str]) -> Any:
    """Return a result in which the sentences that name options or commands are translated."""
    if isinstance(value, str):
        return translate(value) if "--" in value or "ckpttool " in value else value
    if type(value) in (tuple, list):
        return type(value)(map_sentences(item, translate) for item in value)
    if not dataclasses.is_dataclass(value):
        return value
    changes = {}
    for name in {*_SENTENCES, *_CONTAINERS} & {field.name for field in dataclasses.fields(value)}:
        former = getattr(value, name)
        if (translated := map_sentences(former, translate)) != former:
            changes[name] = translated
    return dataclasses.replace(cast(Any, value), **changes) if changes else value


def _describe_field(value: object) -> str:
    if isinstance(value, str):
        return repr(shorten(clean(value), _LONGEST_FIELD))
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, tuple) and len(value) <= _FEW and all(isinstance(item, int) for item in value):
        return repr(value)  # a shape
    if isinstance(value, Mapping | Sequence | Set) and not hasattr(value, "_fields"):
        return format_count(len(value), "entry", "entries")
    return f"<{type(value).__name__}>"


def format_size(nbytes: int) -> str:
    """Return a readable size in bytes, in powers of a thousand."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def format_count(number: int, word: str, words: str | None = None) -> str:
    """Return a count with its noun, e.g. `1 tensor`, `2 tensors`; `words` is an irregular plural."""
    return f"{number:,} {word if number == 1 else words or f'{word}s'}"


def describe_error(error: CkpttoolError) -> str:
    """Return an error as one escaped line that fits a few lines of a terminal."""
    text = clean(str(error))
    if len(text) <= _LONGEST or not error.file:
        return truncate_text(text)
    # The problem comes after the name of the file, which may be long.
    file, rest = clean(error.file), text.removeprefix(clean(error.file))
    return truncate_text(truncate_text(file, _LONGEST_NAME) + rest)


def truncate_text(text: str, most: int = _LONGEST) -> str:
    """Return the text, shortened in the middle: names from a file may have any length."""
    return text if len(text) <= most else f"{text[: most // 2 - 3]}...{text[-most // 2 :]}"


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts l10 after l2, and ckpt-15000 after ckpt-7500."""
    parts = re.split(r"([0-9]+)", name)
    return [_digits_key(part) if number % 2 else (0, part) for number, part in enumerate(parts)]


def _digits_key(digits: str) -> tuple[int, str]:
    # Not int(): it accepts at most 4,300 digits, and a name in a file may have any number.
    number = digits.lstrip("0")
    return len(number), number + digits
