"""A CUDA driver without a GPU: real memory behind real addresses, and the real driver's rules, kept strictly.

What driver.py's Protocol promises, for tests and for dry runs. Device and host memory are files without a name, and a
mapping is a real mapping of them: a stitched range is one address range that numpy and torch read and write on the CPU.
What a real driver refuses is refused, with the rule that was broken; of what its documentation leaves open, the
strictest reading holds. Copies and writes happen at once, whatever the stream.

    machine      how much memory there is, in which pages, and what is not supported
    calls        every call by its CUDA name and its arguments, refused ones too
    fail(n)      the n-th call from now on fails, and changes nothing
    held         what has not been given back

    >>> driver = FakeDriver(FakeMachine(device_bytes=4 << 20))
    >>> gpu = Location(kind="device")
    >>> address = driver.reserve(2 << 20, alignment=2 << 20)
    >>> handle = driver.create(2 << 20, location=gpu)
    >>> driver.map(address, num_bytes=2 << 20, handle=handle)
    >>> driver.release(handle)
    >>> driver.write32(address, value=7, stream=0)
    Traceback (most recent call last):
    hotsplit.errors.BankError: cuMemsetD32Async: got CUDA_ERROR_ILLEGAL_ADDRESS (no access was set)
    >>> driver.set_access(address, num_bytes=2 << 20, locations=[gpu])
    >>> driver.write32(address, value=7, stream=0)
    >>> driver.held.device_bytes, driver.calls[-1].name
    (2097152, 'cuMemsetD32Async')
    >>> driver.unmap(address, num_bytes=2 << 20)
    >>> driver.free(address, num_bytes=2 << 20)
    >>> driver.held == NOTHING
    True
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hotsplit.bank.driver import Location, LocationKind, driver_error
from hotsplit.errors import BankError
from hotsplit.host.libc import MAP_FIXED, MAP_NORESERVE, PROT_NONE, READ_WRITE, checked
from hotsplit.units import MIB

_RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
_INVALID: Final = "CUDA_ERROR_INVALID_VALUE"
_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
_NOT_SUPPORTED: Final = "CUDA_ERROR_NOT_SUPPORTED"
_ILLEGAL: Final = "CUDA_ERROR_ILLEGAL_ADDRESS"

_FIGURES: Final[Mapping[LocationKind, str]] = {
    "device": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "host_numa": "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "host": "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
}
"""Which figure of the device tells that allocations of a kind are supported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeMachine:
    """What a fake driver pretends to run on."""

    device_bytes: int = 1 << 40
    """GPU memory."""
    host_bytes: int = 1 << 40
    """Host memory that the driver may allocate."""
    lockable_bytes: int = 1 << 40
    """Host memory that may be registered."""
    granularity: Mapping[LocationKind, int] = field(default_factory=dict)
    """Pages of an allocation by where it is, in bytes; 2 MiB where nothing is said."""
    unsupported: frozenset[LocationKind] = frozenset()
    """Where nothing can be allocated."""
    nodes: tuple[int, ...] = (0,)
    """NUMA nodes with memory."""
    attributes: Mapping[str, int | None] = field(default_factory=dict)
    """Figures of the device that differ from a machine that can do everything; None is unknown."""
    bus_id: str = "0000:17:00.0"
    """Where the GPU is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeCall:
    """One call of the driver."""

    name: str
    """Its CUDA name."""
    values: Mapping[str, object]
    """Its arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeHeld:
    """What has been taken and not given back."""

    reservations: int = 0
    """Reserved address ranges."""
    mappings: int = 0
    """Mapped allocations."""
    handles: int = 0
    """Handles that were not released."""
    registrations: int = 0
    """Registered pieces of host memory."""
    device_bytes: int = 0
    """GPU memory."""
    host_bytes: int = 0
    """Host memory of the driver's own."""


NOTHING: Final = FakeHeld()
"""Held by a driver that leaks nothing."""


@dataclass(kw_only=True, slots=True)
class _Allocation:
    """Physical memory: a file without a name."""

    file: int
    num_bytes: int
    location: Location
    is_released: bool = False
    is_mapped: bool = False


