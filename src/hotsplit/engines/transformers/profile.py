"""Profile: play sample traffic through a model and count what it asks of every expert.

    prompts -> generate -> route -> counters -> histogram (decode and prefill apart), and a trace of every token

Shapes: L MoE layers, B batch, S sequence, T = B*S tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotsplit.bank.banks import EngineBanks
from hotsplit.bank.route import StepRouting
from hotsplit.engines.transformers.traffic import Prompt
from hotsplit.errors import ConfigError
from hotsplit.plan.histogram import Histogram
from hotsplit.plan.identity import ModelIdentity
from hotsplit.plan.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """How sample traffic is played."""

    prompt_tokens: int = 128
    """Longest prompt, in tokens; text files are cut into pieces of this length."""
    decode_tokens: int = 64
    """Tokens decoded per prompt, fewer where the model ends by itself."""
    max_prompts: int | None = 32
    """Prompts per data file at most, spread over the file; None for all."""
    batch_size: int = 8
    """Prompts computed at once."""
    temperature: float = 0.8
    """Of sampling; 0 for greedy decoding, which tends to repeat itself and so to flatter the hit rate."""
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, least in (("prompt_tokens", 1), ("decode_tokens", 0), ("max_prompts", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')}", got=str(value), wanted=f"an integer >= {least}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError("--temperature", got=str(self.temperature), wanted="a finite number >= 0")


def play(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    options: ProfileOptions,
    on_progress: Callable[[int, int], None] | None = None,
    want_trace: bool = False,
) -> tuple[Histogram, Trace | None]:
    """Play prompts through a model from hotsplit.load().

    Args:
        model: With banks behind it.
        prompts: In any order; each is one request.
        options: How.
        on_progress: Told prompts done and in all.
        want_trace: Record every token's experts as well.

    Returns:
        The histogram of everything counted by the model so far, and the trace or None.
    """
    banks = model.hotsplit.banks
    router, on_gpu = banks.router, banks.device.type == "cuda"
    router.flush()  # what ran before is nothing that a trace should see
    recorder = _Recorder(prompts, num_layers=router.row_map.shape[0]) if want_trace else None
    generators = torch.random.fork_rng(devices=[banks.device.index] if on_gpu else [])
    with _observed(banks, recorder), generators, torch.no_grad():
        torch.manual_seed(options.seed)
        for first in range(0, len(prompts), options.batch_size):
            batch = prompts[first : first + options.batch_size]
            if recorder:
                recorder.begin(first, [len(prompt.token_ids) for prompt in batch])
            _play_batch(model, batch, options=options)
            router.flush()
            if on_progress:
                on_progress(first + len(batch), len(prompts))
    return model.hotsplit.histogram(), recorder.trace(model.hotsplit.sizes.identity) if recorder else None


def _play_batch(model: Any, batch: Sequence[Prompt], *, options: ProfileOptions) -> None:
    longest = max(len(prompt.token_ids) for prompt in batch)
    pad = _pad_id(model)
    rows = [[pad] * (longest - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in batch]
    mask = [[0] * (longest - len(prompt.token_ids)) + [1] * len(prompt.token_ids) for prompt in batch]
    sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    device = model.hotsplit.banks.device
    model.generate(
        torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
        # The prompt's own step yields the first token; each further one is a decode step.
        max_new_tokens=options.decode_tokens + 1,
        pad_token_id=pad,
        **(sampling if options.temperature > 0 else {"do_sample": False}),
    )


def _pad_id(model: Any) -> int:
    config = model.generation_config
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    return int(pad[0] if isinstance(pad, list) else pad or 0)


@contextmanager
def _observed(banks: EngineBanks, recorder: _Recorder | None) -> Iterator[None]:
    if recorder is None:
        yield
        return
    banks.observers.append(recorder)
    try:
        yield
    finally:
        banks.observers.remove(recorder)


class _Recorder:
    """Writes down what every real token was routed to."""

    def __init__(self, prompts: Sequence[Prompt], *, num_layers: int) -> None:
        self._domains = sorted({prompt.domain for prompt in prompts})
        self._domain_of = [self._domains.index(prompt.domain) for prompt in prompts]
        self._num_layers = num_layers
        self._columns: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in ("experts", "phase", "step", "request", "position", "domain")
        }
        self._first, self._next_position = 0, np.zeros(0, dtype=np.int64)

    def begin(self, first: int, lengths: Sequence[int]) -> None:
        """A batch follows: its first request's number, and its prompts' lengths."""
        self._first, self._next_position = first, np.zeros(len(lengths), dtype=np.int64)

    def __call__(self, seen: StepRouting) -> None:
        experts_TLK = np.zeros((len(seen.topk_ids[0]), self._num_layers, seen.topk_ids[0].shape[1]), dtype=np.int64)
        for layer_id, topk_ids in zip(seen.layer_ids, seen.topk_ids, strict=True):
            experts_TLK[:, layer_id] = topk_ids.numpy()
        batch = len(self._next_position)
        kept_BS = np.ones((batch, len(experts_TLK) // batch), dtype=bool)
        if seen.is_padding is not None:
            kept_BS = ~seen.is_padding.numpy().reshape(kept_BS.shape)
        position_BS = self._next_position[:, None] + np.cumsum(kept_BS, axis=1) - 1
        self._next_position = self._next_position + kept_BS.sum(axis=1)
        request_BS = np.broadcast_to(self._first + np.arange(batch)[:, None], kept_BS.shape)
        kept = kept_BS.ravel()
        num_kept = int(kept.sum())
        self._columns["experts"].append(experts_TLK[kept])
        self._columns["phase"].append(np.full(num_kept, seen.phase == "decode", dtype=np.uint8))
        self._columns["step"].append(np.full(num_kept, seen.step, dtype=np.uint32))
        self._columns["request"].append(request_BS.ravel()[kept])
        self._columns["position"].append(position_BS.ravel()[kept])
        self._columns["domain"].append(np.array(self._domain_of)[request_BS.ravel()[kept]])

    def trace(self, identity: ModelIdentity) -> Trace:
        """All that was written down."""
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        ids_dtype = np.uint8 if (identity.num_experts or 0) <= 256 else np.uint16
        return Trace(
            identity=identity,
            experts=columns["experts"].astype(ids_dtype),
            phase=columns["phase"],
            step=columns["step"],
            request=columns["request"].astype(np.uint32),
            position=columns["position"].astype(np.uint32),
            domain=columns["domain"].astype(np.uint16),
            domains=tuple(self._domains),
        )
