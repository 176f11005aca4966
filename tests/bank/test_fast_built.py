"""The native code is there wherever it can be built: the tests of the fast kernel skip without it, and this one does not."""

from __future__ import annotations

import shutil

import pytest

from hotsplit.bank.kernels import fast_library


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_an_installation_with_a_compiler_has_the_native_code():
    library = fast_library.load()
    assert library is not None
    assert "portable" in library.paths
