"""What happens around every step of a transformers model, and in every experts module.

An engine step is one forward of the base model: a hook before it ticks the banks and reads phase and padding off the
arguments. The experts modules call the function that is registered under the name "hotsplit".

Shapes: B batch, S sequence, T = B*S tokens, K top-k, D model dim.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hotsplit.bank.banks import Banks
from hotsplit.bank.route import Phase
from hotsplit.errors import EngineError

logger = logging.getLogger(__name__)

NAME = "hotsplit"
"""Of our experts implementation."""

_ATTRIBUTE = "_hotsplit"


def register() -> None:
    """Make the experts implementation known to transformers; again is harmless."""
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, experts_forward)


def attach(module: Any, *, banks: Banks, layer_id: int) -> None:
    """Tie an experts module to its layer of the banks.

    Args:
        module: The experts module.
        banks: All layers' rows.
        layer_id: Its ordinal.
    """
    setattr(module, _ATTRIBUTE, (banks, layer_id))


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts of one layer (what transformers calls an experts implementation).

    Args:
        module: The experts module.
        hidden_states: Tokens, [T, D].
        top_k_index: Expert ids, [T, K], int64.
        top_k_weights: Router weights, [T, K].

    Raises:
        EngineError: The module has no banks, gradients are wanted, or the model was moved.
    """
    attached = getattr(module, _ATTRIBUTE, None)
    if attached is None:
        raise EngineError(
            f"{type(module).__name__}", got="no hotsplit banks", do="load the model with hotsplit.load(...)"
        )
    if hidden_states.requires_grad and torch.is_grad_enabled():
        raise EngineError("hotsplit models only infer", got="a forward that wants gradients", do="use torch.no_grad()")
    if hidden_states.device.type != "cpu":
        raise EngineError(
            "hotsplit's rows lie on the CPU", got=f"tokens on {hidden_states.device}", do="do not move it"
        )
    banks, layer_id = attached
    output: torch.Tensor = banks.forward(layer_id, hidden_states, topk_ids=top_k_index, topk_weights=top_k_weights)
    return output


class StepHook:
    """Runs before every forward of the base model.

    Args:
        banks: Ticked and told what kind of step follows.
        end_ids: Token ids that end a sequence.
    """

    def __init__(self, banks: Banks, *, end_ids: frozenset[int]) -> None:
        self._banks = banks
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self._has_ended: torch.Tensor | None = None
        self._has_warned = False

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tick, then begin the step.

        Args:
            module: The base model.
            args: Its positional arguments; input_ids may be the first.
            kwargs: Its keyword arguments.
        """
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        self._banks.tick()
        if tokens is None:
            self._banks.begin_step(phase="prefill", is_padding=None)
            return
        num_new = int(tokens.shape[1])
        phase: Phase = "decode" if num_new == 1 else "prefill"
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self._banks.begin_step(phase=phase, is_padding=self._padding(tokens, input_ids=input_ids, mask=mask))

    def _padding(
        self, tokens: torch.Tensor, *, input_ids: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Tokens that nobody asked for, [T], bool; None where there are none."""
        num_new = tokens.shape[1]
        is_padding = None
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= num_new:
            is_padding = mask[:, mask.shape[1] - num_new :] == 0
        elif mask is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("the attention mask is not two-dimensional: padding tokens, if any, count as traffic")
        ended = self._ended(input_ids) if num_new == 1 and input_ids is not None else None
        if ended is None:
            self._has_ended = None
        else:
            is_padding = ended if is_padding is None else is_padding | ended
        if is_padding is None or not bool(is_padding.any()):
            return None
        return is_padding.reshape(-1)

    def _ended(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """Sequences of a batch that have ended, [B, 1], bool: generate() goes on with them until the last one ends.

        From the token that ends it on, nobody asks for what follows; what generate() feeds afterwards is padding.
        """
        if input_ids.shape[0] == 1 or not self._end_ids.numel():
            return None
        ended = torch.isin(input_ids, self._end_ids)
        if self._has_ended is not None and self._has_ended.shape == ended.shape:
            ended = ended | self._has_ended
        self._has_ended = ended
        return ended


def end_ids(model: Any) -> frozenset[int]:
    """Token ids that end a sequence.

    Args:
        model: The loaded model; what is passed to generate() itself is not known here.
    """
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
