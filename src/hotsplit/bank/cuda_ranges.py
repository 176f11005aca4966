"""Address ranges on a GPU: one tensor whose first rows lie in GPU memory and whose other rows lie in host memory.

The CUDA counterpart of ranges.py, below the row logic of range_rows.py. The GPU reads cold rows in place, over PCIe or
NVLink, by plain loads; no kernel knows that the tensor lies in two memories:

           | lead | row 0 ... row num_fast-1 |  row num_fast ... row R-1  | tail |
    page   ^      ^ address, on 256 bytes    ^ edge, a page edge                 ^
    edge   |  GPU memory, fast_bytes         |  host memory, slow_bytes

A page is the larger of what both memories' allocations are made of, asked of the driver. The tensor starts inside its
first page so that its first cold row falls on a page edge: no row lies in both memories. Sizes are whole pages of that,
never rounded further.

NOTE: a copy or a fill by the driver must not span both memories, so whole-tensor copy_() and zero_() are forbidden,
kernels are not. Rows move one by one: by copy_row(), or by torch between tensor[row] and memory elsewhere.

    >>> from hotsplit.bank.fake_driver import FakeDriver, NOTHING
    >>> from hotsplit.bank.tensor_at import cpu_tensor
    >>> driver = FakeDriver()
    >>> memory = cuda_memory(driver, host=Location(kind="host_numa"), tensor_at=cpu_tensor)
    >>> held = CudaRange(shape=(8, 3, 640), dtype=torch.float16, num_fast=3, memory=memory)
    >>> held.fast_bytes, held.slow_bytes, held.edge % memory.page_bytes, held.address % 256
    (2097152, 2097152, 0, 0)
    >>> str(driver.location_at(held.row_address(2))), str(driver.location_at(held.row_address(3)))
    ('device 0', 'HOST_NUMA node 0')
    >>> held.tensor[1] = 5
    >>> held.copy_row(source_row=1, target_row=7, stream=0), held.tensor[7, 2, 639].item()
    (3840, 5.0)
    >>> held.close()
    >>> driver.held == NOTHING
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hotsplit.bank.driver import Driver, Location
from hotsplit.bank.row_memory import bytes_per_row, can_divide, closed_range, require_layout
from hotsplit.bank.tensor_at import DeviceTensors, TensorAt
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT, Placement, thread_policy
from hotsplit.units import gib

ALIGNMENT: Final = 256
"""Bytes: where a tensor starts, and what its rows must be a multiple of for that."""
_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMemory:
    """Where the ranges of one rank get their pages; cuda_memory() makes one."""

    driver: Driver
    """Of the rank's device."""
    host: Location
    """Where cold rows lie: of kind "host_numa" or "host"."""
    page_bytes: int
    """The larger granularity of both memories."""
    tensor_at: TensorAt
    """Makes the tensors."""
    placement: Placement = NO_PLACEMENT
    """What plain host memory, which names no node, follows while it is allocated."""
    give_back: Callable[[], None] | None = None
    """Lets whoever else caches memory of the device give it back, before an allocation there is tried again."""

    @property
    def device(self) -> Location:
        """Where hot rows lie."""
        return Location(kind="device", index=self.driver.device)


def cuda_memory(
    driver: Driver,
    *,
    host: Location,
    tensor_at: TensorAt | None = None,
    placement: Placement = NO_PLACEMENT,
    give_back: Callable[[], None] | None = None,
) -> CudaMemory:
    """Ask the driver for its pages.

    Args:
        driver: Of the rank's device.
        host: Where cold rows shall lie.
        tensor_at: Makes the tensors; None for tensors of the driver's device.
        placement: For plain host memory.
        give_back: As CudaMemory has it.

    Raises:
        BankError: The driver knows no allocations in one of both memories.
    """
    sizes = [driver.granularity(one) for one in (Location(kind="device", index=driver.device), host)]
    if any(size < ALIGNMENT or size.bit_count() != 1 for size in sizes):
        raise BankError("pages of the driver", got=f"{sizes} bytes", wanted=f"powers of two from {ALIGNMENT} on")
    return CudaMemory(
        driver=driver,
        host=host,
        page_bytes=max(sizes),
        tensor_at=tensor_at or DeviceTensors(driver.device),
        placement=placement,
        give_back=give_back,
    )


