"""Gymnasium's registry: its refusals as our sentences, with the name that was probably meant."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckpttool.agents.envs.gym_vector import plain
from ckpttool.errors import MissingExtraError, UsageError, choice

# Arguments that say how an environment is drawn.
_DRAWN = frozenset(("render_mode", "width", "height", "camera_id", "camera_name", "default_camera_config"))
HINT = "pip install 'ckpttool[eval]'"


def installed() -> bool:
    """Say whether the library is there, without importing it."""
    return importlib.util.find_spec("gymnasium") is not None


def gymnasium() -> Any:
    """Return the library; raise MissingExtraError if it is not installed."""
    if not installed():
        raise MissingExtraError("environments need gymnasium, which is not installed", hint=HINT)
    return importlib.import_module("gymnasium")


def require_arguments(env_id: str, names: Iterable[str]) -> None:
    """Raise UsageError for an argument that the environment's class does not name in its signature.

    Gymnasium's own arguments of `make` are none of them: a file does not change time limits or wrappers.
    """
    library = gymnasium()
    with sentences(env_id):
        entry = library.spec(env_id).entry_point
        kind = library.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    allowed = set()
    for each in getattr(kind, "__mro__", (kind,)):
        made = each.__dict__.get("__init__") if isinstance(each, type) else each
        parameters = inspect.signature(made).parameters.values() if inspect.isroutine(made) else ()
        allowed |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if made is not None and not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break  # what is not named here cannot reach a base class
    for name in names:
        if name not in allowed - {"self"} - _DRAWN:
            raise UsageError(
                f"{env_id} takes no argument {name!r} from a file",
                hint=choice(name, sorted(allowed - {"self"} - _DRAWN)),
            )


@contextmanager
def sentences(env_id: str) -> Iterator[None]:
    """Turn Gymnasium's refusals into ours, with the name that was probably meant."""
    library = gymnasium()
    said = f"gymnasium {library.__version__} cannot make {env_id!r}"
    near = _near(env_id, library.registry)
    hint = f"there is {', '.join(near)}" if near else None
    if hint is None and ":" in env_id and env_id.rpartition(":")[2].isidentifier():
        hint = "--engine device --backend torch plays a factory of simulators"
    try:
        yield
    except library.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{said}: {_first(error)}", hint=HINT) from None
    except (library.error.Error, ImportError) as error:
        raise UsageError(f"{said}: {_first(error)}", hint=hint) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{said} with these arguments: {_first(error)}") from None


def _first(error: Exception) -> str:
    return plain(str(error)).partition("\n")[0]


def _near(env_id: str, registry: Sequence[str]) -> list[str]:
    """Return the newest version of each environment whose name is close."""
    newest: dict[str, int] = {}
    for known in registry:
        if found := re.fullmatch(r"(.+)-v(\d+)", known):
            newest[found[1]] = max(int(found[2]), newest.get(found[1], 0))
    wanted = re.sub(r"-v\d+$", "", env_id)
    names = [wanted] if wanted in newest else difflib.get_close_matches(wanted, newest, n=3)
    return [f"{name}-v{newest[name]}" for name in names]
