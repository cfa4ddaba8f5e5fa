"""Measure this machine, and write down what it costs: a profile the simulator can charge.

``heterolab calibrate --device cuda --out mine.json`` takes about a minute, ``--device cpu`` about
fifteen seconds; ``sim:mine.json`` is that machine, simulated.

A GPU's engines are measured from nothing (``gpu.py``: calls, copies, pauses, kernels), then what
the host does in real runs of the pipeline. With a base profile of the same GPU its physics is kept,
and only what depends on the host and on our own code is measured and put in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from heterolab.device.base import Device
from heterolab.device.calibrate import compute, deviceside, extras, gpu, hostside, insitu, lock
from heterolab.device.calibrate.bench import CudaBench
from heterolab.device.calibrate.cpuside import cpu_profile
from heterolab.device.calibrate.figures import Effort, Json
from heterolab.device.calibrate.files import differences, profile_matches, write
from heterolab.device.calibrate.keeping import base_of, judged, merged
from heterolab.device.calibrate.noise import Noise
from heterolab.device.calibrate.parts import Parts, Tell, quiet
from heterolab.device.calibrate.rig import Rig
from heterolab.device.calibrate.waiters import compare_waiting
from heterolab.device.cores import FastCores
from heterolab.device.cpu import CpuDevice
from heterolab.device.host import usable_cores
from heterolab.device.profile import FORMAT, VERSION
from heterolab.errors import InputError

__all__ = [
    "Effort",
    "calibrate",
    "calibrate_cpu",
    "calibrate_cuda",
    "differences",
    "profile_matches",
    "write",
]

IN_RUNS, KERNELS = "the host's work in real runs of the pipeline", "kernels"
HOST_PLAN = [IN_RUNS, "the interpreter lock", "host calls, waiting, workers"]
HOST_MEMORY = "the host's memory"
WAITING = "waiting for events: polling against a waiter thread"


def _anything(name: str) -> None:
    """Any device may be measured."""


def calibrate(
    device: str,
    base: str | None = None,
    tell: Tell = quiet,
    *,
    keep_going: bool = False,
    accept_noise: bool = False,
    spans: Any = "auto",
    may: Callable[[str], None] = _anything,
) -> Json:
    """Measure the machine behind ``"cpu"`` or ``"cuda"``; gives a profile as JSON data.

    Parameters
    ----------
    base
        For a GPU: the profile (name or JSON file) whose physics of the same GPU is kept. None
        measures everything.
    tell
        Told as each part begins: its name, the share of all that is done, seconds left.
    keep_going
        For a GPU: give a profile though parts failed; they stand in its notes.
    accept_noise
        Give a profile though passes differed too much; its provenance says so.
    spans
        For a GPU: where times of device ops come from, see :meth:`CudaDevice.open`.
    may
        Called with the device's name before anything is measured; what it raises ends it.

    Raises
    ------
    InputError
        There is no such device to measure, or `base` is of another GPU.
    DeviceUnavailable
        There is no GPU that can be used; says why.
    PartsFailed, NoisyMeasurement
        Parts failed, or it is noisy, and that was not allowed.
    """
    if device == "cpu":
        return calibrate_cpu(tell=tell, accept_noise=accept_noise, may=may)
    if device == "cuda":
        return calibrate_cuda(
            base, tell=tell, keep_going=keep_going, accept_noise=accept_noise, spans=spans, may=may
        )
    raise InputError(f'device={device!r} cannot be measured. Use "cpu" or "cuda".')


def calibrate_cpu(
    effort: Effort | None = None,
    tell: Tell = quiet,
    *,
    accept_noise: bool = False,
    may: Callable[[str], None] = _anything,
) -> Json:
    """A whole profile of the CPU that plays the device (see :class:`CpuDevice`)."""
    effort, noise = effort or Effort.quick(), Noise()
    parts = Parts(tell, [*HOST_PLAN, "copies and gaps", KERNELS, HOST_MEMORY])
    device = CpuDevice.open()
    try:
        may(device.name)
        model = _model()
        host = _steady_host(device, model, effort, parts.begin, noise)
        profile = cpu_profile(device, model, effort, parts.begin, host)
        profile["provenance"] = _provenance(device, "this machine's CPU as the device, through the seam")
        parts.begin(HOST_MEMORY)
        notes = _host_notes()
        parts.finish()
    finally:
        device.close()
    profile["notes"] = notes | {"seconds": parts.seconds, "noise": noise.note()}
    return judged(profile, parts, noise, keep_going=False, accept_noise=accept_noise)


def _steady_host(
    device: Device, model: Any, effort: Effort, tell: Callable[[str], None], noise: Noise
) -> Json:
    """:func:`_host_sections`, once more if its passes differ too much; the quieter of the two."""
    host = _host_sections(device, model, effort, tell)
    if apart := noise.runs(host["cpu_costs"]):
        again = _host_sections(device, model, effort, tell)
        still = noise.runs(again["cpu_costs"])
        if max(still.values(), default=0.0) < max(apart.values()):
            host, apart = again, still
    noise.found |= {f"real runs, {name}": round(share, 3) for name, share in apart.items()}
    return host


def _host_notes() -> Json:
    """What is known of the host's memory, for the notes."""
    return {"host_memory": extras.host_memory(), "shared_memory": extras.shared_memory_cost()}


