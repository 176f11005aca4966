"""What every check is given: the device, the sizes, the time that is left, and the rates that were measured before it.

Sizes are data: FULL for a GPU, DRY for a CPU in which every line runs in less than a second. A rate that a check
measures is the bound of another one's figures, and both come from the same run.

    >>> clock = Clock(60, now=iter([0.0, 45.0]).__next__)
    >>> clock.left_s()
    15.0
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import torch

from hotsplit.bank.checks.device import Device
from hotsplit.bank.checks.findings import Finding, NotMeasured
from hotsplit.bank.cuda_ranges import CudaMemory, cuda_memory
from hotsplit.bank.driver import Location
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.units import GIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """Experts of one layer, a gate and SiLU in each, and the tokens that are routed to them."""

    num_experts: int
    """E."""
    hidden_dim: int
    """D."""
    inner_dim: int
    """I."""
    top_k: int
    """K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much of everything."""

    repeats: int
    """Measured runs of each figure; the median counts."""
    hbm_bytes: int
    """Of each tensor of the GPU memory's own figures."""
    copy_bytes: tuple[int, ...]
    """Copies over the link; the last one is the largest."""
    trial_bytes: int
    """Cold bytes of the trial that chooses a memory."""
    odd_row_bytes: tuple[int, ...]
    """Rows that are no multiples of a page."""
    read_row_bytes: int
    """Of the rows that are read and copied."""
    read_hot_rows: int
    """Hot rows in front of them."""
    footprints: tuple[int, ...]
    """Bytes of cold rows that are read, from the smallest to the largest."""
    spare_host_bytes: int
    """Host memory that is left to others."""
    layer: LayerSize
    """Of the figures of a layer."""
    tokens: tuple[int, ...]
    """T of them."""
    draws: int
    """Calls of a layer in one graph, each with tokens and ids of its own, so that no cache serves them."""
    replay: LayerSize
    """Of the layers that are replayed beside swaps."""
    replays: int
    """Of each rule of publishing."""
    mutant_replays: int
    """Of each mutant."""
    lag_bytes: int
    """Copied before each row where copies shall lag behind the steps."""
    route: LayerSize
    """Of the figures of the route op; D and I do not matter there."""
    route_layers: int
    """Layers of a model, for a step's figures."""
    publishes: int
    """Entries that are written one behind the other."""
    step_layers: int
    """Layers with rows of their own in the step that swaps run beside."""
    step_cold_ratio: float
    """Pairs of that step whose expert is cold."""
    steps: int
    """Steps with and without swaps, in each of the rounds."""


FULL: Final = Sizes(
    repeats=5,
    hbm_bytes=4 * GIB,
    copy_bytes=(MIB, 11 * MIB, 44 * MIB, 2 * GIB),
    trial_bytes=512 * MIB,
    odd_row_bytes=(7 * MIB, 7 * MIB // 2, 791 * MIB // 100 // 256 * 256, 2 * MIB + 256),
    read_row_bytes=11 * MIB,
    read_hot_rows=2 * GIB // (11 * MIB),
    footprints=(GIB, 8 * GIB, 24 * GIB),
    spare_host_bytes=8 * GIB,
    layer=LayerSize(num_experts=64, hidden_dim=4096, inner_dim=768, top_k=8),
    tokens=(1, 4, 16),
    draws=8,
    replay=LayerSize(num_experts=32, hidden_dim=1024, inner_dim=448, top_k=4),
    replays=1500,
    mutant_replays=300,
    lag_bytes=128 * MIB,
    route=LayerSize(num_experts=256, hidden_dim=1, inner_dim=1, top_k=8),
    route_layers=60,
    publishes=200,
    step_layers=4,
    step_cold_ratio=0.01,
    steps=100,
)
DRY: Final = Sizes(
    repeats=1,
    hbm_bytes=MIB,
    copy_bytes=(MIB // 8, MIB // 4, MIB // 2, MIB),
    trial_bytes=MIB,
    odd_row_bytes=(3 * MIB // 4, 2 * MIB + 256),
    read_row_bytes=68 * 1024,
    read_hot_rows=4,
    footprints=(256 * 1024, MIB),
    spare_host_bytes=0,
    layer=LayerSize(num_experts=8, hidden_dim=128, inner_dim=128, top_k=2),
    tokens=(1, 4, 16),
    draws=2,
    replay=LayerSize(num_experts=8, hidden_dim=64, inner_dim=32, top_k=2),
    replays=300,
    mutant_replays=500,
    lag_bytes=4096,
    route=LayerSize(num_experts=16, hidden_dim=1, inner_dim=1, top_k=2),
    route_layers=3,
    publishes=8,
    step_layers=2,
    step_cold_ratio=0.1,
    steps=10,
)


class Clock:
    """The time that a run may take.

    Args:
        budget_s: From now on, seconds.
        now: Tells the time, in seconds; another one only in tests.
    """

    def __init__(self, budget_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + budget_s

    def left_s(self) -> float:
        """Seconds until the end."""
        return self._end - self._now()


@dataclass(kw_only=True, slots=True)
class Bench:
    """What a check works with, and what it leaves for those that come after it."""

    device: Device
    """Where everything runs."""
    sizes: Sizes
    """How much of everything."""
    clock: Clock
    """Until when."""
    rates: dict[str, float] = field(default_factory=dict)
    """Measured rates in bytes per second: "link", "hbm", "h2d", "d2h"; they bound other figures."""
    placement: Placement = NO_PLACEMENT
    """Where cold rows belong."""
    location: Location | None = None
    """Host memory that was chosen for cold rows; None where no range can be stitched, or before it was tried."""

    def memory(self) -> CudaMemory:
        """Where ranges of the chosen memory get their pages.

        Raises:
            NotMeasured: No range can be stitched here.
        """
        if self.location is None:
            raise NotMeasured("no range can be stitched here", do="look at the check called backing")
        return cuda_memory(
            self.device.driver, host=self.location, tensor_at=self.device.tensor_at, placement=self.placement
        )

    def tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of torch's own on the device, its bytes anything.

        Args:
            *shape: Of it.
            dtype: Of its elements.
        """
        return torch.empty(shape, dtype=dtype, device=self.device.type)

    def generator(self, seed: int = 0) -> torch.Generator:
        """Random numbers on the device.

        Args:
            seed: Of them.
        """
        return torch.Generator(device=self.device.type).manual_seed(seed)

    def require_time(self, seconds: float) -> None:
        """Give up what would not end in time; a dry run always has it.

        Args:
            seconds: That it takes on a GPU.

        Raises:
            NotMeasured: So much is not left.
        """
        left = self.clock.left_s()
        if left < (1 if self.device.is_dry else seconds):
            raise NotMeasured("no time", got=f"{left:.0f} s left", wanted=f"{seconds:.0f} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One subject."""

    name: str
    """As --only takes it."""
    title: str
    """For the table."""
    run: Callable[[Bench], Iterator[Finding]]
    """Yields what it finds, as it finds it; an error ends the check and no other one."""
    seconds: float
    """What it needs on a GPU, at least; with less time left it is not begun."""
    needs: tuple[str, ...] = ()
    """Checks whose rates and choices it takes up."""


class _Closeable(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closeable)


@contextlib.contextmanager
def opened(bench: Bench, resource: _Opened) -> Iterator[_Opened]:
    """Close what lies at an address, and not before the device is done with it.

    Args:
        bench: Whose device may use it.
        resource: Has close().
    """
    try:
        yield resource
    finally:
        bench.device.synchronise()
        resource.close()
