"""Makes docs/api.md: every public name of the package with its signature and the summary of its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

HEAD = """# Python API

<!-- Made by `python docs/generate.py` from the names in `ckpttool.__all__`; do not edit it by hand. -->
The public names of the package; all others may change without notice. Tasks:
[use from Python](howto/use_from_python.md), [live models](howto/live_objects.md).
`help(ckpttool.NAME)` has types, errors and examples.

"""
WIDTH = 100
# An argument in a docstring, the placeholder and names of its option, and the meaning.
ENTRY = re.compile(r"^ {4}(\w+)(?: \((.*?)\))?:((?: .*)?(?:\n {8}.*)*)", re.MULTILINE)


def page() -> str:
    """Return the whole page."""
    import ckpttool

    names = [name for name in ckpttool.__all__ if not name.startswith("__")]
    things = [(name, getattr(ckpttool, name)) for name in sorted(names, key=str.lower)]
    functions = [item for item in things if not isinstance(item[1], (type, ModuleType))]
    classes = [item for item in things if isinstance(item[1], type)]
    modules = [item for item in things if isinstance(item[1], ModuleType)]
    parts = [
        HEAD,
        "## Functions\n\n",
        *(_function(name, function) for name, function in functions),
        "## Classes\n\n",
        *(_class(name, kind) for name, kind in classes),
        "## Modules\n\n",
        *(_module(name, module) for name, module in modules),
    ]
    return "".join(parts).rstrip("\n") + "\n"


def _function(name: str, function: Any) -> str:
    arguments = "".join(_arguments(function))
    call = _fenced("ckpttool." + name + _signature(function, result=True))
    return f"### {name}\n\n{call}\n{_first(function)}\n\n{arguments}"


def _class(name: str, kind: type) -> str:
    arguments, heading = "".join(_arguments(kind)), ""
    if not arguments and not issubclass(kind, Exception):
        heading = f"{_fenced(f'ckpttool.{name}{_signature(kind)}')}\n"
    return f"### {name}\n\n{heading}{_first(kind)}\n\n{arguments}{''.join(_members(kind))}"


def _module(name: str, module: ModuleType) -> str:
    import ckpttool

    own = [item for item in vars(module).values() if getattr(item, "__module__", "") == module.__name__]
    # A package has its public names in a list.
    own = [getattr(module, item) for item in getattr(module, "__all__", ())] or [
        item for item in own if isinstance(item, type)
    ]
    kinds = (item for item in own if getattr(ckpttool, item.__name__, None) is not item)
    rows = "".join(f"- `{item.__name__}`: {_first(item).rstrip('.')}\n" for item in kinds)
    return f"### {name}\n\n{_first(module)}\n\n{rows}\n"


def _arguments(target: Any) -> Iterator[str]:
    """Yield a table of the arguments that the docstring lists, with their defaults."""
    parameters = inspect.signature(target).parameters
    rows = []
    kinds = reversed(target.__mro__[:-1]) if is_dataclass(target) else [target]  # fields of bases too
    text = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in kinds)
    for name, words, meaning in ENTRY.findall(text):
        if name in parameters:
            default = parameters[name].default
            shown = name if default is inspect.Parameter.empty else f"{name}={_default(default)}"
            placeholder = "" if words.startswith("--") else words.partition(", ")[0]
            placeholder = "False" if words.startswith("--no-") else placeholder
            text = f"{f'`{placeholder}`: ' if placeholder else ''}{_safe(' '.join(meaning.split()))}"
            rows.append("| `{}` | {} |\n".format(shown, text.rstrip(".").replace("|", r"\|")))
    if rows:
        yield f"| argument | meaning |\n|---|---|\n{''.join(rows)}\n"


def _default(value: Any) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return f"{type(value).__name__}()" if is_dataclass(value) else repr(value)


def _members(kind: type) -> Iterator[str]:
    """Give a line for each public method and property that the class itself has."""
    rows = []
    for name, member in vars(kind).items():
        called = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not (inspect.isfunction(called) or isinstance(member, property)):
            continue
        call = "" if isinstance(member, property) else re.sub(r"^\((self|cls)(, )?", "(", _signature(called))
        rows.append(f"- `{name}{call}`: {_first(member).partition('; raise')[0].rstrip('.')}\n")
    if rows:
        yield "".join(rows) + "\n"


def _signature(target: Any, result: bool = False) -> str:
    """Return the names and defaults of the arguments, with the type of the result if wanted."""
    signature = inspect.signature(target)
    bare = [param.replace(annotation=inspect.Parameter.empty) for param in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    text = re.sub(r"AgentFacts\([^()]*\)", "AgentFacts()", text)
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    return f"{text} -> {signature.return_annotation}" if result else text


def _fenced(call: str) -> str:
    if len(call) > WIDTH:
        head, _, rest = call.partition("(")
        inner, _, result = rest.rpartition(")")
        arguments = "".join(f"    {part},\n" for part in re.split(r", (?=\*|\w+[=,]|\w+$)", inner))
        call = f"{head}(\n{arguments}){result}"
    return f"```text\n{call}\n```\n"


def _first(target: Any) -> str:
    return _safe(" ".join(inspect.getdoc(target).split("\n\n")[0].split()))


def _safe(text: str) -> str:
    return re.sub(r"(?<!`)([<*])(?!`)", r"\\\1", text)
