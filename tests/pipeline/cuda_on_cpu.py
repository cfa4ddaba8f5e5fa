"""Run our CUDA C++ on the CPU: each thread of a block is a thread here, block after block.

Slow and small, but it is the very source that the GPU gets, with real barriers, so it finds a
wrong index, a missing bounds check and a missing ``__syncthreads`` on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heterolab.device.base import CudaSource

COMPILER = shutil.which("g++")

_SHIM = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <thread>
#include <vector>
struct Index { int x; };
static thread_local Index threadIdx;
static Index blockIdx, blockDim, gridDim;
static std::barrier<>* everyone;
static float dynamic_shared[16384];
#define __global__
#define __launch_bounds__(threads)
#define __device__
#define __shared__ static
static void __syncthreads() { everyone->arrive_and_wait(); }
using std::max; using std::min;
"""

_LAUNCH = r"""
extern "C" void launch(int blocks, int threads %(parameters)s) {
    gridDim.x = blocks; blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        std::barrier<> meeting(threads);
        everyone = &meeting; blockIdx.x = block;
        std::vector<std::thread> crew;
        for (int t = 0; t < threads; ++t)
            crew.emplace_back([=, &meeting] {
                threadIdx.x = t;
                %(entry)s(%(names)s);
                meeting.arrive_and_drop();
            });
        for (auto& thread : crew) thread.join();
    }
}
"""


def launch(source: CudaSource, reads: Sequence[Any], writes: Sequence[Any], folder: Path) -> None:
    """One launch of `source` over NumPy arrays; `folder` gets the compiled library."""
    library = folder / f"{source.entry}.so"
    arguments = source.arguments(reads, writes)
    if not library.exists():
        types = [_c_type(a) for a in arguments]
        names = [f"a{i}" for i in range(len(arguments))]
        parameters = "".join(f", {t} {n}" for t, n in zip(types, names, strict=True))
        code = source.code.replace("extern __shared__ float vector[];", "float* vector = dynamic_shared;")
        tail = _LAUNCH % {"parameters": parameters, "entry": source.entry, "names": ", ".join(names)}
        path = folder / f"{source.entry}.cpp"
        path.write_text(_SHIM + code + tail)
        command = [
            COMPILER,
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            "-pthread",
            "-o",
            str(library),
            str(path),
        ]
        subprocess.run([str(part) for part in command], check=True)
    blocks, threads = source.grid(reads, writes)
    passed = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else _scalar(a) for a in arguments]
    ctypes.CDLL(str(library)).launch(blocks, threads, *passed)


_SCALARS = {np.int32: ("int", ctypes.c_int32), np.uint32: ("unsigned int", ctypes.c_uint32)}
_SCALARS[np.int64] = ("long long", ctypes.c_int64)


def _scalar(value: Any) -> Any:
    return _SCALARS[type(value)][1](int(value))


def _c_type(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return _SCALARS[type(value)][0]
    return {"float32": "float*", "int32": "int*", "uint32": "unsigned int*"}[str(value.dtype)]
