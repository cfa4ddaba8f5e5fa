"""A GPU's engines, measured part by part, and the sections of its profile that come of it.

What is bare (CUDA's own calls, by the host's clock) comes first, while nothing traces them; then
what needs spans. Nothing here knows what device it is: on a simulated one it gives back the
constants of that one's profile, which is how the method is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from heterolab.device.calibrate import calls, compute, engines, extras, hostmemory, managed
from heterolab.device.calibrate.figures import Json
from heterolab.device.calibrate.parts import Parts
from heterolab.device.calibrate.rig import Rig
from heterolab.device.cores import FastCores

#: What is measured by the host's clock, by its part's name.
BARE: dict[str, Callable[[Rig], Any]] = {
    "host calls": calls.host_calls,
    "cold calls": calls.cold_calls,
    "start and synchronize": calls.latency,
    "pauses between ops": engines.pauses,
    "both directions at once": engines.both_directions,
    "copy channels": engines.channels,
    "pageable copies": hostmemory.pageable,
    "reads over the link beside copies": hostmemory.mapped_share,
    "grids on the processors": compute.waves,
    "managed memory": managed.managed,
}
#: What is measured by spans where they are exact.
TIMED: dict[str, Callable[[Rig], Any]] = {
    "kernels that do nothing": compute.fixed,
    "return of a synchronize": calls.returns,
    "copy before a kernel": engines.copy_share,
    "copies": engines.copies,
    "pieces of pageable copies": hostmemory.staged_share,
    "reads over the link": hostmemory.mapped,
    "vector add": compute.vector_adds,
    "integer arithmetic": compute.integers,
}
PRODUCT_CALLS, PRODUCTS = "matrix products, the host's calls", "matrix products"
#: What only a CUDA device has; for the notes.
ONLY_CUDA: dict[str, Callable[[Any], Json]] = {
    "allocation": extras.allocation,
    "CUDA graph": extras.graph,
}

PLAN = [*BARE, PRODUCT_CALLS, *TIMED, PRODUCTS]


def measure(rig: Rig, parts: Parts, types: Sequence[str], cores: FastCores | None = None) -> Json:
    """Everything about the device's engines and calls, by the part's name; what failed is None.

    Parameters
    ----------
    types
        Types of matrix products that the device can do.
    cores
        Each part keeps to the host's cores that are fast as it begins.
    """
    measured: Json = {}

    def run(name: str, fn: Callable[[], Any]) -> None:
        if cores is not None:
            cores.choose()
        measured[name] = parts.run(name, fn)

    for name, fn in BARE.items():
        run(name, partial(fn, rig))
    run(PRODUCT_CALLS, lambda: compute.product_calls(rig, types))
    if rig.exact:
        rig.drop()
    for name, fn in TIMED.items():
        run(name, partial(fn, rig))
    run(PRODUCTS, lambda: compute.products(rig, types))
    return measured


def sections(rig: Rig, measured: Json, cores: float, failed: dict[str, str]) -> Json:
    """The profile's sections ``host``, ``copies``, ``pageable``, ``mapped``, ``managed``, ``gaps``,
    ``compute`` and ``kernels``; one whose parts failed is absent. What cannot be made of its parts is
    put in `failed`."""
    out: Json = {"kernels": {}}

    def build(section: str, needs: Sequence[str], make: Callable[..., Any]) -> None:
        found = [measured.get(name) for name in needs]
        if None not in found:
            try:
                out[section] = make(*found)
            except Exception as error:  # one section must not take the others with it
                failed[f"section {section}"] = f"{type(error).__name__}: {error}"

    exact, noise = rig.exact, rig.noise
    build(
        "host",
        ("host calls", "start and synchronize", "kernels that do nothing", "cold calls"),
        lambda warm, late, quiet, cold: calls.host_section(
            warm, late, measured["return of a synchronize"], quiet["fixed_ns"], cold, cores
        ),
    )
    build(
        "gaps",
        ("pauses between ops", "copies", "kernels that do nothing"),
        lambda chains, copied, quiet: engines.gaps_section(
            chains,
            copied if exact else None,
            quiet["fixed_ns"] if exact else None,
            measured["copy before a kernel"],
        ),
    )
    build(
        "copies",
        ("copies", "both directions at once", "reads over the link beside copies", "copy channels"),
        partial(copies_section, exact),
    )
    build("mapped", ("reads over the link",), lambda table: table)
    build("managed", ("managed memory",), lambda section: section)
    if "host" in out:
        build(
            "pageable",
            ("pageable copies",),
            lambda rows: hostmemory.pageable_section(
                rows, measured["pieces of pageable copies"], out["host"], noise
            ),
        )
    build(
        "compute",
        ("kernels that do nothing", "vector add"),
        lambda quiet, adds: compute.compute_section(
            rig.attributes,
            quiet,
            adds,
            measured[PRODUCTS],
            measured["integer arithmetic"],
            measured["grids on the processors"],
        ),
    )
    build("kernels", (), lambda: _kernels(measured, out.get("host")))
    return out


def _kernels(measured: Json, host: Json | None) -> Json:
    """Vector add and matrix products, by name."""
    out = {}
    if (adds := measured["vector add"]) is not None:
        out["vector_add"] = adds | {"source": "measured: alone on the device"}
    held = measured[PRODUCT_CALLS] or {}
    for dtype, row in (measured[PRODUCTS] or {}).items():
        entry = {name: value for name, value in row.items() if name != "rate"}
        if dtype in held and host is not None:
            entry |= compute.cold_product(held[dtype], host["cold_work_ns"])
        out[f"gemm.{dtype}"] = entry
    return out


def copies_section(exact: bool, copied: Json, both: Json, beside: Json, channels: Json) -> Json:
    """The profile's ``copies``."""
    how = "exact spans" if exact else "chains of copies, the pause between two included (no exact spans)"
    return {
        **copied,
        "both_speed": both["both_speed"],
        "both_large_bytes": both["both_large_bytes"],
        "both_large_speed": both["both_large_speed"],
        "mapped_share": beside["mapped_share"],
        "channels": channels["channels"],
        "measured": {
            "both": both["measured"],
            "mapped_share": beside["measured"],
            "channels": channels["measured"],
        },
        "source": f"measured: pinned copies alone, {how}; both directions, and reads over the link beside "
        "copies: walls by the host's clock; channels: which streams a waiting copy holds up",
    }
