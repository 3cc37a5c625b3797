"""The fit of the latency model: known coefficients come back, and its errors are those of shapes it has not seen."""

from dataclasses import replace

import numpy as np
import pytest

from depthlaw.scaling.calibrate import CalibrationError, Measurement, calibrate, held_out
from depthlaw.scaling.hardware import Hardware, Mixing, Workload

TRUTH = Hardware(
    "truth",
    1e10,
    8e10,
    1e-4,
    5e-5,
    "made up",
    {
        "pre_ln": Mixing(1e-4, 1.5e-8, workspace=12.0),
        "hc": Mixing(5e-4, 3e-8, workspace=15.0),
        "full_attnres": Mixing(2e-4, 2e-8, 7e-6, workspace=9.0, scores=3.0),
    },
)
DEPTHS, WIDTHS = (2, 6, 12, 24), (64, 128, 192, 320)


def timings(make_lattice, noise=0.0, seed=0, labels=tuple(TRUTH.topologies), depths=DEPTHS, widths=WIDTHS):
    rng = {what: np.random.default_rng(seed) for what in ("times", "peak_memory")}
    made = []
    for label in labels:
        for L in depths:
            for d in widths:
                reads = L * (2 * L + 3) if label == "full_attnres" else 0
                design = replace(make_lattice(label, [L], [d]), n_layers=L, d_model=d, depth_reads=reads)
                for context in (64, 256):
                    for what in ("tpot", "ttft", "peak_memory"):
                        one = Measurement(design, Workload(context, 1, 4, 4), what, 1.0)
                        error = noise * rng["peak_memory" if what == "peak_memory" else "times"].standard_normal()
                        made.append(replace(one, value=one.predicted(TRUTH) * np.exp(error)))
    return made


def test_noiseless_timings_give_back_every_coefficient(make_lattice):
    found = calibrate(timings(make_lattice), "mine", "from here")
    on = found.hardware
    assert (on.name, on.source) == ("mine", "from here")
    for name in ("bandwidth_bytes_per_s", "peak_flops", "constant_s", "sublayer_s"):
        assert getattr(on, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert set(on.topologies) == set(TRUTH.topologies)
    for label, own in TRUTH.topologies.items():
        for name in ("sublayer_s", "element_s", "source_s", "workspace", "scores"):
            assert getattr(on.topologies[label], name) == pytest.approx(
                getattr(own, name), rel=1e-6, abs=1e-9 if name in ("workspace", "scores") else 1e-15
            )
    assert found.held_out["tpot"].worst < 1e-6
    assert found.held_out["ttft"].worst < 1e-6


def test_noisy_timings_give_coefficients_near_the_truth_and_held_out_errors_of_the_size_of_the_noise(make_lattice):
    found = calibrate(timings(make_lattice, noise=0.05, seed=3), "mine", "")
    assert found.hardware.bandwidth_bytes_per_s == pytest.approx(TRUTH.bandwidth_bytes_per_s, rel=0.1)
    assert found.hardware.peak_flops == pytest.approx(TRUTH.peak_flops, rel=0.2)
    for label, own in TRUTH.topologies.items():
        assert found.hardware.topologies[label].sublayer_s == pytest.approx(own.sublayer_s, rel=0.1)
    assert found.hardware.topologies["full_attnres"].source_s == pytest.approx(7e-6, rel=0.15)
    for what in ("tpot", "ttft", "peak_memory"):
        # The median of |noise| of 5 % is 3.4 %.
        assert 0.02 < found.held_out[what].median < 0.055
        assert found.held_out[what].n == 3 * 2 * len(found.held_out_shapes)
        assert found.fitted[what].n == 3 * 2 * (16 - len(found.held_out_shapes))


def test_errors_are_those_of_shapes_that_the_fit_did_not_see(make_lattice):
    """Held-out times doubled change no coefficient, and show as an error of one half, with the place of the worst."""
    plain = timings(make_lattice)
    aside = held_out([t.shape for t in plain])
    worse = [replace(t, value=2 * t.value) if t.shape in aside else t for t in plain]
    worse[worse.index(next(t for t in worse if t.shape == aside[0] and t.what == "tpot"))] = replace(
        next(t for t in plain if t.shape == aside[0] and t.what == "tpot"), value=1e3
    )
    found, clean = calibrate(worse, "x", ""), calibrate(plain, "x", "")
    assert found.hardware == clean.hardware
    assert found.held_out["ttft"].median == pytest.approx(0.5, rel=1e-6)
    assert found.held_out["tpot"].worst == pytest.approx(1.0, abs=1e-3)
    assert found.held_out["tpot"].worst_at == f"pre_ln, {aside[0][0]} layers of width {aside[0][1]}, context 64"
    assert found.fitted["tpot"].worst < 1e-6


def test_a_third_of_the_grid_is_held_out_of_every_depth_and_width_and_never_a_corner_of_four_by_four():
    grid = [(L, d) for L in DEPTHS for d in WIDTHS]
    aside = held_out(grid)
    assert aside == held_out(grid[::-1]) == [(2, 128), (6, 64), (6, 320), (12, 192), (24, 128)]
    assert {L for L, _ in aside} == set(DEPTHS)
    assert {d for _, d in aside} == set(WIDTHS)


def test_no_rate_is_fitted_above_what_the_machine_reaches(make_lattice):
    """Small models whose weights cost nothing measurable: the rates are then the machine's best, not infinite."""
    small = [replace(t, value=1e-3 * t.shape[0]) for t in timings(make_lattice, labels=["pre_ln"])]
    on = calibrate(small, "x", "", fastest=(5e10, 1e11)).hardware
    assert 0 < on.bandwidth_bytes_per_s <= 5e10 * (1 + 1e-12)
    assert 0 < on.peak_flops <= 1e11 * (1 + 1e-12)
    with pytest.raises(CalibrationError, match=r"do not grow with .*: measure wider models"):
        calibrate(small, "x", "")


def test_what_was_measured_is_kept_with_the_hardware(make_lattice):
    got = calibrate(timings(make_lattice), "x", "").hardware.measured
    assert got == {
        "n_layers": (2, 24), "d_model": (64, 320), "context": (64, 256), "batch": (1, 1),
        "weight_bytes": (4, 4), "cache_bytes": (4, 4), "tensor_parallel": (1, 1),
    }  # fmt: skip


def test_without_pre_ln_an_unmeasured_topology_costs_as_the_middle_one(make_lattice):
    found = calibrate(timings(make_lattice, labels=["hc", "full_attnres"]), "x", "")
    assert found.hardware.sublayer_s == pytest.approx(3.5e-4, rel=1e-6)


@pytest.mark.parametrize(("depths", "widths"), [((2,), WIDTHS), (DEPTHS, (64,)), ((), ())])
def test_too_few_shapes_are_refused(make_lattice, depths, widths):
    with pytest.raises(CalibrationError, match="take at least two depths, each at the same two widths"):
        calibrate(timings(make_lattice, depths=depths, widths=widths), "x", "")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_named(make_lattice, seconds):
    made = timings(make_lattice)
    made[7] = replace(made[7], value=seconds)
    with pytest.raises(
        CalibrationError, match=r"pre_ln, 2 layers of width 128, context 64: ttft of .* positive number"
    ):
        calibrate(made, "x", "")
