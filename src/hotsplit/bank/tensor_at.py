"""Tensors over memory that is not torch's own: by address, without a copy, of the device that the caller names.

What ranges by address are made of. Through DLPack and not through __cuda_array_interface__: that one lets torch ask the
driver whose memory it is, and of host memory that a GPU reads the driver says: the processor's. DLPack says it itself,
and the same code makes tensors of the CPU, so that it runs in tests.

    >>> import ctypes
    >>> memory = (ctypes.c_ubyte * 4)(1, 2, 3, 4)
    >>> held = cpu_tensor(ctypes.addressof(memory), num_bytes=4)
    >>> held[3] = 9
    >>> held.dtype, list(memory)
    (torch.uint8, [1, 2, 3, 9])

Source: struct and constants as dlpack.h has them (DLPack 0.x, which every version of torch takes).
"""

from __future__ import annotations

import ctypes
from typing import Final, Protocol

import torch
import torch.utils.dlpack

from hotsplit.errors import BankError

_CPU, _CUDA = 1, 2  # DLDeviceType
_UNSIGNED: Final = 1  # DLDataTypeCode

_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = (ctypes.c_size_t,)
_NEW_CAPSULE = ctypes.pythonapi.PyCapsule_New
_NEW_CAPSULE.restype = ctypes.py_object
_NEW_CAPSULE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_NAME: Final = b"dltensor"  # a capsule keeps only its address


class TensorAt(Protocol):
    """Makes a tensor over memory that is not its own."""

    def __call__(self, address: int, *, num_bytes: int) -> torch.Tensor:
        """The bytes at an address, [num_bytes], uint8, without a copy; they stay the caller's to give back."""


class DeviceTensors:
    """Tensors over addresses that a GPU reads (a TensorAt).

    Args:
        device: Ordinal among the visible devices.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def __call__(self, address: int, *, num_bytes: int) -> torch.Tensor:
        """The bytes at an address, [num_bytes], uint8, on the device.

        Args:
            address: Of GPU memory, or of host memory that the GPU reads.
            num_bytes: How many.
        """
        return _tensor(address, num_bytes=num_bytes, kind=_CUDA, device=self._device)


def cpu_tensor(address: int, *, num_bytes: int) -> torch.Tensor:
    """The bytes at an address, [num_bytes], uint8, on the CPU: for drivers whose memory is host memory.

    Args:
        address: That this process reads and writes.
        num_bytes: How many.
    """
    return _tensor(address, num_bytes=num_bytes, kind=_CPU, device=0)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor, and behind it the one number that its shape is."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extent", ctypes.c_int64),
    )


def _tensor(address: int, *, num_bytes: int, kind: int, device: int) -> torch.Tensor:
    """Tell torch of the bytes. The struct is the C library's, and its deleter is free(): no Python at the end."""
    place: int | None = _LIBC.malloc(ctypes.sizeof(_ManagedTensor))
    if place is None:
        raise BankError("tensor over memory", got="no memory left")
    told = _ManagedTensor.from_address(place)
    told.data, told.byte_offset, told.manager = address, 0, None
    told.device_kind, told.device_index = kind, device
    told.code, told.bits, told.lanes = _UNSIGNED, 8, 1
    told.num_dimensions, told.extent = 1, num_bytes
    told.shape, told.strides = place + _ManagedTensor.extent.offset, None
    told.deleter = ctypes.cast(_LIBC.free, ctypes.c_void_p)
    made = torch.utils.dlpack.from_dlpack(_NEW_CAPSULE(place, _NAME, None))
    if made.data_ptr() != address:
        raise BankError("tensor over memory", got="a copy of it", wanted="the memory itself")
    return made
