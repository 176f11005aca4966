"""Two banks: where a GPU cannot have both memories at one address, hot rows and cold rows are two tensors.

The fallback for cuda_ranges.py, below the row logic of range_rows.py. Row numbers go on through both parts, so the row
map, the counters and the swaps are the same; only a kernel sees that there are two tensors, and is called for each:

    parts   (hot, cold)      rows [0, num_fast) in GPU memory | rows [num_fast, R) in host pages that the GPU reads in place
    ids     bank_row_ids()   what each call is given: rows inside its part, -1 for pairs that are the other part's
    sum     hot + cold       each pair is computed by exactly one of the calls and adds nothing in the other

That is right for kernels alone that leave out a pair without a row, and its last bits differ: a token whose experts lie
in both parts is summed in another order than in one call.

GPU memory is torch's own here: a device that is refused by the driver's virtual memory has plain memory all the same.
Host memory is host/pages.py's: exact sizes, on the right NUMA node, locked and mapped by the driver.

    >>> from hotsplit.bank.fake_driver import FakeDriver, NOTHING
    >>> from hotsplit.bank.tensor_at import cpu_tensor
    >>> driver = FakeDriver()
    >>> memory = TwoBankMemory(driver, tensor_at=cpu_tensor, synchronise=lambda: None)
    >>> held = memory.make((8, 3, 640), dtype=torch.float16, num_fast=3)
    >>> [tuple(part.shape) for part in held.parts], held.slow_bytes, driver.held.registrations
    ([(3, 3, 640), (5, 3, 640)], 20480, 1)
    >>> held.close()
    >>> driver.held == NOTHING
    True
    >>> row_ids = torch.tensor([[0, 5], [7, 2]], dtype=torch.int32)
    >>> [ids.tolist() for ids in bank_row_ids(row_ids, first_cold=3)]
    [[[0, -1], [-1, 2]], [[-1, 2], [4, -1]]]
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hotsplit.bank.cuda_ranges import ALIGNMENT
from hotsplit.bank.cuda_row_memory import copy_and_wait, require_cold_rows_placed
from hotsplit.bank.driver import Driver
from hotsplit.bank.row_memory import AddressRange, bytes_per_row, closed_range, require_layout
from hotsplit.bank.tensor_at import DeviceTensors, TensorAt
from hotsplit.errors import BankError
from hotsplit.host.numa import NO_PLACEMENT, Placement
from hotsplit.host.pages import HostPages
from hotsplit.units import gib

logger = logging.getLogger(__name__)


def bank_row_ids(row_ids: torch.Tensor, *, first_cold: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell the rows of both parts apart; static shapes, and nothing that the host would have to wait for.

    Args:
        row_ids: Rows of all, any shape, int32 or int64; -1 is a sentinel that belongs to neither part.
        first_cold: The lowest row of the second part.

    Returns:
        Rows inside the first part and inside the second one, of the same shape and dtype; -1 for those that are not
        there.
    """
    return row_ids.masked_fill(row_ids >= first_cold, -1), (row_ids - first_cold).clamp(min=-1)


