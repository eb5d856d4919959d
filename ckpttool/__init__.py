"""Read, convert, check and play reinforcement-learning checkpoints, without the program that wrote them.

>>> import ckpttool
>>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")
>>> checkpoint["policy/actor/l1/kernel"]
<Handle policy/actor/l1/kernel float32[3, 64] parameter>
>>> checkpoint["policy/actor/l1/kernel"].numpy().shape
(3, 64)

Importing the package loads no framework and not even numpy; names arrive when they are first used.
"""

# ruff: noqa: E402  # Ctrl-C and the search path come before other imports

import os
import sys

FunctionType = type(lambda: None)
TYPE_CHECKING = False  # true for type checkers; `typing` may not be imported yet
if TYPE_CHECKING:
    from collections.abc import Callable


# Parameters of public functions that are names of files and folders.
_PATHS = ("file", "first", "path", "paths", "second", "source", "target")
# Public functions that have another name than their command.
FUNCTIONS = {"eval": "evaluate", "inspect": "summary"}


def package_face(**renamed: str) -> None:
    """Give the calling package the names that it imports for type checkers, each loaded on first use.

    `co_names` has the modules and names of its imports in their order. `renamed` are the names in their
    modules of those that are called otherwise here.
    """
    frame = sys._getframe(1)
    space, homes, home = frame.f_globals, {}, ""
    for name in frame.f_code.co_names:
        if name.partition(".")[0] == "ckpttool":
            home = name
        elif f"{home}.".startswith(f"{space['__name__']}.") and name[0] != "_":
            homes[name] = home

    def load(name: str) -> object:
        import importlib

        if name not in space["__all__"]:
            error = AttributeError(
                f"module {space['__name__']!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules[str(space["__name__"])],
            )
            if space["__name__"] == "ckpttool":
                add_function_hint(error, name, space["__all__"])
            raise error
        own = renamed.get(name, name)
        value = vars(importlib.import_module(homes[own])).get(own)
        if value is None:
            value = importlib.import_module(f"{homes[own]}.{own}")
        if space["__name__"] == "ckpttool" and type(value) is FunctionType:
            value = call_from_python(name, value)
        space[name] = value
        return value

    names = sorted(homes.keys() - set(renamed.values()))
    space.update(__all__=names, __getattr__=load, __dir__=lambda: names)


def add_function_hint(error: AttributeError, name: str, names: "list[str]") -> None:
    """Add the function of a command, or the public names like a wrong one, as a hint."""
    from difflib import get_close_matches

    commands = [*FUNCTIONS, *names]
    near = [*get_close_matches(name, commands, 2), *(n for n in commands if n.startswith(name))]
    meant = [f"ckpttool.{other}" for other in dict.fromkeys(FUNCTIONS.get(n, n) for n in near)]
    if name in FUNCTIONS:
        error.add_note(f"hint: the function of the command {name} is ckpttool.{FUNCTIONS[name]}")
    elif meant:
        from ckpttool.core.errors import did_you_mean

        error.add_note(f"hint: {did_you_mean(*meant)}")


def call_from_python(name: str, function: "Callable[..., object]") -> "Callable[..., object]":
    """Return a public function that takes paths of any type and whose sentences name its keywords."""
    import functools

    @functools.wraps(function)
    def call(*arguments: object, **keywords: object) -> object:
        from ckpttool.core.errors import CkpttoolError

        texts = [*map(path_text, arguments)]
        kinds = function.__annotations__
        names = [*kinds][: len(texts)]
        try:
            for parameter, value in [*((name, texts[n]) for n, name in enumerate(names)), *keywords.items()]:
                require_path(parameter, kinds.get(parameter), path_text(value))
            result = function(*texts, **{word: path_text(value) for word, value in keywords.items()})
        except CkpttoolError as error:
            from ckpttool.cli.keywords import use_keywords

            use_keywords(error, call, texts, keywords)
            raise
        except TypeError as error:
            from ckpttool.cli.keywords import closest_option

            for word in keywords.keys() - kinds.keys():
                keyword = translate(f"--{closest_option(word, call)} {keywords[word]}")
                if f"'{word}'" in str(error) and not keyword.startswith("--"):
                    error.add_note(f"hint: use {keyword}")
            raise
        if not hasattr(result, "document"):
            return result
        from ckpttool.core.text import map_sentences

        return map_sentences(result, translate)

    def translate(sentence: str) -> str:
        from ckpttool.cli.keywords import translate_sentence

        return translate_sentence(sentence, call)

    call.__module__, call.__name__, call.__qualname__ = "ckpttool", name, name  # pickled by these
    return call


