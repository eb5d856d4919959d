"""Collect the wheels that a machine with PyTorch lacks: `python -m benchmarks.gpu.bundle DIR`.

`make gpu` in a checkout installs from such a folder without a network: `--install` checks every wheel against
the manifest, leaves out whatever the machine's Python has in a version that serves, and never replaces NumPy
or PyTorch. It needs the standard library and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = "manifest.json"
MOST_BYTES = 60 << 20
# Taken from the machine or not at all.
NEVER_REPLACED = ("numpy", "torch")
OPTIONAL = {
    "gymnasium": "environments to compare with",
    "pytest": "the CUDA tests",
    "hypothesis": "the CUDA tests",
}
MUJOCO = {"mujoco": "MuJoCo's environments", "imageio": "which Gymnasium imports for MuJoCo"}
LEFT_OUT = {
    "torch": "the machine's own, built for its driver",
    "tensorflow": "hundreds of MB; its checks are left out where it is absent",
    "jax": "hundreds of MB; used where present",
    "onnxruntime": "a CPU backend; used where present",
    "mujoco": "above 60 MB with what it needs; --mujoco adds it",
}


class BundleError(Exception):
    """The bundle cannot be made or installed; the text is one sentence."""


@dataclass(frozen=True)
class Wheel:
    """One file of the bundle."""

    file: str
    name: str
    version: str
    nbytes: int
    sha256: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Make or install a bundle; return the exit status."""
    options = _parsed(arguments)
    try:
        if options.install:
            return _install(Path(options.folder), Path(options.install))
        _make(Path(options.folder), options.python, options.platform, mujoco=options.mujoco)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.bundle", description=__doc__)
    parser.add_argument("folder", help="the bundle, e.g. gpu_bundle")
    parser.add_argument("--python", default=here, metavar="X.Y", help=f"target's Python version ({here})")
    parser.add_argument(
        "--platform",
        default=f"manylinux_2_28_{platform.machine()}",
        help="newest wheel platform that the target runs; older manylinux ones are included",
    )
    parser.add_argument("--mujoco", action="store_true", help="add MuJoCo")
    parser.add_argument("--install", metavar="TARGET", help="install from the bundle into the folder TARGET")
    return parser.parse_args(arguments)


