"""A libcupti for tests without a GPU: it calls the real callbacks with real pointers, and fills
buffers with records made from the dtypes that the reader uses (which are tested against NVIDIA's
headers). Beside :mod:`fake_cupy` it tells of the calls made there."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from heterolab.device.cupti_library import FUNCTIONS, NEWER
from heterolab.device.cupti_records import FIELDS, layouts

LAUNCH_KERNEL, MEMCPY_ASYNC, MEMSET_ASYNC, GRAPH_LAUNCH = 307, 41, 51, 311
THREAD = 0xFFFF_FFFF


class FakeCupti:
    """Attributes whose names begin with ``cupti`` are the library's functions.

    Attributes
    ----------
    refuse
        Function → the CUptiResult it gives.
    silent
        It accepts everything and records nothing.
    """

    def __init__(self, version: int = 130001, lacks: tuple[str, ...] = ()) -> None:
        self.version, self.refuse, self.silent = version, dict[str, int](), False
        self.layouts = layouts(min(version, 130001))
        self.enabled: set[int] = set()
        self.calls_traced: set[tuple[str, int]] = set()
        self.forgets_calls = False
        self.log: list[tuple[Any, ...]] = []
        self.waiting: list[bytes] = []
        self.unfinished = 0  # so many of the last records are not finished yet
        self.dropped = 0
        self.correlation = 100
        self.clock: Callable[[], int] = time.time_ns
        self.callbacks: tuple[Any, Any] = (None, None)
        self.names: list[Any] = []
        for name in {**FUNCTIONS, **NEWER}:
            if name not in lacks:
                setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.log.append((name, *(a for a in arguments if isinstance(a, int))))
            if self.refuse.get(name):
                return self.refuse[name]
            return int(getattr(self, "_" + name.removeprefix("cupti"), lambda *_: 0)(*arguments) or 0)

        return call

    # -- the functions -------------------------------------------------------------------

    def _GetVersion(self, out: Any) -> None:
        out._obj.value = self.version

    def _GetResultString(self, status: int, out: Any) -> None:
        out._obj.value = b"CUPTI_ERROR_FAKE"

    def _GetTimestamp(self, out: Any) -> None:
        out._obj.value = self.clock()

    def _ActivityRegisterCallbacks(self, request: Any, complete: Any) -> None:
        self.callbacks = request, complete

    def _ActivityEnable(self, kind: int) -> None:
        self.enabled.add(kind)

    def _ActivityDisable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def _ActivityEnableDriverApi(self, number: int, on: int) -> None:
        (self.calls_traced.add if on else self.calls_traced.discard)(("driver", number))

    def _ActivityEnableRuntimeApi(self, number: int, on: int) -> None:
        (self.calls_traced.add if on else self.calls_traced.discard)(("runtime", number))

    def _ActivityFlushAll(self, flag: int) -> None:
        ready = self.waiting if flag else self.waiting[: len(self.waiting) - self.unfinished]
        self.waiting = self.waiting[len(ready) :]
        if ready:
            self.hand_over(b"".join(ready))

    def _ActivityGetNumDroppedRecords(self, context: Any, stream: int, out: Any) -> None:
        out._obj.value, self.dropped = self.dropped, 0

    def _ActivityGetNextRecord(self, address: int, valid: int, record: Any) -> int:
        kind = ctypes.c_uint32.from_address(record._obj.value).value
        name = next(name for name, (number, _) in FIELDS.items() if number == kind)
        behind = record._obj.value + self.layouts[name].itemsize
        if behind >= address + valid:
            return 12
        record._obj.value = behind
        return 0

    # -- what happens on the GPU ---------------------------------------------------------

    def hand_over(self, data: bytes) -> None:
        """Ask for a buffer, fill it, hand it back: as CUPTI does, through the callbacks."""
        request, complete = self.callbacks
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        request(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert most.value == 0
        if not buffer.value:
            self.dropped += 1
            return
        assert len(data) <= size.value
        assert not any(ctypes.string_at(buffer.value, len(data))), "a buffer has to be all zeros"
        ctypes.memmove(buffer.value, data, len(data))
        complete(None, 0, buffer.value, size.value, len(data))

    def record(self, name: str, /, **fields: Any) -> None:
        """A record of an enabled kind goes into CUPTI's buffer."""
        chosen = (name, fields.get("cbid")) in self.calls_traced and not self.forgets_calls
        traced = FIELDS[name][0] in self.enabled or chosen
        if traced and not self.silent:
            self.waiting.append(self.made(name, **fields))

    def made(self, name: str, /, **fields: Any) -> bytes:
        row = np.zeros(1, self.layouts[name])
        row["kind"] = FIELDS[name][0]
        for field, value in fields.items():
            row[field] = value
        return row.tobytes()

    def work(self, name: str, api: str, cbid: int, /, lasts_ns: int = 3000, **fields: Any) -> None:
        """The host calls, and the GPU does: the call's record and the activity's."""
        self.correlation += 1
        start = self.clock()
        self.record(
            api,
            cbid=cbid,
            start=start,
            end=start + 1000,
            threadId=threading.get_ident() & THREAD,
            correlationId=self.correlation,
        )
        if name == "kernel":
            self.names.append(ctypes.create_string_buffer(b"a_kernel"))
            fields["name"] = ctypes.addressof(self.names[-1])
        if name == "memcpy":
            fields["runtimeCorrelationId"] = self.correlation
        begins = start + 500
        self.record(name, start=begins, end=begins + lasts_ns, correlationId=self.correlation, **fields)

    def attach(self, cupy: Any, kernels: int = 1) -> Any:
        """Tell of what a fake CuPy is asked to do; each array function is so many kernels."""
        runtime = cupy.cuda.runtime
        zeros, multiply, copy, raw = cupy.zeros, cupy.multiply, runtime.memcpyAsync, cupy.RawKernel.__call__

        def traced_zeros(*given: Any) -> Any:
            self.work("memset", "runtime", MEMSET_ASYNC, bytes=1)
            return zeros(*given)

        def traced_multiply(*given: Any, **named: Any) -> Any:
            for _ in range(kernels):
                self.work("kernel", "driver", LAUNCH_KERNEL)
            return multiply(*given, **named)

        def traced_copy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
            fields = {"copyKind": {1: 1, 2: 2, 3: 8}[kind], "srcKind": 2, "dstKind": 3, "bytes": size}
            self.work("memcpy", "runtime", MEMCPY_ASYNC, **fields)
            copy(dst, src, size, kind, stream)

        def traced_raw(kernel: Any, *given: Any, **named: Any) -> None:
            raw(kernel, *given, **named)
            self.work("kernel", "driver", LAUNCH_KERNEL)

        cupy.zeros, cupy.multiply, runtime.memcpyAsync = traced_zeros, traced_multiply, traced_copy
        cupy.RawKernel.__call__ = traced_raw
        return cupy
