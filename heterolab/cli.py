"""The command line: ``heterolab lab | run | show | calibrate | bench``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterolab.errors import HeteroLabError, InputError

if TYPE_CHECKING:
    from heterolab.pipeline.preprocess import Rejected
    from heterolab.pipeline.run import Failed, Run
    from heterolab.trace.trace import Trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See how a CPU and a GPU share the work of serving a model.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure HeteroLab itself against a truth.")
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; an error made on purpose is one clear line and exit code 2."""
    try:
        app()
    except (HeteroLabError, OSError) as error:
        typer.secho(f"heterolab: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(2) from error


def labs_folder() -> Path:
    """The labs: beside the package in a checkout, else where the user keeps a copy."""
    folder = Path(__file__).parent.parent / "labs"
    if not (folder / "03_streams_and_overlap.ipynb").exists():
        raise InputError(
            "the labs are not beside this installation. Install from a checkout with `pip install -e .`, "
            "or start `jupyter lab` in the folder that holds the notebooks."
        )
    return folder


@app.command()
def lab(
    name: Annotated[str, typer.Argument(help="Which lab to open, e.g. 03 or 05.")] = "05",
    port: Annotated[int, typer.Option(help="Port of JupyterLab.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    device: Annotated[str, typer.Option(help="Device for the labs; default: CUDA, else simulated.")] = "",
) -> None:
    """Open a lab in JupyterLab."""
    folder = labs_folder()
    found = sorted(folder.glob(f"{name}*.ipynb"))
    if not found:
        names = ", ".join(path.stem for path in sorted(folder.glob("*.ipynb")))
        raise InputError(f"lab {name!r} is not there. There are: {names}.")
    environment = dict(os.environ)
    if device:
        environment["HETEROLAB_DEVICE"] = device
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}", f"--port={port}"]
    command.append(f"--LabApp.default_url=/lab/tree/{found[0].name}")
    # Debian's root shells and containers have no browser and run as root.
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    if os.name == "posix":
        # JupyterLab takes this process's place: what ends the one ends the other.
        os.execve(command[0], command, environment)
    raise SystemExit(subprocess.call(command, env=environment))


@app.command()
def run(
    device: Annotated[str, typer.Option(help="sim:PROFILE, cpu, cuda, cuda:N.")] = "",
    batch: Annotated[int, typer.Option(help="Most requests in a batch.")] = 8,
    streams: Annotated[int, typer.Option(help="Streams on the device.")] = 2,
    memory: Annotated[str, typer.Option(help="pageable, pinned, mapped or managed.")] = "pinned",
    delay: Annotated[float, typer.Option(help="Longest wait for a batch, ms.")] = 2.0,
    workers: Annotated[int, typer.Option(help="Preprocessing threads; 0: the host thread.")] = 1,
    chunk: Annotated[int, typer.Option(help="Requests a preprocessing job.")] = 16,
    payload: Annotated[str, typer.Option(help="ids, embeddings, images_uint8, images_float32.")] = "ids",
    returns: Annotated[str, typer.Option(help="topk, vectors, logits.")] = "topk",
    rate: Annotated[float, typer.Option(help="Requests per second, Poisson arrivals.")] = 300.0,
    n: Annotated[int, typer.Option(help="Number of requests.")] = 64,
    requests: Annotated[Path | None, typer.Option(help="Replay this JSONL file instead.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and texts.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the interactive timeline here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the trace (JSON; .gz: gzipped).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    answers: Annotated[bool, typer.Option(help="Print each answer too.")] = False,
    explain: Annotated[bool, typer.Option(help="Say why the GPU was idle, and what would help.")] = False,
) -> None:
    """Serve requests through the five stages once, and print what it cost."""
    import heterolab as hl

    dev = hl.open_device(device or None)
    load = hl.replay(requests) if requests else hl.poisson(rate=rate, n=n, seed=seed)
    pipe = hl.Pipeline(
        hl.models.encoder(),
        batch=batch,
        streams=streams,
        memory=memory,
        max_delay_ms=delay,
        workers=workers,
        chunk=chunk,
        payload=payload,
        returns=returns,
    )
    result = pipe.run(load, on=dev)
    dev.close()
    report = summary(result) | ({"outputs": [vars(a) for a in result.answers]} if answers else {})
    if explain and as_json:
        report["explain"] = explained(result)
    typer.echo(json.dumps(report, indent=1) if as_json else table(result))
    if explain and not as_json:
        typer.echo(f"\n{hl.explain(result)}\n\n{hl.what_if(result)}")
    if answers and not as_json:
        for answer in result.answers:
            typer.echo(f"{answer.question!r} -> {answer.answer!r} ({answer.confidence:.2f})")
    if trace:
        result.trace.save(trace)
    if html:
        from heterolab.view.timeline import save_html

        save_html(result, html)


def summary(run: Run) -> dict[str, Any]:
    """The figures of a run, with their stamp, ready for JSON."""
    from heterolab.trace import metrics

    return {
        "stamp": run.stamp,
        "settings": run.trace.meta["settings"],
        "answers": len(run.answers),
        "rejected": len(run.rejected),
        "failed": len(run.failed),
        "unserved": len(run.unserved),
        "reasons": reasons(run),
        "trained": all(answer.trained for answer in run.answers),
        "wall_ms": run.wall_ns / 1e6,
        "throughput_per_s": metrics.throughput_per_s(run),
        "latency_mean_ms": float(run.latencies_ns.mean() / 1e6) if run.answers else None,
        "waiting_mean_ms": float(run.waiting_ns.mean() / 1e6) if run.answers else None,
        "batch_sizes": run.batch_sizes.tolist(),
        "balance_ms_per_request": metrics.balance_card(run).as_dict(),
        "gpu_idle_ms_by_cause": {k: v / 1e6 for k, v in metrics.gpu_idle_by_cause(run.trace).items()},
        "hook_errors": list(run.hook_errors),
    }


def explained(run: Run) -> dict[str, Any]:
    """Why the GPUs were idle, the critical path and what would help, ready for JSON."""
    import heterolab as hl
    from heterolab.trace import critical

    why, then = hl.explain(run), hl.what_if(run)
    path = critical.totals(why.critical_path)
    return {
        "idle_ns_by_cause": {str(device): why.found.by_cause(device) for device in why.found.devices},
        "longest_gaps": [why.sentence(gap) for gap in why.longest()],
        "critical_path": [
            {"lane": lane, "work": work, "waits_because_of": cause, "ns": ns}
            for (lane, work, cause), ns in path.items()
        ],
        "notes": why.notes,
        "what_if": {
            "stamp": then.stamp,
            "ranked_by": then.found.goal,
            "throughput_per_s": then.found.per_s,
            "latency_p90_ms": then.found.p90_ns / 1e6,
            "changes": [
                {
                    "change": one.change.name,
                    "settings": dict(one.change.settings),
                    "can_be_tried": one.change.can_be_tried,
                    "throughput_gain": one.gain,
                    "latency_p90_ratio": one.p90_ratio,
                    "why_not": one.why_not,
                }
                for one in then.outcomes
            ],
            "best": then.best.change.name if then.best else None,
        },
    }


def table(run: Run) -> str:
    """A run's figures as a short table, then what was not answered and why."""
    from heterolab.view import words

    lines = [f"  not answered: {reason}" for reason in reasons(run)[:20]]
    return "\n".join([aligned([("where", run.stamp), *words.figures(run)]), *lines, *run.hook_errors])


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def printable(text: str) -> str:
    """`text` without what could command a terminal: a file may come from anybody."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def reasons(run: Run) -> list[str]:
    """Why requests got no answer, one line a request."""
    unanswered: list[Rejected | Failed] = [*run.rejected, *run.failed]
    return [f"request {output.id}: {output.reason}" for output in unanswered]


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A recorded trace, e.g. from `heterolab run --trace`.")],
    html: Annotated[Path | None, typer.Option(help="Write the interactive timeline here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a recorded run cost, stamped "replayed"."""
    from heterolab.trace.trace import Trace

    trace = Trace.load(file)
    report = recorded(trace)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        from heterolab.view import words

        noted = [(name, str(report[name])) for name in ("settings", "load") if report[name] is not None]
        typer.echo(printable(aligned([("where", trace.stamp), *noted, *words.figures(trace)])))
    if html:
        from heterolab.view.timeline import save_html

        save_html(trace, html)


def recorded(trace: Trace) -> dict[str, Any]:
    """The figures of a recorded trace, with its stamp, ready for JSON."""
    from heterolab.trace import compare, metrics

    return {
        "stamp": trace.stamp,
        "settings": compare.settings_of(trace),
        "load": trace.meta.get("load"),
        "answers": trace.meta.get("answers"),
        "spans": len(trace),
        "wall_ms": trace.wall_ns / 1e6,
        "throughput_per_s": compare.per_s(trace),
        "busy_ms_by_lane": {lane: ns / 1e6 for lane, ns in metrics.busy_by_lane(trace).items()},
        "gpu_idle_ms_by_cause": {k: v / 1e6 for k, v in metrics.gpu_idle_by_cause(trace).items()},
    }


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(help="What to measure: cpu or cuda.")],
    out: Annotated[Path | None, typer.Option(help="The profile to write; then use device sim:FILE.")] = None,
    base: Annotated[str, typer.Option(help="For a GPU: keep the physics of this profile of it.")] = "",
    check: Annotated[
        str, typer.Option(help="Measure nothing; say how the machine of this profile differs.")
    ] = "",
    spans: Annotated[str, typer.Option(help="Times of device ops: auto, cupti, events.")] = "auto",
    force: Annotated[bool, typer.Option(help="Write over a file that is of another device.")] = False,
    keep_going: Annotated[bool, typer.Option(help="Write a profile though parts of it failed.")] = False,
    accept_noise: Annotated[bool, typer.Option(help="Write a profile though it is noisy.")] = False,
) -> None:
    """Measure this machine's costs and write a device profile for the simulator."""
    from heterolab.device.calibrate import command

    if check:
        typer.echo(command.check(device, check))
    elif out:
        told = command.measure(
            device,
            out,
            base or None,
            spans=spans,
            force=force,
            keep_going=keep_going,
            accept_noise=accept_noise,
        )
        typer.echo(told)
    else:
        raise InputError("calibrate: say where the profile is to be written, --out FILE.")


@bench.command()
def simulator(
    file: Annotated[Path, typer.Argument(help="Stream programs with what a real GPU did.")],
    without: Annotated[
        list[str] | None, typer.Option(help="Leave this effect of the physics out; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay measured stream programs on the simulator, and print the error by family."""
    from heterolab.device import score

    typer.echo(score.main(file, as_json=as_json, without=without or ()))


@bench.command()
def effects(
    file: Annotated[Path, typer.Argument(help="Stream programs with what a real GPU did.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What each effect of the simulator's physics is worth: the error without it."""
    from heterolab.device import worth

    typer.echo(worth.main(file, as_json=as_json))


@bench.command()
def scale(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """How fast the simulator is, in runs of a thousand to a million ops."""
    from heterolab.device import scale as speed

    typer.echo(speed.main(as_json=as_json))


@bench.command()
def fit(
    file: Annotated[Path, typer.Argument(help="Stream programs with what a real GPU did.")],
    base: Annotated[
        str, typer.Option(help="The profile whose sections other than the physics stay.")
    ] = "h200",
    out: Annotated[str, typer.Option(help="Write the fitted profile here.")] = "",
    splits: Annotated[int, typer.Option(help="Report on so many ways to hold a third out.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit the simulator's physics to two thirds of the programs, and report on the other third."""
    from heterolab.device import heldout

    typer.echo(heldout.main(file, base, out, splits, as_json=as_json))


if __name__ == "__main__":
    main()