def _make(folder: Path, python: str, newest: str, *, mujoco: bool) -> None:
    """Download and build all wheels into a folder, which then holds nothing else."""
    _check_replaceable(folder)
    fresh = folder.with_name(folder.name + ".part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = OPTIONAL | (MUJOCO if mujoco else {})
    tags = [flag for tag in platforms(newest) for flag in ("--platform", tag)]
    try:
        _pip(
            "download",
            *("--dest", str(fresh), "--only-binary", ":all:", "--implementation", "cp"),
            *("--python-version", python, *tags, "--constraint", str(ROOT / "constraints.txt")),
            *project["dependencies"],
            *optional,
        )
        # The same environment builds it if it can: there may be no network for hatchling alone.
        alone = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
        _pip("wheel", "--no-deps", *alone, "--wheel-dir", str(fresh), str(ROOT))
        wheels = [_wheel(file) for file in sorted(fresh.glob("*.whl"))]
        total = sum(wheel.nbytes for wheel in wheels)
        if total > MOST_BYTES and not mujoco:
            raise BundleError(f"the wheels take {total:,} bytes, more than {MOST_BYTES:,}")
        left_out = {name: why for name, why in LEFT_OUT.items() if not mujoco or name != "mujoco"}
        manifest = {
            "python": python,
            "platform": newest,
            "bytes": total,
            "optional": optional,
            "left_out": left_out,
            "wheels": [asdict(wheel) for wheel in wheels],
        }
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        (fresh / "README.txt").write_text(_readme(manifest, folder.name), "utf-8")
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    print(f"{folder}: {len(wheels)} wheels, {total / 1e6:.1f} MB, for Python {python} on {newest}")
    for name, why in left_out.items():
        print(f"  left out: {name} ({why})")


def _check_replaceable(folder: Path) -> None:
    """Raise BundleError if the folder holds anything but an older bundle."""
    if (
        folder.exists()
        and not (folder / MANIFEST).is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise BundleError(f"{folder} exists and is no bundle")


def platforms(newest: str) -> list[str]:
    """Return the platform tags that a machine of the newest one runs: pip compares them exactly."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if match is None:
        return [newest]
    older = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    tags = []
    for minor in range(int(match[1]), 4, -1):
        tags.append(f"manylinux_2_{minor}_{match[2]}")
        tags += [f"{older[minor]}_{match[2]}"] if minor in older else []
    return [*tags, f"linux_{match[2]}"]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            done.stderr.strip()
        ]
        raise BundleError(f"pip {arguments[0]} failed: {lines[-1]}")


def _wheel(file: Path) -> Wheel:
    name, version = file.name.split("-")[:2]
    content = file.read_bytes()
    return Wheel(file.name, _normal(name), version, len(content), hashlib.sha256(content).hexdigest())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _readme(manifest: dict[str, Any], name: str) -> str:
    wheels = "\n".join(
        f"  {wheel['name']} {wheel['version']}  {wheel['nbytes']:,}" for wheel in manifest["wheels"]
    )
    left_out = "\n".join(f"  {name}: {why}" for name, why in manifest["left_out"].items())
    return f"""Wheels for `make gpu` on a machine without a network.

Python {manifest["python"]}, {manifest["platform"]}, {manifest["bytes"]:,} bytes.

Copy the checkout of ckpttool to the machine, with this folder in it as {name}, and run there:

    make gpu

Without make: python3 -m benchmarks.gpu.bundle {name} --install build/gpu_site
              PYTHONPATH=.:build/gpu_site python3 -m benchmarks.gpu

What the machine's Python has in a version that serves is used from there. NumPy and PyTorch are never
replaced. ckpttool, its tests and its checkpoints come from the checkout; its wheel is for use without one.

Wheels (bytes):
{wheels}

Left out:
{left_out}
"""


def _install(folder: Path, target: Path) -> int:
    """Install what the machine's Python lacks into a folder for PYTHONPATH; replace what was there."""
    # An earlier installation is replaced: it does not count as the machine's own.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != target.resolve()]
    manifest = _read_manifest(folder)
    _check_machine(manifest)
    wheels = {wheel["name"]: Wheel(**wheel) for wheel in manifest["wheels"]}
    chosen, lacking = choose(folder, wheels, _roots(manifest))
    for wheel in chosen:
        _check_content(folder, wheel)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if chosen:
        files = [str(folder / wheel.file) for wheel in chosen]
        _pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(target), *files)
    names = ", ".join(wheel.name for wheel in chosen) or "nothing: the machine has everything"
    print(f"installed from {folder}: {names}")
    for requirement, problem in lacking.items():
        print(f"  {requirement}: {problem}")
    return 0


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        for wheel in manifest["wheels"]:
            if Path(wheel["file"]).name != wheel["file"]:
                raise ValueError(wheel["file"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{folder} is no bundle ({type(error).__name__})") from None
    return manifest


def _check_machine(manifest: dict[str, Any]) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != here:
        raise BundleError(
            f"the bundle is for Python {manifest['python']}, this is {here} (make one with --python {here})"
        )
    if not manifest["platform"].endswith(platform.machine()):
        raise BundleError(f"the bundle is for {manifest['platform']}, this machine is {platform.machine()}")


def _check_content(folder: Path, wheel: Wheel) -> None:
    try:
        content = (folder / wheel.file).read_bytes()
    except OSError:
        raise BundleError(f"{wheel.file} is missing in the bundle") from None
    if hashlib.sha256(content).hexdigest() != wheel.sha256:
        raise BundleError(f"{wheel.file} is not the file that the manifest lists")


def _roots(manifest: dict[str, Any]) -> list[str]:
    """Return the requirements to satisfy: ckpttool's own by the checkout, then the optional packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *manifest["optional"]]


def choose(
    folder: Path, wheels: dict[str, Wheel], roots: Iterable[str]
) -> tuple[list[Wheel], dict[str, str]]:
    """Return the wheels to install, and the requirements that neither machine nor bundle satisfies."""
    requirement_of = _requirement_class()
    chosen: dict[str, Wheel] = {}
    lacking: dict[str, str] = {}
    pending = list(roots)
    while pending:
        requirement = requirement_of(pending.pop(0))
        name = _normal(requirement.name)
        if name in chosen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        installed = _installed(name)
        if installed is not None and requirement.specifier.contains(installed, prereleases=True):
            continue
        wheel = wheels.get(name)
        if installed is not None and name in NEVER_REPLACED:
            lacking[str(requirement)] = f"this machine has {installed}, which is never replaced"
        elif wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            lacking[str(requirement)] = "not in the bundle"
        else:
            chosen[name] = wheel
            pending += _requirements(folder / wheel.file)
    return list(chosen.values()), lacking


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(file: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            text = archive.read(member).decode("utf-8")
    except (OSError, zipfile.BadZipFile, StopIteration):
        raise BundleError(f"{file.name} is no wheel") from None
    yield from HeaderParser().parsestr(text).get_all("Requires-Dist") or []


def _requirement_class() -> Any:
    """Return packaging's Requirement: an installed one, or pip's own."""
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return importlib.import_module(module).Requirement
        except ImportError:
            continue
    raise BundleError("neither packaging nor pip is installed for this Python")


if __name__ == "__main__":
    sys.exit(main())
