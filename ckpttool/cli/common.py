"""Options, output, progress, completion and suggestions shared by the commands."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import inspect
import io
import json
import os
import re
import select
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TextIO,
    TypeGuard,
    cast,
    get_args,
    get_type_hints,
)

import typer

from ckpttool.core import deferred, filesystem, sidecar, text, urls
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    LimitError,
    MissingExtraError,
    NotACheckpointError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.text import clean, describe_error, shorten, truncate_text
from ckpttool.version import __version__

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ckpttool.commands.doctor import Diagnosis
    from ckpttool.commands.evidence import AgentFacts
    from ckpttool.commands.folder import CheckpointChoice, CheckpointFolder
    from ckpttool.commands.inspect import CheckpointSummary
    from ckpttool.commands.plan import ConversionResult
    from ckpttool.commands.stats import Diff, Stats
    from ckpttool.commands.sweep import Sweep
    from ckpttool.commands.verify import Verification
    from ckpttool.core.atomic_write import Progress
    from ckpttool.core.plugins import Kind


# Program output: one JSON document or text without control characters, one sentence per error.

SCHEMA = 1
# Our own styles carry a random marker that no file can contain: `escape_controls` escapes all other escape
# characters.
_MARK = os.urandom(8).hex()
_STYLE = deferred.compile(f"\x1b{_MARK}(\\[[0-9;]*m)")
_REQUESTED = deferred.compile(r"\x1b(?=\[[0-9;]*m)")

# Not empty once stdout has failed.
_FAILED: list[bool] = []

# Maximum number of objects in a list that are shown with one line per value.
_MANY = 20_000


def render_document(content: dict[str, Any]) -> str:
    """Return the JSON document of a command: schema, tool version, then the content."""
    whole = {"schema": SCHEMA, "tool": f"ckpttool {__version__}", **content}
    return (
        "{\n"
        + ",\n".join(f" {json.dumps(name)}: {_render_member(item)}" for name, item in whole.items())
        + "\n}"
    )


def _render_member(value: Any) -> str:
    """Return a document's member with one line per value, or one per object of a very long list.

    One line per value would take ten times as long, and all memory for a hundred thousand tensors.
    """
    if isinstance(value, list | tuple) and len(value) > _MANY:
        return "[\n  " + ",\n  ".join(_dump_json(item) for item in value) + "\n ]"
    return _dump_json(value, indent=1).replace("\n", "\n ")


def _dump_json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(text.replace_nonfinite(value), indent=indent, allow_nan=False)


def style_code(code: str) -> str:
    """Return the escape code of a style: "1" is bold, "2" dim, "0" resets."""
    return f"\x1b{_MARK}[{code}m"


def adopt_rich_styles(text: str) -> str:
    """Return text drawn by rich from clean cells, with its styles replaced by our own markers."""
    return _REQUESTED.sub(f"\x1b{_MARK}", text)


def escape_controls(text: str, *, styles: bool = False) -> str:
    """Return lines of printable characters that cannot control a terminal, with our styles if wanted."""
    if text.replace("\n", "").isprintable():
        return text
    pieces = _STYLE.split(text)
    for at, piece in enumerate(pieces):
        if at % 2:
            pieces[at] = f"\x1b{piece}" if styles else ""
        else:
            pieces[at] = "\n".join(map(clean, piece.split("\n")))
    return "".join(pieces)


def print_text(text: str) -> None:
    """Print the text to stdout, if there is any; escape what the terminal's encoding lacks.

    Raise BrokenPipeError when the reader has closed the pipe, and CkpttoolError when writing to stdout
    fails for another reason.
    """
    if not text:
        return
    require_stdout()
    data = (escape_controls(text, styles=has_colors()) + "\n").encode(
        sys.stdout.encoding or "utf-8", "backslashreplace"
    )
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise CkpttoolError(f"cannot write to standard output: {error.strerror}") from error


def page_text(text: str) -> None:
    """Print the text; on a terminal that it does not fit, through $PAGER (less by default, cat for none)."""
    height, keyboard = terminal_height(), sys.stdin is not None and sys.stdin.isatty()
    long = height is not None and text.count("\n") >= height
    command = shlex.split(os.environ.get("PAGER") or "less")
    plain = command[:1] in ([], ["cat"])
    if not (long and keyboard) or plain or not _run_pager(command, text):
        print_text(text)


def _run_pager(command: list[str], text: str) -> bool:
    """Return whether the pager could be started; wait until the user leaves it."""
    import subprocess

    # F: leave at once if the text fits; R: show colors; X: leave the text on the screen.
    environment = {"LESS": "FRX", **os.environ}
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603  # the user's own
    except OSError:
        return False
    data = (escape_controls(text, styles=has_colors()) + "\n").encode("utf-8", "backslashreplace")
    while True:
        try:
            pager.communicate(data)
        except KeyboardInterrupt:
            continue  # the pager handles Ctrl-C itself
        return True


def terminal_height() -> int | None:
    """Return the number of lines of the terminal or of LINES; None if stdout is no terminal."""
    return shutil.get_terminal_size((80, 24)).lines if sys.stdout.isatty() else None


def require_stdout() -> None:
    """Raise CkpttoolError if stdout is closed or has failed before."""
    if sys.stdout is None or _FAILED:
        raise CkpttoolError(
            "cannot write to standard output: it is closed", hint="use > /dev/null to discard the output"
        )


class EscapingStream:
    """Stream for libraries' prints and warnings; control characters are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattribute__(self, name: str) -> Any:
        """Return the attribute of the wrapped stream, for everything except writing."""
        if name in ("write", "writelines", "stream", "__class__", "__dict__"):
            return super().__getattribute__(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text with control characters escaped."""
        self.stream.write(text if text.isprintable() else escape_controls(text.expandtabs()))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)


class _RichCapture(io.StringIO):
    """Buffer for rich's output, in color if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    # rich chooses box characters by the stream's encoding.
    encoding = property(lambda self: self.stream.encoding)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self.stream.isatty()


@contextlib.contextmanager
def render_with_rich() -> Iterator[None]:
    """Let rich print our own text, such as --help; its styles reach the terminal like those of `style`."""
    require_stdout()
    before, drawn = sys.stdout, _RichCapture(sys.stdout)
    sys.stdout = drawn
    try:
        yield
    finally:
        sys.stdout = before
    print_text(adopt_rich_styles(drawn.getvalue()).removesuffix("\n"))


def guard_streams() -> None:
    """Wrap stdout and stderr in `EscapingStream` and replace closed descriptors.

    Otherwise the first file opened would get a closed descriptor's number, and with it what libraries
    print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)  # the lowest free number
    _FAILED.clear()
    sys.stdout, sys.stderr = (
        stream
        if stream is None or isinstance(stream, EscapingStream)
        else cast(TextIO, EscapingStream(stream))
        for stream in (sys.stdout, sys.stderr)
    )


def is_stderr_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def raw_stderr() -> TextIO:
    """Return the unwrapped stderr, for code that draws on a terminal."""
    return sys.stderr.stream if isinstance(sys.stderr, EscapingStream) else sys.stderr


def print_error(error: CkpttoolError, *, as_json: bool) -> None:
    """Print the error and its hint to stderr, or the error document to stdout."""
    if as_json and sys.stdout is not None and not _FAILED:
        facts = {"kind": error.kind, "message": describe_error(error), "file": error.file, "hint": error.hint}
        print_text(render_document({"error": facts}))
        return
    lines = [_wrap_for_stderr(f"ckpttool: {describe_error(error)}")]
    if error.hint:
        hint = f"hint: {truncate_text(clean(error.hint))}"
        # Do not wrap lines that are meant to be pasted.
        lines.append(hint if re.match(r"hint: (ckpttool |-)", hint) else _wrap_for_stderr(hint))
    _write_stderr(lines)


def _wrap_for_stderr(line: str) -> str:

    return wrap_sentence(line, sys.stderr) if sys.stderr is not None and not sys.stderr.closed else line


def print_interruption(how: str) -> None:
    """Report on stderr that the program was stopped; ignore a closed terminal."""
    with contextlib.suppress(OSError):
        _write_stderr([f"ckpttool: {how}"])


def print_note(line: str) -> None:
    """Print a line to stderr."""
    _write_stderr([line])


def _write_stderr(lines: list[str]) -> None:
    # If stderr is closed or full, only the exit status remains.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write("".join(f"{escape_controls(line)}\n" for line in lines))
            sys.stderr.flush()


def is_reader_gone() -> bool:
    """Return whether stdout is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False


def silence_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's final flush does not fail again."""
    _FAILED.append(True)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush_streams() -> None:
    """Flush what libraries have printed; raise as `write` does."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
    if sys.stdout is None or _FAILED:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise CkpttoolError(f"cannot write to standard output: {error.strerror}") from error


# Column layout that fits the terminal: names, kinds, numbers and a note.

_NARROWEST = 60
_HANGING = " " * 4
# Minimum (on a narrow terminal) and maximum width of each column.
_NAME, _WHAT, _NOTE = (18, 60), (13, 40), (20, 80)
_CLASS = 20
# A path shortened below this width is useless.
_SHORTEST = 8
BOLD, DIM, PLAIN, RED, GREEN, YELLOW = map(style_code, ("1", "2", "0", "1;31", "1;32", "1;33"))


class ColumnLine(NamedTuple):
    """One row before fitting: the text of each column; `below` are further lines, never shortened.

    `lead` precedes the note and is not shortened with it, e.g. "m of " or "also ".
    """

    level: int
    name: str
    what: str
    elements: str
    nbytes: str
    note: str
    lead: str = ""
    module: bool = False
    below: tuple[str, ...] = ()


def terminal_width() -> int:
    """Return the output width: the terminal's or that of COLUMNS; 80 in a pipe."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def wrap_sentence(sentence: str, stream: TextIO | None = None) -> str:
    """Return a labelled sentence, wrapped to the terminal's width; paths are never broken.

    `stream` is the output stream, stdout by default.
    """
    if not (stream or sys.stdout).isatty():
        return sentence
    return textwrap.fill(
        sentence, terminal_width(), subsequent_indent=_HANGING, break_long_words=False, break_on_hyphens=False
    )


def fit_path(path: str, used: int) -> str:
    """Return a path shortened for a line with `used` other characters; in a pipe, the full path."""
    return shorten(path, max(2 * _SHORTEST, terminal_width() - used)) if sys.stdout.isatty() else path


def has_colors() -> bool:
    """Return whether colors are shown: on a color terminal, or where a variable forces them.

    https://no-color.org, https://force-color.org and https://bixense.com/clicolors.
    """
    forced = any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    if os.environ.get("NO_COLOR"):
        return False
    return forced or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def strip_line_end(line: str) -> str:
    """Return the line without trailing spaces, including those before a style's end."""
    line = line.rstrip()
    return line.removesuffix(PLAIN).rstrip() + PLAIN if line.endswith(PLAIN) else line


def align_columns(lines: list[ColumnLine], width: int, *, cut: bool = True) -> list[str]:
    """Return the lines in columns that fit the width.

    Without `cut`, longer names, types and notes are complete and make their line longer.
    """
    if not lines:
        return []
    fit = shorten if cut else keep_whole
    lines = [_escape_line(line) for line in lines]
    elements = max(10, *(len(line.elements) for line in lines))
    nbytes = max(7, *(len(line.nbytes) for line in lines))
    names = max(2 * line.level + len(line.name) for line in lines)
    # A value may extend into the empty columns after it, so it needs no width: a plain value, and that of
    # a counter (`int64[] = 14000`).
    whats = max((len(line.what.partition(" = ")[0]) for line in lines if line.nbytes), default=0)
    # A class name may extend into the next column if its module has no parameters, so it shrinks first.
    typed = (line.what.partition(" = ")[0] for line in lines if line.nbytes and not line.module)
    types = max([_CLASS, *map(len, typed)])
    notes = max((len(line.lead) + len(line.note) for line in lines if line.nbytes), default=0)
    spare = width - elements - nbytes - (8 if notes else 6)
    # Deep names start far to the right, so the column grows with the depth as far as the terminal allows.
    least, most = _NAME
    deepest = max(2 * line.level for line in lines)
    least = max(least, min(deepest + least // 2, width // 2 - 4))
    name, what, note = _fit_widths([(names, (least, most)), (whats, _WHAT), (notes, _NOTE)], types, spare)
    colours = has_colors()
    title = f"{'':<{name}}  {'':<{what}}  {'parameters':>{elements}}  {'size':>{nbytes}}"
    text = [f"{DIM}{title}{PLAIN}" if colours else title] if any(line.nbytes for line in lines) else []
    for line in lines:
        # A name keeps up to half of the column at any depth.
        indent = " " * min(2 * line.level, max(name // 2, name - len(line.name)))
        # Rows without numbers may use the number columns.
        room = name if line.nbytes else max(name, width // 2)
        left = f"{indent + fit(line.name, room - len(indent)):<{name}}"
        if line.nbytes:
            room = what if line.elements else what + elements
            label = fit(line.what, room)
            numbers = max(what + 2 + elements - len(label), len(line.elements) + 2)
            middle = f"{label}{line.elements:>{numbers}}  {line.nbytes:>{nbytes}}"
        else:
            middle = shorten(line.what, width - len(left) - 2)
        room = note if line.nbytes else width - len(left) - 4 - len(middle)
        right = _fit_note(line, room) if cut else line.lead + line.note
        if colours:
            left = f"{BOLD}{left}{PLAIN}" if line.module else left
            right = f"{DIM}{right}{PLAIN}" if right else ""
        text.append(strip_line_end(f"{left}  {middle}  {right}"))
        text += [f"{indent}    {below}" for below in line.below]
    return text


def keep_whole(text: str, width: int) -> str:  # noqa: ARG001  # it stands for `shorten`
    """Return the text as it is."""
    return text


def _escape_line(line: ColumnLine) -> ColumnLine:
    """Return the line without characters that would break it or control a terminal."""
    if all(map(str.isprintable, (*line[1:7], *line.below))):
        return line
    name, what, elements, nbytes, note, lead = map(clean, line[1:7])
    return ColumnLine(
        line.level, name, what, elements, nbytes, note, lead, line.module, tuple(map(clean, line.below))
    )


def _fit_note(line: ColumnLine, width: int) -> str:
    room = width - len(line.lead)
    if not line.lead or room < min(len(line.note), _SHORTEST):
        return shorten(line.lead.split(" ")[0] if line.lead else line.note, width)
    return line.lead + shorten(line.note, room)


def _fit_widths(requested: Iterable[tuple[int, tuple[int, int]]], types: int, spare: int) -> list[int]:
    """Return a width for each column, shrinking the last column first if space runs out.

    The middle column is cut down to `types` before any other column shrinks.
    """
    wanted = [(min(natural, most), least) for natural, (least, most) in requested]
    given = [width for width, _ in wanted]
    # If even the minimum widths do not fit, drop the notes first.
    steps = ((1, types), (2, wanted[2][1]), (0, wanted[0][1]), (1, wanted[1][1]), (2, 0), (0, 8), (1, 8))
    for at, least in steps:
        over = sum(given) - spare
        if over > 0:
            given[at] = min(given[at], max(least, given[at] - over))
    return given


# Shell completion: words offered for an option or an argument.
#
# Each function receives the incomplete word. Ordinary commands import or run nothing here except these few
# definitions.


def complete_layouts(incomplete: str) -> list[str]:
    """Return the layout names."""
    return _complete_plugins("layouts", incomplete)


def complete_backends(incomplete: str) -> list[str]:
    """Return the backend names."""
    return _complete_plugins("backends", incomplete)


def complete_targets(incomplete: str) -> list[str]:
    """Return the targets of `convert --to`."""
    from ckpttool.commands.options import EXPORTS, TARGETS

    return _filter_by_prefix((*TARGETS, *EXPORTS), incomplete)


def complete_schemas(incomplete: str) -> list[str]:
    """Return the names of the JSON Schemas."""
    from ckpttool.commands.inspect import schema_names

    return _filter_by_prefix(schema_names(), incomplete)


def complete_environments(incomplete: str) -> list[str]:
    """Return the environments registered by Gymnasium itself; none if it is not installed."""
    from ckpttool.evaluation.environments import import_gymnasium

    try:
        return _filter_by_prefix(import_gymnasium().registry, incomplete)
    except MissingExtraError:
        return []


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function for these words."""

    def offered(incomplete: str) -> list[str]:
        return _filter_by_prefix(words, incomplete)

    return offered


def _complete_plugins(kind: Kind, incomplete: str) -> list[str]:
    from ckpttool.core import plugins

    return _filter_by_prefix((plugin.name for plugin in plugins.installed(kind)), incomplete)


def _filter_by_prefix(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


# Suggested next commands with the paths just used, only on a terminal.

# Arguments of a few commands, without the program's name.
Steps = list[tuple[str, ...]]
# Checkpoints of one framework are most often converted to the other one.
_TENSORFLOW = ("tensor_bundle", "tensorflow_v1", "saved_model", "keras_h5", "keras_zip", "keras_rl")


def print_next_steps(after: Callable[..., Steps], *found: Any, quiet: bool) -> None:
    """Print the commands that a function suggests for a result, one per line; never into a pipe."""
    if quiet or not sys.stdout.isatty():
        return
    for words in after(*found):
        line = f"next: {clean(shlex.join(('ckpttool', *words)))}"
        print_text(f"{DIM}{line}{PLAIN}" if has_colors() else line)


def after_inspect(found: CheckpointSummary | CheckpointFolder) -> Steps:
    """Suggest commands for an agent, or for a model that is not one."""
    from ckpttool.commands.inspect import CheckpointSummary

    if not isinstance(found, CheckpointSummary):
        return []
    path = urls.display_url(found.checkpoint.path)
    if urls.is_copy(found.checkpoint.path):
        return []
    if found.layout is None:
        return [*_audit_command(found, path), *([("stats", path), ("doctor", path)] if found.tensors else [])]
    tensorflow = found.checkpoint.format in _TENSORFLOW
    other = ("agent.pt",) if tensorflow else ("ckpt-1", "--to", "tf")
    return [("convert", path, *other), *([_eval_command(path, found)] if _may_play(found) else [])]


def _may_play(found: CheckpointSummary) -> bool:
    """Return whether the agent has a policy with continuous actions."""
    if found.binding is None:
        return True
    discrete = any("discrete" in each for each in found.binding.unplaced.get("actor", ()))
    return not discrete and any(part.acts for part in found.binding.parts)


def _audit_command(found: CheckpointSummary, path: str) -> Steps:
    """Suggest the list of what loading would run, unless it is shown already."""
    from ckpttool.core.checkpoint import UNSAFE, worst_verdict

    runs = worst_verdict(found.checkpoint.code_references) in UNSAFE
    return [("inspect", path, "--names")] if runs and "--names" not in sys.argv else []


def after_overview(found: CheckpointSummary | CheckpointFolder) -> Steps:
    """Suggest what `inspect` suggests, except `doctor`, which has run."""
    steps = after_inspect(found)
    return [("report", *step[1:]) if step[0] == "doctor" else step for step in steps]


def after_digest(path: str) -> Steps:
    """Suggest comparing with this digest later; nothing for stdin."""
    if urls.is_copy(path):
        return []
    return [("digest", path, "--check", "saved.json")]


def after_stats(path: str, found: Stats) -> Steps:
    """Suggest `doctor` if the values look unhealthy."""
    bad = not found.finite or any(each.signs for each in found.tensors)
    return [("doctor", path)] if bad else []


def after_diff(left: str, right: str, found: Diff) -> Steps:
    """Suggest checking whether two different agents still act alike."""
    agents = None not in found.layouts
    return [("verify", left, right)] if agents and not found.identical and not found.resized else []


def after_doctor(path: str, found: Diagnosis) -> Steps:
    """Suggest evaluating a healthy agent."""
    return [_eval_command(path)] if found.layout is not None and not found.findings else []


def after_convert(found: ConversionResult) -> Steps:
    """Suggest the same command without --dry-run, or verifying and evaluating the written agent."""
    if found.written:
        played = [("verify", found.source, found.target), _eval_command(found.target)]
        return played if found.parity and not found.target.endswith(".onnx") else [("inspect", found.target)]
    words = sys.argv[1:]
    if "--dry-run" not in words or not found.report.complete:
        return []
    if "--glob" in words:
        at = words.index("--glob")
        del words[at : at + 2]
    return [tuple(word for word in words if word != "--dry-run" and not word.startswith("--glob="))]


def after_verify(second: str, found: Verification) -> Steps:
    """Suggest evaluating the verified agent."""
    return [_eval_command(second)] if found.within and found.models is None else []


def after_eval(found: Sweep, env: str | None) -> Steps:
    """Suggest scoring the best of several more precisely, or recording a video of one."""
    env_options = ("--env", env) if env is not None else ()
    if found.best is not None:
        return [("eval", urls.display_url(found.best.checkpoint), *env_options, "--episodes", "100")]
    return [
        ("eval", urls.display_url(each.checkpoint), *env_options, "--video", "agent.mp4")
        for each in found.evaluations[:1]
    ]


def _eval_command(path: str, found: CheckpointSummary | None = None) -> tuple[str, ...]:
    """Return the command that plays an agent, with its environment if neither file nor sidecar names it."""
    if found is not None and found.binding is not None and found.binding.facts.env:
        return "eval", path
    # Do not download anything for a suggestion.
    recorded = None
    if not urls.is_url(path):
        with contextlib.suppress(CkpttoolError):
            recorded = sidecar.load_sidecar(path)
    if recorded is not None and recorded.env:
        return "eval", path
    if found is not None and found.layout == "stable_baselines3" and not urls.is_elsewhere(path):
        from ckpttool.libraries.sb3 import names_environment

        if names_environment(path):
            return "eval", path
    return "eval", path, "--env", _infer_environment(found) or "ID"


def _infer_environment(found: CheckpointSummary | None) -> str | None:
    """Return the only environment that fits the path and the sizes of an agent; None for none or several."""
    from ckpttool.commands.dataflow import build_listed_strips, find_policy_sizes

    if found is None:
        return None
    sizes = find_policy_sizes(build_listed_strips(found.binding, found.checkpoint.tree))
    if sizes is None:
        return None
    from ckpttool.evaluation.environments import candidate_environments

    words = "/".join(found.checkpoint.path.rstrip("/").split("/")[-3:])
    fitting = candidate_environments(words, *sizes)
    return fitting[0] if len(fitting) == 1 else None


# Option panels: a dataclass is one titled group in a command's help, and one argument of its function.


class OptionPanel:
    """Base of dataclasses whose fields are the options in one panel of a command's help.

    A field is annotated like a parameter of a typer command; its default is the option's default.
    Mutually exclusive options raise UsageError in `__post_init__`.
    """

    TITLE: ClassVar[str]

    def __init_subclass__(cls, title: str) -> None:
        cls.TITLE = title


def takes_panels(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command with the options of every `OptionPanel` parameter of this function."""
    hints = get_type_hints(command, include_extras=True)
    panels = {name: hint for name, hint in hints.items() if _is_panel(hint)}
    shown: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        if each.name in panels:
            shown += _panel_parameters(panels[each.name])
        else:
            shown.append(each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> int:
        for name, panel in panels.items():
            given[name] = panel(**{each.name: given.pop(each.name) for each in dataclasses.fields(panel)})
        return command(**given)

    # typer reads both attributes, and neither may be the wrapped function's.
    run.__signature__ = inspect.Signature(shown, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown} | {"return": int}
    return run


def _is_panel(hint: object) -> TypeGuard[type[Any]]:
    return isinstance(hint, type) and issubclass(hint, OptionPanel)


def _panel_parameters(panel: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field, with its option under the panel's title."""
    hints = get_type_hints(panel, include_extras=True)
    for each in dataclasses.fields(panel):
        value, *notes = get_args(hints[each.name])
        (option,) = (copy.copy(note) for note in notes if isinstance(note, typer.models.OptionInfo))
        option.rich_help_panel = panel.TITLE
        # Create a separate list for every call of the command.
        if each.default_factory is not dataclasses.MISSING:
            option.default_factory = each.default_factory
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option]
        )


def use_checkpoint(path: str, *, quiet: bool) -> str:
    """Return the path to open for a command's path; a folder stands for one checkpoint, named on stderr.

    Raise NotACheckpointError for a folder from whose checkpoints the user must choose.
    """
    if urls.is_url(path) or not os.path.isdir(path):
        return path
    from ckpttool.commands import folder

    choice = folder.choose_checkpoint(path)
    if choice.candidates:
        raise _ambiguous_folder_error(path, choice)
    if not quiet and os.path.normpath(choice.location) != os.path.normpath(path):
        beside = f" (also in this folder: {abbreviate_list([*choice.beside], _CANDIDATES)})"
        _write_stderr(
            [wrap_sentence(f"using {choice.location}{beside if choice.beside else ''}", sys.stderr)]
        )
    return choice.path


def require_one_run(paths: Sequence[str]) -> None:
    """Raise NotACheckpointError for a folder of several training runs, from which the user must choose."""
    from ckpttool.commands import folder

    for path in paths:
        choice = folder.choose_checkpoint(path)
        if choice.folders > 1:
            raise _ambiguous_folder_error(path, choice)


def _ambiguous_folder_error(path: str, choice: CheckpointChoice) -> NotACheckpointError:
    paths = [each.path for each in choice.candidates]
    words = [paths[-1] if word == path else word for word in sys.argv[1:]]
    found = abbreviate_list([os.path.relpath(each, path) for each in reversed(paths)], _CANDIDATES)
    hint = shlex.join(("ckpttool", *words))
    return NotACheckpointError(choice.problem, file=path, found=found, hint=hint)


# Checkpoints of a folder in an error.
_CANDIDATES = 5
# Name of the copy of stdin, as it is shown; the maximum number of its bytes, and how many at a time.
_STDIN = "stdin"
_MOST_STDIN, _PIECE = 8 << 30, 1 << 20


def spool_stdin(path: str) -> str:
    """Return the path; for `-`, the path of a temporary copy of stdin, removed when the program ends.

    Raise UsageError if stdin is a terminal or closed, and LimitError if it is too long.
    """
    if path != "-":
        return path
    import atexit
    import tempfile

    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "'-' reads a checkpoint from stdin, which is a terminal", hint="ckpttool inspect - < FILE"
        )
    folder = tempfile.mkdtemp(prefix="ckpttool-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy_path, total = os.path.join(folder, _STDIN), 0
    urls.name_copy(copy_path, _STDIN)
    with open(copy_path, "wb") as copied:
        while piece := sys.stdin.buffer.read(_PIECE):
            total += len(piece)
            if total > _MOST_STDIN:
                raise LimitError("stdin is too long", expected=f"at most {_MOST_STDIN:,} bytes")
            copied.write(piece)
    return copy_path


# Arguments and options shared by several commands.

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="File, TensorFlow prefix or folder.", show_default=False)
]
PathOrStdin = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="File, TensorFlow prefix or folder; - for stdin.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, findings and output paths.")]
Glob = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Only tensors whose path matches (** crosses levels)."),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Layout to read (see ckpttool layouts), or none.",
        autocompletion=complete_layouts,
    ),
]
Env = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Gymnasium environment of the agent.",
        autocompletion=complete_environments,
    ),
]
ActivationOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Hidden activation: one, or one per layer (relu,tanh).",
        autocompletion=complete_words(*ACTIVATIONS),
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Action map: tanh, affine, unit_tanh, linear, clip, ...",
        autocompletion=complete_words(
            "tanh", "affine", "unit_tanh", "linear", "clip", "clip_affine", "tanh_clip_affine"
        ),
    ),
]
BoundsOption = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="LOW HIGH", help="Action bounds: two numbers or two comma-separated lists."),
]
ObsNormOption = Annotated[
    str | None,
    typer.Option(
        "--obs-norm", metavar="FILE", help="Observation statistics: vecnormalize.pkl, or mean and var."
    ),
]
LikeArgs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="For --like: arguments of the factory, '{\"hidden\": 256}'."),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(metavar="H,W,C", help="For --like: input shape without batch; repeatable."),
]
LikePython = Annotated[
    str | None,
    typer.Option(metavar="INTERPRETER", help="For --like: Python interpreter with its framework."),
]


