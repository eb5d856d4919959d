"""How this program was installed, and the command that installs something beside it.

pip, pipx, uv and uvx each keep what they install in a separate environment: the command of another one
ends without an error and changes nothing here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "ckpttool"


def require_package(module: str, sentence: str, extra: str) -> None:
    """Raise MissingExtraError unless a module is installed; the sentence names what requires the library."""
    if importlib.util.find_spec(module) is None:
        from ckpttool.core.errors import MissingExtraError

        raise MissingExtraError(f"{sentence}, which is not installed", hint=install_extra(extra))


def install_extra(extra: str) -> str:
    """Return the command that adds this extra of ckpttool to the installation that runs."""
    return install_command(f"{PACKAGE}[{extra}]")


def install_command(*requirements: str) -> str:
    """Return the command that installs the requirements beside the ckpttool that runs.

    The records are pipx's `pipx_metadata.json` (1.18), in `venvs` or in the cache of `pipx run`, and uv's
    `uv-receipt.toml` (0.13) in the environment of a tool, `CACHEDIR.TAG` in the cache above an environment
    of uvx, and `direct_url.json` (PEP 610) of a package that did not come from an index.
    """
    prefix = Path(sys.prefix)
    if runner := _runner(prefix):
        extras, others = _split(requirements)
        return shlex.join((*runner, _own_requirement(extras), *_with(others), *_this_command()))
    if (prefix / "pipx_metadata.json").is_file():
        return shlex.join(("pipx", "inject", prefix.name, *requirements))
    if (prefix / "uv-receipt.toml").is_file():
        return _uv_tool(prefix / "uv-receipt.toml", requirements)
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        where = () if os.environ.get("VIRTUAL_ENV") == sys.prefix else ("--python", sys.executable)
        return shlex.join(("uv", "pip", "install", *where, *requirements))
    pip = shutil.which("pip")
    own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return shlex.join((*(("pip",) if own else (sys.executable, "-m", "pip")), "install", *requirements))


def _runner(prefix: Path) -> tuple[str, ...]:
    """Return what ran this program in an environment of its cache; empty if the program is installed."""
    if (prefix / "pipx_metadata.json").is_file():
        return () if prefix.parent.name == "venvs" else ("pipx", "run", "--spec")
    cached = any((folder / "CACHEDIR.TAG").is_file() for folder in prefix.parents)
    return ("uvx", "--from") if cached and not (prefix / "uv-receipt.toml").is_file() else ()


def program_words() -> tuple[str, ...]:
    """Return the words that start this program: those of uvx or `pipx run` where nothing is installed."""
    runner = _runner(Path(sys.prefix))
    own = _own_requirement(()) if runner else PACKAGE
    return (*runner, own, PACKAGE) if own != PACKAGE else (*runner[:-1], PACKAGE)


def name_program(text: str) -> str:
    """Return the text of a hint whose commands start this program as it was started."""
    program = shlex.join(program_words())
    if program == PACKAGE or text.startswith(_runner(Path(sys.prefix))):
        return text
    return re.sub(rf"(?<![\w/.'\[-]){PACKAGE} (?=-?-?[a-z])", lambda _: f"{program} ", text)


def _this_command() -> tuple[str, ...]:
    """Return the words of the command that runs; only the program's name if Python runs another one."""
    program, *words = sys.argv
    return (PACKAGE, *(words if os.path.basename(program) == PACKAGE else ()))


def _uv_tool(receipt: Path, requirements: tuple[str, ...]) -> str:
    """Return the command that replaces the tool's environment: what it has is stated again."""
    import tomllib

    try:
        rows = tomllib.loads(receipt.read_text(encoding="utf-8"))["tool"]["requirements"]
        own = next(row for row in rows if row["name"] == PACKAGE)
        present = [row["name"] for row in rows if row is not own]
        extras, others = _split(requirements, own.get("extras", ()))
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return shlex.join(("uv", "pip", "install", "--python", sys.executable, *requirements))
    return shlex.join(("uv", "tool", "install", _own_requirement(extras), *_with((*present, *others))))


def _split(requirements: tuple[str, ...], extras: Any = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return our own extras among the requirements, together with `extras`, and all other requirements."""
    opening = f"{PACKAGE}["
    own = {
        requirement.removeprefix(opening).rstrip("]")
        for requirement in requirements
        if requirement.startswith(opening)
    }
    others = tuple(requirement for requirement in requirements if not requirement.startswith(opening))
    return tuple(sorted({*extras, *own})), others


def _with(requirements: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for requirement in requirements for word in ("--with", requirement))


def _own_requirement(extras: tuple[str, ...]) -> str:
    """Return ckpttool with its extras, from where it was installed."""
    from importlib import metadata

    name = f"{PACKAGE}[{','.join(extras)}]" if extras else PACKAGE
    try:
        origin = json.loads(metadata.distribution(PACKAGE).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return name
    url, version = origin.get("url"), origin.get("vcs_info", {})
    if url is None:
        return name
    if version:
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f"{name} @ {url}"
