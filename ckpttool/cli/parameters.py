"""Arguments and options that several commands share, and the checkpoint that a path stands for."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli.console import _write_stderr
from ckpttool.cli.panels import complete_field
from ckpttool.cli.styles import wrap_sentence
from ckpttool.core import urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import LimitError, NotACheckpointError, UsageError, abbreviate_list

if TYPE_CHECKING:
    from ckpttool.evaluation.agent_facts import AgentFacts
    from ckpttool.listing.paths import CheckpointChoice


def use_checkpoint(path: str, *, quiet: bool) -> str:
    """Return the path to open for a command's path; a folder stands for one checkpoint, named on stderr.

    Raise NotACheckpointError for a folder from whose checkpoints the user must choose.
    """
    if urls.is_url(path) or not os.path.isdir(path):
        return path
    from ckpttool.listing import paths

    choice = paths.choose_checkpoint(path)
    if choice.candidates:
        raise _ambiguous_folder_error(choice)
    if not quiet and os.path.normpath(choice.location) != os.path.normpath(path):
        beside = f" (also in this folder: {abbreviate_list([*choice.beside], paths.NAMED)})"
        _write_stderr(
            [wrap_sentence(f"using {choice.location}{beside if choice.beside else ''}", sys.stderr)]
        )
    return choice.path


def require_one_run(paths: Sequence[str]) -> None:
    """Raise NotACheckpointError for a folder of several training runs, from which the user must choose."""
    from ckpttool.listing.paths import choose_checkpoint

    for path in paths:
        choice = choose_checkpoint(path)
        if choice.folders > 1:
            raise _ambiguous_folder_error(choice)


def _ambiguous_folder_error(choice: CheckpointChoice) -> NotACheckpointError:
    last = choice.candidates[-1].path
    words = [last if word == choice.path else word for word in sys.argv[1:]]
    return choice.error(shlex.join(("ckpttool", *words)))


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


def argument(metavar: str, text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Return the declaration of an argument: its name in the usage line, its help, and what completes it."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, autocompletion=complete)


PathArgument = Annotated[str, argument("PATH", "File, TensorFlow prefix or folder.")]
PathOrStdin = Annotated[str, argument("PATH", "File, TensorFlow prefix or folder; - for stdin.")]
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
        autocompletion=complete_field("layout"),
    ),
]
Env = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Gymnasium environment of the agent.",
        autocompletion=complete_field("env"),
    ),
]


@dataclass(frozen=True)
class AgentOptions:
    """How to read an agent, and facts about it that are not stored in the file.

    Agent:
        activation (NAME): Hidden activation: one, or one per layer (relu,tanh).
        head (NAME, tanh|affine|unit_tanh|linear|clip|clip_affine|tanh_clip_affine):
            Action map: tanh, affine, unit_tanh, linear, clip, ...
        bounds (LOW HIGH): Action bounds, for all or by dimension: -2 2, or -1,-3 1,3.
        obs_norm (FILE): Observation statistics: vecnormalize.pkl, or mean and var.
    """

    layout: LayoutOption = None
    activation: str | None = None
    head: str | None = None
    bounds: tuple[str, str] | None = None
    obs_norm: str | None = None

    def facts(self, env: str | None = None) -> AgentFacts:
        """Return the facts given by the options, and the environment."""
        from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts, parse_bounds

        stated = self.activation, self.head, self.bounds, self.obs_norm, env
        if all(fact is None for fact in stated):
            return NO_FACTS
        low, high = parse_bounds(self.bounds)
        return AgentFacts(self.activation, self.head, low, high, self.obs_norm, env)


@dataclass(frozen=True)
class ModelOptions:
    """Model created by the user's code.

    Your own model:
        like (MODULE:FACTORY): Your own model, created by this class or function.
        like_args (JSON): For --like: arguments of the factory, '{"hidden": 256}'.
        input_shape (H,W,C): For --like: input shape without batch; repeatable.
        python (INTERPRETER): For --like: Python interpreter with its framework.
    """

    like: str | None = None
    like_args: str | None = None
    input_shape: list[str] | None = None
    python: str | None = None

    def model(self) -> Any:
        """Return the model, or None without --like; raise UsageError for options that require --like."""
        if self.like is None:
            if self.like_args or self.input_shape or self.python:
                raise UsageError("--like-args, --input-shape and --python require --like")
            return None
        from ckpttool.networks.worker import parse_model_spec

        return parse_model_spec(self.like, self.like_args, self.input_shape or (), self.python)


def make_importable(env: str | None) -> str | None:
    """Return the environment id; make the module of `module:Env-v0` importable from the working directory."""
    module, colon, _ = (env or "").partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        from ckpttool.networks.model_child import find_user_module  # not needed by most commands

        find_user_module(module)
    return env
