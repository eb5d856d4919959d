"""What the process that forks to list HDF5 files has imported: all that a listing imports (warm_hdf5.py)."""

import h5py  # type: ignore[import-untyped]  # noqa: F401

import ckpttool.formats.hdf5_child  # noqa: F401
