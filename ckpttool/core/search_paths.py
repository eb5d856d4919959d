"""Search paths for code, without the working directory, which may contain a stranger's files.

A user's own module in the working directory is found only by a name typed by the user (`--like`,
`--env`). This module runs before all other code of a command, so it first imports only `os` and
`sys`; it also runs in the interpreters of other environments, so the syntax is Python 3.7's.
"""

import os
import sys


def leave_working_directory(*, first: bool = False) -> None:
    """Remove the working directory from the search paths of this process and its child processes.

    `first` means that Python itself put it in front, as `python -m` does. A folder in PYTHONPATH is
    kept, even if it is the working directory; an empty element of PYTHONPATH, which Python
    interprets as the working directory, is removed.
    """
    elements = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if first and sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path[:] = [path for path in sys.path if path]
    if len(elements) > 1 and "" in elements:
        here = _working_directory()
        named = {os.path.abspath(element) for element in elements if element}
        if here is not None and here not in named:
            sys.path[:] = [path for path in sys.path if path != here]
    os.environ.update(child_environment())
    os.environ["PYTHONSAFEPATH"] = "1"


def child_environment() -> "dict[str, str]":
    """Return the environment for a child process, with no search path to the working directory."""
    environment = dict(os.environ)
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        if name in environment:
            kept = [folder for folder in environment[name].split(os.pathsep) if folder]
            if name == "PATH":
                kept = [folder for folder in kept if os.path.isabs(folder)]
            environment[name] = os.pathsep.join(kept)
    return environment


def installed_folders(paths: "tuple[str, ...]") -> "tuple[str, ...]":
    """Return the search paths (`sys.path`) in which packages are installed: without the working directory.

    Python puts it in front for `python -c`, `python -m` and a script in it. It is kept if the user
    chose it: by name in PYTHONPATH, as a folder of installed packages, or by importing this package
    from it. Relative paths, which depend on the working directory, are left out.
    """
    here = _identity(os.curdir)
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if os.path.isabs(path) and (here is None or _identity(path) != here or _is_chosen(here))
    )


def _identity(path: str) -> "tuple[int, int] | None":
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # it does not exist, or is not a path
        return None
    return status.st_dev, status.st_ino


def _is_chosen(here: "tuple[int, int]") -> bool:
    import site

    named = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    folders = [folder for folder in named.split(os.pathsep) if folder] + site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    folders.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return here in map(_identity, folders)


def _working_directory() -> "str | None":
    try:
        return os.getcwd()
    except OSError:  # it was removed, or is not readable
        return None


class change_directory:  # noqa: N801  # a context manager, which contextlib would make with an import
    """Change the working directory while a block imports or starts code that looks there first."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        # By a descriptor where a folder can be opened: the name may lead elsewhere by then.
        opens = os.chdir in os.supports_fd
        self.here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY)) if opens else os.getcwd()
        os.chdir(self.folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self.here)
        if isinstance(self.here, int):
            os.close(self.here)


def enable_user_module(name: str) -> "str | None":
    """Allow imports of this user module, and of its own imports, from the working directory.

    Installed modules come first. Return the file of the same name in the working directory as well
    if there are two modules of one name: the caller then refuses, and the working directory is not
    searched.
    """
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    here, top = _working_directory(), name.partition(".")[0]
    if here is None or not top:
        return None
    own = PathFinder.find_spec(top, [here])
    try:
        installed = find_spec(top)
    except (ImportError, ValueError):
        installed = None
    # A folder without an __init__.py has no origin and may be a folder of checkpoints.
    if own is not None and installed is not None and own.origin not in (None, installed.origin):
        return own.origin
    add_user_module(top, here)
    return None


def add_user_module(name: str, folder: str) -> None:
    """Allow imports of a top-level module, and of its own imports, from a folder that comes last."""
    _FINDER.names.add(name)
    if folder not in _FINDER.folders:
        _FINDER.folders.append(folder)
    # The protocol's types are not in Python 3.7.
    if _FINDER not in sys.meta_path:  # type: ignore[comparison-overlap]
        sys.meta_path.append(_FINDER)  # type: ignore[arg-type]


def list_user_modules() -> "list[tuple[str, str]]":
    """Return the names and folders passed to `add_user_module`, for a process that repeats the calls."""
    return [(name, folder) for name in sorted(_FINDER.names) for folder in _FINDER.folders]


class _UserModuleFinder:
    """Find users' modules: those named by the user, and the modules that they import.

    Libraries try to import what may not be installed (`try: import msvcrt`): those imports are not
    looked up here. Nor is the metadata of plugins, which `sys.path` would expose.
    """

    # Imports the modules that a user's module has registered: register(..., entry_point="other_module:Env").
    FOR_USERS = ("gymnasium.envs.registration",)

    def __init__(self) -> None:
        self.names = set()  # type: set[str]
        self.folders = []  # type: list[str]

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:  # noqa: ARG002
        """Return the location of a top-level module that the user named or a user's module imports."""
        from importlib.machinery import PathFinder

        if path is not None or not (name in self.names or self._is_imported_by_user()):
            return None
        spec = PathFinder.find_spec(name, self.folders)
        if spec is not None:
            self.names.add(name)
        return spec

    def _is_imported_by_user(self) -> bool:
        depth, importer = 2, "importlib"
        while importer.partition(".")[0] in _IMPORTING:
            importer = str(sys._getframe(depth).f_globals.get("__name__", ""))
            depth += 1
        return importer.partition(".")[0] in self.names or importer in self.FOR_USERS


_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
_FINDER = _UserModuleFinder()
