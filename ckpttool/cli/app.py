"""Main program: registers the commands, handles signals and converts every exit to a status."""

from __future__ import annotations

import copy
import importlib
import mmap
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, cast

import typer

from ckpttool import exit_interrupted
from ckpttool.cli import console, panels
from ckpttool.cli.progress import show_fetch_progress
from ckpttool.cli.styles import terminal_width
from ckpttool.core import limits, plugins
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, UsageError, from_system_error
from ckpttool.version import __version__

# Fixed, however the program was started: usage lines and the shell completion variable use this name.
_NAME = "ckpttool"
_TRACEBACK = "CKPTTOOL_TRACEBACK"
_SHORT_HELP = "-h"
_UNBROKEN = "\xa0"  # a space at which lines of the short help are not broken
_REPEATABLE = frozenset(
    ("--match", "--kind", "--flatten", "--unflatten", "--input-shape", "--l2", "--optimizer", "--wrapper")
)


class _SignalExit(SystemExit):
    """Exception raised on a termination signal, so that temporary files are removed before exit."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.how = (
            "interrupted" if signum == signal.SIGINT else f"terminated by {signal.Signals(signum).name}"
        )


class _RichHelp:
    """Command whose help goes through `print_text`, so that no foreign escape codes reach a terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help with rich, or write it to the formatter."""
        with console.render_with_rich():
            super().format_help(ctx, formatter)  # type: ignore[misc]  # typer's command has it


class _CliCommand(_RichHelp, typer.core.TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with the second name of a switch in its description: its column is too wide."""
        narrow = copy.copy(self)
        narrow.params = [_with_one_name(param) for param in self.params]
        super(_CliCommand, narrow).format_help(ctx, formatter)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the option that prints the whole help; `-h` prints one screen of it."""
        return [name for name in super().get_help_option_names(ctx) if name != _SHORT_HELP]

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help`."""
        shown = super().get_help_option(ctx)
        if shown is not None:
            shown.help = f"Show all options and exit; {_SHORT_HELP} shows them on one screen."
        return shown

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with `-h` and `-V`, which every command has."""
        known = super().get_params(ctx)
        whole = self.get_help_option(ctx)
        if whole is None:
            return known
        short = copy.copy(whole)
        short.name, short.opts, short.hidden = "short_help", [_SHORT_HELP], True
        short.callback = _print_short_help
        version = copy.copy(short)
        version.name, version.opts = "version", ["--version", "-V"]
        version.callback = lambda _, __, requested: _print_version(requested)
        return [*known, short, version]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under their panel titles when rich does not draw the help."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                title = getattr(param, "rich_help_panel", None) or usual
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _print_short_help(ctx: Any, _: Any, requested: bool) -> None:
    """Print usage, purpose, examples and the names of the options, by panel: at most one screen."""
    if not requested or ctx.resilient_parsing:
        return
    command, width = ctx.command, min(terminal_width(), 80)
    panels: dict[str, list[str]] = {}
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            value = "" if param.is_flag else f" {param.make_metavar(ctx)}"
            panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(
                f"{param.opts[0]}{value}".replace(" ", _UNBROKEN)
            )
    purpose = str(command.help).split("\n\n", 1)[0]
    lines = [ctx.get_usage(), "", *textwrap.wrap(purpose, width), ""]
    for title, options in panels.items():
        lines += textwrap.wrap(
            f"{title}: {', '.join(options)}",
            width,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    lines += ["", *str(command.epilog or "").split("; "), f"All options: {ctx.command_path} --help"]
    console.print_text("\n".join(lines).replace(_UNBROKEN, " "))
    ctx.exit()


def _with_one_name(param: Any) -> Any:
    """Return an option for the help: one name, and the opposite one in its description."""
    if not param.secondary_opts:
        return param
    shown = copy.copy(param)
    shown.help = f"{param.help} Opposite: {', '.join(param.secondary_opts)}."
    shown.secondary_opts = []
    return shown


class CommandEntry(NamedTuple):
    """Lazily imported command: its module is imported when the command is chosen.

    `target` is `module:function`, or `:function` for a command of another package.
    """

    name: str
    target: str
    summary: str
    examples: str

    def load(self) -> Callable[..., int]:
        """Import and return the function; its signature defines all options."""
        module, _, function = self.target.partition(":")
        loaded = importlib.import_module(module) if module else plugins.find("commands", self.name).load()
        return panels.takes_panels(getattr(loaded, function))

    def listed(self) -> typer.core.TyperCommand:
        """Return a stub command for --help, completion and suggestions."""
        return typer.core.TyperCommand(self.name, help=self.summary)

    def parser(self) -> Any:
        """Return the command with its options."""
        function = self.load()
        return typer.main.get_command_from_info(
            typer.models.CommandInfo(
                self.name,
                cls=_CliCommand,
                callback=function,
                help=_join_paragraphs(function.__doc__),
                epilog=self.examples,
            ),
            pretty_exceptions_short=True,
            rich_markup_mode=app.rich_markup_mode,
        )


# `ckpttool PATH`, without a command.
_OVERVIEW = CommandEntry(
    "PATH",
    "ckpttool.cli.inspect:overview",
    "Show a checkpoint, what doctor finds in it, and the next commands.",
    "Example: ckpttool runs/ckpt-15000",
)
# In the order of --help.
COMMANDS = (
    CommandEntry(
        "inspect",
        "ckpttool.cli.inspect:inspect",
        "Show the module tree, shapes, types, roles and layout.",
        "Examples: ckpttool inspect runs/ckpt-15000 --glob 'actor/**' --depth 2; "
        "ckpttool inspect agent.pt --graph agent.svg",
    ),
    CommandEntry(
        "digest",
        "ckpttool.cli.inspect:digest",
        "Print the sha256 of every tensor; verify checksums.",
        "Examples: ckpttool digest agent.pt --json > saved.json; ckpttool digest agent.pt --check saved.json",
    ),
    CommandEntry(
        "convert",
        "ckpttool.cli.convert:convert",
        "Convert a checkpoint to another framework or library.",
        "Examples: ckpttool convert runs/ckpt-15000 agent.pt; ckpttool convert agent.pt ckpt-1 --to tf",
    ),
    CommandEntry(
        "verify",
        "ckpttool.cli.verify:verify",
        "Verify that two checkpoints compute the same outputs.",
        "Example: ckpttool verify runs/ckpt-15000 agent.pt",
    ),
    CommandEntry(
        "eval",
        "ckpttool.cli.evaluate:evaluate",
        "Play agents and report their returns.",
        "Examples: ckpttool eval agent.pt --env Pendulum-v1 --episodes 100; "
        "ckpttool eval 'run/ckpt-*' --plot curve.png; ckpttool eval agent.pt --video agent.mp4",
    ),
    CommandEntry(
        "stats",
        "ckpttool.cli.inspect:stats",
        "Summarize values: range, mean, zeros, NaNs, dead units.",
        "Examples: ckpttool stats agent.pt; ckpttool stats runs/ckpt-15000 --depth 1",
    ),
    CommandEntry(
        "report",
        "ckpttool.cli.report:report",
        "Write an HTML report on one checkpoint, on two or on a run.",
        "Examples: ckpttool report agent.pt; "
        "ckpttool report runs/ckpt-2500 runs/ckpt-15000 --out change.html; "
        "ckpttool report runs/ --eval results.json",
    ),
    CommandEntry(
        "doctor",
        "ckpttool.cli.inspect:doctor",
        "Find problems in a checkpoint and suggest fixes.",
        "Example: ckpttool doctor downloaded.pt --env HalfCheetah-v5",
    ),
    CommandEntry(
        "check",
        "ckpttool.cli.inspect:check",
        "Check many checkpoints for code, damage and NaNs.",
        "Examples: ckpttool check runs/; ckpttool check *.pt --shapes shapes.json; "
        "ckpttool check downloaded.pt --strict --no-numbers",
    ),
    CommandEntry(
        "textconv",
        "ckpttool.cli.inspect:textconv",
        "Print a file as text for git diff.",
        "Example: ckpttool textconv agent.pt",
    ),
    CommandEntry(
        "browse",
        "ckpttool.cli.inspect:browse",
        "Browse a checkpoint in the terminal.",
        "Examples: ckpttool browse runs/ckpt-15000; ckpttool browse old.pt new.pt",
    ),
    CommandEntry(
        "diff",
        "ckpttool.cli.inspect:diff",
        "Compare the entries and values of two checkpoints.",
        "Examples: ckpttool diff old.pt new.pt; ckpttool diff runs/ckpt-15000 agent.pt --json",
    ),
    CommandEntry(
        "formats",
        "ckpttool.cli.inspect:formats",
        "List the formats that can be read and written.",
        "Example: ckpttool formats --json",
    ),
    CommandEntry(
        "layouts", "ckpttool.cli.inspect:layouts", "List the agent layouts.", "Example: ckpttool layouts"
    ),
    CommandEntry(
        "backends",
        "ckpttool.cli.inspect:backends",
        "List the backends that run networks.",
        "Example: ckpttool backends",
    ),
    CommandEntry(
        "limits",
        "ckpttool.cli.inspect:limits",
        "List the parser limits that --limit overrides.",
        "Example: ckpttool --limit unpacked_ratio=1000 inspect old.npz",
    ),
    CommandEntry(
        "schema",
        "ckpttool.cli.inspect:schema",
        "List or print the JSON Schemas of --json output.",
        "Examples: ckpttool schema; ckpttool schema inspect > inspect.schema.json",
    ),
)


def _all_commands() -> Iterator[CommandEntry]:
    """Yield the built-in commands, then those of other packages; raise UsageError for two of one name."""
    yield from COMMANDS
    for row in plugins.installed("commands"):
        if any(row.name == command.name for command in COMMANDS):
            reason = f"two packages provide command {row.name!r}: ckpttool and {row.owner}"
            raise UsageError(reason, hint=f"pip uninstall {row.owner}")
        yield CommandEntry(row.name, ":run", f"Command of package {row.owner}.", "")


def _find_command(name: str) -> CommandEntry | None:
    """Return the command of a name; None if there is none, as for a path with a dot or a slash."""
    commands = _all_commands() if re.fullmatch(r"\w[\w-]*", name) else ()
    return next((command for command in commands if command.name == name), None)


_COMPLETION = ("--show-completion", "--install-completion")
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def _complete_shell(ctx: Any, option: str, shell: str) -> None:
    """Print or install the completion of a named shell, and exit; typer's own options take no name."""
    from typer.completion import install_callback, show_callback

    if shell not in _SHELLS:
        raise UsageError(f"{option} supports {', '.join(_SHELLS)}, not {shell!r}", hint=f"ckpttool {option}")
    (show_callback if option == _COMPLETION[0] else install_callback)(ctx, ctx.command.params[0], shell)


