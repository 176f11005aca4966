"""One GPU: what load() decides and builds differently there.

    meta model -> forms of rows -> sizes -> budget -> plan -> room on GPU and host -> dense weights moved -> banks -> proof

The experts that are hot lie in GPU memory, the others in host RAM, where the GPU reads them in place; the checkpoint is
read once. Nothing is allocated before everything is known to fit.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from hotsplit.bank.banks import BankOptions
from hotsplit.bank.build import Progress, place_layers
from hotsplit.bank.device_banks import DeviceBanks, DeviceParts
from hotsplit.bank.device_fill import stored_views
from hotsplit.bank.direct import DirectReader
from hotsplit.bank.driver import Location
from hotsplit.bank.kernels.reference import FP8
from hotsplit.bank.row_format import FormedExperts, RowFormat, Tensors, row_bytes_of
from hotsplit.config import HotsplitConfig, variable_name
from hotsplit.engines.transformers import hooks
from hotsplit.engines.transformers.index import SCALE, CheckpointSource, ExpertsLayer
from hotsplit.engines.transformers.mathematics import preparer
from hotsplit.engines.transformers.opening import Opened
from hotsplit.engines.transformers.places import GpuPlace
from hotsplit.engines.transformers.row_forms import row_form
from hotsplit.engines.transformers.row_proof import Subject, prove_rows
from hotsplit.errors import ConfigError, UnsupportedEngineError
from hotsplit.host.budget import GpuMemory, ModuleBytes, default_hot_bytes_gpu, require_gpu_memory
from hotsplit.host.demand import COLD_ROWS, HostDemand, require_host
from hotsplit.notices import Notice
from hotsplit.plan.choose import PlanChoice
from hotsplit.plan.sizes import ExpertSizes
from hotsplit.units import gib

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnGpu:
    """A model that will run on a GPU, before anything of it is loaded."""

    place: GpuPlace
    """Which."""
    opened: Opened
    """The model's facts."""
    forms: tuple[RowFormat, ...]
    """How the kernels have its rows, [L]."""
    sizes: ExpertSizes
    """What its experts and its dense weights weigh there."""
    modules: tuple[ModuleBytes, ...]
    """What an automatic device map would place one after the other, whole."""

    @property
    def source(self) -> CheckpointSource:
        """Where every expert lies."""
        return self.opened.source

    def memory(self, config: HotsplitConfig) -> GpuMemory:
        """The GPU's memory as it is now.

        Args:
            config: Settings.
        """
        found = self.place.memory()
        return GpuMemory(
            free_bytes=found.free_bytes,
            total_bytes=found.total_bytes,
            reserve_bytes=config.vram_reserve_bytes,
            dense_bytes=self.sizes.dense_bytes,
            name=str(self.place.device),
        )


def on_gpu(place: GpuPlace, *, opened: Opened) -> OnGpu:
    """See whether a GPU's kernels can compute a model's experts, and how.

    Args:
        place: The GPU.
        opened: The model's facts.

    Raises:
        UnsupportedEngineError: They cannot; it names what, and the way out.
    """
    source, block = opened.source, _block(opened.config)
    forms = tuple(
        row_form(
            opened.meta.get_submodule(layer.path),
            layer=layer,
            layout=layout,
            conversions=source.conversions,
            block=block,
        )
        for layer, layout in zip(source.layers, source.layouts, strict=True)
    )
    _require_capability(place, forms=forms)
    row_bytes = row_bytes_of(forms)
    modules = modules_of(opened, expert_bytes=[num_bytes * source.num_experts for num_bytes in row_bytes])
    # As they will be computed with: dense weights of a float8 checkpoint are dequantised.
    dense = sum(one.dense_bytes for one in modules)
    sizes = replace(opened.sizes, row_bytes=np.array(row_bytes, dtype=np.int64), dense_bytes=dense)
    return OnGpu(place=place, opened=opened, forms=forms, sizes=sizes, modules=modules)


_LEAST_CAPABILITY: Final = {FP8: (8, 9), torch.bfloat16: (8, 0)}
"""That a GPU must have to multiply weights of a type; older ones have no instructions for it."""


def _require_capability(place: GpuPlace, *, forms: Sequence[RowFormat]) -> None:
    """Refuse weights of a type that the GPU cannot compute with, which Triton says at the first step alone."""
    capability = place.capability()
    for dtype in {form.tensors["up"][1] for form in forms}:
        least = _LEAST_CAPABILITY.get(dtype, (7, 5))
        if capability < least:
            wanted, got = (f"compute capability {major}.{minor}" for major, minor in (least, capability))
            do = "use another GPU, or device='cpu'; bfloat16 models may do with model_kwargs={'dtype': 'float16'}"
            raise UnsupportedEngineError(
                f"{dtype} experts on {place.device}", got=got, wanted=f"{wanted} or more", do=do
            )


