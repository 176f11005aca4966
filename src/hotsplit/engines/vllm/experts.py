"""The experts class that stands in for vLLM's RoutedExperts and for every subclass of it, present and later.

vLLM looks a replacement up by the class's own name, so each subclass needs one of its own: one that is missed would run
stock without a word. A layer differs from stock in four places only:

    __init__            R rows instead of E experts; its big tensors are views of ranges that exist already
    the loader's map    expert -> planned row, so that every weight is read straight into its place
    post-processing     the result goes back into the ranges, row by row
    forward_modular     topk_ids -> row ids

Where memory comes in two banks, the forward is two calls of the stock one (two_calls.py).
"""

from __future__ import annotations

from typing import Any

import torch

from hotsplit.engines.vllm import session as sessions
from hotsplit.engines.vllm.weights import LayerWeights
from hotsplit.errors import UnsupportedEngineError

_COVERED = "hotsplit_covers"


class HotsplitExperts:
    """What is put in front of vLLM's own experts class (a mixin: RoutedExperts comes behind it).

    Args:
        layer_name: Module path.
        params_dtype: Of the weights.
        moe_config: vLLM's, one per layer; its numbers of experts become numbers of rows.
        *args: For the class behind.
        **kwargs: For the class behind.
    """

    def __init__(self, layer_name: str, params_dtype: torch.dtype, moe_config: Any, *args: Any, **kwargs: Any) -> None:
        # nn.Module is not initialised yet, and super().__init__ needs these already.
        object.__setattr__(self, "hotsplit_weights", None)
        object.__setattr__(self, "hotsplit_layer_id", None)
        object.__setattr__(self, "hotsplit_calls", None)
        session = sessions.required()
        claim = session.claim(layer_name, moe_config=moe_config)
        if claim is None:
            super().__init__(layer_name, params_dtype, moe_config, *args, **kwargs)  # type: ignore[call-arg]
            return
        object.__setattr__(self, "hotsplit_weights", LayerWeights(self, claim=claim))
        object.__setattr__(self, "hotsplit_layer_id", claim.layer_id)
        if hasattr(moe_config, "require_decomposed_backend"):
            moe_config.require_decomposed_backend = True
        session.adopt(self)
        moe_config.num_experts += claim.num_extra
        moe_config.num_local_experts += claim.num_extra
        super().__init__(layer_name, params_dtype, moe_config, *args, **kwargs)  # type: ignore[call-arg]
        # update_expert_map_info() has set it back to E; get_expert_weights() views its tensors by it.
        self.local_num_experts = claim.num_rows

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        """The last point before create_weights: the method is this layer's own, so it can be wrapped here."""
        method = super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
        weights: LayerWeights | None = self.hotsplit_weights  # type: ignore[attr-defined]
        if weights is None:
            return method
        if method.is_monolithic:
            raise UnsupportedEngineError(
                f"{prefix}: {type(method).__name__}",
                got="a monolithic kernel, which routes and computes in one",
                wanted="a kernel that takes the router's choice",
                do="choose another one with vLLM's --moe-backend (triton, cutlass or marlin, as the format allows)",
            )
        return weights.wrap(method)

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        weights: LayerWeights | None = self.hotsplit_weights  # type: ignore[attr-defined]
        if weights is None:
            return int(super()._map_global_expert_id_to_local_expert_id(expert_id))  # type: ignore[misc]
        return weights.row_to_load(expert_id)

    def forward_modular(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The stock forward, over rows.

        Args:
            x: Tokens, [T, D].
            topk_weights: Router weights, [T, K].
            topk_ids: Expert ids, [T, K].
            *args: Shared experts and their input.
            **kwargs: The same by name.
        """
        if self.hotsplit_layer_id is not None:  # type: ignore[attr-defined]
            topk_ids = torch.ops.hotsplit.route(topk_ids, self.layer_name)  # type: ignore[attr-defined]
        if self.hotsplit_calls is not None:  # type: ignore[attr-defined]
            return self.hotsplit_calls(x, topk_weights, topk_ids, *args, **kwargs)  # type: ignore[attr-defined]
        return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)  # type: ignore[misc]

    def forward_rows(
        self, x: torch.Tensor, topk_weights: torch.Tensor, row_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The same where the rows are known already: for the self-test, and for each bank of a layer in two.

        Args:
            x: Tokens, [T, D].
            topk_weights: Router weights, [T, K].
            row_ids: Row ids, [T, K].
            *args: Shared experts and their input.
            **kwargs: The same by name.
        """
        forward = self.hotsplit_calls or super().forward_modular  # type: ignore[attr-defined, misc]
        output: torch.Tensor = forward(x, topk_weights, row_ids, *args, **kwargs)
        return output


def cover_all(root: Any, *, register_oot: Any) -> None:
    """Replace a class and every subclass of it, also those that are defined later.

    Args:
        root: vLLM's RoutedExperts.
        register_oot: PluggableLayer.register_oot.

    Raises:
        UnsupportedEngineError: Something else stands in for one of them, now or, for a later one, when it is defined.
    """
    if _COVERED in vars(root):
        return
    setattr(root, _COVERED, True)
    own: Any = vars(root).get("__init_subclass__")

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        if own is None:
            super(root, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        _cover(cls, register_oot=register_oot)

    root.__init_subclass__ = classmethod(init_subclass)
    for cls in dict.fromkeys([root, *_subclasses(root)]):
        _cover(cls, register_oot=register_oot)


def _cover(cls: Any, *, register_oot: Any) -> None:
    if issubclass(cls, HotsplitExperts):
        return
    try:
        register_oot(name=cls.__name__)(type(f"Hotsplit{cls.__name__}", (HotsplitExperts, cls), {}))
    except AssertionError as error:
        raise UnsupportedEngineError(
            f"vLLM's class {cls.__module__}.{cls.__name__}",
            got=f"another class in its place ({error})",
            wanted="vLLM's own, which hotsplit puts its class in front of",
            do="uninstall the other plugin, or unset the HOTSPLIT_ variables",
        ) from error


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return [found for child in children for found in (child, *_subclasses(child))]
