"""Makes docs/api.md: every public name of the package, with its signature and what its docstring says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

HEAD = """# The Python interface

Made by `python docs/generate.py` from the names in `ckpttool.__all__`; do not edit it by hand. How they go
together is in [Use the library from Python](howto/use_from_python.md) and
[Compare a live model with its checkpoint](howto/live_objects.md). Everything else may change without notice.

"""
WIDTH = 100


def page() -> str:
    """Return the whole page."""
    import ckpttool

    names = [name for name in ckpttool.__all__ if not name.startswith("__")]
    things = [(name, getattr(ckpttool, name)) for name in sorted(names, key=str.lower)]
    functions = [each for each in things if not isinstance(each[1], (type, ModuleType))]
    classes = [each for each in things if isinstance(each[1], type)]
    modules = [each for each in things if isinstance(each[1], ModuleType)]
    parts = [
        HEAD,
        "## Functions\n\n",
        *(_function(name, thing) for name, thing in functions),
        "## Classes\n\n",
        *(_class(name, thing) for name, thing in classes),
        "## Modules\n\n",
        *(_module(name, thing) for name, thing in modules),
    ]
    return "".join(parts).rstrip("\n") + "\n"


def _function(name: str, function: Any) -> str:
    return f"### {name}\n\n{_fenced('ckpttool.' + name + _signature(function))}\n{_told(function)}\n\n"


def _class(name: str, kind: type) -> str:
    made = "" if issubclass(kind, Exception) else _signature(kind)
    members = "".join(_members(kind))
    return f"### {name}\n\n{_fenced(f'ckpttool.{name}{made}')}\n{_told(kind)}\n\n{members}"


def _module(name: str, module: ModuleType) -> str:
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    rows = "".join(f"- `{each.__name__}`: {_first(each)}\n" for each in own if isinstance(each, type))
    return f"### {name}\n\n{_first(module)}\n\n{rows}\n"


def _members(kind: type) -> Iterator[str]:
    """Give a line for each public method and property that the class itself has."""
    rows = []
    for name, member in vars(kind).items():
        called = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not (inspect.isfunction(called) or isinstance(member, property)):
            continue
        call = "" if isinstance(member, property) else re.sub(r"^\((self|cls)(, )?", "(", _signature(called))
        rows.append(f"- `{name}{call}`: {_first(member)}\n")
    if rows:
        yield "".join(rows) + "\n"


def _signature(thing: Any) -> str:
    # Annotations are text here; defaults that are text keep their quotes.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", signature)


def _fenced(call: str) -> str:
    if len(call) > WIDTH:
        head, _, rest = call.partition("(")
        inner, _, result = rest.rpartition(")")
        arguments = "".join(f"    {each},\n" for each in re.split(r", (?=\*|\w+:)", inner))
        call = f"{head}(\n{arguments}){result}"
    return f"```text\n{call}\n```\n"


def _told(thing: Any) -> str:
    """Return a docstring as Markdown; examples are shown as they are."""
    parts = []
    for paragraph in inspect.getdoc(thing).split("\n\n"):
        shown = paragraph.startswith((">>>", "    "))
        parts.append(f"```text\n{inspect.cleandoc(paragraph)}\n```" if shown else _safe(paragraph))
    return "\n\n".join(parts)


def _first(thing: Any) -> str:
    return _safe(" ".join(inspect.getdoc(thing).split("\n\n")[0].split()))


def _safe(text: str) -> str:
    return re.sub(r"(?<!`)([<*])(?!`)", r"\\\1", text)