class _CliGroup(_RichHelp, typer.core.TyperGroup):
    """Command group that loads the options of a command only when it is chosen."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {command.name: command.listed() for command in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, those of other packages last."""
        self.commands.update({command.name: command.listed() for command in _all_commands()})
        return super().list_commands(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without any, print the first screen."""
        if not args and not ctx.resilient_parsing:
            console.print_text(_first_screen())
            ctx.exit(2)
        if len(args) == 2 and args[0] in _COMPLETION:
            _complete_shell(ctx, *args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the program; typer's own help of one takes two lines."""
        params: list[Any] = super().get_params(ctx)
        for option in params:
            if option.name == "show_completion":
                option.help = "Print the completion script of the current shell."
        return params

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the chosen command, the command, and the remaining arguments.

        `help COMMAND` is `COMMAND --help`; a path without a command is listed and diagnosed.
        """
        if args[0] == "help":
            if len(args) == 1:
                console.print_text(ctx.get_help())
                ctx.exit()
            args = [args[1], "--help"]
        if (command := _find_command(args[0])) is not None:
            self.commands.setdefault(command.name, command.listed())
            return command.name, command.parser(), args[1:]
        if _is_checkpoint_path(args[0]):
            return _OVERVIEW.name, _OVERVIEW.parser(), args
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn Ctrl-C into our own exit instead of typer's."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _SignalExit(signal.SIGINT) from None
        except Exception as error:
            # An interrupted `threading` lock may raise that it was never acquired, which hides the interrupt.
            before = error.__context__
            while before is not None and not isinstance(before, KeyboardInterrupt | _SignalExit):
                before = before.__context__
            if before is None:
                raise
            raise before if isinstance(before, _SignalExit) else _SignalExit(signal.SIGINT) from None


def _is_checkpoint_path(word: str) -> bool:
    """Return whether a word in place of a command is a path: of a file, a folder, or a TensorFlow prefix.

    No command has a dot or a slash: opening a missing file suggests similar names.
    """
    return bool(re.search(r"[./\\]", word)) or os.path.lexists(word) or os.path.exists(f"{word}.index")


def _join_paragraphs(text: str | None) -> str:
    """Return a docstring with each paragraph on one line, so that the terminal wraps it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n"))


app = typer.Typer(
    cls=_CliGroup,
    name=_NAME,
    help="Inspect, convert, verify and evaluate reinforcement-learning checkpoints without the program that "
    "wrote them. Code in a checkpoint is never executed.",
    epilog="Start with: ckpttool PATH",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        console.print_text(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback does it
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="Override a parser limit (see ckpttool limits); repeatable.",
        ),
    ] = None,
) -> None:
    if limit:
        context.with_resource(limits.override_limits(limit))
    context.with_resource(show_fetch_progress(quiet=not {"-q", "--quiet"}.isdisjoint(sys.argv)))


