"""What the process that forks has done already: what commands on files import, and the parser's making."""

import contextlib
import functools
import gc
import importlib
import pkgutil

import h5py  # type: ignore[import-untyped]  # noqa: F401
import numpy as np  # noqa: F401
import typer

import ckpttool.cli.app
import ckpttool.cli.inspection
import ckpttool.cli.tables
import ckpttool.formats
import ckpttool.mapping
import ckpttool.ops.convert
import ckpttool.ops.digest
import ckpttool.wire
import ckpttool.writing
from ckpttool import plugins
from ckpttool.agents import envs
from ckpttool.errors import CkpttoolError

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(ckpttool.cli.app.app)
for kind in ("formats", "layouts"):
    for plugin in plugins.BUILT_IN[kind]:  # type: ignore[index]
        plugin.load()
# What a child would import or compile itself, each for itself.
for package in (ckpttool.wire, ckpttool.formats, ckpttool.mapping, ckpttool.writing, ckpttool.cli):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith(".child"):
            importlib.import_module(found.name)
# Gymnasium and the simulators' libraries, which are asked for near names.
with contextlib.suppress(CkpttoolError):
    envs.make("Nothing-v0")
# A collection in a child would copy every page of what is here.
gc.freeze()
