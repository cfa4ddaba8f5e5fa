"""NVIDIA's libcupti, called through ctypes: where it is, its functions, and its refusals in words.

It is never imported by way of another package (torch has a copy, and starts a profiler of its
own), and never vendored: its licence is NVIDIA's. It comes with the CUDA toolkit, with torch, or
with ``pip install nvidia-cuda-cupti``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from heterolab.device.cupti_records import CuptiUnavailable, layouts, release

#: Called by CUPTI for an empty buffer, and with a full one.
REQUESTED = ctypes.CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
COMPLETED = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)

#: Arguments of the functions used here; each returns a CUptiResult, 0 where all is well.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuptiGetVersion": (POINTER(c_uint32),),
    "cuptiGetResultString": (c_int, POINTER(c_char_p)),
    "cuptiGetTimestamp": (POINTER(c_uint64),),
    "cuptiActivitySetAttribute": (c_int, POINTER(c_size_t), c_void_p),
    "cuptiActivityRegisterCallbacks": (REQUESTED, COMPLETED),
    "cuptiActivityEnable": (c_int,),
    "cuptiActivityDisable": (c_int,),
    "cuptiActivityFlushAll": (c_uint32,),
    "cuptiActivityGetNumDroppedRecords": (c_void_p, c_uint32, POINTER(c_size_t)),
    "cuptiActivityGetNextRecord": (c_void_p, c_size_t, POINTER(c_void_p)),
    "cuptiActivityConfigureUnifiedMemoryCounter": (c_void_p, c_uint32),
}
#: Those that only newer versions have: single calls to trace (12.5), queries to leave out (12.8).
NEWER: dict[str, tuple[Any, ...]] = {
    "cuptiActivityEnableDriverApi": (c_uint32, c_uint8),
    "cuptiActivityEnableRuntimeApi": (c_uint32, c_uint8),
    "cuptiActivityEnableAllSyncRecords": (c_uint8,),
}

ADMIN_ONLY = (
    "this system lets only administrators trace the GPU (the driver's NVreg_RestrictProfilingToAdminUsers)."
)
#: What a refusal means to a user, by CUptiResult.
REFUSALS = {
    14: "it does not go with the state of this process; another profiler may hold it.",
    15: "it does not start with this NVIDIA driver; is CUPTI newer than the driver?",
    27: "it does not support this GPU or driver.",
    33: "it does not trace a virtualised GPU here.",
    35: ADMIN_ONLY,
    39: "another profiler holds it (torch.profiler, Nsight, compute-sanitizer, cuda-gdb): there is one a "
    "process. End that one, then open the device again.",
    40: "this machine's hypervisor does not allow it.",
    41: "it does not trace in confidential-computing mode.",
    43: "it does not trace a MIG slice here.",
    45: "it does not trace under WSL here.",
}


class CuptiRefused(CuptiUnavailable):
    """libcupti returned an error; `status` is its CUptiResult."""

    def __init__(self, function: str, status: int, text: str) -> None:
        meaning = REFUSALS.get(status, "")
        super().__init__(f"{function} said {text} ({status}){': ' + meaning if meaning else '.'}")
        self.status = status


class Library:
    """libcupti's functions, with their errors raised.

    Parameters
    ----------
    functions
        A ctypes library, or what can stand for one.
    """

    def __init__(self, functions: Any) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in {**FUNCTIONS, **NEWER}.items():
            function = getattr(functions, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
                self._functions[name] = function
            elif name in FUNCTIONS:
                raise CuptiUnavailable(f"this libcupti lacks {name}; it is too old.")
        version = c_uint32()
        self("cuptiGetVersion", ctypes.byref(version))
        self.version = version.value
        layouts(self.version)  # refuses one that is not known
        self._get_timestamp = self._functions["cuptiGetTimestamp"]
        self._next_record = self._functions["cuptiActivityGetNextRecord"]

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; an error is raised."""
        status = self._functions[name](*arguments)
        if status:
            raise CuptiRefused(name, status, self._text(status))

    def has(self, name: str) -> bool:
        return name in self._functions

    def timestamp(self) -> int:
        """CUPTI's clock now, ns: on Linux the time of day."""
        stamp = c_uint64()
        self._get_timestamp(ctypes.byref(stamp))
        return stamp.value

    def following(self, address: int, valid: int, at: int) -> int | None:
        """Where the record behind the one at `at` begins; None behind the last."""
        record = c_void_p(address + at)
        if self._next_record(address, valid, ctypes.byref(record)) or not record.value:
            return None
        return record.value - address

    def dropped(self) -> int:
        """Records lost since the last call, for lack of buffers."""
        count = c_size_t()
        self("cuptiActivityGetNumDroppedRecords", None, 0, ctypes.byref(count))
        return count.value

    def _text(self, status: int) -> str:
        text = c_char_p()
        self._functions["cuptiGetResultString"](status, ctypes.byref(text))
        return (text.value or b"an error").decode(errors="replace")


