"""The guard is there wherever it can be built: its other tests skip without it, and this one does not."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from hotsplit.bank import guard_library


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="none for this")
def test_an_installation_with_a_compiler_has_the_guard():
    library = guard_library.load()
    assert library is not None
    assert library.begin() == library.breaks()
