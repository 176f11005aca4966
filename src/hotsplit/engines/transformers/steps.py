"""What happens around every step: tick, phase, padding, and one thread at a time.

An engine step is one forward of the base model. Around each one the banks are ticked and told what kind of step
follows; a step that breaks off is forgotten, so that counts stay those of whole steps. Inside generate() it is known
which token ends a sequence, and whether steps are speculative.

Shapes: B batch, S sequence, T = B*S tokens.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotsplit.bank.banks import Banks, EngineBanks
from hotsplit.bank.route import Phase

logger = logging.getLogger(__name__)


class _Generation(threading.local):
    """The generate() call that this thread is in."""

    end_ids: torch.Tensor | None = None
    """Tokens that end a sequence; None outside generate(): what a caller feeds by hand is asked for."""
    is_speculative: bool = False
    """Whether a step may verify several drafted tokens."""
    has_ended: torch.Tensor | None = None
    """Sequences of the batch that have ended, [B, 1], bool."""
    num_steps: int = 0
    """Steps so far."""


class Steps:
    """The steps of one model.

    Args:
        banks: Ticked and told what kind of step follows.
    """

    def __init__(self, banks: EngineBanks) -> None:
        self._banks = banks
        # A publish between two steps of one thread would fall into the middle of another thread's step.
        self._lock = threading.RLock()
        self._generation = _Generation()
        self._has_warned = False
        self._grow = _growth(banks)

    @property
    def is_on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return self._banks.device.type == "cuda"

    @contextmanager
    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around one forward of the base model; other threads wait.

        Args:
            args: Its positional arguments; input_ids may be the first.
            kwargs: Its keyword arguments.
        """
        with self._lock:
            self._banks.tick()
            phase, is_padding = self._read(args, kwargs)
            self._grow(_cache(kwargs))
            with self._banks.step(phase=phase, is_padding=is_padding):
                yield
            self._generation.num_steps += 1

    @contextmanager
    def generation(self, *, end_ids: frozenset[int], is_speculative: bool) -> Iterator[None]:
        """Around one generate().

        Args:
            end_ids: Tokens that end a sequence.
            is_speculative: Whether drafted tokens are verified several at a time.
        """
        now = self._generation
        before = now.end_ids, now.is_speculative, now.has_ended, now.num_steps
        now.end_ids, now.is_speculative = torch.tensor(sorted(end_ids), dtype=torch.int64, device="cpu"), is_speculative
        now.has_ended, now.num_steps = None, 0
        try:
            yield
        finally:
            now.end_ids, now.is_speculative, now.has_ended, now.num_steps = before

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Phase, torch.Tensor | None]:
        """Phase of the step, and the tokens that nobody asked for, [T], bool, or None."""
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            return "prefill", None
        num_new, has_past = int(tokens.shape[1]), self._has_past(kwargs)
        is_decode = num_new == 1 or (has_past and self._generation.is_speculative)
        is_padding = self._masked(kwargs.get("attention_mask", args[1] if len(args) > 1 else None), num_new=num_new)
        if is_padding is not None:  # transformers moves a mask itself, and takes one that lies on the CPU
            is_padding = None if _is_empty(is_padding) else is_padding.to(self._banks.device)
        if not has_past:
            self._generation.has_ended = None
        elif num_new == 1 and input_ids is not None and (ended := self._ended(input_ids)) is not None:
            is_padding = ended if is_padding is None else is_padding | ended
        phase: Phase = "decode" if is_decode else "prefill"
        # On a GPU a mask without padding is handed on as well: whether there is any only the device knows.
        if is_padding is None or _is_empty(is_padding):
            return phase, None
        return phase, is_padding.reshape(-1)

    def _has_past(self, kwargs: dict[str, Any]) -> bool:
        """Whether a cache holds tokens already."""
        length = getattr(_cache(kwargs), "get_seq_length", None)
        held = 0 if length is None else length()
        if isinstance(held, torch.Tensor) and held.device.type != "cpu":
            # A static cache counts on its device, which is not waited for: generate() fills it from its first step on.
            return self._generation.end_ids is None or self._generation.num_steps > 0
        return int(held) > 0

    def _masked(self, mask: Any, *, num_new: int) -> torch.Tensor | None:
        """New tokens that the attention mask hides, [B, S], bool."""
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= num_new:
            return mask[:, mask.shape[1] - num_new :] == 0
        if mask is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("the attention mask is not two-dimensional: padding tokens, if any, count as traffic")
        return None

    def _ended(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Sequences of a batch that have ended, [B, 1], bool: generate() goes on with them until the last one ends.

        From the token that ends it on, nobody asks for what follows; what generate() feeds afterwards is padding.
        """
        now = self._generation
        if input_ids.shape[0] == 1 or now.end_ids is None or not now.end_ids.numel():
            return None
        if now.end_ids.device != input_ids.device:
            now.end_ids = now.end_ids.to(input_ids.device)
        ended = torch.isin(input_ids, now.end_ids)
        if now.has_ended is not None and now.has_ended.shape == ended.shape:
            ended = ended | now.has_ended
        now.has_ended = ended
        return ended


def _growth(banks: EngineBanks) -> Callable[[Any], None]:
    """What a step does with its cache: of the fast kernel it grows in place."""
    if not isinstance(banks, Banks) or banks.kernel != "fast":
        return lambda _: None
    from hotsplit.engines.transformers.growing_cache import grow_in_place  # it needs transformers

    return grow_in_place


def _cache(kwargs: dict[str, Any]) -> Any:
    """The cache of a step."""
    # transformers 5.24 renames the argument.
    return kwargs.get("cache", kwargs.get("past_key_values"))


def _is_empty(is_padding: torch.Tensor) -> bool:
    """Whether a mask is known to mark nothing."""
    return is_padding.device.type == "cpu" and not bool(is_padding.any())


def drive(model: Any, *, steps: Steps) -> None:
    """Put the steps around the model's forward and generate.

    Args:
        model: The loaded model.
        steps: Its steps.
    """

    def forward(_owner: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with steps.step(args, kwargs):
            return call(*args, **kwargs)

    def generate(owner: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        ends = _setting("eos_token_id", kwargs, config, owner.generation_config)
        lookup = _setting("prompt_lookup_num_tokens", kwargs, config, owner.generation_config)
        is_speculative = lookup is not None or kwargs.get("assistant_model") is not None
        if steps.is_on_gpu:
            kwargs.setdefault("disable_compile", True)  # transformers compiles the forward where a cache is static
        with steps.generation(end_ids=_as_ids(ends), is_speculative=is_speculative):
            return call(*args, **kwargs)

    _around(model.base_model, "forward", forward)
    if callable(getattr(model, "generate", None)):
        _around(model, "generate", generate)


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace one method of one object; a weak reference, so that the model goes when its last user does."""
    bound, own = getattr(owner, name), weakref.ref(owner)
    unbound = getattr(type(owner), name)

    @functools.wraps(unbound)
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = own()
        return around(alive, functools.partial(unbound, alive), args, kwargs)

    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _setting(name: str, kwargs: dict[str, Any], config: Any, default: Any) -> Any:
    """A generation setting as generate() finds it: its argument, the given config's, the model's own."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(config, name, None)
    return getattr(default, name, None) if value is None else value


def _as_ids(ends: Any) -> frozenset[int]:
    if ends is None:
        return frozenset()
    if isinstance(ends, torch.Tensor):
        ends = ends.reshape(-1).tolist()
    return frozenset([ends] if isinstance(ends, int) else ends)