def path_text(value: object) -> object:
    """Return a path as text, also those in a list, and any other value unchanged."""
    if isinstance(value, list | tuple) and any(isinstance(item, os.PathLike) for item in value):
        return [path_text(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def require_path(parameter: str, annotation: object, value: object) -> None:
    """Raise UsageError unless a parameter of paths has text, or a list of texts where it takes one."""
    several = annotation == "str | Sequence[str]"
    if parameter not in _PATHS or not (several or annotation == "str"):
        return
    items = value if several and isinstance(value, list | tuple) else [value]
    wrong = [type(item).__name__ for item in items if not isinstance(item, str)]
    if wrong:
        from ckpttool.core.errors import UsageError

        raise UsageError(
            f"{parameter} is not a path",
            expected="the name of a file or folder",
            found=wrong[0],
            hint="pass the path that was opened: its attribute `path`" if wrong[0] == "Checkpoint" else None,
        )


def exit_interrupted(signum: int, frame: object) -> None:  # noqa: ARG001
    """End the process on Ctrl-C without a traceback, until the command handles it: nothing to clean up."""
    os._exit(128 + signum)


def prepare_process() -> None:
    """Handle Ctrl-C, and leave the working directory, if the package is started as a program.

    `python -m ckpttool` puts that directory first on the path, and `import __future__` would be the first
    module to come from there. While Python looks for the module to run, the first argument is "-m".
    """
    module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] in (["ckpttool"], ["-mckpttool"])
    if module or "".join(sys.argv[:1]).endswith(("/ckpttool", "\\ckpttool", "\\ckpttool.exe")):
        import _signal  # type: ignore[import-not-found]  # built in: `signal` would come from that folder

        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, exit_interrupted)
    if module:
        from ckpttool.core import search_paths

        search_paths.leave_working_directory(first=True)


prepare_process()
from ckpttool.version import __version__ as __version__

if TYPE_CHECKING:
    from ckpttool import graphs as graphs
    from ckpttool.commands.check import CheckOptions as CheckOptions, check as check
    from ckpttool.commands.convert import convert as convert, fill as fill
    from ckpttool.commands.diff import diff as diff
    from ckpttool.commands.digest import digest as digest
    from ckpttool.commands.doctor import diagnose
    from ckpttool.commands.evaluate import evaluate as evaluate, video as video
    from ckpttool.evaluation.protocol import Protocol as Protocol
    from ckpttool.evaluation.agent_facts import AgentFacts as AgentFacts
    from ckpttool.conversion.export import export as export
    from ckpttool.cli.figures import plot as plot
    from ckpttool.pages.options import ReportOptions as ReportOptions
    from ckpttool.pages.report import report as report
    from ckpttool.commands.inspect import summary as summary
    from ckpttool.commands.schemas import schema as schema
    from ckpttool.evaluation.loaded_agent import LoadedAgent as LoadedAgent, load_agent as load_agent
    from ckpttool.conversion.filling import FillOptions as FillOptions, load_into as load_into
    from ckpttool.conversion.options import (
        ConversionOptions as ConversionOptions,
        ExportOptions as ExportOptions,
        FormatOptions as FormatOptions,
        ModelFileOptions as ModelFileOptions,
    )
    from ckpttool.conversion.write import save as save
    from ckpttool.commands.stats import stats as stats
    from ckpttool.commands.sweep import sweep as sweep
    from ckpttool.commands.verify import verify as verify
    from ckpttool.verification.options import VerificationOptions as VerificationOptions
    from ckpttool.core import errors as errors
    from ckpttool.core.checkpoint import Checkpoint as Checkpoint
    from ckpttool.core.handles import Branch as Branch, Handle as Handle
    from ckpttool.core.errors import CkpttoolError as CkpttoolError
    from ckpttool.core.sidecar import Sidecar as Sidecar
    from ckpttool.core.tree import Leaf as Leaf, Tree as Tree, ValueLeaf as ValueLeaf, display as display
    from ckpttool.networks.live_trees import flatten_with_path as flatten_with_path
    from ckpttool.listing.paths import open_path

    doctor = diagnose
    open = open_path  # noqa: A001  # ckpttool.open(path)

package_face(open="open_path", doctor="diagnose")
