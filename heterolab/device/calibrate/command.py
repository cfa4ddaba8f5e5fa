"""``heterolab calibrate``: measure with a progress bar, and write the profile or say why not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from heterolab.device.base import Device
from heterolab.device.calibrate import calibrate
from heterolab.device.calibrate.figures import Json
from heterolab.device.calibrate.files import may_write, profile_matches, save_json, write
from heterolab.device.calibrate.parts import Bar, PartsFailed
from heterolab.device.profile import DeviceProfile
from heterolab.errors import InputError


def measure(
    device: str,
    out: Path,
    base: str | None = None,
    *,
    spans: str = "auto",
    force: bool = False,
    keep_going: bool = False,
    accept_noise: bool = False,
) -> str:
    """Measure `device` and write its profile to `out`; gives what to say of it.

    What was measured when parts failed is written beside it, as ``NAME.partial.json``.

    Raises
    ------
    HeteroLabError
        See :func:`calibrate` and :func:`write`; `out` is then as it was.
    """
    may_write(out, None, force)
    bar = Bar()
    try:
        profile = calibrate(
            device,
            base,
            bar,
            keep_going=keep_going,
            accept_noise=accept_noise,
            spans=spans,
            may=partial(may_write, out, force=force),
        )
    except PartsFailed as error:
        beside = out.with_name(f"{out.stem}.partial.json")
        save_json(error.measured, beside)
        raise PartsFailed(f"{error} What the other parts measured is in {beside}.") from error
    finally:
        bar.close()
    path = write(profile, out, force)
    return f"written: {path}. Simulate this machine with --device sim:{path}.\n{_took(profile)}"


def _took(profile: Json) -> str:
    """How long it took, and which parts of it the longest."""
    seconds: dict[str, float] = profile["notes"]["seconds"]
    longest = sorted(seconds.items(), key=lambda row: -row[1])[:6]
    parts = "; ".join(f"{name} {s:.1f} s" for name, s in longest)
    return f"It took {sum(seconds.values()):.0f} s: {parts}."


def check(device: str, file: str | Path) -> str:
    """How the machine that `file` (or a built-in profile) is of differs from this one, in words."""
    profile = DeviceProfile.load(file)
    opened = _open(device)
    try:
        found = profile_matches(opened, profile)
        this = opened.name
    finally:
        opened.close()
    if not found:
        return f"{file} is a profile of this machine: {this}, {profile.stamp}."
    return f"{file} is a profile of another machine. " + "; ".join(found) + "."


def _open(device: str) -> Device:
    if device == "cpu":
        from heterolab.device.cpu import CpuDevice

        return CpuDevice.open()
    if device == "cuda":
        from heterolab.device.cuda import CudaDevice

        return CudaDevice.open(spans="off")
    raise InputError(f'device={device!r} cannot be measured. Use "cpu" or "cuda".')
