"""A recipe of the bundled model, to be changed key by key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import recipe_files


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    """write_recipe(("old", "new"), ..., config={...}) -> path of the recipe with these texts and fields changed."""
    return partial(recipe_files.write_recipe, tmp_path)
