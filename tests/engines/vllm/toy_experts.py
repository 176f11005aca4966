"""A layer of routed experts as vLLM builds one, in plain torch: what hotsplit wraps, without vLLM.

The module owns the parameters, a quantisation method makes and post-processes them, and the forward indexes them by row.
Every expert's bytes say whose they are.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch

from hotsplit.bank.file_memory import FileMemory
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.ranges import BankFile
from hotsplit.bank.rows import place
from hotsplit.bank.tensor_at import cpu_tensor
from hotsplit.bank.two_banks import TwoBankMemory
from hotsplit.engines.vllm.experts import HotsplitExperts
from hotsplit.engines.vllm.selftest import Prover
from hotsplit.engines.vllm.weights import Claim, LayerWeights
from hotsplit.host.progress import LoadWatch

E, D, F = 6, 16, 8
"""Experts, model dim, expert hidden dim."""
HOT = (4, 1)
W13_BYTES, W2_BYTES = 2 * F * D * 4, D * F * 4
"""Of a row: multiples of 64, and each more than 1 % of an expert."""


def weights_of(expert):
    """w13 [2F, D] and w2 [D, F] of an expert."""
    generator = torch.Generator().manual_seed(expert)
    return torch.randn(2 * F, D, generator=generator), torch.randn(D, F, generator=generator)


def bias_of(expert):
    return torch.full((3,), float(expert))


class Method:
    """An unquantised method: two big tensors, and a bias too small for a range."""

    topk_indices_dtype = None
    is_monolithic = False

    def __init__(self, process=None):
        self._process = process

    def create_weights(self, layer, num_experts, **_):
        for name, shape in {"w13_weight": (2 * F, D), "w2_weight": (D, F)}.items():
            data = torch.empty(num_experts, *shape, dtype=torch.float32)
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        bias = torch.zeros(num_experts, 3)
        layer.register_parameter("w2_bias", torch.nn.Parameter(bias, requires_grad=False))

    def process_weights_after_loading(self, layer):
        if self._process:
            self._process(layer)


class RoutedExperts(torch.nn.Module):
    """Loads expert by expert, each where its map says."""

    def __init__(self, *, method=None, quant_config=None):
        super().__init__()
        self.layer_name, self.top_k, self.hidden_size = "model.layers.3.mlp.experts", 2, D
        self.moe_config = SimpleNamespace(in_dtype=torch.float32)
        self.quant_config, self.quant_method = quant_config, method or Method()
        self.row_of = None
        """Expert id -> row to load it into."""

    def weight_loader(self, param, loaded, *, expert):
        param.data[self.row_of(expert)].copy_(loaded)

    def load(self, experts=range(E)):
        for expert in experts:
            w13, w2 = weights_of(expert)
            for name, loaded in {"w13_weight": w13, "w2_weight": w2, "w2_bias": bias_of(expert)}.items():
                self.weight_loader(getattr(self, name), loaded, expert=expert)

    def get_expert_weights(self):
        return [parameter.view(self.w2_bias.shape[0], -1) for parameter in self.parameters()]

    def forward_modular(self, x, topk_weights, row_ids, shared_experts=None):
        return self.quant_method.forward(self, x, topk_weights, row_ids, shared_experts)

    def forward_rows(self, x, topk_weights, row_ids):
        outputs_RTD = torch.stack([self.expert(x, row) for row in range(self.w2_bias.shape[0])])
        chosen = [outputs_RTD[row_ids[:, k].long(), torch.arange(len(x))] for k in range(row_ids.shape[1])]
        return sum(topk_weights[:, k, None] * one for k, one in enumerate(chosen))

    def expert(self, x, row):
        """One row on all tokens."""
        gate, up = (x @ self.w13(row).T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ self.w2(row).T + self.w2_bias[row].sum()

    def w13(self, row):
        """As it was loaded, [2F, D]."""
        return self.w13_weight[row]

    def w2(self, row):
        """As it was loaded, [D, F]."""
        return self.w2_weight[row]


class WholeExperts(RoutedExperts):
    """Loads all experts in one copy, and never asks for a row."""

    def weight_loader(self, param, loaded, *, expert):
        assert param.shape == loaded.shape
        param.data.copy_(loaded)

    def load(self, experts=range(E)):
        zero = torch.zeros(())
        for number, name in enumerate(("w13_weight", "w2_weight")):
            whole = [weights_of(expert)[number] * (1 if expert in experts else zero) for expert in range(E)]
            self.weight_loader(getattr(self, name), torch.stack(whole), expert=0)
        self.weight_loader(self.w2_bias, torch.stack([bias_of(expert) for expert in range(E)]), expert=0)


def forward(module, rows, *, seed=1):
    """The layer's output on fixed tokens, every expert chosen, over the given rows [E]."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(E, D, generator=generator)
    ids_TK = torch.stack([torch.arange(E), (torch.arange(E) + 1) % E], dim=1)
    return module.forward_rows(x_TD, torch.full((E, 2), 0.5), torch.tensor(rows)[ids_TK])


def expected(kind=RoutedExperts, *, process=None):
    """The same of a layer whose experts lie in the order of their ids, post-processed alike."""
    module = kind(method=Method(process))
    module.row_of = int
    module.quant_method.create_weights(module, E)
    module.load()
    module.quant_method.process_weights_after_loading(module)
    return forward(module, list(range(E)))