def can_stitch(shape: Sequence[int], *, dtype: torch.dtype) -> bool:
    """Whether a tensor can have its rows in two memories: start and page edge can both be kept.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
    """
    return can_divide(shape, dtype=dtype, alignment=ALIGNMENT)


class CudaRange:
    """One tensor in two memories, at one address for as long as it is open.

    NOTE: the tensor, and any view of it, must not be touched after close(), and no work of the device may need it any
    more: unmapping waits for no stream. A range that is dropped without close() stays mapped.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
        num_fast: Rows in GPU memory, 0 to R.
        memory: Where pages come from; its driver's context is current in this thread.

    Raises:
        BankError: Rows are no multiple of 256 bytes, or a call of the driver fails; nothing is held then.
    """

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype, num_fast: int, memory: CudaMemory) -> None:
        require_layout(shape, dtype=dtype, num_fast=num_fast, alignment=ALIGNMENT)
        self._memory, self._num_rows = memory, shape[0]
        self._row_bytes = bytes_per_row(shape, dtype=dtype)
        self._base = 0
        self._segments: list[_Segment] = []
        self._tensor: torch.Tensor | None = None
        self.num_bytes = self._row_bytes * shape[0]
        """Bytes of the tensor."""
        self.fast_bytes = self._whole_pages(num_fast)
        """Bytes of GPU memory, whole pages."""
        self.slow_bytes = self._whole_pages(shape[0] - num_fast)
        """Bytes of host memory, whole pages."""
        try:
            self._map()
            self.edge = self._base + self.fast_bytes
            """Address of the first cold row, on a page; the end of the GPU memory where no row is cold."""
            self.address = self.edge - self._row_bytes * num_fast if self.slow_bytes else self._base
            """Address of the tensor."""
            self._tensor = memory.tensor_at(self.address, num_bytes=self.num_bytes).view(dtype).view(shape)
        except BaseException as error:
            try:
                self.close()
            except BankError as another:
                error.add_note(f"and then: {another}")
            raise

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, of the shape and dtype asked for.

        Raises:
            BankError: The range is closed.
        """
        if self._tensor is None:
            raise closed_range()
        return self._tensor

    @property
    def parts(self) -> tuple[torch.Tensor]:
        """The tensor: both memories lie at one address.

        Raises:
            BankError: The range is closed.
        """
        return (self.tensor,)

    def row_address(self, row: int) -> int:
        """Address of a row, all of which lies in one memory.

        Args:
            row: 0 to R - 1.

        Raises:
            BankError: No such row, or the range is closed.
        """
        if self._tensor is None:
            raise closed_range()
        if not 0 <= row < self._num_rows:
            raise BankError("row of an address range", got=str(row), wanted=f"0..{self._num_rows - 1}")
        return self.address + row * self._row_bytes

    def copy_row(self, *, source_row: int, target_row: int, stream: int) -> int:
        """Enqueue the copy of one row.

        Args:
            source_row: Where the bytes lie.
            target_row: Where they shall lie as well.
            stream: Handle of the stream, torch.cuda.Stream.cuda_stream.

        Returns:
            Bytes of a row.

        Raises:
            BankError: No such row, the range is closed, or the driver refuses.
        """
        target, source = self.row_address(target_row), self.row_address(source_row)
        self._memory.driver.copy(target, source=source, num_bytes=self._row_bytes, stream=stream)
        return self._row_bytes

    def evict(self) -> None:
        """Nothing: the driver keeps host pages that a device reads in RAM. Here so that all ranges have one shape.

        Raises:
            BankError: The range is closed.
        """
        if self._tensor is None:
            raise closed_range()

    def close(self) -> None:
        """Unmap it all, then give memory and addresses back; twice is harmless.

        Raises:
            BankError: The driver refuses a part of it, which another close() tries again; the rest is given back.
        """
        self._tensor = None
        failures = [failure for segment in self._segments for failure in segment.give_back(self._memory.driver)]
        self._segments = [segment for segment in self._segments if segment.is_held]
        if self._base and not self._segments:
            try:
                self._memory.driver.free(self._base, num_bytes=self.fast_bytes + self.slow_bytes)
                self._base = 0
            except BankError as error:
                failures.append(error)
        if failures:
            raise BankError("address range cannot be given back", got=str(failures[0])) from failures[0]

    def _map(self) -> None:
        """Reserve the addresses and put both memories behind them."""
        memory = self._memory
        total = self.fast_bytes + self.slow_bytes
        try:
            self._base = memory.driver.reserve(total, alignment=memory.page_bytes)
        except BankError as error:
            do = "look at ulimit -v and vm.max_map_count"
            raise BankError("addresses for expert rows", got=str(error), wanted=gib(total), do=do) from error
        for location, start, num_bytes in (
            (memory.device, self._base, self.fast_bytes),
            (memory.host, self._base + self.fast_bytes, self.slow_bytes),
        ):
            if num_bytes:
                self._segments.append(_Segment(address=start, num_bytes=num_bytes))
                self._back(self._segments[-1], location=location)

    def _back(self, segment: _Segment, *, location: Location) -> None:
        is_host = location.kind != "device"
        policy = self._memory.placement if location.kind == "host" else NO_PLACEMENT
        readers = [self._memory.device, location] if is_host else [location]
        try:
            with thread_policy(policy):
                self._fill(segment, location=location, readers=readers)
        except BankError as error:
            host_cure = "raise HOTSPLIT_HOT_GIB, so that fewer experts are cold; a container needs --cap-add SYS_NICE"
            raise BankError(
                f"{'host' if is_host else 'GPU'} memory for expert rows",
                got=str(error),
                wanted=f"{gib(segment.num_bytes)} at {location}",
                do=host_cure if is_host else "lower HOTSPLIT_HOT_GIB, or free GPU memory",
                error_name=getattr(error, "error_name", None),
            ) from error

    def _fill(self, segment: _Segment, *, location: Location, readers: Sequence[Location]) -> None:
        """Back a segment; of a device that is full once more, when torch has given back what it only caches."""
        driver, give_back = self._memory.driver, self._memory.give_back
        try:
            segment.back(driver, location=location, readers=readers)
        except BankError as error:
            is_full = getattr(error, "error_name", None) == _OUT_OF_MEMORY and location.kind == "device"
            if give_back is None or not is_full or segment.is_held:
                raise
            give_back()
            segment.back(driver, location=location, readers=readers)

    def _whole_pages(self, num_rows: int) -> int:
        page = self._memory.page_bytes
        return -(-self._row_bytes * num_rows // page) * page


@dataclass(kw_only=True, slots=True)
class _Segment:
    """One memory behind a part of the addresses, and how far it has come."""

    address: int
    """Of its first byte, on a page."""
    num_bytes: int
    """Whole pages."""
    handle: int | None = None
    """Of the memory, until the mapping alone keeps it."""
    is_mapped: bool = False
    """Whether the memory lies behind the addresses."""

    @property
    def is_held(self) -> bool:
        """Whether something is left to give back."""
        return self.is_mapped or self.handle is not None

    def back(self, driver: Driver, *, location: Location, readers: Sequence[Location]) -> None:
        """Allocate, map, leave the memory to the mapping, and grant access."""
        self.handle = driver.create(self.num_bytes, location=location)
        driver.map(self.address, num_bytes=self.num_bytes, handle=self.handle)
        self.is_mapped = True
        driver.release(self.handle)
        self.handle = None
        driver.set_access(self.address, num_bytes=self.num_bytes, locations=readers)

    def give_back(self, driver: Driver) -> list[BankError]:
        """Undo what was done; what the driver refuses stays to be done."""
        failures = []
        if self.is_mapped:
            try:
                driver.unmap(self.address, num_bytes=self.num_bytes)
                self.is_mapped = False
            except BankError as error:
                failures.append(error)
        if self.handle is not None:
            try:
                driver.release(self.handle)
                self.handle = None
            except BankError as error:
                failures.append(error)
        return failures
