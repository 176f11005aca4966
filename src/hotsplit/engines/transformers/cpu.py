"""This machine's CPU: what load() decides and builds there; gpu.py has the same for a GPU.

Hot rows lie in an arena of private memory, cold ones stay in the checkpoint's own mapped files.

Shapes: D model dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from hotsplit.bank.banks import Banks
from hotsplit.bank.kernels import fast_library
from hotsplit.bank.kernels.exact import ExpertMath, Tensors
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.fast_attention import use_native_attention
from hotsplit.engines.transformers.fast_dense import FastDense, use_native_linears
from hotsplit.engines.transformers.fast_forms import Proof, Stored, native_experts, prove_native, with_native
from hotsplit.engines.transformers.fast_norms import FastNorms, use_native_norms
from hotsplit.engines.transformers.fast_routers import FastRouters, use_native_routers
from hotsplit.engines.transformers.index import CheckpointSource, ExpertsLayer
from hotsplit.engines.transformers.mathematics import Precision, expert_math, preparer, prove
from hotsplit.errors import ConfigError, UnsupportedEngineError
from hotsplit.host.budget import default_hot_bytes
from hotsplit.notices import Notice, enforce
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import gib

logger = logging.getLogger(__name__)


def idle_on_cpu(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on there.

    Args:
        config: Settings.
    """
    idle = {
        "numa_policy": "on a CPU rows lie in plain memory and mapped files",
        "bank_dir": "the transformers engine reads cold rows from the model's own files",
    }
    for name, reason in idle.items():
        if config.origin(name) != "default":
            text = f"{variable_name(name)} has no effect: {reason}"
            yield Notice(name="no-effect", text=text, strict=False)


def kernel_notices(config: HotsplitConfig) -> list[Notice]:
    """What must be said of the kernel before anything is loaded.

    Args:
        config: Settings.

    Raises:
        ConfigError: The fast kernel is asked for, its native code is missing, and that is an error in strict mode.
    """
    if config.kernel != "fast" or fast_library.load() is not None:
        return []
    reason = "its native code was not built where hotsplit was installed, and kernel exact runs instead"
    notices = [Notice(name="no-native-code", text=f"{variable_name('kernel')}=fast has no effect: {reason}")]
    enforce(notices, strict=config.strict, error=ConfigError)
    return notices


def default_budget(sizes: ExpertSizes, *, config: HotsplitConfig) -> int:
    """Hot bytes where nobody says.

    Args:
        sizes: Of the model.
        config: Settings.
    """
    return default_hot_bytes(sizes, reserve_bytes=config.vram_reserve_bytes)


def budget_notices(config: HotsplitConfig, *, budget: int) -> list[Notice]:
    """What must be said of a budget that nobody has given.

    Args:
        config: Settings.
        budget: Hot bytes.

    Raises:
        ConfigError: There is none, and that is an error in strict mode.
    """
    if config.hot_bytes is not None or budget > 0:
        return []
    left = f"beside dense weights and a reserve of {gib(config.vram_reserve_bytes)} memory has no room for hot experts"
    what = f"{left}: all are read from the disk; set {variable_name('hot_gib')}, or lower {variable_name('vram_reserve_gib')}"
    notices = [Notice(name="nothing-hot", text=what)]
    enforce(notices, strict=config.strict, error=ConfigError)
    return notices


