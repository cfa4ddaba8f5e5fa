"""The sections of a profile of the CPU that plays the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heterolab.device.calibrate import deviceside, insitu
from heterolab.device.calibrate.figures import Effort, Json
from heterolab.device.cpu import CpuDevice
from heterolab.device.host import usable_cores
from heterolab.device.profile import FORMAT, VERSION


def cpu_profile(
    device: CpuDevice, model: Any, effort: Effort, tell: Callable[[str], None], host: Json
) -> Json:
    """The profile, from what is measured on the device here and `host`, what its host does; all but
    its provenance."""
    calls = host["calls"]
    tell("copies and gaps")
    moved, paused = deviceside.copies(device, effort), deviceside.gaps(device, effort)
    both = deviceside.both_directions(device, effort)
    tell("kernels")
    arithmetic = deviceside.arithmetic(device, effort)
    between_ns = max(calls["between"]["median"], 0)
    kernels = insitu.with_launches(
        deviceside.encoder_kernels(device, model, effort), host["inside"], between_ns
    )
    cores = usable_cores()
    profile = {
        "format": FORMAT,
        "version": VERSION,
        "name": device.name,
        "provenance": {},  # stands here so that it comes first in the file
        "limits": {
            "memory_bytes": device.limits.memory_bytes,
            "pinned_bytes": device.limits.pinned_bytes,
            "streams": device.limits.streams,
        },
        "host": {
            "cores": cores,
            "launch_ns": calls["launch"]["median"],
            "copy_ns": calls["copy"]["median"],
            "record_ns": calls["record"]["median"],
            "wait_ns": calls["wait"]["median"],
            "between_ns": between_ns,
            "sync_ns": max(calls["sync"]["median"], 0),
            "sync_idle_ns": calls["sync_idle"]["median"],
            "start_ns": max(calls["start"]["median"], 0),
            "submit_share": 1.0,
            "measured": calls,
            "source": "measured: each call among the others",
        },
        "waiting": host["waiting"],
        "workers": host["workers"],
        "copies": {
            "h2d": moved["h2d pinned"],
            "d2h": moved["d2h pinned"],
            "inside": moved["inside"],
            "both_speed": round(both, 3),
            "both_large_bytes": effort.copy_bytes[-1],
            "both_large_speed": round(both, 3),
            "mapped_share": 1.0,
            "channels": device.limits.streams,
            "source": "measured: memcpy by a stream's thread, one lock a direction",
        },
        "pageable": {
            "d2h": moved["d2h pageable held"],
            "h2d": None,  # nothing is staged
            "source": "measured: the host is held until the copy has ended",
        },
        "mapped": None,
        "gaps": {
            "copy_kernel_ns": paused["copy_kernel"]["median"],
            "kernel_copy_ns": paused["kernel_copy"]["median"],
            "kernel_kernel_ns": paused["kernel_kernel"]["median"],
            "copy_copy_ns": paused["copy_copy"]["median"],
            "turn_ns": paused["turn"]["median"],
            "event_ns": paused["event"]["median"],
            "legacy_ns": max(paused["event"]["median"] - paused["kernel_kernel"]["median"], 0),
            "measured": paused,
            "source": "measured: the second op enqueued while a kernel still ran before the first",
        },
        "compute": {
            "sms": 1,
            "threads_per_sm": 1024,
            "blocks_per_sm": 1024,
            "kernels": 1,
            "fixed_ns": arithmetic["fixed"]["median"],
            "flops_per_ns": arithmetic["flops_per_ns"],
            "memory": arithmetic["memory"],
            "on_host_gil": round(deviceside.kernel_gil_share(device, model), 2),
            "source": "measured: empty kernel, matrix product, rounds, vector add; one kernel at a time",
        },
        "cpu_costs": host["cpu_costs"],
        "kernels": kernels,
    }
    profile["seam"] = insitu.seam_section(profile["host"], calls, host["inside"], host["locks"])
    return profile
