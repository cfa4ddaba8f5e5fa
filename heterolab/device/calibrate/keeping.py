"""What becomes of the measurements: whether they are kept, and what a base profile keeps of its own."""

from __future__ import annotations

import json
from pathlib import Path

from heterolab.device.base import Device
from heterolab.device.calibrate.figures import Json
from heterolab.device.calibrate.noise import Noise
from heterolab.device.calibrate.parts import Parts, PartsFailed
from heterolab.device.profile import BUILT_IN, DeviceProfile
from heterolab.errors import InputError


def judged(profile: Json, parts: Parts, noise: Noise, keep_going: bool, accept_noise: bool) -> Json:
    """`profile`, unless parts of it failed or are noise, and neither was allowed."""
    if not keep_going:
        parts.refuse(profile)
    needed = ("host", "waiting", "workers", "copies", "pageable", "mapped", "gaps", "compute")
    if missing := [name for name in needed if name not in profile]:
        error = PartsFailed(
            f"without {', '.join(missing)} it is no profile; what failed: {'; '.join(parts.failed)}. Give "
            "--base with a profile of the same GPU, from which these can be taken."
        )
        error.measured = profile
        raise error
    if not accept_noise:
        noise.refuse()
    elif noise.found:
        worst = max(noise.found, key=noise.found.__getitem__)
        profile["provenance"]["method"] += (
            f"; noisy, and accepted: {len(noise.found)} figures whose passes differ, at most by "
            f"{noise.found[worst]:.0%} ({worst})"
        )
    return profile


def merged(kept: Json, measured: Json, cores: int, notes: Json, provenance: Json) -> Json:
    """`kept` with the measured sections in place of its own; stages and kernels one by one."""
    whole = dict(kept)
    for name in ("cpu_costs", "kernels"):
        whole[name] = kept.get(name, {}) | measured[name]
    for name in ("waiting", "workers", "seam"):
        if name in measured:  # its part may have failed
            whole[name] = measured[name]
    whole["host"] = kept["host"] | {"cores": cores}
    if "arithmetic" in notes:
        rate = notes["arithmetic"]["flops_per_ns"]["int32"]
        source = kept["compute"]["source"].partition("; int32:")[0] + "; int32: measured, rounds"
        whole["compute"] = kept["compute"] | {
            "flops_per_ns": kept["compute"]["flops_per_ns"] | {"int32": rate},
            "source": source,
        }
    former = kept["provenance"]
    method = f"{former.get('method', '')}; then {provenance['method']}, {provenance['date']}"
    whole["provenance"] = former | {"date": provenance["date"], "method": method.removeprefix("; then ")}
    whole["notes"] = kept.get("notes", {}) | notes
    return whole


def base_of(device: Device, base: str) -> Json:
    """The profile to start from, as JSON data.

    Raises
    ------
    InputError
        It is of another GPU.
    """
    profile = DeviceProfile.load(base)
    if profile.name != device.name:
        raise InputError(
            f"base={base!r} is a profile of {profile.name}, and this is {device.name}: its physics would be "
            "wrong here. Leave the base out: then everything is measured."
        )
    path = BUILT_IN / f"{base}.json" if base.isidentifier() else Path(base)
    kept: Json = json.loads(path.read_text(encoding="utf-8"))
    return kept
