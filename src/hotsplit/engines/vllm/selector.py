"""Which modules hold the routed experts of which decoder layers: one-to-one, or the start is refused.

Stands between the plan, which counts decoder layers, and the engine, which names modules. Paths differ by model
(`model.layers.3.mlp.experts.routed_experts`, `language_model.model.layers.3.mlp.experts.switch_glu`), so no path is
written down here: the first number in it is the decoder index, and what stands before that number is the stack.

    found        visual.blocks.0.moe            another stack, named and left alone
                 model.layers.3.mlp.experts     layer 3
                 model.layers.3.mlp.experts     a draft model's: layer 3 is taken, left alone
                 model.layers.61.mlp.experts    not in the plan (MTP), left alone

A layer that the configuration promises and that is not found would run stock without a word: that is an error.

    >>> decoder_index("language_model.model.layers.12.mlp.experts.routed_experts")
    12
    >>> match_layers(["model.layers.3.mlp.experts", "mtp.layers.0.mlp.experts"], expected=[3]).names
    {3: 'model.layers.3.mlp.experts'}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hotsplit.errors import UnsupportedEngineError

_OTHER_STACKS: Final = frozenset(
    {"audio", "draft", "drafter", "eagle", "image", "medusa", "mtp", "nextn", "speculator", "video", "vision", "visual"}
)
"""Words of a path component that no part of a language model's own decoder has."""
_USUAL: Final = "model.layers.{}.mlp.experts"
"""What a path looks like in most models: names near to it are shown where a layer is missing."""
_NUM_NEAREST: Final = 3


def decoder_index(module_path: str) -> int | None:
    """The decoder layer that a module belongs to: the first number in its path.

    Args:
        module_path: Names joined by dots; a parameter's path does as well.

    Returns:
        The index; None where no component is a number.
    """
    found = _split(module_path)
    return None if found is None else found[1]


def is_other_stack(module_path: str) -> bool:
    """Whether a path leads through something beside the language model's own layers: a tower, a draft model, MTP.

    Args:
        module_path: As in decoder_index().
    """
    return any(word in _OTHER_STACKS for word in re.split(r"[._]", module_path.lower()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMatch:
    """Which module serves which decoder layer, and which serve none."""

    expected: tuple[int, ...]
    """Decoder indices that must be served, [L]."""
    names: Mapping[int, str]
    """Decoder index -> module path, in the order of `expected`."""
    other: tuple[str, ...]
    """Modules of another stack, by their path."""
    taken: tuple[str, ...]
    """Modules of a layer that one before them serves: a draft model's."""
    beyond: tuple[str, ...]
    """Modules of layers that are not expected, or with no number in their path: MTP layers, other pipeline stages."""
    nearest: tuple[str, ...]
    """The names most like that of the first missing layer; empty where none is missing."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Decoder indices that no module serves."""
        return tuple(index for index in self.expected if index not in self.names)

    @property
    def left_alone(self) -> tuple[str, ...]:
        """Every module that serves no layer: they run stock."""
        return (*self.other, *self.taken, *self.beyond)

    def require_all(self) -> None:
        """Refuse to start where a layer would run stock.

        Raises:
            UnsupportedEngineError: No routed experts at all, or fewer than expected; says how many of how many, which
                layer is missing first, and the names nearest to it.
        """
        if not self.names and not self.left_alone:
            raise UnsupportedEngineError(
                "no routed experts",
                got="a model without any module of them",
                wanted=f"{len(self.expected)} MoE layers, as its configuration says" if self.expected else None,
                do="run this model without hotsplit",
            )
        if self.missing:
            raise UnsupportedEngineError(
                "MoE layers of the model",
                got=f"{len(self.names)}, without decoder layer {self.missing[0]}; nearest names: "
                f"{', '.join(self.nearest) or 'none'}",
                wanted=f"{len(self.expected)}, as its configuration says",
                do="report the model to hotsplit, and unset HOTSPLIT_* to run it without",
                num_found=len(self.names),
                num_expected=len(self.expected),
                missing=self.missing,
            )


def match_layers(found: Sequence[str], *, expected: Sequence[int], modules: Sequence[str] = ()) -> LayerMatch:
    """Give every decoder layer its module.

    All come from one stack: the one that serves most of the layers, of equals the one that was found first. So a stack
    with the same numbers cannot fill a hole of another.

    Args:
        found: Paths of modules that hold routed experts, in the order in which the engine made them.
        expected: Decoder indices of the MoE layers that this rank is to serve, [L].
        modules: All module paths of the model, for the names nearest to a missing one; none for `found`.

    Returns:
        The match, complete or not: require_all() refuses one that is not.
    """
    other = tuple(name for name in found if is_other_stack(name))
    numbered = [(name, split) for name in found if name not in other and (split := _split(name)) is not None]
    stack = _largest_stack([split for _, split in numbered], expected=expected)
    claims: dict[int, str] = {}
    taken: list[str] = []
    for name, (prefix, index) in numbered:
        if prefix == stack and index in expected:
            taken += [name] if index in claims else []
            claims.setdefault(index, name)
    names = {index: claims[index] for index in expected if index in claims}
    placed = {*names.values(), *other, *taken}
    missing = [index for index in expected if index not in names]
    return LayerMatch(
        expected=tuple(expected),
        names=names,
        other=other,
        taken=tuple(taken),
        beyond=tuple(name for name in found if name not in placed),
        nearest=_nearest(_USUAL.format(missing[0]), modules or found) if missing else (),
    )


def require_real(tensors: Mapping[str, tuple[int, str]]) -> None:
    """Refuse tensors that hold nothing: moved there, they would look done.

    Args:
        tensors: Path -> number of elements and device type ("cpu", "cuda", "meta") of the experts' tensors.

    Raises:
        UnsupportedEngineError: There are none, or one is empty or a placeholder; names it and says how many are.
    """
    if not tensors:
        raise UnsupportedEngineError(
            "routed experts are not offloaded", got="no tensor of them", do="unset HOTSPLIT_* to run without"
        )
    hollow = {name: what for name, what in tensors.items() if what[0] == 0 or what[1] == "meta"}
    for name, (numel, device_type) in hollow.items():
        raise UnsupportedEngineError(
            f"{name} is not offloaded",
            got=f"{numel} elements on {device_type}, as {len(hollow)} of {len(tensors)} of the experts' tensors are",
            wanted="weights that are there once the model is loaded",
            do="use vLLM's default load format, or unset HOTSPLIT_* to run without",
            hollow=tuple(hollow),
        )


def _split(module_path: str) -> tuple[str, int] | None:
    """What stands before the first number of a path, and the number."""
    parts = module_path.split(".")
    for place, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None


def _largest_stack(splits: Sequence[tuple[str, int]], *, expected: Sequence[int]) -> str | None:
    """The stack that serves most of the expected layers, of equals the first."""
    served: dict[str, set[int]] = {}
    for prefix, index in splits:
        served.setdefault(prefix, set()).update({index} & set(expected))
    return max(served, key=lambda prefix: len(served[prefix]), default=None)


def _nearest(wanted: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(wanted, dict.fromkeys(names), n=_NUM_NEAREST, cutoff=0.0))
