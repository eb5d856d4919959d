"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpttool.cli import completing
from ckpttool.errors import UsageError

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A file, a TensorFlow prefix, or a folder.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only rows, findings and what was written.")]
Glob = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN", help="Only the tensors whose path matches: * in a segment, ** across them."
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Read the source as this layout (see ckpttool layouts); none: by layers alone.",
        autocompletion=completing.layouts,
    ),
]
Video = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Film episodes of the best checkpoint: a new .mp4 or .gif file."),
]
VideoEpisodes = Annotated[
    str, typer.Option(metavar="LIST", help="What to film: best, worst, median, or numbers from 0.")
]
Plot = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Draw returns or the learning curve: a new .png, .svg or .pdf file."),
]
Chart = Annotated[
    bool | None,
    typer.Option(
        "--chart/--no-chart",
        help="Draw in the terminal too. Default: where a person reads.",
        show_default=False,
    ),
]
Noise = Annotated[
    float | None,
    typer.Option(metavar="STD", help="Add Gaussian noise to actions: its deviation in half action ranges."),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What steps the environments: auto, gymnasium, mujoco, pendulum.batch, device.",
        autocompletion=completing.among("auto", "gymnasium", "mujoco", "pendulum.batch", "device"),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What the policy computes in: float32 or float64.",
        autocompletion=completing.among("float32", "float64"),
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME",
        help="zero_contact_forces: Ant and Humanoid policies from before simulators reported these. "
        "current_positions: policies that were shown where the body is.",
        autocompletion=completing.among("zero_contact_forces", "current_positions"),
    ),
]
WrapperOption = Annotated[
    list[str] | None,
    typer.Option(
        "--wrapper",
        metavar="NAME[:ARG=N,...]",
        help="Environment wrapper of the training, innermost first; may be repeated. Default: those that the "
        "agent's files name; none: without.",
        autocompletion=completing.among(
            "none", "TimeFeatureWrapper", "HistoryWrapper", "VecFrameStack", "RescaleAction"
        ),
    ),
]
Runs = Annotated[bool, typer.Option("--runs", help="Each PATH is one training run: intervals over the runs.")]
Last = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Score each run by its last N checkpoints together (--runs)."),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH", help="A run of another algorithm to compare with; may be repeated (--runs)."
    ),
]
Csv = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write one line per episode to a new CSV file.")
]
Tensorboard = Annotated[
    str | None, typer.Option(metavar="DIR", help="Write scalars at the training steps for TensorBoard.")
]
LikeArgs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="For --like: the factory's arguments, '{\"hidden\": 256}'."),
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="H,W,C",
        help="For --like: the shape of the model's input without its batch, once for each input. The "
        "model is called with it.",
    ),
]
LikePython = Annotated[
    str | None, typer.Option(metavar="INTERPRETER", help="For --like: the Python that has its framework.")
]

Env = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Gymnasium environment of the agent.",
        autocompletion=completing.environments,
    ),
]
ActivationOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Activation after the hidden layers: one, or one each (relu,tanh).",
        autocompletion=completing.among(
            "relu", "tanh", "sigmoid", "elu", "leaky_relu", "gelu", "silu", "softplus", "linear"
        ),
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Action map: tanh (times the upper bound), affine (tanh to the bounds), unit_tanh, linear, "
        "clip, clip_affine, ...",
        autocompletion=completing.among(
            "tanh", "affine", "unit_tanh", "linear", "clip", "clip_affine", "tanh_clip_affine"
        ),
    ),
]
BoundsOption = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="LOW HIGH", help="Action bounds: two numbers, or two lists with commas."),
]
ObsNormOption = Annotated[
    str | None,
    typer.Option(
        "--obs-norm",
        metavar="FILE",
        help="Observation statistics: vecnormalize.pkl, or a file with mean and var.",
    ),
]


def agent_facts(
    activation: str | None,
    head: str | None,
    bounds: tuple[str, str] | None,
    obs_norm: str | None,
    env: str | None = None,
) -> Any:
    """Return the facts that the options give of an agent."""
    if activation is None and head is None and bounds is None and obs_norm is None and env is None:
        from ckpttool.ops.agent_facts import NO_FACTS

        return NO_FACTS
    from ckpttool.ops.agent_facts import AgentFacts, bounds_of_text

    low, high = bounds_of_text(bounds)
    return AgentFacts(activation, head, low, high, obs_norm, env)


def importable(env: str | None) -> str | None:
    """Return the environment's id; let the module of `module:Env-v0` be found in the working directory."""
    module, colon, _ = (env or "").partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")):
        from ckpttool.agents.skeleton.factory import find_user_module  # not needed by most commands

        find_user_module(module)
    return env


def like_of(factory: str | None, arguments: str | None, shapes: list[str] | None, python: str | None) -> Any:
    """Return the model that --like and its options name, None without; raise UsageError for these alone."""
    if factory is None:
        if arguments or shapes or python:
            raise UsageError("--like-args, --input-shape and --python are for --like alone")
        return None
    from ckpttool.agents.skeleton.beside import like

    return like(factory, arguments, shapes or (), python)
