"""The browser of the tests of the page: one process for all of them, or a skip that says what is missing."""

from __future__ import annotations

import pytest

from report.browser import Browser, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = chromium()
    if program is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(program, profile=tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
