"""A kernel's CUDA C++, compiled once, and its arguments checked against its own signature.

A launch passes bare bytes: a float64 array for a ``float*``, or a Python int (64 bits) for an
``int``, is no error to CUDA. It computes nonsense. So the types are compared with the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from heterolab.device.base import Array, CudaSource, Kernel
from heterolab.errors import InputError

#: C types we know the NumPy type of. Others (a struct, a template's) are not checked.
C_TYPES = {
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "int8_t": "int8",
    "unsigned char": "uint8",
    "uint8_t": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "int32_t": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "long long": "int64",
    "int64_t": "int64",
    "unsigned long long": "uint64",
    "uint64_t": "uint64",
    "size_t": "uint64",
    "half": "float16",
    "__half": "float16",
    "float": "float32",
    "double": "float64",
}


class CompiledKernels:
    """The kernels of one device, by source; compiled at their first launch."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._compiled: dict[tuple[str, str], Any] = {}
        self._checked: set[tuple[Any, ...]] = set()

    def launch(
        self, kernel: Kernel, source: CudaSource, reads: Sequence[Array], writes: Sequence[Array], stream: Any
    ) -> None:
        """Launch on a CuPy stream."""
        arguments = source.arguments(reads, writes)
        types = (source.entry, source.code, *map(_type_of, arguments))
        if types not in self._checked:
            check_arguments(kernel.name, source, arguments)
            self._checked.add(types)
        blocks, threads = source.grid(reads, writes)
        shared = source.shared_bytes(reads, writes) if source.shared_bytes else 0
        self._function(source)((blocks,), (threads,), arguments, shared_mem=shared, stream=stream)

    def _function(self, source: CudaSource) -> Any:
        key = (source.code, source.entry)
        if key not in self._compiled:
            self._compiled[key] = self._cupy.RawKernel(source.code, source.entry)
        return self._compiled[key]


def check_arguments(name: str, source: CudaSource, arguments: Sequence[Any]) -> None:
    """Compare a launch's arguments with the parameters in the kernel's source.

    Raises
    ------
    InputError
        Their number differs, one is no array or NumPy scalar, or has another type.
    """
    expected = parameters(source)
    if len(arguments) != len(expected):
        raise InputError(
            f"kernel {name!r}: {source.entry} takes {len(expected)} arguments, got {len(arguments)}."
        )
    for (label, c_type, is_pointer), argument in zip(expected, arguments, strict=True):
        given, given_pointer = _type_of(argument)
        if given is None:
            raise InputError(
                f"kernel {name!r}: argument {label}={argument!r} is a Python {type(argument).__name__}, "
                f"whose size in CUDA is not what it seems. Give its exact type: "
                f"np.{C_TYPES.get(c_type, 'int32')}(…)."
            )
        wanted = C_TYPES.get(c_type)
        if is_pointer != given_pointer or (wanted is not None and np.dtype(wanted) != given):
            what = "an array" if given_pointer else "a scalar"
            raise InputError(
                f"kernel {name!r}: argument {label} is {what} of {given}, but the source of {source.entry} "
                f"says {c_type}{'*' if is_pointer else ''}."
            )


def parameters(source: CudaSource) -> list[tuple[str, str, bool]]:
    """(name, C type, whether a pointer) of each parameter of the kernel's entry function."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source.code, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(source.entry)}\s*\(([^)]*)\)", code)
    if found is None:
        raise InputError(
            f"kernel source has no entry {source.entry!r}: it needs "
            f'extern "C" __global__ void {source.entry}(…).'
        )
    return [_parameter(text) for text in found[1].split(",") if text.strip()]


def _parameter(text: str) -> tuple[str, str, bool]:
    words = re.sub(r"\b(const|volatile|__restrict__|__restrict|restrict)\b", " ", text)
    *c_type, name = words.replace("*", " ").split()
    return name, " ".join(c_type), "*" in words


def _type_of(argument: Any) -> tuple[np.dtype[Any] | None, bool]:
    """An argument's NumPy type, and whether it is an array in device memory."""
    if isinstance(argument, np.generic):
        return argument.dtype, False
    if hasattr(argument, "dtype") and hasattr(argument, "data"):
        return np.dtype(argument.dtype), True
    return None, False