class TwoBankRange:
    """The rows of one tensor in two tensors (an AddressRange).

    NOTE: no tensor of it may be touched after close(), and no work of the device may need it any more. A range that is
    dropped without close() keeps its host pages.

    Args:
        shape: [R, ...].
        dtype: Of its elements.
        num_fast: Rows in GPU memory, 0 to R.
        memory: Where they come from; its driver's context is current in this thread.

    Raises:
        BankError: Rows are no multiple of 256 bytes, memory does not suffice, or the driver refuses; nothing is held
            then.
    """

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype, num_fast: int, memory: TwoBankMemory) -> None:
        require_layout(shape, dtype=dtype, num_fast=num_fast, alignment=ALIGNMENT)
        self._pages: HostPages | None = None
        self._parts: tuple[torch.Tensor, torch.Tensor] | None = None
        num_cold = shape[0] - num_fast
        try:
            hot = _gpu_memory((num_fast, *shape[1:]), dtype=dtype, device=memory.device)
            cold = torch.empty((0, *shape[1:]), dtype=dtype, device=memory.device)
            if num_cold:
                cold_bytes = num_cold * bytes_per_row(shape, dtype=dtype)
                self._pages = HostPages(cold_bytes, placement=memory.placement)
                device_address = self._pages.register(memory.driver)
                cold = memory.tensor_at(device_address, num_bytes=cold_bytes).view(dtype).view(num_cold, *shape[1:])
        except BaseException as error:
            try:
                self.close()
            except BankError as another:
                error.add_note(f"and then: {another}")
            raise
        self._parts = (hot, cold)
        self.fast_bytes = hot.nbytes
        """Bytes of GPU memory, without what its allocator rounds up."""
        self.slow_bytes = self._pages.num_bytes if self._pages else 0
        """Bytes of host memory, whole pages."""

    @property
    def tensor(self) -> torch.Tensor:
        """None: the rows lie in two tensors.

        Raises:
            BankError: Always.
        """
        raise BankError("expert rows as one tensor", got="a memory of two banks", wanted="its parts")

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hot rows [num_fast, ...] and cold rows [R - num_fast, ...], both of the device that computes.

        Raises:
            BankError: The range is closed.
        """
        if self._parts is None:
            raise closed_range()
        return self._parts

    @property
    def address(self) -> int:
        """Where the first row lies."""
        return next(part.data_ptr() for part in self.parts if part.numel())

    @property
    def pages(self) -> HostPages | None:
        """What cold rows lie in; None where no row is cold, or the range is closed."""
        return self._pages

    def evict(self) -> None:
        """Nothing: locked pages stay in RAM. Here so that all ranges have one shape.

        Raises:
            BankError: The range is closed.
        """
        if self._parts is None:
            raise closed_range()

    def close(self) -> None:
        """Unlock the host pages and give both memories back; twice is harmless.

        Raises:
            BankError: The driver or the kernel refuses, which another close() tries again.
        """
        self._parts = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None


class TwoBankMemory:
    """Hot rows in torch's memory of a device, cold rows in registered host pages (a RowMemory).

    Args:
        driver: Of the rank's device; registers pages and copies rows.
        placement: Where host pages shall lie.
        synchronise: Waits until the device has done all that was enqueued; None for torch.cuda.synchronize.
        tensor_at: Makes tensors over host pages, of the device that computes; None for the driver's device.
    """

    alignment = ALIGNMENT
    num_banks: Literal[2] = 2
    copies_rows_alone = True

    def __init__(
        self,
        driver: Driver,
        *,
        placement: Placement = NO_PLACEMENT,
        synchronise: Callable[[], None] | None = None,
        tensor_at: TensorAt | None = None,
    ) -> None:
        self.driver = driver
        """Of the device."""
        self.placement = placement
        """Of cold rows."""
        self.tensor_at = tensor_at or DeviceTensors(driver.device)
        """Makes the tensors of cold rows."""
        self.device = torch.device("cuda", driver.device) if tensor_at is None else _device_of(tensor_at)
        """Of all tensors."""
        self._synchronise = synchronise or torch.cuda.synchronize
        self._told: set[str] = set()

    @property
    def device_type(self) -> str:
        """Of the tensors it makes: "cuda", or "cpu" where stand-ins make them."""
        return self.device.type

    def make(self, shape: tuple[int, ...], *, dtype: torch.dtype, num_fast: int) -> TwoBankRange:
        """Make a range, as RowMemory says.

        Args:
            shape: [R, ...].
            dtype: Of its elements.
            num_fast: Rows in GPU memory.
        """
        made = TwoBankRange(shape=shape, dtype=dtype, num_fast=num_fast, memory=self)
        for notice in made.pages.notices if made.pages else ():
            if notice.text not in self._told:
                logger.warning("%s", notice)
            self._told.add(notice.text)
        return made

    def copy(self, moves: Sequence[tuple[int, int]], *, num_bytes: int) -> None:
        """Copy bytes, as RowMemory says; never during serving, where the side stream does it.

        Args:
            moves: Target and source addresses.
            num_bytes: Of every move.
        """
        copy_and_wait(moves, num_bytes=num_bytes, driver=self.driver, synchronise=self._synchronise)

    def require_placed(self, ranges: Sequence[AddressRange]) -> None:
        """Look on which NUMA nodes the cold rows lie, as RowMemory says.

        Args:
            ranges: That this memory made.

        Raises:
            BankError: Under `bind`, pages lie elsewhere.
        """
        held = [one.pages for one in ranges if isinstance(one, TwoBankRange) and one.pages]
        require_cold_rows_placed([(one.address, one.num_bytes) for one in held], placement=self.placement)


def _gpu_memory(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Engines load in inference mode: what is made there may not be written to outside of it, as swaps and tests do.
    with torch.inference_mode(mode=False):
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, RuntimeError itself on a CPU
            num_bytes = shape[0] * bytes_per_row(shape, dtype=dtype)
            raise BankError(
                "GPU memory for expert rows",
                got=str(error).splitlines()[0],
                wanted=gib(num_bytes),
                do="lower HOTSPLIT_HOT_GIB, or free GPU memory",
                wanted_bytes=num_bytes,
            ) from error


def _device_of(tensor_at: TensorAt) -> torch.device:
    """Which device a maker of tensors makes them for: it alone knows."""
    byte = ctypes.c_ubyte()
    return tensor_at(ctypes.addressof(byte), num_bytes=1).device