@dataclass(kw_only=True, slots=True)
class _Mapping:
    """An allocation behind addresses."""

    num_bytes: int
    handle: int
    location: Location
    has_access: bool = False


class FakeDriver:
    """A driver for machines without a GPU (a Driver, which says what each method does). For one thread at a time.

    Args:
        machine: What it pretends to run on.
    """

    def __init__(self, machine: FakeMachine | None = None) -> None:
        self.machine = machine or FakeMachine()
        """What it pretends to run on."""
        self.device = 0
        """Ordinal of the only device."""
        self.calls: list[FakeCall] = []
        """All so far, refused ones too."""
        self._fails: dict[str, tuple[int, str]] = {}  # call, "" for any -> how many more, error's name
        self._threads: set[int] = set()
        self._reserved: dict[int, int] = {}  # address -> bytes
        self._allocations: dict[int, _Allocation] = {}  # handle -> memory
        self._mapped: dict[int, _Mapping] = {}  # address -> mapping
        self._registered: dict[int, int] = {}  # address -> bytes
        self._last_handle = 0
        self.make_current()

    @property
    def held(self) -> FakeHeld:
        """What has not been given back."""
        return FakeHeld(
            reservations=len(self._reserved),
            mappings=len(self._mapped),
            handles=sum(not one.is_released for one in self._allocations.values()),
            registrations=len(self._registered),
            device_bytes=self._used("device"),
            host_bytes=self._used("host_numa", "host"),
        )

    def fail(self, at: int, *, call: str = "", error: str = _OUT_OF_MEMORY) -> None:
        """Let a call fail that has not been made yet, once; it changes nothing then.

        Args:
            at: Which of those to come, 1 is the next.
            call: Count calls of this CUDA name alone; "" for all.
            error: The driver's name of the error.
        """
        self._fails[call] = (at, error)

    def location_at(self, address: int) -> Location | None:
        """What lies behind an address; None where nothing is mapped.

        Args:
            address: Any.
        """
        found = self._mapping_at(address)
        return found[1].location if found else None

    def make_current(self) -> None:
        """Make the context current in the calling thread."""
        self._begin("cuCtxSetCurrent", needs_context=False)
        self._threads.add(threading.get_ident())

    def version(self) -> int:
        """13.0, as the real driver writes it."""
        self._begin("cuDriverGetVersion", needs_context=False)
        return 13000

    def attribute(self, name: str) -> int | None:
        """What the machine says; else 0 for what it does not support and for its NUMA node, and 1 for the others."""
        self._begin("cuDeviceGetAttribute", needs_context=False, name=name)
        unsupported = {_FIGURES[kind] for kind in self.machine.unsupported}
        return self.machine.attributes.get(name, 0 if name in unsupported or name == "HOST_NUMA_ID" else 1)

    def bus_id(self) -> str:
        """Where the device is on the PCI bus."""
        self._begin("cuDeviceGetPCIBusId", needs_context=False)
        return self.machine.bus_id

    def granularity(self, location: Location) -> int:
        """What sizes and addresses of an allocation must be a multiple of, in bytes."""
        self._begin("cuMemGetAllocationGranularity", needs_context=False, location=location)
        if location.kind in self.machine.unsupported:
            raise self._refused(_NOT_SUPPORTED, f"no allocations at {location}")
        return self._granularity(location)

    def reserve(self, num_bytes: int, *, alignment: int) -> int:
        """Reserve addresses, aligned as asked for and no better, so that nothing works by luck."""
        self._begin("cuMemAddressReserve", num_bytes=num_bytes, alignment=alignment)
        self._require(num_bytes > 0 and num_bytes % mmap.PAGESIZE == 0, "size in no whole pages of the host")
        self._require(alignment >= mmap.PAGESIZE and alignment.bit_count() == 1, "alignment that is no power of two")
        room = num_bytes + 2 * alignment
        start = checked("mmap", 0, room, PROT_NONE, _RESERVED, -1, 0)
        address = -(-start // alignment) * alignment
        address += 0 if address % (2 * alignment) else alignment
        for piece, end in ((start, address), (address + num_bytes, start + room)):
            if end > piece:
                checked("munmap", piece, end - piece)
        self._reserved[address] = num_bytes
        return address

    def free(self, address: int, *, num_bytes: int) -> None:
        """Give reserved addresses back: as they were reserved, and nothing mapped there."""
        self._begin("cuMemAddressFree", address=address, num_bytes=num_bytes)
        self._require(self._reserved.get(address) == num_bytes, "not what was reserved")
        self._require(not self._overlapping(address, num_bytes=num_bytes), "something is mapped there")
        del self._reserved[address]
        checked("munmap", address, num_bytes)

    def create(self, num_bytes: int, *, location: Location) -> int:
        """Allocate physical memory, in whole pages of where it is, as long as there is some."""
        self._begin("cuMemCreate", num_bytes=num_bytes, location=location)
        if location.kind in self.machine.unsupported:
            raise self._refused(_NOT_SUPPORTED, f"no allocations at {location}")
        self._require(num_bytes > 0 and num_bytes % self._granularity(location) == 0, "size in no whole pages")
        known = self.machine.nodes if location.kind == "host_numa" else (0,)
        self._require(location.index in known, f"there is no {location}")
        kinds: tuple[LocationKind, ...] = ("device",) if location.kind == "device" else ("host_numa", "host")
        limit = self.machine.device_bytes if location.kind == "device" else self.machine.host_bytes
        if self._used(*kinds) + num_bytes > limit:
            raise self._refused(_OUT_OF_MEMORY, f"{limit - self._used(*kinds)} bytes left")
        file = os.memfd_create(f"hotsplit-{location.kind}")
        os.ftruncate(file, num_bytes)
        self._last_handle += 1
        self._allocations[self._last_handle] = _Allocation(file=file, num_bytes=num_bytes, location=location)
        return self._last_handle

    def release(self, handle: int) -> None:
        """Let go of a handle, once."""
        self._begin("cuMemRelease", handle=handle)
        allocation = self._unreleased(handle)
        allocation.is_released = True
        self._drop_if_unused(handle)

    def map(self, address: int, *, num_bytes: int, handle: int) -> None:
        """Put a whole allocation behind reserved addresses, on a page of its memory."""
        self._begin("cuMemMap", address=address, num_bytes=num_bytes, handle=handle)
        allocation = self._unreleased(handle)
        self._require(num_bytes == allocation.num_bytes, "not the whole allocation")
        self._require(not allocation.is_mapped, "an allocation that is mapped elsewhere")
        self._require(address % self._granularity(allocation.location) == 0, "address on no page of its memory")
        self._require(self._is_reserved(address, num_bytes=num_bytes), "addresses that are not reserved")
        self._require(not self._overlapping(address, num_bytes=num_bytes), "something is mapped there")
        checked("mmap", address, num_bytes, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, allocation.file, 0)
        self._mapped[address] = _Mapping(num_bytes=num_bytes, handle=handle, location=allocation.location)
        allocation.is_mapped = True

    def unmap(self, address: int, *, num_bytes: int) -> None:
        """Take one mapping away, all of it."""
        self._begin("cuMemUnmap", address=address, num_bytes=num_bytes)
        mapping = self._mapped.get(address)
        if mapping is None or mapping.num_bytes != num_bytes:
            raise self._refused(_INVALID, "not a whole mapping")
        checked("mmap", address, num_bytes, PROT_NONE, _RESERVED | MAP_FIXED, -1, 0)
        del self._mapped[address]
        self._allocations[mapping.handle].is_mapped = False
        self._drop_if_unused(mapping.handle)

    def set_access(self, address: int, *, num_bytes: int, locations: Sequence[Location]) -> None:
        """Grant access to whole mappings; a host location only to memory of its own kind."""
        self._begin("cuMemSetAccess", address=address, num_bytes=num_bytes, locations=tuple(locations))
        inside = self._overlapping(address, num_bytes=num_bytes)
        is_whole = bool(inside) and min(inside) == address
        is_whole &= sum(one.num_bytes for one in inside.values()) == num_bytes
        self._require(is_whole, "not whole mappings")
        kinds = {one.location.kind for one in inside.values()}
        for location in locations:
            if location.kind != "device" and kinds != {location.kind}:
                raise self._refused(_NOT_SUPPORTED, f"access of {location} to other memory")
        self._require(Location(kind="device") in locations, "no access for the device")
        for mapping in inside.values():
            mapping.has_access = True
        checked("mprotect", address, num_bytes, READ_WRITE)

    def register(self, address: int, *, num_bytes: int) -> int:
        """Page-lock whole pages, once; their address on the device is the same."""
        self._begin("cuMemHostRegister", address=address, num_bytes=num_bytes)
        self._require(num_bytes > 0 and address % mmap.PAGESIZE == 0 == num_bytes % mmap.PAGESIZE, "no whole pages")
        if any(start < address + num_bytes and address < start + size for start, size in self._registered.items()):
            raise self._refused("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        if sum(self._registered.values()) + num_bytes > self.machine.lockable_bytes:
            raise self._refused(_OUT_OF_MEMORY, "too much locked memory")
        self._registered[address] = num_bytes
        return address

    def unregister(self, address: int) -> None:
        """Undo register(), once."""
        self._begin("cuMemHostUnregister", address=address)
        if self._registered.pop(address, None) is None:
            raise self._refused("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Copy at once; neither side may span two mappings."""
        self._begin("cuMemcpyAsync", target=target, source=source, num_bytes=num_bytes, stream=stream)
        for address in (target, source):
            self._require_access(address, num_bytes=num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Write one aligned word at once."""
        self._begin("cuMemsetD32Async", address=address, value=value, stream=stream)
        self._require(address % 4 == 0, "address of no word")
        self._require_access(address, num_bytes=4)
        ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF

    def _begin(self, call: str, /, *, needs_context: bool = True, **values: object) -> None:
        """Log a call, fail it if it is its turn, and refuse it in a thread without a context."""
        self.calls.append(FakeCall(name=call, values=values))
        for counted in ("", call):
            left, error = self._fails.pop(counted, (0, ""))
            if left == 1:
                raise self._refused(error)
            if left:
                self._fails[counted] = (left - 1, error)
        if needs_context and threading.get_ident() not in self._threads:
            raise self._refused("CUDA_ERROR_INVALID_CONTEXT", "none is current in this thread")

    def _refused(self, error: str, detail: str = "") -> BankError:
        return driver_error(self.calls[-1].name, name=error, detail=detail)

    def _require(self, is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition reads best in first place
        if not is_so:
            raise self._refused(_INVALID, otherwise)

    def _granularity(self, location: Location) -> int:
        return self.machine.granularity.get(location.kind, 2 * MIB)

    def _used(self, *kinds: LocationKind) -> int:
        return sum(one.num_bytes for one in self._allocations.values() if one.location.kind in kinds)

    def _unreleased(self, handle: int) -> _Allocation:
        allocation = self._allocations.get(handle)
        if allocation is None or allocation.is_released:
            raise self._refused(_INVALID, "a handle that was released")
        return allocation

    def _drop_if_unused(self, handle: int) -> None:
        allocation = self._allocations[handle]
        if allocation.is_released and not allocation.is_mapped:
            os.close(self._allocations.pop(handle).file)

    def _is_reserved(self, address: int, *, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self._reserved.items())

    def _overlapping(self, address: int, *, num_bytes: int) -> dict[int, _Mapping]:
        end = address + num_bytes
        return {at: one for at, one in self._mapped.items() if at < end and address < at + one.num_bytes}

    def _mapping_at(self, address: int) -> tuple[int, _Mapping] | None:
        return next(((at, one) for at, one in self._mapped.items() if at <= address < at + one.num_bytes), None)

    def _require_access(self, address: int, *, num_bytes: int) -> None:
        """Bytes of one mapping with access, or memory that is not the driver's to judge."""
        found = self._mapping_at(address)
        if found is None:
            if any(start < address + num_bytes and address < start + size for start, size in self._reserved.items()):
                raise self._refused(_ILLEGAL, "nothing is mapped there")
            return
        start, mapping = found
        self._require(address + num_bytes <= start + mapping.num_bytes, "bytes of two mappings")
        if not mapping.has_access:
            raise self._refused(_ILLEGAL, "no access was set")
