"""What is known of a model on a machine, as data: flags, layout, known-bad flags, results, counts, facts for `fit`.

A recipe is one TOML file; `data/` holds those that ship, and a user's own is read by its path. Between plan and the
command line: nothing here starts or prints anything, and the one planner plans for all.

    >>> from hotsplit import recipes
    >>> recipes.load("mimo-v2.6-pro").facts.experts
    384
"""

from __future__ import annotations

from hotsplit.recipes.shelf import load, names

__all__ = ["load", "names"]
