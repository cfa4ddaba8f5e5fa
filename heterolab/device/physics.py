"""The simulator's physics, effect by effect, each with a name and a switch.

``open_device("sim:h200", without=["pageable_holds_host"])`` opens a machine that lacks an effect:
what it predicts then says what the effect is worth. :data:`EFFECTS` has all of them.

An effect is switched off once, when the device is opened. Most are numbers of the profile that
get neutral values (a gap of 0 ns); the few that are rules are the flags of :class:`Physics`.
Off means that the simulator does not know of it, not that a machine without it could be built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from heterolab.device.prices import Prices
from heterolab.device.profile import CpuCost, DeviceProfile, HostCosts, KernelCost, Managed, Table
from heterolab.errors import InputError

#: Kernels of a profile that memory traffic bounds: the L2 cache has a part in their tables.
MEMORY_BOUND = ("vector_add",)
NOTHING = Table.constant(0.0)
#: Managed memory whose pages need not move.
EVERYWHERE = Managed(group_bytes=1 << 16, fault_ns=0.0, bytes_per_ns=float("inf"), host_fault_ns=0.0)


@dataclass(frozen=True)
class Physics:
    """What a simulated device goes by: the costs of its profile, and rules that are no numbers.

    Attributes
    ----------
    one_engine
        Copies of a direction go one after the other; else all at once, sharing the link.
    channels
        A copy engine is fed through channels, first in, first out; else it takes the copy that
        was ready first.
    legacy_barrier
        The legacy default stream waits for all blocking streams, and they for it.
    without
        The names of the effects that are off, sorted.
    """

    profile: DeviceProfile
    one_engine: bool = True
    channels: bool = True
    legacy_barrier: bool = True
    without: tuple[str, ...] = ()

    @cached_property
    def prices(self) -> Prices:
        """What ops cost."""
        return Prices(self.profile)

    @classmethod
    def of(cls, profile: DeviceProfile, without: str | Iterable[str] = ()) -> Physics:
        """The physics of a profile, without the effects named.

        Raises
        ------
        InputError
            There is no such effect.
        """
        names = tuple(sorted({known(name) for name in _listed(without)}))
        physics = cls(profile, without=names)
        for name, effect in EFFECTS.items():
            if name in names:
                physics = effect.off(physics)
        return physics


@dataclass(frozen=True)
class Effect:
    """One effect: what it is, in a sentence, and how it is switched off."""

    what: str
    off: Callable[[Physics], Physics]


def known(name: object) -> str:
    """`name`, if it is an effect's; else InputError with the nearest names."""
    if isinstance(name, str) and name in EFFECTS:
        return name
    near = get_close_matches(str(name).replace(" ", "_"), EFFECTS, 3, 0.4)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise InputError(
        f"without={name!r}: the simulator has no effect of that name.{meant} Its effects are: "
        f"{', '.join(EFFECTS)}."
    )


def _listed(without: object) -> list[object]:
    """One name or several, as a list."""
    if isinstance(without, str):
        return [without]
    if not isinstance(without, Iterable):
        raise InputError(f"without={without!r}: give a list of effects, e.g. without=['copy_channels'].")
    return list(without)


# -- off: neutral numbers --------------------------------------------------------------------


def _changed(part: str, **values: Any) -> Callable[[Physics], Physics]:
    """Off where the numbers of one section of the profile have these values."""

    def off(physics: Physics) -> Physics:
        profile = physics.profile
        section = replace(getattr(profile, part), **values)
        return replace(physics, profile=replace(profile, **{part: section}))

    return off


def _missing(part: str) -> Callable[[Physics], Physics]:
    """Off where the profile lacks a section: host memory is as near as any other, then."""
    nothing: dict[str, Any] = {part: None}
    return lambda physics: replace(physics, profile=replace(physics.profile, **nothing))


def _rule(name: str) -> Callable[[Physics], Physics]:
    off: dict[str, Any] = {name: False}
    return lambda physics: replace(physics, **off)


def _host_costs(physics: Physics, kernel: Callable[[KernelCost], KernelCost], **values: Any) -> Physics:
    """The same numbers of the bare calls and of those through the seam, and of kernels by name."""
    profile = physics.profile
    seam: HostCosts | None = profile.seam and replace(profile.seam, **values)
    kernels = {name: kernel(cost) for name, cost in profile.kernels.items()}
    host = replace(profile.host, **values)
    return replace(physics, profile=replace(profile, host=host, seam=seam, kernels=kernels))


_CALLS = ("launch_ns", "copy_ns", "record_ns", "wait_ns", "between_ns")
_COLD = ("cold_launch_ns", "cold_copy_ns", "cold_event_ns")


def _no_calls(physics: Physics) -> Physics:
    def free(cost: KernelCost) -> KernelCost:
        return replace(cost, host=cost.host and NOTHING, cold_host_ns=0.0)

    return _host_costs(physics, free, **dict.fromkeys((*_CALLS, *_COLD), 0.0))


def _never_cold(physics: Physics) -> Physics:
    return _host_costs(physics, lambda cost: replace(cost, cold_host_ns=0.0), **dict.fromkeys(_COLD, 0.0))


