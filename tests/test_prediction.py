"""The simulator predicts this machine: calibrate its CPU, simulate, run for real, compare.

A shared machine is noisy, so calibration and comparison happen in one go, settings are
interleaved with their predictions, and the median of six decides, as it does for a student.
"""

import json
from pathlib import Path
from statistics import median

import heterolab as hl
from heterolab.device.calibrate import calibrate

SETTINGS = [
    {"batch": 1, "streams": 1},
    {"batch": 4, "streams": 1, "ring": 1},
    {"batch": 4, "streams": 2, "memory": "pageable"},
    {"batch": 8, "streams": 2, "workers": 0},
    {"batch": 4, "streams": 2, "payload": "embeddings", "returns": "vectors"},
    {"batch": 8, "streams": 3, "workers": 2, "chunk": 4, "length_aware": False},
]


def errors_here(path: Path) -> list[float]:
    """Calibrate this machine's CPU now; |predicted / measured - 1| of each setting's wall."""
    path.write_text(json.dumps(calibrate("cpu", accept_noise=True)))
    encoder, load, errors = hl.models.encoder(), hl.closed_loop(n=32, in_flight=16, seed=0), []
    real = hl.open_device("cpu")
    try:
        for knobs in SETTINGS:
            predicted = hl.Pipeline(encoder, **knobs).run(load, on=hl.open_device(f"sim:{path}"))
            measured = [hl.Pipeline(encoder, **knobs).run(load, on=real).wall_ns for _ in range(5)]
            errors.append(abs(predicted.wall_ns / median(measured) - 1))
            print(knobs, f"predicted {predicted.wall_ns:,} ns, measured {median(measured):,} ns")
    finally:
        real.close()
    return errors


def test_predicted_walls_are_within_ten_percent_of_measured_ones(tmp_path) -> None:
    errors = errors_here(tmp_path / "here.json")
    assert median(errors) <= 0.10, [f"{error:.0%}" for error in errors]
