"""The CUDA driver calls that hotsplit needs, every return code checked, and nothing loaded before the first of them.

Stands under cuda_ranges.py, the host's registered pages and the swaps. The calls go through cuda.bindings, NVIDIA's own
Python module, and not through ctypes: every current torch with CUDA brings it, its structs and constants are made from
the driver's headers, and it releases Python's lock during a call. It is imported by load_driver() alone, so a machine
without a driver imports this module and is told what is missing when it asks for a range.

    driver = load_driver(0)              the primary context, torch's own, is current in this thread afterwards
    driver.granularity(Location(...))    asked, never assumed
    reserve, create, map, set_access     in this order; unmap and free in the other; release once it is mapped
    copy, write32                        on a stream, by address; other streams see nothing of their order

Addresses, handles and streams are plain ints. fake_driver.py has a Driver for machines without a GPU.

    >>> driver_error("cuMemMap", name="CUDA_ERROR_INVALID_VALUE").error_name
    'CUDA_ERROR_INVALID_VALUE'
    >>> str(Location(kind="host_numa", index=1))
    'HOST_NUMA node 1'
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from hotsplit.errors import BankError

LocationKind: TypeAlias = Literal["device", "host_numa", "host"]

_BUS_ID_BYTES: Final = 16
"""Room for "0000:17:00.0" and its NUL; a domain may have more than four digits."""

_CURES: Final = {
    "CUDA_ERROR_NO_DEVICE": "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart after the update of the driver",
    "CUDA_ERROR_NOT_PERMITTED": "in a container, start it with --cap-add SYS_NICE",
}
"""By the driver's error name: the next step, where one is sure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A kind of memory, and which of that kind."""

    kind: LocationKind
    """The GPU's own memory, host memory of one NUMA node, or host memory of no node in particular."""
    index: int = 0
    """Device ordinal or NUMA node; 0 for plain host memory."""

    def __str__(self) -> str:
        names = {"device": f"device {self.index}", "host_numa": f"HOST_NUMA node {self.index}", "host": "HOST"}
        return names[self.kind]


class Driver(Protocol):
    """One device's driver. Each method makes one call, or a pair that must not be torn apart.

    Every method raises BankError, with the call's name and the driver's error name, and then has changed nothing.
    """

    device: int
    """Ordinal among the visible devices, as torch counts them."""

    def make_current(self) -> None:
        """Make the primary context current; once in each thread that calls any of what follows."""

    def version(self) -> int:
        """CUDA version of the driver, 1000 x major + 10 x minor."""

    def attribute(self, name: str) -> int | None:
        """A figure of the device, by its name without CU_DEVICE_ATTRIBUTE_; None where it is not known here."""

    def bus_id(self) -> str:
        """Where the device is on the PCI bus, as /sys writes it: "0000:17:00.0"."""

    def granularity(self, location: Location) -> int:
        """What sizes and addresses of an allocation there must be a multiple of, in bytes."""

    def reserve(self, num_bytes: int, *, alignment: int) -> int:
        """Reserve addresses and return the first one; nothing lies behind them yet."""

    def free(self, address: int, *, num_bytes: int) -> None:
        """Give reserved addresses back, all of one reservation; nothing may be mapped there."""

    def create(self, num_bytes: int, *, location: Location) -> int:
        """Allocate physical memory and return its handle."""

    def release(self, handle: int) -> None:
        """Let go of a handle; the memory goes with its last mapping."""

    def map(self, address: int, *, num_bytes: int, handle: int) -> None:
        """Put a whole allocation behind reserved addresses; nobody has access yet."""

    def unmap(self, address: int, *, num_bytes: int) -> None:
        """Take a whole mapping away. NOTE: not ordered on a stream; nothing that runs may use it."""

    def set_access(self, address: int, *, num_bytes: int, locations: Sequence[Location]) -> None:
        """Let devices and processors read and write whole mappings; a host location only where host memory lies."""

    def register(self, address: int, *, num_bytes: int) -> int:
        """Page-lock host memory for every context and return its address on the device."""

    def unregister(self, address: int) -> None:
        """Undo register(); nothing that runs may use it."""

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy by address. NOTE: neither side may span two mappings."""

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue the write of one aligned 32-bit word, its value taken now.

        An int64 entry that is never negative and stays below 2**31 is written whole by its first word.
        """


def load_driver(device: int = 0) -> Driver:
    """The real driver, with the device's primary context current in the calling thread.

    NOTE: after torch has made its own context there, which is the same one. It stays until the process ends.

    Args:
        device: Ordinal among the visible devices.

    Raises:
        BankError: cuda.bindings, the driver or the device is missing; the message says which.
    """
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BankError(
            "CUDA driver calls",
            got=f"no module cuda.bindings ({error})",
            do="install a CUDA build of torch, which brings it, or: pip install cuda-bindings",
        ) from error
    return CudaDriver(bindings, device=device)


def driver_error(call: str, *, name: str, detail: str = "") -> BankError:
    """A refusal of the driver as an error of ours.

    Args:
        call: "cuMemMap".
        name: The driver's name of the error; also the attribute error_name.
        detail: What else is known.
    """
    got = f"{name} ({detail})" if detail else name
    return BankError(call, got=got, do=_CURES.get(name), call=call, error_name=name)


