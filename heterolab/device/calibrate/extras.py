"""Costs that the profile's file keeps under ``notes``: no section charges them (yet).

Memory that is allocated, launches in a CUDA graph, and the host's own memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from heterolab.device.base import CudaSource
from heterolab.device.calibrate.figures import Json, median, spread
from heterolab.pipeline.kernels import empty

GRAPH_LAUNCHES = 100
#: `cudaDeviceAttr`: what a device says of itself.
SMS, THREADS_PER_SM, BLOCKS_PER_SM, L2_BYTES = 16, 39, 106, 38
CONCURRENT_MANAGED, COPY_ENGINES = 89, 40
#: Kernels that run at once at most, by compute capability (CUDA C++ Programming Guide, "resident
#: grids per device"); all others from 6.0 on: 128.
RESIDENT_GRIDS = {(6, 1): 32, (6, 2): 16, (7, 2): 16}


def attributes(device: Any) -> Json:
    """What a CUDA device says of itself: processors, their room, caches."""
    runtime, number = device.runtime, device.native.id
    properties = runtime.getDeviceProperties(number)

    def asked(which: int) -> int:
        return int(runtime.deviceGetAttribute(which, number))

    capability = int(properties["major"]), int(properties["minor"])
    return {
        "sms": asked(SMS),
        "threads_per_sm": asked(THREADS_PER_SM),
        "blocks_per_sm": asked(BLOCKS_PER_SM),
        "kernels": RESIDENT_GRIDS.get(capability, 128),
        "l2_bytes": asked(L2_BYTES),
        "copy_engines": asked(COPY_ENGINES),
        "concurrent_managed_access": bool(asked(CONCURRENT_MANAGED)),
        "compute_capability": f"{capability[0]}.{capability[1]}",
    }


def _timed(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Times of `fn`, ns; what it gives is dropped outside of them."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        made = fn()
        times.append(float(time.perf_counter_ns() - start))
        del made
    return times


def allocation(device: Any) -> Json:
    """ns of allocating pinned and device memory from the driver, past CuPy's pools, by bytes."""
    cuda = device.cupy.cuda
    return {
        str(nbytes): {
            "pinned": spread(_timed(partial(cuda.PinnedMemory, nbytes), 3)),
            "device": spread(_timed(partial(cuda.Memory, nbytes), 3)),
        }
        for nbytes in (1 << 20, 1 << 24, 1 << 26)
    }


def graph(device: Any) -> Json:
    """ns of one launch of :data:`GRAPH_LAUNCHES` empty kernels as a CUDA graph: the host's call, and
    until all have ended."""
    source = empty().cuda
    assert isinstance(source, CudaSource)
    stream = device.cupy.cuda.Stream(non_blocking=True)
    function = device.cupy.RawKernel(source.code, source.entry)
    function((1,), (32,), (), stream=stream)
    stream.synchronize()
    stream.begin_capture()
    with stream:
        for _ in range(GRAPH_LAUNCHES):
            function((1,), (32,), ())
    captured = stream.end_capture()
    calls, walls = [], []
    for _ in range(23):
        start = time.perf_counter_ns()
        captured.launch(stream)
        called = time.perf_counter_ns()
        stream.synchronize()
        calls.append(float(called - start))
        walls.append(float(time.perf_counter_ns() - start))
    return {"launches": GRAPH_LAUNCHES, "call": spread(calls[3:]), "until done": spread(walls[3:])}


def host_memory(nbytes: int = 1 << 26) -> Json:
    """Bytes a ns at which the host copies its own memory: one core, and several at once."""
    cores = min(4, os.cpu_count() or 1)
    pairs = [(np.ones(nbytes // 8), np.zeros(nbytes // 8)) for _ in range(cores)]

    def copied(pair: tuple[Any, Any]) -> None:
        np.copyto(pair[1], pair[0])  # lets go of the interpreter lock

    copied(pairs[0])
    alone = _timed(lambda: copied(pairs[0]), 7)
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(copied, pairs))
        together = _timed(lambda: list(pool.map(copied, pairs)), 5)
    return {
        "bytes": nbytes,
        "one core": spread(alone) | {"bytes_per_ns": round(nbytes / median(alone), 3)},
        f"{cores} threads": spread(together) | {"bytes_per_ns": round(cores * nbytes / median(together), 3)},
    }


def shared_memory_cost(nbytes: int = 1 << 22) -> Json:
    """What handing an array to another process by shared memory costs: making a block and opening
    it, and ns a byte of copying into it."""
    values, makes, opens, copies = np.ones(nbytes, np.uint8), [], [], []
    for _ in range(7):
        start = time.perf_counter_ns()
        block = shared_memory.SharedMemory(create=True, size=nbytes)
        try:
            assert block.buf is not None
            inside = np.frombuffer(block.buf, np.uint8, nbytes)
            inside[:] = values  # the pages come with the first touch
            touched = time.perf_counter_ns()
            inside[:] = values
            copied = time.perf_counter_ns()
            del inside
            other = shared_memory.SharedMemory(block.name)
            other.close()
            opened = time.perf_counter_ns()
        finally:
            block.close()
            block.unlink()
        makes.append(float(touched - start))
        copies.append((copied - touched) / nbytes)
        opens.append(float(opened - copied))
    return {
        "bytes": nbytes,
        "make and fill": spread(makes),
        "open": spread(opens),
        "copy_ns_per_byte": round(median(copies), 4),
    }
