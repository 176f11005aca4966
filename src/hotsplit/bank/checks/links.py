"""The bounds: how fast the GPU's memory and the link are, by plain copies, before anything of ours is measured.

HBM is copied by torch and read by the same kernel as cold rows will be; the link is measured by the copy engine, both
ways, alone and at once. Copies of one measurement go back to back, each to and from a place of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch

from hotsplit.bank.checks.bench import Bench
from hotsplit.bank.checks.device import join, median_s
from hotsplit.bank.checks.findings import Figure, Finding
from hotsplit.bank.checks.machine import link_files
from hotsplit.bank.swap import Stream
from hotsplit.units import gib

_MOST_COPIES = 64
"""Of one measurement."""


def check_hbm(bench: Bench) -> Iterator[Finding]:
    """Copy and read GPU memory.

    Args:
        bench: Gets the rate "hbm".
    """
    device, num_bytes, repeats = bench.device, bench.sizes.hbm_bytes, bench.sizes.repeats
    bench.require_time(2)
    source, target = (bench.tensor(num_bytes, dtype=torch.uint8) for _ in range(2))
    source.zero_()
    copied = 2 * num_bytes / median_s(device, lambda: _copy(target, source), repeats=repeats)
    words = source.view(torch.int32).view(-1, num_bytes // 4 // _num_rows(bench))
    order_N = torch.randperm(len(words), device=device.type, generator=bench.generator())
    read = num_bytes / median_s(device, lambda: _read(bench, words, order_N), repeats=repeats)
    bench.rates["hbm"] = max(copied, read)
    bound = _hbm_bound(bench)
    for name, value in (("copy, read and written bytes", copied), ("read", read)):
        yield Figure(name=name, value=value, unit="bytes/s", bound=bound, bound_is="clock x bus width x 2")


def check_dma(bench: Bench) -> Iterator[Finding]:
    """Let the copy engine use the link.

    Args:
        bench: Gets the rates "h2d", "d2h" and, where the kernel tells it, "link".
    """
    device, sizes = bench.device, bench.sizes
    bench.require_time(5)
    largest = sizes.copy_bytes[-1]
    on_device = bench.tensor(largest, dtype=torch.uint8)
    there = on_device.data_ptr()
    with device.pinned(largest) as held:
        host = held.data_ptr()
        rates = {
            (way, size): _dma_rate(bench, target, source, size=size)
            for way, target, source in (("h2d", there, host), ("d2h", host, there))
            for size in sizes.copy_bytes
        }
        link = link_rate(link_files(device.driver.bus_id()))  # at once after the copies: a link that idles slows down
        for way in ("h2d", "d2h"):
            bench.rates[way] = max(rates[way, size] for size in sizes.copy_bytes)
        if link is not None:
            bench.rates["link"] = link
        for (way, size), rate in rates.items():
            yield _dma_figure(bench, f"{way}, copies of {gib(size)}", rate=rate)
        both = _both_ways_rate(bench, there, host, num_bytes=largest // 2)
        bound = bench.rates["h2d"] + bench.rates["d2h"]
        name = "both ways at once, sum"
        yield Figure(name=name, value=both, unit="bytes/s", bound=bound, bound_is="the sum of one way each")


def link_rate(files: dict[str, str | None]) -> float | None:
    """What a PCIe link carries one way, before the overhead of its packets; None where it is not known.

    Args:
        files: machine.link_files().

    Returns:
        Bytes per second.

    >>> link_rate({"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}) / 1e9
    63.01538461538462
    """
    speed = re.match(r"([\d.]+) GT/s", files.get("current_link_speed") or "")
    width = files.get("current_link_width") or ""
    if speed is None or not width.isdigit():
        return None
    transfers = float(speed[1])
    # 8b/10b up to generation 2, 128b/130b up to 5, flits of 256 bytes with 242 of content from 6 on.
    code = 0.8 if transfers < 8 else 128 / 130 if transfers < 64 else 242 / 256
    return transfers * 1e9 * int(width) * code / 8 or None


def _dma_figure(bench: Bench, name: str, *, rate: float) -> Figure:
    bound = bench.rates.get("link")
    bound_is = "the link, by its generation and width" if bound else "the kernel does not tell the link's speed"
    return Figure(name=name, value=rate, unit="bytes/s", bound=bound, bound_is=bound_is)


def _dma_rate(bench: Bench, target: int, source: int, *, size: int) -> float:
    """Bytes per second of copies of one size, all places of both sides in turn."""
    num_copies = min(_MOST_COPIES, bench.sizes.copy_bytes[-1] // size)
    work = partial(_copies, bench, (target, source), size=size, num_copies=num_copies, stream="compute")
    return num_copies * size / median_s(bench.device, work, repeats=bench.sizes.repeats)


def _both_ways_rate(bench: Bench, there: int, host: int, *, num_bytes: int) -> float:
    """Bytes per second of both ways together; each way has a half of either side to itself."""
    device = bench.device

    def work() -> None:
        join(device, first="compute", then="side")
        _copies(bench, (there, host), size=num_bytes, num_copies=1, stream="compute")
        _copies(bench, (host + num_bytes, there + num_bytes), size=num_bytes, num_copies=1, stream="side")
        join(device, first="side", then="compute")

    return 2 * num_bytes / median_s(device, work, repeats=bench.sizes.repeats)


def _copies(bench: Bench, places: tuple[int, int], *, size: int, num_copies: int, stream: Stream) -> None:
    """Enqueue copies back to back: target and source go on by one size each."""
    target, source = places
    handle = bench.device.streams.handle(stream)
    for start in range(0, num_copies * size, size):
        bench.device.calls.copy(target + start, source=source + start, num_bytes=size, stream=handle)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _read(bench: Bench, words_RW: torch.Tensor, order_N: torch.Tensor) -> None:
    bench.device.kernels.sum_rows(words_RW, order=order_N)


def _num_rows(bench: Bench) -> int:
    """Rows that the memory is cut into: powers of two, so that they come out even."""
    return 1 << max(0, (bench.sizes.hbm_bytes // bench.sizes.read_row_bytes).bit_length() - 1)


def _hbm_bound(bench: Bench) -> float | None:
    """What the data sheet promises: two transfers per clock on the whole width of the bus."""
    clock_khz = bench.device.driver.attribute("MEMORY_CLOCK_RATE")
    width = bench.device.driver.attribute("GLOBAL_MEMORY_BUS_WIDTH")
    return 2e3 * clock_khz * width / 8 if clock_khz and width else None
