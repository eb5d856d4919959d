"""Contracts of formats, layouts and backends, for the tests of plug-ins; needs pytest.

A subclass states what it tests and inherits the laws; pytest runs it like any test class:

    class TestCrate(WritingContract):
        module = crate

        def make(self, folder):
            return self.put(tree, folder / "toy.crate")
"""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.testing.backends import BackendContract as BackendContract
    from ckpttool.testing.formats import FormatContract as FormatContract, WritingContract as WritingContract
    from ckpttool.testing.layouts import LayoutContract as LayoutContract

package_face()
