"""NumPy that counts the operations CuPy would launch as kernels."""

from __future__ import annotations

from typing import Any

import numpy as np


class Counted(np.ndarray):
    """An array whose operations are counted: one ufunc, reduction, gather or copy is one launch.

    CuPy's matrix product of more than two axes first copies each operand that is not in memory
    order: a launch more for each.
    """

    launches = 0

    @classmethod
    def count(cls, n: int = 1) -> None:
        Counted.launches += n

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        if ufunc is np.matmul:
            self.count(sum(x.ndim > 2 and not x.flags.c_contiguous for x in inputs))
        self.count()
        return _counted(getattr(ufunc, method)(*map(_plain, inputs), **_plain_out(keywords)))

    def _once(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        self.count()
        return _counted(getattr(_plain(self), method)(*arguments, **keywords))

    def mean(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("mean", *arguments, **keywords)

    def sum(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("sum", *arguments, **keywords)

    def max(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("max", *arguments, **keywords)

    def any(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("any", *arguments, **keywords)

    def astype(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("astype", *arguments, **keywords)

    def copy(self, *arguments: Any, **keywords: Any) -> Any:
        return self._once("copy", *arguments, **keywords)

    def reshape(self, *shape: Any, **keywords: Any) -> Any:
        result = _plain(self).reshape(*shape, **keywords)
        self.count(not np.shares_memory(result, self))
        return _counted(result)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            return self._once("__getitem__", _plain(index))
        return _counted(_plain(self)[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.count()
        _plain(self)[index] = _plain(value)


class CountingNumpy:
    """The array module that goes with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def full(self, *arguments: Any, **keywords: Any) -> Any:
        Counted.count()
        return _counted(np.full(*arguments, **keywords))


def counted(array: Any) -> Counted:
    return np.asarray(array).view(Counted)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def _counted(value: Any) -> Any:
    return value.view(Counted) if isinstance(value, np.ndarray) else value


def _plain_out(keywords: dict[str, Any]) -> dict[str, Any]:
    if "out" in keywords:
        keywords["out"] = tuple(map(_plain, keywords["out"]))
    return keywords