@dataclass(frozen=True)
class AgentOptions(OptionPanel, title="Agent"):
    """How to read an agent, and facts about it that are not stored in the file."""

    layout: LayoutOption = None
    activation: ActivationOption = None
    head: HeadOption = None
    bounds: BoundsOption = None
    obs_norm: ObsNormOption = None

    def facts(self, env: str | None = None) -> AgentFacts:
        """Return the facts given by the options, and the environment."""
        return agent_facts(self.activation, self.head, self.bounds, self.obs_norm, env)


@dataclass(frozen=True)
class ModelOptions(OptionPanel, title="Your own model"):
    """Model created by the user's code."""

    like: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="Your own model, created by this class or function."),
    ] = None
    like_args: LikeArgs = None
    input_shape: InputShape = None
    python: LikePython = None

    def model(self) -> Any:
        """Return the model, or None without --like; raise UsageError for options that require --like."""
        return build_like_model(self.like, self.like_args, self.input_shape, self.python)


def agent_facts(
    activation: str | None,
    head: str | None,
    bounds: tuple[str, str] | None,
    obs_norm: str | None,
    env: str | None = None,
) -> AgentFacts:
    """Return the agent facts given by the options."""
    from ckpttool.commands.evidence import NO_FACTS, AgentFacts, parse_bounds

    if activation is None and head is None and bounds is None and obs_norm is None and env is None:
        return NO_FACTS
    low, high = parse_bounds(bounds)
    return AgentFacts(activation, head, low, high, obs_norm, env)


