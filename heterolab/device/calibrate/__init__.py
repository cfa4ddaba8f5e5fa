"""Measure this machine, and write down what it costs: a profile the simulator can charge.

``python -m heterolab.device.calibrate --device cpu --out my.json`` takes about fifteen seconds;
``sim:my.json`` is that machine, simulated. For a GPU the physics of its engines (copy speeds,
gaps, processors) come from a profile of that GPU, and what depends on the host and on our own
code is measured and put in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heterolab.device.base import Device
from heterolab.device.calibrate import deviceside, hostside, insitu, lock
from heterolab.device.calibrate.figures import Effort, Json
from heterolab.device.calibrate.waiters import compare_waiting
from heterolab.device.cores import FastCores
from heterolab.device.cpu import CpuDevice
from heterolab.device.host import usable_cores
from heterolab.device.profile import BUILT_IN, FORMAT, VERSION, DeviceProfile
from heterolab.errors import InputError

__all__ = ["Effort", "calibrate", "calibrate_cpu", "calibrate_cuda", "write"]


def _quiet(line: str) -> None:
    """Say nothing."""


def calibrate(device: str, base: str | None = None, tell: Callable[[str], None] = _quiet) -> Json:
    """Measure the machine behind ``"cpu"`` or ``"cuda"``; gives a profile as JSON data.

    Parameters
    ----------
    base
        For a GPU: the profile (name or JSON file) whose physics of the same GPU is kept.
    tell
        Gets a line before each measurement.
    """
    if device == "cpu":
        return calibrate_cpu(tell=tell)
    if device == "cuda":
        return calibrate_cuda(base, tell=tell)
    raise InputError(f'device={device!r} cannot be measured. Use "cpu" or "cuda".')


def calibrate_cpu(effort: Effort | None = None, tell: Callable[[str], None] = _quiet) -> Json:
    """A whole profile of the CPU that plays the device (see :class:`CpuDevice`)."""
    effort = effort or Effort.quick()
    device = CpuDevice.open()
    try:
        return _cpu_profile(device, _model(), effort, tell)
    finally:
        device.close()


def _cpu_profile(device: CpuDevice, model: Any, effort: Effort, tell: Callable[[str], None]) -> Json:
    host = _host_sections(device, model, effort, tell)
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
        "provenance": _provenance(device, "this machine's CPU as the device, through the seam"),
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


def calibrate_cuda(
    base: str | None = None, effort: Effort | None = None, tell: Callable[[str], None] = _quiet
) -> Json:
    """The profile `base` of this machine's GPU, with what depends on the host measured anew.

    Measured: CPU stages, waiting, workers, the encoder's kernels and the host's time for their
    launches, the rate of integer arithmetic. Kept: copies, gaps, processors, and the costs of
    bare calls (measured ones, which include the recording of spans, are under ``notes``).

    Raises
    ------
    InputError
        The base profile is of another GPU.
    """
    from heterolab.device.cuda import CudaDevice

    effort = effort or Effort.full()
    device = CudaDevice.open()
    try:
        kept = _base_of(device, base)
        model = _model()
        host = _host_sections(device, model, effort, tell)
        tell("kernels")
        kernels = insitu.with_launches(
            deviceside.encoder_kernels(device, model, effort),
            host["inside"],
            max(host["calls"]["between"]["median"], 0),
        )
        tell("copies, gaps, arithmetic")
        notes = {
            "cores": host["inside"]["cores"],
            "host_calls": host["calls"],
            "copies": deviceside.copies(device, effort),
            "both_speed": deviceside.both_directions(device, effort),
            "gaps": deviceside.gaps(device, effort),
            "arithmetic": deviceside.arithmetic(device, effort),
        }
    finally:
        device.close()
    tell("waiting for events: polling against a waiter thread")
    notes["waiting_for_events"] = compare_waiting(lambda h: CudaDevice.open(host=h), effort)
    measured = {name: host[name] for name in ("waiting", "workers", "cpu_costs")} | {"kernels": kernels}
    bare = {name: value for name, value in kept["host"].items() if name != "measured"}
    measured["seam"] = insitu.seam_section(bare, host["calls"], host["inside"], host["locks"])
    measured["int32"] = notes["arithmetic"]["flops_per_ns"]["int32"]
    return _merge(kept, measured, usable_cores(), notes, _provenance(device, "through the seam"))


def _merge(kept: Json, measured: Json, cores: int, notes: Json, provenance: Json) -> Json:
    """`kept` with the measured sections in place of its own; stages and kernels one by one."""
    merged = dict(kept)
    for name in ("cpu_costs", "kernels"):
        merged[name] = kept.get(name, {}) | measured[name]
    for name in ("waiting", "workers", "seam"):
        merged[name] = measured[name]
    merged["host"] = kept["host"] | {"cores": cores}
    rates = kept["compute"]["flops_per_ns"] | {"int32": measured["int32"]}
    source = kept["compute"]["source"].partition("; int32:")[0] + "; int32: measured, rounds"
    merged["compute"] = kept["compute"] | {"flops_per_ns": rates, "source": source}
    former = kept["provenance"]
    method = f"{former.get('method', '')}; then {provenance['method']}, {provenance['date']}"
    merged["provenance"] = former | {"date": provenance["date"], "method": method.removeprefix("; then ")}
    merged["notes"] = kept.get("notes", {}) | notes
    return merged


def _base_of(device: Device, base: str | None) -> Json:
    """The profile to start from: the one asked for, else the built-in one of this very GPU."""
    names = [base] if base else DeviceProfile.names()
    for name in names:
        profile = DeviceProfile.load(name)
        if profile.name == device.name:
            path = BUILT_IN / f"{name}.json" if name.isidentifier() else Path(name)
            kept: Json = json.loads(path.read_text(encoding="utf-8"))
            return kept
    raise InputError(
        f"{device.name} has no profile yet whose physics could be kept ({', '.join(names)} are of other "
        f'devices). Give base= a JSON profile whose "name" is {device.name!r}.'
    )


def _host_sections(device: Device, model: Any, effort: Effort, tell: Callable[[str], None]) -> Json:
    """What is measured on the host, whatever the device."""
    with FastCores() as cores:
        tell("the host's work in real runs of the pipeline")
        runs = insitu.InRuns(device, model, effort, cores)
        runs.watch()
        tell("the interpreter lock")
        cores.choose()
        locks = lock.shares(device, model)
        runs.watch()
        tell("host calls, waiting, workers")
        cores.choose()
        calls = hostside.host_calls(device, effort)
        late = hostside.waiting(device, effort)
        pools = hostside.workers(device, effort)
        runs.watch()
        inside = runs.costs() | {"cores": cores.summary()}
        alone = hostside.stages(model, effort, leave_out=inside["stages"])
    step = inside["loop_step"]
    return {
        "cpu_costs": insitu.stage_sections(inside, alone, locks),
        "calls": calls,
        "inside": inside,
        "locks": locks,
        "waiting": {
            "loop_step_ns": step["mean"],
            "event_ns": max(late["event"]["median"], 0),
            "job_ns": max(late["job"]["median"], 0),
            "timer_ns": max(late["timer"]["median"], 0),
            "measured": late | {"loop_step": step},
            "source": "measured: lateness after ends known from spans; the loop's Python in real runs",
        },
        "workers": {
            "submit_ns": pools["submit"]["median"],
            "start_ns": pools["start"]["median"],
            "process_job_ns": pools["process_job_ns"],
            "pickle_ns_per_byte": pools["pickle_ns_per_byte"],
            "measured": {"submit": pools["submit"], "start": pools["start"]},
            "source": "measured: empty jobs; bytes of 1 MiB to a process",
        },
    }


def _model() -> Any:
    from heterolab.models import encoder

    return encoder()


def _provenance(device: Device, what: str) -> Json:
    meta = device.meta()
    versions = ", ".join(f"{k} {meta[k]}" for k in ("python", "numpy", "cupy", "blas_threads") if k in meta)
    return {
        "kind": "measured",
        "date": datetime.now(UTC).date().isoformat(),
        "driver": str(meta.get("driver", "")),
        "method": f"heterolab calibrate, {what}, {meta['cores']} cores, medians ({versions})",
    }


def write(profile: Json, path: str | Path) -> Path:
    """Check a profile and write it as JSON, tables on one line each."""
    DeviceProfile.from_json(profile, "the measured profile")
    path = Path(path)
    path.write_text(_pretty(profile) + "\n", encoding="utf-8")
    return path


def _pretty(value: Any, depth: int = 0) -> str:
    """JSON with one line for each value that fits it."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(flat) + 2 * depth <= 110:
        return flat
    pad = "  " * (depth + 1)
    rows = [f"{pad}{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
