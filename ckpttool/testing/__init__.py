"""Contracts of formats, layouts and backends, for the tests of plug-ins; needs pytest.

A subclass states what it tests and inherits the laws; pytest runs it like any test class. `build_tree`
builds trees for them:

    class TestCrate(WritingContract):
        module = crate

    class TestToylab(LayoutContract):
        name = "toylab"

        @pytest.fixture
        def tree(self):
            return build_tree({"brain/first.weight": kernel, ...})

    class TestEinsum(BackendContract):
        module = einsum
"""

from typing import TYPE_CHECKING

import pytest

from ckpttool import package_face

# In other packages pytest would report a law that is broken without the values that it compared.
pytest.register_assert_rewrite(
    "ckpttool.testing.backends", "ckpttool.testing.formats", "ckpttool.testing.layouts"
)

if TYPE_CHECKING:
    from ckpttool.testing.backends import BackendContract as BackendContract
    from ckpttool.testing.formats import (
        FormatContract as FormatContract,
        WritingContract as WritingContract,
        build_tree as build_tree,
    )
    from ckpttool.testing.layouts import LayoutContract as LayoutContract

package_face()