def teach(loaded: Any, *, banks: Banks, source: CheckpointSource, strict: bool = False) -> list[Notice]:
    """Give every layer its mathematics; one proof per class of experts.

    Args:
        loaded: The model without experts.
        banks: Its rows.
        source: Where the experts lie.
        strict: Whether it is an error that the fast kernel has none of the layers.

    Returns:
        What the fast kernel does not have.

    Raises:
        UnsupportedEngineError: A class of experts computes something that is not known here.
        ConfigError: In strict mode.
    """
    proven: dict[type, Precision] = {}
    library = fast_library.load() if banks.kernel == "fast" else None
    native = None if library is None else _Native(library)
    for layer_id, layer in enumerate(source.layers):
        module = loaded.get_submodule(layer.path)
        layout, read = source.layouts[layer_id], _reader(banks, layer_id)
        prepare = preparer(layer, layout=layout, conversions=source.conversions)
        if type(module) not in proven:
            proven[type(module)] = prove(
                module,
                prepare=prepare,
                read=read,
                num_experts=source.num_experts,
                hidden_dim=_hidden_dim(module, layer=layer),
            )
        math = expert_math(
            module,
            layer=layer,
            prepare=prepare,
            precision=proven[type(module)],
            num_experts=source.num_experts,
        )
        if native is not None:
            stored = Stored(layer=layer, layout=layout, conversions=source.conversions)
            math = native.taught(math, module=module, stored=stored, read=read)
        banks.use_math(layer_id, math)
        _, dtype = next(iter(layer.parameters.values()))
        hooks.attach(module, banks=banks, layer_id=layer_id, dtype=dtype)
    if native is None:
        return []
    banks.on_close += native.on_close
    notices = native.notices(num_layers=len(source.layers))
    enforce(notices, strict=strict, error=ConfigError)
    dense = use_native_linears(loaded, library=native.library)
    norms = use_native_norms(loaded, library=native.library)
    routers = use_native_routers(loaded, library=native.library)
    attention = use_native_attention(loaded)
    banks.on_close += [dense.close, norms.close, routers.close, attention.close]
    native.report(dense, norms=norms, routers=routers)
    return [*notices, *dense.notices, *norms.notices, *routers.notices, *attention.notices]


class _Native:
    """The fast kernel's side of teach(): which layers have it, and what must be said of those that have not.

    Args:
        library: Its native code.
    """

    def __init__(self, library: fast_library.Library) -> None:
        self.library = library
        """Its native code."""
        self.on_close: list[Callable[[], None]] = []
        """What must be done then, so that the rows' memory can go."""
        self._shares: dict[tuple[type, bytes], float] = {}
        self._reasons: dict[str, list[str]] = {}

    def taught(self, math: ExpertMath, *, module: Any, stored: Stored, read: Callable[[int], Tensors]) -> ExpertMath:
        """A layer's mathematics with the native code, proven; or as they were, with a reason."""
        try:
            native = native_experts(module, stored=stored, library=self.library)
            self.on_close.append(native.forget)
            fast = with_native(math, native=native)
            key = (type(module), bytes(native.form))
            if key not in self._shares:
                prepare = preparer(
                    _exactly(stored.layer) if stored.is_scaled else stored.layer,
                    layout=stored.layout,
                    conversions=stored.conversions,
                )
                self._shares[key] = prove_native(Proof(module=module, prepare=prepare, read=read, math=fast))
        except UnsupportedEngineError as error:
            self._reasons.setdefault(f"{error.what}: {error.got}", []).append(stored.layer.path)
            return math
        return fast

    def notices(self, *, num_layers: int) -> list[Notice]:
        """What it does not have; a doubt where that is everything."""
        texts = [
            f"the fast kernel does not have {reason}; kernel exact runs in {len(paths)} of {num_layers} MoE layers"
            for reason, paths in self._reasons.items()
        ]
        return [Notice(name="exact-instead", text=text, strict=not self._shares) for text in texts]

    def report(self, dense: FastDense, *, norms: FastNorms, routers: FastRouters) -> None:
        """Say what runs where."""
        threads = torch.get_num_threads() if fast_library.parallel_function() else 1
        numbers = {
            "thread": threads,
            "linear layer": len(dense.layers),
            "norm": len(norms.norms),
            "router": len(routers.routers),
        }
        served = ", ".join(f"{number} {what}{'' if number == 1 else 's'}" for what, number in numbers.items())
        share = max([dense.share, routers.share, *self._shares.values()])
        what = "kernel fast: %s, %s; errors are at most %.0f %% of what rounding explains"
        logger.info(what, self.library.paths[-1], served, 100 * share)


def _exactly(layer: ExpertsLayer) -> ExpertsLayer:
    """The same layer in float32: factors applied without rounding to the model's type."""
    return replace(layer, parameters={name: (shape, torch.float32) for name, (shape, _) in layer.parameters.items()})


def _reader(banks: Banks, layer_id: int) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """An expert's stored tensors, wherever it lies."""
    row_map = banks.router.row_map[layer_id].tolist()
    return lambda expert: banks.rows.tensors(layer_id, row_map[expert])


def _hidden_dim(module: Any, *, layer: ExpertsLayer) -> int:
    """D, from the shape of the first projection."""
    shape, _ = layer.parameters["gate_up_proj" if module.has_gate else "up_proj"]
    return shape[1] if module.is_transposed else shape[2]
