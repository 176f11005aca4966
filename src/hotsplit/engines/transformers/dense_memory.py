"""Dense weights in private memory: what from_pretrained leaves in a mapped file is copied out of it.

safetensors maps the checkpoint, and a weight that keeps its type stays a view of the mapping. To the kernel that is page
cache: under pressure (cold rows pass through the same cache) it is dropped first, although every token needs it. Copied
one by one the peak is one tensor more, since the file's pages can go at any time.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hotsplit.bank.arena import Arena
from hotsplit.bank.mapped import populate
from hotsplit.errors import BankError
from hotsplit.host.pages import HUGE_PAGE_BYTES

_LINE_BYTES: Final = 64
Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address, shape, strides and type: tensors that agree in all are one."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Mapping:
    """One mapping of a file into this process."""

    begin: int
    """First address."""
    end: int
    """Address after the last."""
    offset: int
    """In the file, of the first address."""
    path: str
    """Of the file."""


class FileMappings:
    """Which addresses of this process are a file's.

    Args:
        root: Where /proc lies; another one only in tests. Without it nothing counts as a file's.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        try:
            lines = (root / "proc/self/maps").read_text().splitlines()
        except OSError:
            lines = []
        self._mappings = sorted(_of_files(lines))

    def at(self, address: int) -> _Mapping | None:
        """The file's mapping that lies there, if one does.

        Args:
            address: Of the first byte.
        """
        before = bisect.bisect_right(self._mappings, address, key=lambda mapping: mapping.begin) - 1
        found = self._mappings[before] if before >= 0 else None
        return found if found is not None and address < found.end else None


def _of_files(lines: list[str]) -> Iterator[_Mapping]:
    """Every mapping that has an inode."""
    for line in lines:
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        if inode != "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield _Mapping(begin=begin, end=end, offset=int(offset, 16), path=path[0] if path else "a mapped file")


def move_out_of_files(model: Any, *, mappings: FileMappings | None = None) -> int:
    """Copy parameters and buffers that lie in mapped files to private memory; tied ones stay tied.

    Args:
        model: On the CPU; experts that were left out have no parameters.
        mappings: Of this process as it is now; others only in tests.

    Returns:
        Bytes that were copied.

    Raises:
        BankError: A file is shorter than it was, or cannot be read.
    """
    mappings = mappings or FileMappings()
    copies: dict[Key, torch.Tensor] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.device.type != "cpu" or not tensor.numel():
            continue
        mapping = mappings.at(tensor.data_ptr())
        if mapping is None:
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in copies:
            _require_readable(tensor, mapping=mapping)
            copies[key] = _room(tensor.detach()).copy_(tensor.detach())
        tensor.data = copies[key]
    return sum(copy.nbytes for copy in copies.values())


def _require_readable(tensor: torch.Tensor, *, mapping: _Mapping) -> None:
    """Have the pages read by a call that fails: a touch of one that cannot be read would kill the process."""
    address = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = address + (steps + 1) * tensor.itemsize
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    failure = populate(start, end - start)
    last = mapping.offset + end - mapping.begin
    try:
        size = Path(mapping.path).stat().st_size
    except OSError:  # deleted: what is mapped of it stays whole
        size = last
    if failure is not None or size < last:
        got = f"a file of {size} bytes" if size < last else str(failure)
        raise BankError(f"{mapping.path} ended early", got=got, wanted=f"{last} bytes", do="load the model again")


def _room(like: torch.Tensor) -> torch.Tensor:
    """Room like a tensor's, at the same place in a cache line, by which float32 products round.

    A large one is in huge pages where the kernel gives them.
    """
    if not like.is_contiguous():
        return torch.empty_like(like)
    rest = like.data_ptr() % _LINE_BYTES
    size = rest + like.nbytes
    if like.nbytes < HUGE_PAGE_BYTES:
        memory = torch.empty(size, dtype=torch.uint8).numpy().data[rest:]  # torch's own begins on a line
    else:
        memory = Arena(size).part(rest, like.nbytes)  # what it would say of huge pages is said once, of the rows
    # A storage of its own, not a view of something shared: torch.save() writes whole storages.
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
