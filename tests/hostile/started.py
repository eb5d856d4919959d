"""What the process that forks has done already: what commands on files import, and the parser's making."""

import contextlib
import functools
import importlib
import pkgutil
import sys

import google_crc32c  # noqa: F401
import h5py  # type: ignore[import-untyped]  # noqa: F401
import numpy as np  # noqa: F401
import typer
import typer._click.decorators

import ckpttool.cli.app
import ckpttool.commands
import ckpttool.core
import ckpttool.encodings
import ckpttool.formats
import ckpttool.graphs
import ckpttool.mapping
from ckpttool.core import CkpttoolError, plugins
from ckpttool.evaluation import environments
from tests.hostile import readers, room, trial, watched  # noqa: F401  # what the programs import

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(ckpttool.cli.app.app)
ckpttool.cli.app.CommandEntry.parser = functools.cache(ckpttool.cli.app.CommandEntry.parser)  # type: ignore[method-assign]
for command in ckpttool.cli.app.COMMANDS:
    command.parser()
# What is installed is sought once for each sys.path, and that of a child is another (tests/warm.py).
before = list(sys.path)
sys.path[:0] = [str(watched.ROOT)]  # the command removes the working directory
for kind in ("formats", "layouts"):
    for plugin in plugins.installed(kind):  # type: ignore[arg-type]
        plugin.load()
sys.path[:] = before
# What a child would import or compile itself, each for itself.
for package in (
    ckpttool.encodings,
    ckpttool.formats,
    ckpttool.mapping,
    ckpttool.core,
    ckpttool.graphs,
    ckpttool.commands,
    ckpttool.cli,
):
    for results in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not results.name.endswith(("sb3_child", "remote_sites")):
            importlib.import_module(results.name)
# Gymnasium and the simulators' libraries, which are asked for near names.
with contextlib.suppress(CkpttoolError):
    environments.make_vector_env("Nothing-v0")