def calibrate_cuda(
    base: str | None = None,
    effort: Effort | None = None,
    tell: Tell = quiet,
    *,
    keep_going: bool = False,
    accept_noise: bool = False,
    spans: Any = "auto",
    may: Callable[[str], None] = _anything,
) -> Json:
    """A whole profile of this machine's GPU and host; see :func:`calibrate`."""
    from heterolab.device.cuda import CudaDevice
    from heterolab.device.cuda_spans import source

    timed_by = source(spans)
    effort, noise = effort or Effort.full(), Noise()
    measured_here = [] if base else [*gpu.PLAN, *gpu.ONLY_CUDA, HOST_MEMORY]
    parts = Parts(tell, ["opening the device", *measured_here, *HOST_PLAN, KERNELS, WAITING])

    @cache
    def traced() -> CudaDevice:
        return CudaDevice.open(spans=timed_by)

    parts.begin("opening the device")
    bare = CudaDevice.open(spans="off")  # what is bare is measured with nothing that traces it
    try:
        may(bare.name)
        kept = base_of(bare, base) if base else None
        cores, found, notes = usable_cores(), Json(), Json()
        if kept is None:
            found, notes = _engines(bare, traced, noise, parts, cores)
        limits = {name: getattr(bare.limits, name) for name in ("memory_bytes", "pinned_bytes", "streams")}
    finally:
        bare.close()
    model, device = _model(), traced()
    try:
        provenance = _provenance(device, _how(base, device.source))
        profile: Json = {
            "format": FORMAT,
            "version": VERSION,
            "name": device.name,
            "provenance": provenance,
            "limits": limits,
        }
        host = parts.run(IN_RUNS, lambda: _steady_host(device, model, effort, parts.begin, noise))
        kernels = parts.run(KERNELS, lambda: deviceside.encoder_kernels(device, model, effort)) or {}
        if kept is not None:
            notes |= parts.run("copies, gaps, arithmetic", lambda: _notes_beside(device, effort)) or {}
    finally:
        device.close()
    late = parts.run(
        WAITING, lambda: compare_waiting(lambda h: CudaDevice.open(host=h, spans=timed_by), effort)
    )
    measured: Json = {"kernels": kernels, "cpu_costs": {}}
    if host is not None:
        bare_calls = (kept or found).get("host")
        measured |= (
            parts.run("the host's sections", lambda: _host_side(host, kernels, bare_calls, cores)) or {}
        )
        notes |= {"host_calls": host["calls"], "cores": host["inside"].get("cores")}
    parts.finish()
    notes |= {
        "waiting_for_events": late,
        "seconds": parts.seconds,
        "failed": parts.failed,
        "noise": noise.note(),
    }
    if kept is not None:
        profile = merged(kept, measured, cores, notes, provenance)
    else:
        measured["kernels"] = found.pop("kernels", {}) | measured["kernels"]
        profile |= found | measured | {"notes": notes}
    return judged(profile, parts, noise, keep_going, accept_noise)


def _host_side(host: Json, kernels: Json, bare_calls: Json | None, cores: int) -> Json:
    """The sections that say what the host does, and the kernels with what it does for them.

    Parameters
    ----------
    bare_calls
        The profile's ``host``; None: its measurement failed, and there is no ``seam`` beside it.
    """
    between_ns = max(host["calls"]["between"]["median"], 0)
    sections = {name: host[name] for name in ("waiting", "workers", "cpu_costs")}
    sections["kernels"] = insitu.with_launches(kernels, host["inside"], between_ns)
    if bare_calls is not None:
        bare = {name: value for name, value in bare_calls.items() if name != "measured"} | {"cores": cores}
        sections["seam"] = insitu.seam_section(bare, host["calls"], host["inside"], host["locks"])
    return sections


def _how(base: str | None, source: str) -> str:
    traced = "exact spans (CUPTI)" if source == "cupti" else "spans from CUDA events"
    return f"{'the host' if base else 'all'} measured, {traced}"


def _engines(
    bare: Any, traced: Callable[[], Device], noise: Noise, parts: Parts, cores: int
) -> tuple[Json, Json]:
    """The sections of the GPU's physics and of bare calls, and notes."""
    attributes = extras.attributes(bare)
    rig = Rig(CudaBench(bare), traced, attributes, noise)
    notes: Json = {"attributes": attributes}
    try:
        with FastCores() as fast:
            measured = gpu.measure(rig, parts, _types(attributes), fast)
            for name, fn in gpu.ONLY_CUDA.items():
                notes[name] = parts.run(name, partial(fn, bare))
            notes |= parts.run(HOST_MEMORY, _host_notes) or {}
        found = gpu.sections(rig, measured, cores, parts.failed)
        notes["grids"] = measured["grids on the processors"]
        if parts.failed:
            notes["single measurements"] = measured
        return found, notes
    finally:
        rig.close()


def _types(attributes: Json) -> list[str]:
    """Types of matrix products that this GPU and these packages can do."""
    major = int(attributes["compute_capability"].partition(".")[0])
    bfloat16 = major >= 8 and compute.torch_there()
    return [*compute.TYPES[:2], *(["bfloat16"] if bfloat16 else [])]


def _notes_beside(device: Device, effort: Effort) -> Json:
    """What a base profile's physics can be compared with."""
    return {
        "copies": deviceside.copies(device, effort),
        "both_speed": deviceside.both_directions(device, effort),
        "gaps": deviceside.gaps(device, effort),
        "arithmetic": deviceside.arithmetic(device, effort),
    }


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