class _NumpyMemoryGuard:
    """Import hook that ends the process with 1 if OpenBLAS has too little memory to load numpy.

    OpenBLAS reserves buffers for every thread while it is loaded (OpenBLAS, driver/others/memory.c).
    These need address space, which is scarce only under a limit.
    """

    LIBRARY, THREAD = 160 << 20, 48 << 20
    THREADS = "OPENBLAS_NUM_THREADS"

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Return None; raise MemoryError if numpy is requested without enough memory."""
        if name != "numpy":
            return
        threads_setting = os.environ.get(self.THREADS, "")
        threads = int(threads_setting) if threads_setting.isdecimal() else os.cpu_count() or 1
        if not _can_allocate(self.LIBRARY + (threads - 1) * self.THREAD):
            os.environ[self.THREADS] = "1"
            if not _can_allocate(self.LIBRARY):
                raise MemoryError


def _can_allocate(nbytes: int) -> bool:
    try:
        with mmap.mmap(-1, nbytes):
            return True
    except OSError:
        return False


def _install_numpy_memory_guard() -> None:
    """Install the import hook if the address space is limited."""
    try:
        import resource
    except ImportError:
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY and "numpy" not in sys.modules:
        sys.meta_path.insert(0, _NumpyMemoryGuard())


def run() -> None:
    """Run the command line; every exit of the program goes through this function."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Keep signals ignored that a parent set to be ignored, e.g. nohup.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _handle_signal)
    # Silence TensorFlow's start-up messages.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not os.environ.get(_TRACEBACK):
        # Errors of a thread are re-raised in the thread that waits for it.
        threading.excepthook = lambda _: None
        sys.unraisablehook = lambda _: None
    as_json = "--json" in sys.argv
    streams = sys.stdout, sys.stderr
    try:
        if signal.getsignal(signal.SIGINT) is exit_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [*sys.argv[:1], *_use_target_option(sys.argv[1:])]
        console.guard_streams()
        console.require_stdout()
        _install_numpy_memory_guard()
        status = typer.main.get_command(app)(prog_name=_NAME, standalone_mode=False)
        console.flush_streams()
    except _SignalExit as ended:
        console.print_interruption(ended.how)
        raise
    except BaseException as error:  # noqa: BLE001  # the last line of defence: people never see a traceback
        status = _exit_status(error, as_json=as_json)
    finally:
        # A program that calls this function keeps its own streams.
        sys.stdout, sys.stderr = streams
    sys.exit(status or 0)