def make_importable(env: str | None) -> str | None:
    """Return the environment id; make the module of `module:Env-v0` importable from the working directory."""
    module, colon, _ = (env or "").partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        from ckpttool.networks.model_child import find_user_module  # not needed by most commands

        find_user_module(module)
    return env


def build_like_model(
    factory: str | None, arguments: str | None, shapes: list[str] | None, python: str | None
) -> Any:
    """Return the model given by --like and its options, or None; raise UsageError if --like is missing."""
    if factory is None:
        if arguments or shapes or python:
            raise UsageError("--like-args, --input-shape and --python require --like")
        return None
    from ckpttool.networks.worker import parse_model_spec

    return parse_model_spec(factory, arguments, shapes or (), python)


# Progress bars on stderr: only on a terminal, and only for work that takes more than a second.

_PATIENCE_S = 1.0
_NAME_LENGTH = 40


class _DelayedBar:
    """Progress bar that appears once the work takes longer than a moment."""

    def __init__(self, label: str, unit: str | None) -> None:
        self.label, self.unit = label, unit
        self.began = time.monotonic()
        self.bar: Bar | None = None
        # Measure the speed from the first report on, to exclude building the policy and the environments.
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, steps: int | None = None) -> None:
        now = time.monotonic()
        if self.bar is None and now - self.began > _PATIENCE_S and done < total:
            self._start(total)
        speed = self._speed(now, steps) if steps is not None else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, speed=speed)

    def _speed(self, now: float, steps: int) -> str:
        if self.first is None or steps < self.first[1]:
            self.first = (now, steps)
        since, before = self.first
        return f"{(steps - before) / (now - since):,.0f} steps/s" if now > since else ""

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # Show the count if its unit is known, else the percentage.
        amount = f"{{task.completed}}/{{task.total}} {self.unit}" if self.unit else "{task.percentage:>3.0f}%"
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn(amount),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(file=raw_stderr()),
            transient=True,
            # Other output in the meantime goes through the wrapped stderr.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.bar.add_task(self.label, total=total, speed="")
        self.bar.start()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def show_progress(label: str, *, quiet: bool, unit: str | None = None) -> Iterator[Progress]:
    """Yield a progress callback that draws a bar on a terminal; `unit` names what it counts."""
    if quiet or not is_stderr_terminal():
        from ckpttool.core.atomic_write import ignore_progress

        yield ignore_progress
        return
    shown = _DelayedBar(label, unit)
    try:
        yield shown
    finally:
        shown.stop()


@contextmanager
def show_fetch_progress(*, quiet: bool) -> Iterator[None]:
    """Draw a bar on a terminal for every remote file that must be downloaded whole."""
    if quiet or not is_stderr_terminal():
        yield
        return
    shown: dict[str, _DelayedBar] = {}

    def report(name: str, done: int, total: int) -> None:
        bar = shown.setdefault(name, _DelayedBar(f"fetch {shorten(clean(name), _NAME_LENGTH)}", None))
        bar(done, total)
        if done >= total:
            shown.pop(name).stop()

    token = filesystem.watch.set(report)
    try:
        yield
    finally:
        filesystem.watch.reset(token)
        for bar in shown.values():
            bar.stop()
