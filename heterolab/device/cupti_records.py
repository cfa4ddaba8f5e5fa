"""CUPTI's activity records as NumPy dtypes, and a buffer full of them as arrays.

CUPTI writes C structs, one behind another, each as long as its kind and the library's version
say. The fields read here have kept their places since CUDA 12.0; later versions only append.
The tables below are checked against NVIDIA's headers by a test (tests/data/cupti_layout.c printed
what it compares with). Names of records' fields are CUPTI's own; all times are its own clock's ns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.errors import DeviceUnavailable

Records = dict[str, NDArray[Any]]


class CuptiUnavailable(DeviceUnavailable):
    """Exact spans cannot be had here; says why, in words that end with a full stop."""


#: What CUPTI calls its versions before 13.0, by cuptiGetVersion.
RELEASES = {18: "12.1", 19: "12.0", 20: "12.2", 21: "12.3", 22: "12.4", 23: "12.5", 24: "12.6", 26: "12.8"}
OLDEST, NEWEST_MAJOR = 18, 13

#: Record → (CUPTI's number of the kind, {field: (type, offset in bytes)}).
FIELDS: dict[str, tuple[int, dict[str, tuple[str, int]]]] = {
    "memcpy": (
        1,
        {
            "copyKind": ("u1", 4),
            "srcKind": ("u1", 5),
            "dstKind": ("u1", 6),
            "flags": ("u1", 7),
            "bytes": ("u8", 8),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "deviceId": ("u4", 32),
            "contextId": ("u4", 36),
            "streamId": ("u4", 40),
            "correlationId": ("u4", 44),
            "runtimeCorrelationId": ("u4", 48),
            "graphNodeId": ("u8", 64),
            "graphId": ("u4", 72),
            "channelID": ("u4", 76),
        },
    ),
    "memset": (
        2,
        {
            "bytes": ("u8", 8),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "deviceId": ("u4", 32),
            "contextId": ("u4", 36),
            "streamId": ("u4", 40),
            "correlationId": ("u4", 44),
            "memoryKind": ("u2", 50),
            "graphNodeId": ("u8", 64),
            "graphId": ("u4", 72),
        },
    ),
    "kernel": (
        10,  # "concurrent kernel"; kind 3, "kernel", would make kernels run one after the other
        {
            "registersPerThread": ("u2", 6),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "deviceId": ("u4", 40),
            "contextId": ("u4", 44),
            "streamId": ("u4", 48),
            "gridX": ("i4", 52),
            "gridY": ("i4", 56),
            "gridZ": ("i4", 60),
            "blockX": ("i4", 64),
            "blockY": ("i4", 68),
            "blockZ": ("i4", 72),
            "staticSharedMemory": ("i4", 76),
            "dynamicSharedMemory": ("i4", 80),
            "correlationId": ("u4", 92),
            "name": ("u8", 104),  # the address of a C string
            "graphNodeId": ("u8", 144),
            "graphId": ("u4", 156),
        },
    ),
    "driver": (4, {}),  # the same struct as "runtime", filled in below
    "runtime": (
        5,
        {
            "cbid": ("u4", 4),
            "start": ("u8", 8),
            "end": ("u8", 16),
            "processId": ("u4", 24),
            "threadId": ("u4", 28),
            "correlationId": ("u4", 32),
            "returnValue": ("u4", 36),
        },
    ),
    "overhead": (
        17,
        {"overheadKind": ("u4", 4), "objectKind": ("u4", 8), "start": ("u8", 24), "end": ("u8", 32)},
    ),
    "unified_memory": (
        25,
        {
            "counterKind": ("u4", 4),
            "value": ("u8", 8),
            "start": ("u8", 16),
            "end": ("u8", 24),
            "address": ("u8", 32),
            "srcId": ("u4", 40),
            "dstId": ("u4", 44),
            "streamId": ("u4", 48),
            "processId": ("u4", 52),
            "flags": ("u4", 56),
        },
    ),
    "synchronization": (
        38,
        {
            "type": ("u4", 4),
            "start": ("u8", 8),
            "end": ("u8", 16),
            "correlationId": ("u4", 24),
            "contextId": ("u4", 28),
            "streamId": ("u4", 32),
            "cudaEventId": ("u4", 36),
        },
    ),
    "graph": (
        51,  # one record a launch of a whole graph, in place of one a node
        {
            "correlationId": ("u4", 4),
            "start": ("u8", 8),
            "end": ("u8", 16),
            "deviceId": ("u4", 24),
            "graphId": ("u4", 28),
            "contextId": ("u4", 32),
            "streamId": ("u4", 36),
        },
    ),
}
FIELDS["driver"] = (4, FIELDS["runtime"][1])

#: Record → {the first version with it: bytes}.
SIZES: dict[str, dict[int, int]] = {
    "memcpy": {OLDEST: 88, 26: 96},
    "memset": {OLDEST: 88},
    "kernel": {OLDEST: 208, 130_000: 216},
    "driver": {OLDEST: 40},
    "runtime": {OLDEST: 40},
    "overhead": {OLDEST: 40, 21: 48, 22: 56},
    "unified_memory": {OLDEST: 64, 26: 104},
    "synchronization": {OLDEST: 40, 26: 56},
    "graph": {OLDEST: 48, 21: 56},
}

#: The calls that put work on a GPU, by CUPTI's numbers ("cbid"): their records join a kernel or a
#: copy to the op that issued it. The second number is the per-thread default stream's variant.
DRIVER_CALLS = {
    "cuLaunchKernel": (307, 442),
    "cuLaunchKernelEx": (652, 653),
    "cuLaunchCooperativeKernel": (477, 478),
    "cuGraphLaunch": (514, 515),
    "cuMemcpyAsync": (306, 418),
    "cuMemcpyHtoDAsync_v2": (277, 421),
    "cuMemcpyDtoHAsync_v2": (279, 422),
    "cuMemcpyDtoDAsync_v2": (281, 423),
    "cuMemsetD8Async": (216, 428),
    "cuMemsetD32Async": (220, 430),
    "cuMemPrefetchAsync": (467, 468),
    "cuMemPrefetchAsync_v2": (716, 717),
}
RUNTIME_CALLS = {
    "cudaLaunchKernel": (211, 214),
    "cudaLaunchKernelExC": (430, 431),
    "cudaLaunchCooperativeKernel": (269, 270),
    "cudaGraphLaunch": (311, 312),
    "cudaMemcpy": (31, 215),
    "cudaMemcpyAsync": (41, 225),
    "cudaMemcpy2DAsync": (44, 228),
    "cudaMemset": (49, 233),
    "cudaMemsetAsync": (51, 235),
    "cudaMemPrefetchAsync": (252, 253),
    "cudaMemPrefetchAsync_v12020": (449, 450),
}

#: What the numbers in records mean.
COPY_KINDS = {1: "h2d", 2: "d2h", 8: "d2d", 9: "h2h", 10: "p2p"}
MEMORY_KINDS = {0: "unknown", 1: "pageable", 2: "pinned", 3: "device", 4: "array", 5: "managed"}
SYNC_TYPES = {1: "event", 2: "stream waits for event", 3: "stream", 4: "context"}
OVERHEADS = {
    1: "driver compiler",
    1 << 16: "buffer flush",
    2 << 16: "instrumentation",
    3 << 16: "resources",
    4 << 16: "module loading",
    5 << 16: "lazy function loading",
    6 << 16: "command buffer full",
    7 << 16: "buffer request",
    8 << 16: "unified-memory start",
}
UNIFIED_COUNTERS = {
    1: "bytes h2d",
    2: "bytes d2h",
    3: "CPU page faults",
    4: "GPU page faults",
    5: "thrashing",
    6: "throttling",
    7: "remote map",
    8: "bytes d2d",
}


def release(version: int) -> str:
    """cuptiGetVersion's number as the CUDA release people know: 130001 is 13.0.1."""
    if version >= 100_000:
        return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"
    return RELEASES.get(version, "12.x" if version > OLDEST else "11 or older")