def _no_latency(physics: Physics) -> Physics:
    return _host_costs(physics, lambda cost: cost, sync_ns=0.0, sync_idle_ns=0.0, start_ns=0.0)


def _copies_take_turns(physics: Physics) -> Physics:
    return _changed("gaps", copy_copy_ns=physics.profile.gaps.turn_ns)(physics)


def _straight(table: Table) -> Table:
    """`table` as a latency and one rate, that of its largest sizes."""
    if len(table.sizes) < 2:
        return table
    (before, last), (ns_before, ns_last) = table.sizes[-2:], table.ns[-2:]
    slope = (ns_last - ns_before) / (last - before)
    return Table((0.0, last), (table.ns[0], table.ns[0] + slope * last))


def _no_cache(physics: Physics) -> Physics:
    profile = physics.profile
    kernels = {
        name: replace(cost, time=_straight(cost.time)) if name in MEMORY_BOUND else cost
        for name, cost in profile.kernels.items()
    }
    compute = replace(profile.compute, memory=_straight(profile.compute.memory))
    return replace(physics, profile=replace(profile, compute=compute, kernels=kernels))


def _no_lock(physics: Physics) -> Physics:
    def alone(cost: CpuCost) -> CpuCost:
        return replace(cost, gil=NOTHING, waits=NOTHING)

    physics = _host_costs(physics, lambda cost: cost, call_gil=0.0)
    profile = physics.profile
    on_host = None if profile.compute.on_host_gil is None else 0.0
    stages = {name: alone(cost) for name, cost in profile.cpu_costs.items()}
    compute = replace(profile.compute, on_host_gil=on_host)
    return replace(physics, profile=replace(profile, cpu_costs=stages, compute=compute))


#: name → what it is and how it is switched off. Where several are off, they are applied in this order.
EFFECTS: dict[str, Effect] = {
    "concurrent_kernels": Effect(
        "Kernels of several streams run at once where their blocks fit the SMs; without, one at a time.",
        _changed("compute", kernels=1),
    ),
    "host_calls": Effect(
        "Each call to the device holds the host for a time of its own; without, calls cost nothing.",
        _no_calls,
    ),
    "cold_calls": Effect(
        "A call costs more after other work has taken the caches; without, each is as cheap as in a loop.",
        _never_cold,
    ),
    "pageable_holds_host": Effect(
        "Copies from and to pageable memory hold the host while it moves the bytes; without, they are as "
        "pinned ones.",
        _missing("pageable"),
    ),
    "zero_copy_reads": Effect(
        "A kernel reads mapped host memory at the link's speed; without, as fast as the device's own.",
        _missing("mapped"),
    ),
    "one_engine_a_direction": Effect(
        "Copies of one direction go one after the other; without, all at once, and they share the link.",
        _rule("one_engine"),
    ),
    "directions_share_link": Effect(
        "Copies of both directions at once slow each other; without, each goes at its full speed.",
        _changed("copies", both_speed=1.0, both_large_speed=1.0),
    ),
    "queued_copies_pipeline": Effect(
        "A copy queued behind one of the same direction starts at once when that ends; without, it waits "
        "as long as one of the other direction does.",
        _copies_take_turns,
    ),
    "managed_faults": Effect(
        "Kernels and the host wait for the pages of managed memory that are not where they are touched; "
        "without, each page is everywhere.",
        lambda physics: replace(physics, profile=replace(physics.profile, managed=EVERYWHERE)),
    ),
    "gaps_in_a_stream": Effect(
        "Between two ops of a stream passes a pause, by their kinds; without, none.",
        _changed(
            "gaps",
            copy_kernel_ns=0.0,
            kernel_copy_ns=0.0,
            kernel_kernel_ns=0.0,
            copy_copy_ns=0.0,
            turn_ns=0.0,
        ),
    ),
    "event_latency": Effect(
        "A stream that waits for an event goes on some time after it; without, at once.",
        _changed("gaps", event_ns=0.0),
    ),
    "copy_channels": Effect(
        "Streams share a few channels to a copy engine, and a copy that is not ready holds up those behind "
        "it; without, the engine takes whichever was ready first.",
        _rule("channels"),
    ),
    "legacy_default_stream": Effect(
        "The legacy default stream waits for all blocking streams and they for it; without, it is as any "
        "other. (The check for races still goes by the barrier.)",
        _rule("legacy_barrier"),
    ),
    "sync_and_start_latency": Effect(
        "An op starts some time after its call, and a synchronize returns some time after the device is "
        "idle; without, both at once.",
        _no_latency,
    ),
    "l2_regime": Effect(
        "A kernel bound by memory is faster while its data fit the L2 cache; without, all goes at the rate "
        "of the largest sizes.",
        _no_cache,
    ),
    "interpreter_lock": Effect(
        "Threads share Python's interpreter lock; without, none waits for another.",
        _no_lock,
    ),
    "loop_step": Effect(
        "Each step of the host's loop costs it time; without, none.",
        _changed("waiting", loop_step_ns=0.0),
    ),
    "wake_lateness": Effect(
        "A sleeping host goes on some time after what it waited for; without, at once.",
        _changed("waiting", event_ns=0.0, job_ns=0.0, timer_ns=0.0),
    ),
}
