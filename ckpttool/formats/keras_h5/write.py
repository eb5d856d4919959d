"""Writes a `.weights.h5` file that Keras 3 loads, through h5py, the same bytes for the same tree.

Source: keras/src/saving/saving_lib.py, H5IOStore: a group `vars` with an attribute `name` for every object,
numbered datasets in it, bfloat16 as two opaque bytes with an attribute `dtype`. Groups keep the order of
their creation, no object keeps a time.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.formats.hdf5 import Dataset, Group, Index
from ckpttool.formats.keras_h5.place import Placed, placed
from ckpttool.formats.keras_tree.optimizers import SLOTS
from ckpttool.formats.probe import Piece
from ckpttool.leaf import display
from ckpttool.tree import Tree

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

VARS = "vars"
_ATTRIBUTE = 64512


def pieces(tree: Tree, *, root: str | None = None) -> tuple[Piece, ...]:
    """Return the one file; raise UnsupportedError for a leaf that has no place in it."""
    places = placed(tree, root)
    for path, leaf in tree.tensors():
        row = dtypes.BY_NAME[leaf.dtype]
        if (row.extension and row.name != "bfloat16") or not row.itemsize or row.name.startswith("q"):
            raise UnsupportedError(f"Keras keeps no {leaf.dtype} in a .weights.h5 file", path=display(path))
    groups = _groups(places)
    return (Piece("", lambda stream: _write(stream, places, groups)),)


def stored(tree: Tree, *, root: str | None = None) -> Tree:
    """Return the tree as it will be read from the file: with the paths and keys that it gets there."""
    from ckpttool.formats.keras_tree import model

    places = placed(tree, root)
    datasets = {
        path: Dataset(path, number, leaf.dtype, leaf.shape, leaf.source)
        for number, (path, leaf) in enumerate(places.datasets.items())
    }
    groups = {
        path: Group(path, number, True, attributes)
        for number, (path, attributes) in enumerate(_groups(places).items())
    }
    return model(Index(groups, datasets, {}, ())).tree


def _groups(places: Placed) -> dict[str, dict[str, Any]]:
    """Return every group with its attributes, each after the one that holds it."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for group, name in places.groups.items():
        _add(found, f"{group}/{VARS}".lstrip("/"))
        if name is not None:
            found[f"{group}/{VARS}".lstrip("/")]["name"] = name
    for path in places.datasets:
        _add(found, path.rpartition("/")[0])
    for group, slots in places.slots.items():
        found[f"{group}/{VARS}"] |= _pieces(slots)
    both = found.keys() & places.datasets.keys()
    if both:
        raise UnsupportedError("a tensor and a group would have the same name", path=min(both))
    return found


def _add(found: dict[str, dict[str, Any]], path: str) -> None:
    parts = path.split("/") if path else []
    for depth in range(1, len(parts) + 1):
        found.setdefault("/".join(parts[:depth]), {})


def _pieces(names: list[str]) -> dict[str, list[str]]:
    """Return a list as attributes of at most _ATTRIBUTE bytes each, numbered as Keras numbers them.

    Source: keras/src/legacy/saving/legacy_h5_format.py, save_attributes_to_hdf5_group.
    """
    width = max(len(name.encode()) for name in names)
    step = max(1, _ATTRIBUTE // max(1, width))
    if len(names) <= step:
        return {SLOTS: names}
    starts = range(0, len(names), step)
    return {f"{SLOTS}{number}": names[at : at + step] for number, at in enumerate(starts)}


def _write(stream: IO[bytes], places: Placed, groups: dict[str, dict[str, Any]]) -> None:
    if stream.readable():
        _fill(stream, places, groups)
        return
    # The library reads back what it has written, which a stream for writing does not allow.
    with open(stream.name, "r+b") as both:
        _fill(both, places, groups)


def _fill(stream: IO[bytes], places: Placed, groups: dict[str, dict[str, Any]]) -> None:
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, stream)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    created = h5py.h5f.create(b"weights", h5py.h5f.ACC_TRUNC, _ordered(h5py, h5py.h5p.FILE_CREATE), access)
    with h5py.File(created) as file:
        made: dict[str, h5py.Group] = {"": file["/"]}
        for path, attributes in groups.items():
            group = _made(h5py, made, path)
            for name, value in attributes.items():
                # Texts of one width, as Keras writes lists of names.
                group.attrs[name] = [each.encode() for each in value] if isinstance(value, list) else value
        for path, leaf in places.datasets.items():
            parent, _, last = path.rpartition("/")
            array = leaf.array()
            dataset = made[parent].create_dataset(last, data=array, track_times=False)
            if leaf.dtype == "bfloat16":
                dataset.attrs["dtype"] = leaf.dtype


def _made(h5py: Any, made: dict[str, h5py.Group], path: str) -> Any:
    """Return the group, made if it is not there; the one that holds it is there or is made first."""
    missing = []
    while path not in made:
        path, _, last = path.rpartition("/")
        missing.append(last)
    for last in reversed(missing):
        gcpl = _ordered(h5py, h5py.h5p.GROUP_CREATE)
        group = h5py.Group(h5py.h5g.create(made[path].id, last.encode(), gcpl=gcpl))
        path = f"{path}/{last}" if path else last
        made[path] = group
    return made[path]


def _ordered(h5py: Any, kind: Any) -> Any:
    """Return the creation properties of a group that keeps the order of its members and no times."""
    found = h5py.h5p.create(kind)
    found.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    found.set_obj_track_times(False)
    return found