def require_kernel(config: HotsplitConfig) -> None:
    """Refuse the promise that only a CPU keeps, where somebody asks for it.

    Args:
        config: Settings.

    Raises:
        ConfigError: HOTSPLIT_KERNEL was given.
    """
    if config.origin("kernel") != "default":
        raise ConfigError(
            f"{variable_name('kernel')} on a GPU",
            got=config.kernel,
            wanted="no such setting: it chooses among a CPU's kernels, and a GPU has one of its own",
            do="leave it out, or use device='cpu'",
        )


def idle_on_gpu(config: HotsplitConfig) -> Iterator[Notice]:
    """Settings that were given and have nothing to act on there.

    Args:
        config: Settings.
    """
    if config.origin("bank_dir") != "default":
        text = f"{variable_name('bank_dir')} has no effect: on a GPU cold rows lie in host memory"
        yield Notice(name="no-effect", text=text, strict=False)


def default_budget(model: OnGpu, *, config: HotsplitConfig) -> int:
    """Hot bytes where nobody says, and the line that says why.

    Args:
        model: What will run.
        config: Settings.
    """
    default = default_hot_bytes_gpu(model.modules, memory=model.memory(config))
    logger.info("hot budget: %s (%s)", gib(default.num_bytes), default.text)
    return default.num_bytes


def planned_sizes(model: OnGpu, *, parts: DeviceParts, config: HotsplitConfig, budget: int) -> ExpertSizes:
    """What the planner has to count: divided rows, and beside them what stays fast and what whole pages waste.

    A plan file was made from whole rows, and is taken by its own measure; what it takes in the end is looked at below.

    Args:
        model: What will run.
        parts: The device.
        config: Settings.
        budget: Hot bytes.
    """
    if config.plan is not None or not budget:
        return model.sizes
    num_rows = model.source.num_experts + config.dynamic
    page = _page_bytes(parts)
    fixed = [num_rows * form.fixed_bytes + page * len(form.divided) for form in model.forms]
    return replace(
        model.sizes,
        row_bytes=np.array([form.divided_bytes for form in model.forms], dtype=np.int64),
        fixed_bytes=np.array(fixed, dtype=np.int64),
    )


def require_room(model: OnGpu, *, parts: DeviceParts, choice: PlanChoice, config: HotsplitConfig) -> None:
    """Refuse what GPU or host cannot hold, before anything is allocated.

    Args:
        model: What will run.
        parts: The device.
        choice: Which experts are hot.
        config: Settings.

    Raises:
        BudgetError: It does not fit.
    """
    num_experts = model.source.num_experts
    layers = place_layers(choice.plan.hot, num_experts=num_experts, dynamic=config.dynamic, inclusive=False)
    page, needed, cold = _page_bytes(parts), 0, 0
    for form, rows in zip(model.forms, layers, strict=True):
        edges = page * len(form.divided) if rows.first_cold else 0
        needed += rows.first_cold * form.divided_bytes + rows.num_rows * form.fixed_bytes + edges
        cold += (rows.num_rows - rows.first_cold) * form.divided_bytes
    require_gpu_memory(needed, memory=model.memory(config))
    one_row = max(layout.num_bytes for layout in model.source.layouts)
    require_host(HostDemand(items={COLD_ROWS: cold, "one expert on its way": 2 * one_row}))
    require_host(HostDemand(items={"dense weights on their way": model.sizes.dense_bytes}))


def build_banks(
    model: OnGpu,
    *,
    parts: DeviceParts,
    choice: PlanChoice,
    options: BankOptions,
    on_progress: Progress | None,
) -> DeviceBanks:
    """Fill the rows.

    Args:
        model: What will run.
        parts: The device.
        choice: Which experts are hot.
        options: Behaviour.
        on_progress: Told bytes done and in all.

    Raises:
        BankError: Memory, a file or the device failed.
    """
    return DeviceBanks(
        FormedExperts(source=model.source, forms=model.forms),
        hot=choice.plan.hot,
        prior=choice.prior,
        options=options,
        parts=parts,
        on_progress=on_progress,
    )


def teach(loaded: Any, *, banks: DeviceBanks, model: OnGpu, parts: DeviceParts) -> None:
    """Prove every class of experts on real rows, and tie the modules to the banks.

    Args:
        loaded: The model without experts.
        banks: Its rows.
        model: What runs.
        parts: The device.

    Raises:
        UnsupportedEngineError: A class of experts computes something else.
    """
    proven: set[tuple[type, str]] = set()
    reader = DirectReader(model.source.files)
    try:
        for layer_id, layer in enumerate(model.source.layers):
            module, form = loaded.get_submodule(layer.path), model.forms[layer_id]
            kind = (type(module), repr((form.options, form.tensors)))
            if kind not in proven:
                proven.add(kind)
                subject = _subject(module, layer_id=layer_id, banks=banks, model=model, reader=reader)
                with banks.on_device():
                    share = prove_rows(subject, kernel=parts.experts, device=banks.device)
                what = "experts of %s on %s: as the stock module's, at most %.0f %% of what rounding explains"
                logger.info(what, type(module).__name__, banks.device, 100 * share)
            hooks.attach(module, banks=banks, layer_id=layer_id, dtype=_dtype(layer))
    finally:
        reader.close()


