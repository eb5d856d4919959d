"""What the process that forks has done already: what commands on files import, and the parser's making."""

import functools

import h5py  # type: ignore[import-untyped]  # noqa: F401
import numpy as np  # noqa: F401
import typer

import ckpttool.cli.app
import ckpttool.cli.inspection
import ckpttool.cli.tables
import ckpttool.ops.convert
import ckpttool.ops.digest
from ckpttool import plugins

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(ckpttool.cli.app.app)
for kind in ("formats", "layouts"):
    for plugin in plugins.BUILT_IN[kind]:  # type: ignore[index]
        plugin.load()