def _exit_status(error: BaseException, *, as_json: bool) -> int:
    """Print the error that ended a command and return the exit status."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return 130
    # Printing the help exits on its own when stdout is closed.
    ended = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    if ended or (isinstance(error, BrokenPipeError) and console.is_reader_gone()):
        console.silence_stdout()
        return 0
    if isinstance(error, SystemExit) and _modules_in_traceback(error)[-1].partition(".")[0] in (
        "typer",
        "click",
    ):
        return int(error.code or 0)  # shell completion was installed or requested
    try:
        console.print_error(_complete_hint(_convert_error(error)), as_json=as_json)
        console.flush_streams()
    except BrokenPipeError:
        console.silence_stdout()
    except CkpttoolError as unwritten:
        # Neither the error document nor the output of libraries could be written.
        console.print_error(unwritten, as_json=False)
    return 2


def _first_screen() -> str:
    """Return what the program prints without arguments; it fits a terminal of 24 lines."""
    about = textwrap.wrap(str(app.info.help), 79)
    commands = [f"  {command.name:<9} {command.summary}" for command in COMMANDS]
    return "\n".join(
        [*about, "", *commands, "", f"Start with: {_NAME} PATH", f"Options: {_NAME} COMMAND --help"]
    )


def _complete_hint(error: CkpttoolError) -> CkpttoolError:
    """Complete a hint that repeats this command with one more option, keeping the options in use."""
    from ckpttool.cli import usage

    args = sys.argv[1:]
    usage.complete_not_found(error, args)
    usage.complete_inspect_hint(error, args)
    usage.fill_hint(error, args)
    try:
        hint = shlex.split(error.hint or "")
    except ValueError:
        return error
    if args and args[0] in _LIKE_EVAL and hint[:2] == [_NAME, "eval"]:
        hint = _replace_eval(hint, args)
    if not args or hint[:2] != [_NAME, args[0]]:
        return error
    positional, proposed = _split_options(hint[2:])
    if not positional or any(word not in args for word in positional):
        return error
    if args[0] in _OF_TWO_PATHS and len(positional) < 2:
        positional, _ = _split_options(args[1:])
    options = [
        (name, [v for v in values if v not in positional]) for name, values in _split_options(args[1:])[1]
    ]
    kept = [
        option for option in options if option not in proposed and _is_compatible_option(option[0], proposed)
    ]
    # Fill a placeholder with the value in use, if there is one.
    known = dict(options)
    filled = [(name, known.get(name, values) if values == ["ID"] else values) for name, values in proposed]
    words = [word for name, values in (*kept, *filled) for word in (name, *values)]
    error.hint = shlex.join((_NAME, args[0], *positional, *words))
    return error


_OF_TWO_PATHS = ("verify", "diff", "convert")
# Commands that take eval's facts of an agent (--head, --activation, ...).
_LIKE_EVAL = ("verify", "doctor")


def _replace_eval(hint: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the running command with the options that a hint gives eval."""
    options = [(name, values) for name, values in _split_options(hint[2:])[1] if values != ["ID"]]
    words = [word for name, values in options for word in (name, *values)]
    return [_NAME, arguments[0], *_split_options(arguments[1:])[0], *words]


