"""Imports what the user names as `package.module:factory` and calls it.

The syntax here and in the modules beside it that a child imports is Python 3.7's: environments with old
frameworks have old interpreters.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from ckpttool import search_paths
from ckpttool.errors import UsageError

_SHOWN = 300


def made(name: str, arguments: Any) -> Any:
    """Return what the factory of that name makes; `arguments` is None, a list or a dict (by keyword).

    Raise UsageError in one sentence when there is no such module or factory, or when it raises.
    """
    where, colon, what = name.partition(":")
    if not (where and colon and what):
        raise UsageError("--like takes package.module:factory", found=name)
    found = _module(where, name)
    for part in what.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), 1)
            hint = f"did you mean {close[0]}" if close else None
            raise UsageError(f"{where} has no {what}", hint=hint)
        found = getattr(found, part)
    if not callable(found) or (arguments is None and is_model(found)):
        return found
    given = {} if arguments is None else arguments
    try:
        return found(**given) if isinstance(given, dict) else found(*given)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name} raises {last_line(error)}") from error


def find_user_module(name: str) -> None:
    """Let imports find a user's module in the working directory; raise UsageError if one is installed too."""
    other = search_paths.user_module(name)
    if other is not None:
        raise UsageError(
            f"two modules are called {name}: one is installed, the other is in the working directory",
            file=other,
            hint="rename the file, or name its folder in PYTHONPATH if it is the one that is meant",
        )


def _module(where: str, name: str) -> Any:
    if where.endswith(".py") or os.sep in where:
        hint = "--like {}".format(name.replace(".py:", ":").replace(os.sep, "."))
        raise UsageError("--like takes the name of a module, not of a file", found=where, hint=hint)
    find_user_module(where)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where == missing or where.startswith(missing + "."):
            hint = "the current folder and PYTHONPATH are searched"
            raise UsageError(f"there is no module {missing}", hint=hint) from error
        python = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
        raise UsageError(
            f"{where} imports {missing}, which Python {python} does not have",
            hint="--python names the interpreter of the environment that the model needs",
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing {where} raises {last_line(error)}") from error


def bases(value: Any) -> frozenset[tuple[str, str]]:
    """Return every base of the object's class as the package that it comes from and its name."""
    return frozenset((base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__)


def known_class(value: Any) -> str:
    """Return the name of the first base that is a framework's own class; of Transformers' Conv1D, in full."""
    for base in type(value).__mro__:
        if base.__module__.startswith("transformers.") and base.__name__ in ("Conv1D", "TFConv1D"):
            return f"{base.__module__}.{base.__name__}"
        if base.__module__.partition(".")[0] in ("torch", "keras", "tf_keras", "tensorflow", "sonnet"):
            return base.__name__
    return type(value).__name__


def has_own_call(value: Any, method: str) -> bool:
    """Say whether a program's own class, above the first of a framework, defines what a call computes."""
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] in ("torch", "keras", "tf_keras", "tensorflow", "sonnet"):
            return False
        if method in vars(base):
            return True
    return False


def framework(value: Any) -> str | None:
    """Return whose model the object is: torch, keras or tensorflow."""
    found = bases(value)
    # Keras 2 lies within tensorflow until 2.12 (tensorflow.python.keras) or comes as keras or tf_keras. What
    # Keras 3 makes to compute with torch is a torch.nn.Module too, in which its layers cannot be told.
    if any((top, "Layer") in found for top in ("keras", "tf_keras", "tensorflow", "tensorflow_core")):
        return "keras"
    if ("torch", "Module") in found:
        return "torch"
    if any((top, "Module") in found for top in ("tensorflow", "tensorflow_core")):
        return "tensorflow"
    return None


def is_model(value: Any) -> bool:
    """Say whether the object is a model already and no factory."""
    return not isinstance(value, type) and framework(value) is not None


def last_line(error: BaseException) -> str:
    """Return an error as a traceback ends: its type and the last line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "{}: {}".format(type(error).__name__, lines[-1][:_SHOWN] if lines else "no reason given")


def plain_facts(held: Any) -> dict[str, Any]:
    """Return those of an object's attributes or settings that are plain numbers, words and shapes."""
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in held.items()
        if isinstance(name, str) and not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) < 16 and all(isinstance(each, int) for each in value)
    return isinstance(value, (bool, int, float, str)) and len(str(value)) < 100
