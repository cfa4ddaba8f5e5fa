"""A profile's file: written whole or not at all, and compared with the device at hand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from heterolab.device.base import Device
from heterolab.device.calibrate.figures import Json
from heterolab.device.datasheet import dumps
from heterolab.device.host import usable_cores
from heterolab.device.profile import DeviceProfile
from heterolab.errors import InputError, ProfileError


def write(profile: Json, path: str | Path, force: bool = False) -> Path:
    """Check a profile and write it as JSON; the file is there whole, or as it was before.

    Parameters
    ----------
    force
        Write over a file that is no profile of the same device.

    Raises
    ------
    ProfileError
        `profile` is not one.
    InputError
        The file is something else's: nothing is written.
    """
    made, path = DeviceProfile.from_json(profile, "the measured profile"), Path(path)
    may_write(path, made.name, force)
    save_json(profile, path)
    return path


def may_write(path: Path, name: str | None, force: bool = False) -> None:
    """Refuse a place where no profile of the device `name` can be written (None: of any device).

    Raises
    ------
    InputError
        Says what is there.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {str(path.parent)!r}. Make it, or give another --out.")
    if path.is_dir():
        raise InputError(f"{path} is a folder. Give the name of a file: --out {path / 'mine.json'}.")
    if force or not path.exists():
        return
    try:
        known = DeviceProfile.load(path.resolve()).name
    except ProfileError as error:
        raise InputError(
            f"{path} exists and is not a whole profile ({error}) It is left as it is. Give another --out, "
            "or --force to write over it."
        ) from error
    if name is not None and known != name:
        raise InputError(
            f"{path} is a profile of {known}, and this one is of {name}. It is left as it is. Give another "
            "--out, or --force to write over it."
        )


def save_json(data: Json, path: Path) -> None:
    """Write `data` as JSON by way of a file beside it, which takes its place once it is whole."""
    number, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(dumps(data))
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        Path(beside).chmod(mode & 0o777)
        Path(beside).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(beside).unlink()
        raise


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def profile_matches(device: Device, profile: DeviceProfile) -> list[str]:
    """How the machine at hand differs from the one that `profile` is of, in words; none: it is that.

    A prediction for another machine is not wrong, but it cannot be compared with what this one does.
    """
    return differences(profile, device.name, usable_cores(), device.meta())


def differences(profile: DeviceProfile, name: str, cores: int, meta: Any) -> list[str]:
    """As :func:`profile_matches`, for a device of that `name` on a host with so many `cores`."""
    found = []
    if profile.provenance.kind != "measured":
        found.append(f"the profile is no measurement: {profile.provenance.kind}")
    if profile.name != name:
        found.append(f"the profile is of {profile.name}, this is {name}")
    if profile.host.cores != cores:
        found.append(f"it was measured on {profile.host.cores:g} cores, here are {cores}")
    theirs, ours = profile.provenance.driver, str(meta.get("driver", ""))
    if theirs and ours and ours not in theirs:
        found.append(f"it was measured under the driver {theirs}, here is {ours}")
    return found