def notices(banks: DeviceBanks, *, parts: DeviceParts, budget: int) -> list[Notice]:
    """What must be said about a model on a GPU.

    Args:
        banks: Its rows.
        parts: The device.
        budget: As the plan has it.
    """
    said = [*parts.kit.notices]
    if banks.num_banks == 2:
        text = (
            "experts lie in two banks: every layer is two calls, and outputs change in their last bits with placement"
        )
        said.append(Notice(name="two-banks", text=text, strict=False))
    if banks.hot_bytes > budget:
        more = f"{gib(banks.hot_bytes)} of {banks.device}, {gib(banks.hot_bytes - budget)} more than the budget"
        text = f"hot rows take {more}: page edges, and tensors that stay fast for all experts"
        said.append(Notice(name="page-edges", text=text, strict=False))
    return said


def _subject(module: Any, *, layer_id: int, banks: DeviceBanks, model: OnGpu, reader: DirectReader) -> Subject:
    source, layer = model.source, model.source.layers[layer_id]
    layout = source.layouts[layer_id]
    is_scaled = any(part.name.endswith(SCALE) for part in layout.tensors)
    exactly = {name: (shape, torch.float32) for name, (shape, _) in layer.parameters.items()}

    def stored(expert: int) -> Tensors:
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device="cpu")
        view = buffer.numpy().data
        for span in source.spans(layer_id, expert):
            target = view[span.row_offset : span.row_offset + span.num_bytes]
            reader.read_into(target, file=span.file, offset=span.offset)
        return stored_views(buffer, layout=layout)

    return Subject(
        module=module,
        form=model.forms[layer_id],
        prepare=preparer(
            replace(layer, parameters=exactly) if is_scaled else layer, layout=layout, conversions=source.conversions
        ),
        stored=stored,
        on_device=lambda expert: banks.expert(layer_id, expert),
        num_experts=source.num_experts,
        dtype=_dtype(layer),
    )


def _dtype(layer: ExpertsLayer) -> torch.dtype:
    """Of the tokens."""
    _, dtype = next(iter(layer.parameters.values()))
    return dtype


def _block(config: Any) -> tuple[int, int] | None:
    """Outputs and inputs that share a factor, as config.json says."""
    quantisation = getattr(config, "quantization_config", None)
    block = None if quantisation is None else dict(quantisation).get("weight_block_size")
    return None if block is None else (int(block[0]), int(block[1]))


def _page_bytes(parts: DeviceParts) -> int:
    """Of the device's memory: what a range wastes at most."""
    driver = getattr(parts.kit.memory, "driver", None)
    return 0 if driver is None else int(driver.granularity(Location(kind="device", index=driver.device)))


def modules_of(opened: Opened, *, expert_bytes: Sequence[int]) -> tuple[ModuleBytes, ...]:
    """The modules that an automatic device map would place one after the other, whole.

    Args:
        opened: The model's facts.
        expert_bytes: Of all experts of each layer, [L].
    """
    experts = {layer.path: size for layer, size in zip(opened.source.layers, expert_bytes, strict=True)}
    kept_whole = set(getattr(opened.meta, "_no_split_modules", None) or ())
    return tuple(_leaves(opened.meta, "", kept_whole=kept_whole, experts=experts, seen=set()))


def _leaves(
    module: torch.nn.Module, path: str, *, kept_whole: set[str], experts: Mapping[str, int], seen: set[int]
) -> Iterator[ModuleBytes]:
    """A module that is not split, or those in it; what two of them share counts with the first."""
    children = dict(module.named_children())
    is_whole = bool(path) and (not children or type(module).__name__ in kept_whole)
    inside = {name: size for name, size in experts.items() if f"{name}.".startswith(f"{path}.")} if is_whole else {}
    stored = [*module.named_parameters(recurse=is_whole), *module.named_buffers(recurse=is_whole)]
    dense = 0
    for name, tensor in stored:
        is_expert = any(f"{path}.{name}".startswith(f"{one}.") for one in inside)
        dense += 0 if is_expert or id(tensor) in seen else tensor.nbytes
        seen.add(id(tensor))
    if is_whole or dense:
        yield ModuleBytes(name=path, dense_bytes=dense, expert_bytes=sum(inside.values()))
    if not is_whole:
        for name, child in children.items():
            inner = f"{path}.{name}" if path else name
            yield from _leaves(child, inner, kept_whole=kept_whole, experts=experts, seen=seen)