def _is_compatible_option(name: str, proposed: Sequence[tuple[str, list[str]]]) -> bool:
    return name in _REPEATABLE or all(name != other for other, _ in proposed)


def _split_options(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the arguments before the options, and each option with the arguments after it."""
    before: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            options.append((name, [value] if equals else []))
        else:
            (options[-1][1] if options else before).append(word)
    return before, options


def _use_target_option(words: list[str]) -> list[str]:
    """Return the arguments of `convert` with the value of -o or --out, which other commands take, as DST."""
    if next((word for word in words if word in [command.name for command in COMMANDS]), None) != "convert":
        return words
    for at, word in enumerate(words):
        if word in ("-o", "--out") and at + 1 < len(words):
            return [*words[:at], *words[at + 2 :], words[at + 1]]
        if word.startswith("--out="):
            return [*words[:at], *words[at + 1 :], word.removeprefix("--out=")]
    return words


def _handle_signal(signum: int, frame: object) -> None:  # noqa: ARG001
    # Ignore a second signal, which would interrupt the cleanup.
    signal.signal(signum, signal.SIG_IGN)
    raise _SignalExit(signum)


def _modules_in_traceback(error: BaseException) -> list[str]:
    """Return the names of the modules of an error's traceback; the last one raised it."""
    names, frame = [""], error.__traceback__
    while frame is not None:
        names.append(str(frame.tb_frame.f_globals.get("__name__", "")))
        frame = frame.tb_next
    return names


def _owner_of_bug(error: BaseException) -> str:
    """Return the package with the bug: that of a plug-in whose code was running, else ckpttool."""
    modules = _modules_in_traceback(error)
    for kind in plugins.BUILT_IN:
        for plugin in plugins.installed(kind):
            if plugin.owner != "ckpttool" and plugin.module.partition(":")[0] in modules:
                return f"package {plugin.owner}, which provides {kind[:-1]} {plugin.name}"
    return "ckpttool"


def _convert_error(error: BaseException) -> CkpttoolError:
    """Return the error to print; re-raise it if the user requested a traceback."""
    if isinstance(error, CkpttoolError):
        return error
    # typer's usage errors carry their own text; their class moved between its versions.
    message = getattr(error, "format_message", None)
    if callable(message):
        from ckpttool.cli import usage

        context = getattr(error, "ctx", None)
        names = context.find_root().command.commands if context else (command.name for command in COMMANDS)
        return usage.convert_usage_error(
            error, sys.argv[1:], tuple(names), lambda name: cast(CommandEntry, _find_command(name)).parser()
        )
    if os.environ.get(_TRACEBACK):
        raise error
    return from_system_error(error) or CkpttoolError(
        f"unexpected {type(error).__name__}: {error}",
        hint=f"this is a bug in {_owner_of_bug(error)}; set {_TRACEBACK}=1 to show the traceback",
    )