def layouts(version: int) -> dict[str, np.dtype[Any]]:
    """The dtype of each record, for the library with this cuptiGetVersion.

    Raises
    ------
    CuptiUnavailable
        The version is older or newer than those whose layouts are known.
    """
    if version < OLDEST:
        raise CuptiUnavailable(
            f"CUPTI {release(version)} (API {version}) is too old; 12.0 to 13.x are known. "
            "Update: pip install nvidia-cuda-cupti-cu12."
        )
    if version // 10_000 > NEWEST_MAJOR:
        raise CuptiUnavailable(
            f"CUPTI {release(version)} is newer than this HeteroLab, which knows 12.0 to 13.x. "
            "Update HeteroLab, or put CUPTI 13 beside it: pip install 'nvidia-cuda-cupti<14'."
        )
    made: dict[str, np.dtype[Any]] = {}
    for record, (_, fields) in FIELDS.items():
        size = SIZES[record][max(first for first in SIZES[record] if first <= version)]
        named = {"kind": ("u4", 0), **fields}
        made[record] = np.dtype({
            "names": list(named),
            "formats": [format for format, _ in named.values()],
            "offsets": [offset for _, offset in named.values()],
            "itemsize": size,
        })
    return made


class Parser:
    """Buffers to arrays, one a kind of record.

    How long a record is, the walk must know for certain, or all behind it is nonsense. So the
    library itself is asked once a kind (`following`), and a size that the tables do not have is
    told (`problems`), not read.

    Parameters
    ----------
    version
        cuptiGetVersion.
    following
        ``following(address, valid, at)``: where the record behind the one at `at` begins
        (cuptiActivityGetNextRecord), None where the library says that there is no more.
    """

    def __init__(self, version: int, following: Callable[[int, int, int], int | None]) -> None:
        self.layouts = layouts(version)
        self.problems: list[str] = []
        self._following = following
        self._names = {FIELDS[name][0]: name for name in self.layouts}
        self._sizes: dict[int, int] = {}  # by kind, as the library told them
        self._unread: set[int] = set()  # kinds whose size is not the table's

    def parse(self, buffer: NDArray[np.uint8], valid: int, records: dict[str, list[NDArray[Any]]]) -> int:
        """Add the records in the first `valid` bytes of `buffer` to `records`; returns how many."""
        found = self._walk(buffer, valid)
        for kind, places in found.items():
            if kind in self._names and kind not in self._unread:
                layout = self.layouts[self._names[kind]]
                # Rows of bytes, copied out of the buffer, which is used again.
                rows = np.asarray(places)[:, None] + np.arange(layout.itemsize)
                records.setdefault(self._names[kind], []).append(buffer[rows].view(layout)[:, 0])
        return sum(map(len, found.values()))

    def _walk(self, buffer: NDArray[np.uint8], valid: int) -> dict[int, list[int]]:
        """Where the records of each kind begin."""
        words = buffer[: valid // 4 * 4].data.cast("I")
        found: dict[int, list[int]] = {}
        sizes, at = self._sizes, 0
        while at + 4 <= valid:
            kind = words[at >> 2]
            size = sizes.get(kind) or self._learn(buffer, valid, at, kind)
            if size is None or at + size > valid:
                break
            try:
                found[kind].append(at)
            except KeyError:
                found[kind] = [at]
            at += size
        return found

    def _learn(self, buffer: NDArray[np.uint8], valid: int, at: int, kind: int) -> int | None:
        """The size of a record of a kind met for the first time; None ends the walk."""
        name = self._names.get(kind)
        expected = self.layouts[name].itemsize if name else None
        if kind == 0:
            self._tell("a buffer ended in an unfinished record")
            return None
        behind = self._following(int(buffer.ctypes.data), valid, at)
        if behind is None:  # the last one, so its size cannot be learned from the next
            return expected
        size = behind - at
        if expected is not None and size != expected:
            self._unread.add(kind)
            self._tell(f"{name} records have {size} bytes here and {expected} in the headers: not read")
        self._sizes[kind] = size
        return size

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
