"""Where work runs: on a simulated GPU, on a CPU that plays the device, or on a real GPU."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from heterolab.device.base import Device
from heterolab.device.profile import DeviceProfile
from heterolab.errors import DeviceUnavailable, InputError

__all__ = ["open_device"]


def open_device(name: str | DeviceProfile | None = None, **options: Any) -> Device:
    """Open the device called `name`.

    Parameters
    ----------
    name
        ``"sim:h200"`` (a simulated GPU from the profile of that name, or from a JSON file:
        ``"sim:my.json"``), ``"cpu"`` (this machine's CPU plays the device, in real time),
        ``"cuda"`` or ``"cuda:1"`` (a real GPU). A profile is simulated. None takes the environment's
        ``HETEROLAB_DEVICE``, else CUDA where it works, else ``"sim:h200"``: the device's repr
        says which, and why.
    **options
        Passed on: ``races="raise"|"show"|"off"`` (the default is ``"raise"`` on the simulator,
        and ``"off"`` elsewhere), and ``seed=``, ``jitter=``, ``values=`` for the simulator, and
        ``without=``: effects of its physics to leave out, e.g. ``["copy_channels"]`` (all of them:
        ``heterolab.device.physics.EFFECTS``).

    Raises
    ------
    InputError
        There is no such kind of device, or it has no such option.
    DeviceUnavailable
        The device asked for by name cannot be had. Nothing is put in its place.
    """
    if isinstance(name, DeviceProfile):
        from heterolab.device.sim import SimDevice

        _known(options, name.name, SimDevice.open)
        return SimDevice.open(name, **options)
    why = ""
    asked = os.environ.get("HETEROLAB_DEVICE", "") if name is None else str(name)
    if not asked:
        from heterolab.device import cuda

        missing = cuda.why_not()
        asked = "sim:h200" if missing else "cuda"
        why = f"no CUDA device: {missing}" if missing else "a CUDA device works here"
    kind, _, which = asked.partition(":")
    if kind == "sim":
        from heterolab.device.sim import SimDevice

        _known(options, asked, SimDevice.open)
        return SimDevice.open(which or "h200", why=why, **options)
    if kind == "cpu" and not which:
        from heterolab.device.cpu import CpuDevice

        _known(options, asked, CpuDevice.open)
        return CpuDevice.open(why=why, **options)
    if kind == "cuda":
        from heterolab.device import cuda

        if which and not which.isdigit():
            raise InputError(f"device={asked!r}: a CUDA device is cuda or cuda:NUMBER.")
        _known(options, asked, cuda.CudaDevice.open)
        if missing := cuda.why_not():
            raise DeviceUnavailable(
                f"device={asked!r} cannot be opened here: {missing} The simulator needs no GPU: use sim:h200."
            )
        return cuda.CudaDevice.open(int(which or 0), why=why, **options)
    raise InputError(
        f"device={asked!r} is not known. Use sim:PROFILE (e.g. sim:h200), cpu, cuda or cuda:NUMBER."
    )


def _known(options: dict[str, Any], asked: str, opener: Callable[..., Device]) -> None:
    """Refuse an option that this kind of device does not have."""
    own = [name for name in inspect.signature(opener).parameters if name not in ("profile", "index", "why")]
    for option in options:
        if option not in own:
            raise InputError(
                f"open_device({asked!r}, {option}=...): there is no such option. It has: {', '.join(own)}."
            )