class CudaDriver:
    """The driver behind cuda.bindings (a Driver).

    Args:
        bindings: The module cuda.bindings.driver.
        device: Ordinal among the visible devices.

    Raises:
        BankError: The driver or the device is missing.
    """

    def __init__(self, bindings: Any, *, device: int) -> None:
        self._bindings = bindings
        self.device = device
        """Ordinal among the visible devices."""
        self._call("cuInit", 0)
        self._handle = self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        self.make_current()

    def make_current(self) -> None:
        """Make the primary context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def version(self) -> int:
        """CUDA version of the driver."""
        return int(self._call("cuDriverGetVersion"))

    def attribute(self, name: str) -> int | None:
        """A figure of the device.

        Args:
            name: Without CU_DEVICE_ATTRIBUTE_.

        Returns:
            None where cuda.bindings or the driver is older than the figure, which says nothing about the device.
        """
        number = getattr(self._bindings.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if number is None:
            return None
        try:
            return int(self._call("cuDeviceGetAttribute", number, self._handle))
        except BankError as error:
            if getattr(error, "error_name", None) == "CUDA_ERROR_INVALID_VALUE":
                return None
            raise

    def bus_id(self) -> str:
        """Where the device is on the PCI bus."""
        text: bytes = self._call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, self._handle)
        return text.split(b"\0")[0].decode("ascii").lower()

    def granularity(self, location: Location) -> int:
        """What sizes and addresses of an allocation must be a multiple of.

        Args:
            location: Of the allocation.
        """
        least = self._bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._allocation(location), least))

    def reserve(self, num_bytes: int, *, alignment: int) -> int:
        """Reserve addresses.

        Args:
            num_bytes: Whole pages.
            alignment: Of the first one, a power of two.
        """
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free(self, address: int, *, num_bytes: int) -> None:
        """Give reserved addresses back.

        Args:
            address: From reserve().
            num_bytes: As it was reserved.
        """
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int, *, location: Location) -> int:
        """Allocate physical memory.

        Args:
            num_bytes: A multiple of the granularity.
            location: Where.
        """
        return int(self._call("cuMemCreate", num_bytes, self._allocation(location), 0))

    def release(self, handle: int) -> None:
        """Let go of a handle.

        Args:
            handle: From create().
        """
        self._call("cuMemRelease", handle)

    def map(self, address: int, *, num_bytes: int, handle: int) -> None:
        """Put a whole allocation behind reserved addresses.

        Args:
            address: On a page of a reservation.
            num_bytes: Of the allocation.
            handle: From create().
        """
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, *, num_bytes: int) -> None:
        """Take a whole mapping away.

        Args:
            address: Where it was mapped.
            num_bytes: As it was mapped.
        """
        self._call("cuMemUnmap", address, num_bytes)

    def set_access(self, address: int, *, num_bytes: int, locations: Sequence[Location]) -> None:
        """Let devices and processors read and write whole mappings.

        Args:
            address: Where the first one begins.
            num_bytes: Of all of them.
            locations: Who.
        """
        self._call("cuMemSetAccess", address, num_bytes, [self._access(one) for one in locations], len(locations))

    def register(self, address: int, *, num_bytes: int) -> int:
        """Page-lock host memory for every context.

        Args:
            address: On a page.
            num_bytes: Whole pages.
        """
        flags = self._bindings.CU_MEMHOSTREGISTER_PORTABLE | self._bindings.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, num_bytes, flags)
        try:
            return int(self._call("cuMemHostGetDevicePointer", address, 0))
        except BankError:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        """Undo register().

        Args:
            address: As it was registered.
        """
        self._call("cuMemHostUnregister", address)

    def copy(self, target: int, *, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy by address.

        Args:
            target: First byte to write.
            source: First byte to read.
            num_bytes: How many.
            stream: Its handle, torch.cuda.Stream.cuda_stream; 0 is the default stream.
        """
        self._call("cuMemcpyAsync", target, source, num_bytes, stream)

    def write32(self, address: int, *, value: int, stream: int) -> None:
        """Enqueue the write of one word.

        A memset of one word and not cuStreamWriteValue32: it is stream-ordered on every device and for any memory, asks
        for no capability, and carries its value in the call just as well.

        Args:
            address: Of the word, a multiple of 4.
            value: -2**31 to 2**31 - 1.
            stream: Its handle.
        """
        self._call("cuMemsetD32Async", address, value & 0xFFFFFFFF, 1, stream)

    def _allocation(self, location: Location) -> Any:
        properties = self._bindings.CUmemAllocationProp()
        properties.type = self._bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._place(properties.location, location=location)
        return properties

    def _access(self, location: Location) -> Any:
        description = self._bindings.CUmemAccessDesc()
        description.flags = self._bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._place(description.location, location=location)
        return description

    def _place(self, target: Any, *, location: Location) -> None:
        kinds = self._bindings.CUmemLocationType
        target.type = getattr(kinds, f"CU_MEM_LOCATION_TYPE_{location.kind.upper()}")
        target.id = location.index

    def _call(self, name: str, *arguments: Any) -> Any:
        """Make one call; its one result, or None."""
        try:
            status, *results = getattr(self._bindings, name)(*arguments)
        except RuntimeError as error:  # cuda.bindings found no driver library, or no such call in it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            do = "install NVIDIA's driver, or a newer one; in a container, start it with --gpus all"
            raise BankError(name, got=f"no CUDA driver ({reason})", do=do, call=name) from error
        if status != self._bindings.CUresult.CUDA_SUCCESS:
            raise driver_error(name, name=self._error_name(status))
        return results[0] if results else None

    def _error_name(self, status: Any) -> str:
        _, name = self._bindings.cuGetErrorName(status)
        return name.decode("ascii") if name else f"error {int(status)}"