class Kernel:
    """Takes weights from the layer, and a factor per row from a configuration of its own, as vLLM's kernels do.

    Args:
        config: With scale, [R].
    """

    honours_map = True

    def __init__(self, config):
        self.quant_config = config

    def local(self, layer, row_ids):
        """Rows inside the layer's tensors; -1 for those that are not there."""
        return row_ids if layer._expert_map is None or not self.honours_map else layer._expert_map[row_ids.long()]

    def apply(self, layer, x, topk_weights, row_ids):
        local_TK = self.local(layer, row_ids)
        outputs_RTD = torch.stack([layer.expert(x, row) for row in range(len(layer.w13_weight))])
        outputs_RTD *= self.quant_config.scale[:, None, None]
        output_TD = torch.zeros_like(x)
        for k in range(local_TK.shape[1]):
            chosen = outputs_RTD[local_TK[:, k].clamp(min=0).long(), torch.arange(len(x))]
            output_TD += torch.where(local_TK[:, k, None] >= 0, topk_weights[:, k, None] * chosen, 0)
        return output_TD


class IgnoresMap(Kernel):
    """Computes every pair, whatever the map says."""

    honours_map = False


class Declares(Kernel):
    """Says itself that it takes no expert map, and must not be called with one."""

    def supports_expert_map(self):
        return False

    def local(self, layer, row_ids):
        assert layer._expert_map is None
        return row_ids


class KernelMethod(Method):
    """A method whose kernel is called through it; the factors are made in post-processing."""

    def __init__(self, process=None, *, kernel=Kernel):
        super().__init__(process)
        self.kernel, self.moe_quant_config, self.moe_kernel = kernel, None, None
        self.forward = self.apply  # bound, as vLLM's custom ops are dispatched

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        # What a row's factor is depends on its bytes alone, so it moves with them.
        scale_R = 1 + layer.w2_bias.data.sum(dim=1) / 64
        self.moe_quant_config = SimpleNamespace(scale=scale_R)
        self.moe_kernel = SimpleNamespace(fused_experts=self.kernel(self.moe_quant_config))

    def apply(self, layer, x, topk_weights, row_ids, shared_experts):
        if shared_experts is not None:
            shared_experts()
        return self.moe_kernel.fused_experts.apply(layer, x, topk_weights, row_ids)


class MappedExperts(HotsplitExperts, RoutedExperts):
    """Experts behind a kernel that honours an expert map, below hotsplit's own class."""

    def __init__(self, *, method=None, quant_config=None):
        RoutedExperts.__init__(self, method=method or KernelMethod(), quant_config=quant_config)
        self.hotsplit_layer_id = self.hotsplit_calls = None
        self.global_num_experts = self.local_num_experts = E
        self.register_buffer("_expert_map", None)


class Layer:
    """A module whose weights are on their way into banks of their own."""

    def __init__(self, folder, module, *, dynamic=True, fixed=0, row_bytes=W13_BYTES + W2_BYTES, memory=None, hot=HOT):
        self.rows = place(hot, num_experts=E, spare=dynamic, inclusive=False, fixed=fixed)
        self.file = BankFile(folder)
        self.memory = RangeRows([self.rows], memory=memory or FileMemory(self.file))
        self.watch = LoadWatch("experts", total_bytes=1, num_layers=1, available=lambda: None)
        self.module = module
        claim = Claim(
            layer_id=0,
            name=module.layer_name,
            rows=self.rows,
            memory=self.memory,
            row_bytes=row_bytes,
            watch=self.watch,
            prover=Prover(),
        )
        self.weights = LayerWeights(module, claim=claim)
        module.row_of = self.weights.row_to_load
        module.quant_method = self.weights.wrap(module.quant_method)

    def create(self):
        self.module.quant_method.create_weights(self.module, num_experts=self.rows.num_rows)
        return self

    def finish(self):
        self.module.quant_method.process_weights_after_loading(self.module)
        return self

    def load(self):
        self.create().module.load()
        return self.finish()

    def close(self):
        self.module = None
        self.memory.close()
        self.file.close()

    @property
    def output(self):
        return forward(self.module, self.rows.row_map)


@contextmanager
def layers_in(folder):
    """make(module, dynamic=True, fixed=0) -> a layer; all are closed in the end."""
    with ExitStack() as stack:

        def make(module=None, **options):
            layer = Layer(folder, module or RoutedExperts(), **options)
            stack.callback(layer.close)
            return layer

        yield make


def require_ranges(layer, *names):
    """These parameters, and nothing else, lie in ranges; the file holds their cold rows and no more."""
    module, memory = layer.module, layer.memory
    assert set(names) == {name for name, one in module.named_parameters() if memory.owns(one.data)}
    assert len(names) == len(memory.ranges)
    assert sum(one.slow_bytes for one in memory.ranges) == layer.file.num_bytes


def memory_of(driver):
    return TwoBankMemory(driver, tensor_at=cpu_tensor, synchronise=lambda: None)


def stock(kind=MappedExperts, *, process=None):
    """What vLLM without hotsplit gives."""
    module = kind(method=KernelMethod(process))
    module.row_of = int
    module.quant_method.create_weights(module, E)
    module.load()
    module.quant_method.process_weights_after_loading(module)
    return forward(module, list(range(E)))


def near(expected, output):
    return torch.allclose(expected, output, rtol=0, atol=1e-5 * float(expected.abs().max()))