# -- where it is -----------------------------------------------------------------------------


def find(driver: int) -> Library:
    """The first libcupti that loads and is of a known version.

    Parameters
    ----------
    driver
        The driver's CUDA version (13.0 is 13000): a library for a newer CUDA is not tried.

    Raises
    ------
    CuptiUnavailable
        There is none; says what was found instead.
    """
    refused: list[str] = []
    for path in candidates(driver // 1000):
        try:
            return Library(ctypes.CDLL(path))
        except OSError:
            continue  # not there, or of another processor
        except CuptiUnavailable as error:
            refused.append(str(error))
    if refused:
        raise CuptiUnavailable(refused[0])
    packages = "nvidia-cuda-cupti" if driver >= 13_000 else "nvidia-cuda-cupti-cu12"
    raise CuptiUnavailable(f"libcupti is not on this machine. Get it: pip install {packages}.")


def candidates(major: int) -> Iterator[str]:
    """Paths to try: what this process has loaded already (two copies would be two profilers),
    CUDA's wheels, the toolkit, then the loader's own search. None for a CUDA newer than `major`."""
    yield from loaded()
    folders = [*_wheels(), *_toolkits()]
    found = [path for folder in folders for path in sorted(folder.glob("libcupti.so*"), reverse=True)]
    by_major: dict[int, list[str]] = {}
    for path in found:
        by_major.setdefault(_major(path.resolve().name, path.name), []).append(str(path))
    for known in sorted((m for m in by_major if m <= major), reverse=True):
        yield from by_major[known]
    yield from (f"libcupti.so.{number}" for number in range(major, 11, -1))


def loaded() -> list[str]:
    """Every libcupti that is in this process already."""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        return sorted(set(re.findall(r"(/\S*/libcupti\.so\S*)", maps)))
    return []


def _wheels() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace; finding it imports nothing
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return [root / where / "lib" for root in roots for where in ("cu13", "cuda_cupti")]


def _toolkits() -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX") if os.environ.get(name)]
    installed = sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    inside = ("lib64", "lib", "extras/CUPTI/lib64", "targets/*/lib")
    return [place for root in [*map(Path, named), *installed] for end in inside for place in root.glob(end)]


def _major(*names: str) -> int:
    """The CUDA major version of a library file: libcupti.so.12, or libcupti.so.2025.3.1, whose
    year tells it (2022 to 2025.2 are CUDA 12's)."""
    for name in names:
        if year := re.search(r"\.so\.(20\d\d)(?:\.(\d+))?", name):
            return 12 if (int(year[1]), int(year[2] or 0)) < (2025, 3) else 13
        if number := re.search(r"\.so\.(\d+)", name):
            return int(number[1])
    return 12


def words(library: Library) -> str:
    return f"CUPTI {release(library.version)}"
