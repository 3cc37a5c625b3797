"""What the figures show, against figures found another way: by hand, by a loop over designs, by a fit of one's own."""

import numpy as np
import pandas as pd
import pytest

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.report import depth, figures, front, isoflop, rates, shapes
from depthlaw.platform.report.gather import gather
from depthlaw.platform.report.style import styled, ticks
from depthlaw.platform.report.sweeps import LIMITS
from depthlaw.scaling.fit import fit
from depthlaw.scaling.hardware import Workload, hardware, kv_bytes, tpot

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def material(made):
    return gather(made.store, made.law, [], None, {"hardware": "cpu"}, lambda text: None)


@pytest.fixture(scope="module")
def drawings(material):
    with styled():
        return {make: make(material) for make in figures()}


def points(ax, marker=None):
    """The data of every line that has markers and no line of its own."""
    lines = [x for x in ax.lines if x.get_linestyle() == "None" and len(x.get_xdata())]
    return [(x.get_xdata(), x.get_ydata()) for x in lines if marker is None or x.get_marker() == marker]


def test_points_of_loss_by_shape_are_the_cells_at_their_best_rate(made, drawings):
    drawing = drawings[shapes.loss_by_shape]
    shown = {}
    for panel in drawing.panels:
        ax = panel.figure.axes[0]
        begins = ax.get_title(loc="left")[:2]
        for x, y in points(ax):
            if max(y) > 1:  # marks of what broke are at 0.96 of the height
                shown.setdefault(begins, []).extend(zip(x, y, strict=True))
    cells = made.store.cells()
    for label, own in cells[cells["val_loss"].notna()].groupby("topology"):
        wanted = sorted(zip(own["d_model"] / own["n_layers"], own["val_loss"], strict=True))
        assert sorted(shown[str(label)[:2]]) == wanted
    assert len(drawing.panels) == 3 * 3


def test_trade_offs_far_from_the_runs_in_size_or_shape_are_counted_and_not_drawn(material, drawings):
    drawing = drawings[front.pareto_front]
    shown, far = [], 0
    for c in material.answer.pareto:
        of = material.law.ranges[c.topology]
        past = [value < 0.5 * low or value > 2 * high for value, (low, high) in (
            (c.d_model / c.n_layers, of["R"]), (c.backbone_params, of["N"]))]  # fmt: skip
        far += any(past)
        shown += [c.loss] * (not any(past))
    assert far > 0
    assert any(c.backbone_params < 0.5 * material.law.ranges[c.topology]["N"][0] for c in material.answer.pareto)
    assert f"Not shown: {far} whose d/L or size" in drawing.caption
    drawn = [y for x in drawing.panels[0].figure.axes[0].lines for y in x.get_ydata() if len(x.get_xdata())]
    assert sorted(drawn) == sorted(shown)


def test_a_shape_that_always_diverged_is_marked_and_has_no_loss(drawings):
    drawing = drawings[shapes.loss_by_shape]
    titles = {p.figure.axes[0].get_title(loc="left"): p.figure.axes[0] for p in drawing.panels}
    (largest,) = [
        ax for title, ax in titles.items() if title.startswith("pre_ln") and "4" in title.split("about ")[1][:1]
    ]
    crosses = points(largest, "x")
    assert [list(x) for x, _ in crosses] == [[48 / 14], [48 / 14]]  # at both amounts of training
    assert "diverged" in " ".join(t.get_text() for t in largest.figure.legends[0].get_texts())


def test_the_curve_and_the_band_are_those_of_the_law(made, material, drawings):
    drawing = drawings[shapes.loss_by_shape]
    ax = next(p.figure.axes[0] for p in drawing.panels if p.figure.axes[0].get_title(loc="left").startswith("hc"))
    curve = next(x for x in ax.lines if len(x.get_xdata()) == shapes.POINTS)
    cells = material.cells.query("topology == 'hc' and size == 0").assign(ratio=lambda c: c.d_model / c.n_layers)
    few = cells[cells["tokens"] < 4e5].sort_values("ratio")
    for cell, at in ((few.iloc[0], 0), (few.iloc[-1], -1)):  # at its ends the curve is at a cell
        where = ("hc", cell["backbone_params"], cell["tokens"], cell["n_layers"], cell["d_model"])
        assert curve.get_ydata()[at] == pytest.approx(float(made.law.predict(*where)), rel=1e-9)
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    low, high = made.law.interval(*where)
    assert band.min() <= float(low[0]) + 1e-6
    assert float(high[0]) <= band.max() + 1e-6


def test_learning_rates_have_a_point_a_trial_and_a_mark_for_each_that_broke(made, drawings):
    drawing = drawings[rates.learning_rates]
    trials = made.store.trials()
    several = made.store.cells().query("n_lrs > 1")
    keys = ["topology", "n_layers", "d_model", "tokens"]
    wanted = trials.merge(several[keys], on=keys)
    counts = {"finished": 0, "x": 0, "|": 0}
    for panel in drawing.panels:
        for line in panel.figure.axes[0].lines:
            if line.get_linestyle() == "None" and len(line.get_xdata()):
                kind = line.get_marker() if line.get_marker() in ("x", "|") else "finished"
                counts[kind] += len(line.get_xdata())
    status = wanted["status"].value_counts()
    assert counts == {"finished": status["finished"], "x": status["diverged"], "|": status["pruned"]}
    assert (
        f"{len(made.store.cells()) - len(several)} of {len(made.store.cells())} cells ran at one rate"
        in drawing.caption
    )


def test_the_vertex_of_a_cell_is_shown_where_the_cells_have_one(material):
    vertex = {"vertex_lr": 6e-3, "vertex_loss": 3.5}
    with_vertex = type(material)(**{**material.__dict__, "cells": material.cells.assign(**vertex)})
    with styled():
        drawing = rates.learning_rates(with_vertex)
    stars = points(drawing.panels[0].figure.axes[0], "*")
    assert len(stars) > 0
    assert all((x[0], y[0]) == (6e-3, 3.5) for x, y in stars)


def test_levels_of_compute_are_where_most_sizes_lie():
    flops = [1.0, 1.02, 1.1, 9.0, 9.3, 50.0, 120.0, 1000.0]
    cells = pd.DataFrame({"train_flops": np.array(flops) * 1e12, "size": [0, 1, 2, 0, 1, 0, 0, 0]})
    assert isoflop._levels(cells) == pytest.approx([1.02e12, 1e12 * (9.0 * 9.3) ** 0.5, 50e12, 120e12])


def test_lines_of_equal_compute_keep_their_flops_and_stay_where_runs_were(made, material, drawings):
    drawing = drawings[isoflop.iso_flop]
    ax = next(p.figure.axes[0] for p in drawing.panels if p.figure.axes[0].get_title(loc="left") == "hc")
    cells = material.cells.query("topology == 'hc'")
    levels = isoflop._levels(material.cells[material.cells["val_loss"].notna()])
    curves = [x for x in ax.lines if len(x.get_xdata()) > 4]
    assert len(curves) >= 2
    each = cells["train_flops"] / cells["tokens"] / cells["backbone_params"]
    for curve in curves:
        N, loss = curve.get_xdata(), curve.get_ydata()
        assert cells["backbone_params"].min() <= N.min() <= N.max() <= cells["backbone_params"].max() * 1.0001
        # FLOPs a token over N change little between these cells, so D follows from C and N within their spread.
        fits = []
        for level in levels:
            D = level / N / each.median()
            R = made.law.best_ratio("hc", N)
            L = (N / 12 / R**2) ** (1 / 3)
            fits.append(np.abs(np.log(loss / made.law.predict("hc", N, D, L, R * L))).max())
        assert min(fits) < 0.03


def test_held_out_points_are_predictions_of_a_fit_to_the_smaller_sizes(made, material):
    cells = made.store.cells()
    small = cells[cells["backbone_params"] < 2e5]
    law = fit(small, "shape", "shared")
    held = material.held_out
    assert held["N"].min() > 3e5
    largest = cells[(cells["backbone_params"] > 3e5) & cells["val_loss"].notna()]
    assert len(held) == len(largest)
    for cell in largest.itertuples():
        own = held[(held["topology"] == cell.topology) & np.isclose(held["observed"], cell.val_loss)]
        at = (cell.topology, cell.backbone_params, cell.tokens, cell.n_layers, cell.d_model)
        assert own["predicted"].iloc[0] == pytest.approx(float(law.predict(*at)), rel=2e-3)  # fewer starts there
        assert own["lower"].iloc[0] < own["predicted"].iloc[0] < own["upper"].iloc[0]


@pytest.mark.parametrize("budget", ["backbone_params", "kv_bytes", "tpot"])
def test_the_optimum_under_each_limit_is_that_of_a_loop_over_every_design(made, material, budget):
    swept = material.swept[material.swept["budget"] == budget]
    assert set(swept["topology"]) == {"pre_ln", "hc"}
    machine, load = hardware("cpu"), Workload()
    largest, D = made.law.ranges[""]["N"][1], made.law.ranges[""]["D"][1]
    rule = shape_rule("small")
    for row in swept.iloc[[0, 5, LIMITS - 1, -1]].itertuples():
        best = (np.inf, 0, 0)
        for L in range(1, 17):
            for d in range(8, 513, 8):
                design = Costs(topology(row.topology), rule.shape(L, d, 512))
                N = int(design.backbone_params)
                uses = {
                    "backbone_params": N,
                    "kv_bytes": float(kv_bytes(design, load)),
                    "tpot": float(tpot(design, load, machine)),
                }
                if uses[budget] > row.limit * (1 + 1e-9) or (budget != "backbone_params" and largest < N):
                    continue
                best = min(best, (float(made.law.predict(row.topology, N, D, L, d)), L, d))
        assert (row.n_layers, row.d_model) == best[1:]
        assert row.loss == pytest.approx(best[0], rel=1e-12)
        assert row.L_low <= row.L_high
        assert row.d_low <= row.d_high


def test_limits_run_over_what_the_trained_cells_use(material):
    known = material.cells[material.cells["topology"].isin(["pre_ln", "hc"])]
    swept = material.swept[material.swept["budget"] == "backbone_params"]
    assert swept["limit"].min() == pytest.approx(known["backbone_params"].min())
    assert swept["limit"].max() == pytest.approx(known["backbone_params"].max())


def test_diagnostics_are_joined_to_their_trials(made, drawings):
    drawing = drawings[depth.diagnostics]
    assert {p.figure.axes[0].get_title(loc="left") for p in drawing.panels} == {"pruning", "causal"}
    columns, rows = drawing.table
    assert columns[-2:] == ["pruning: least", "trial"]
    trials = made.store.trials().set_index("trial")
    assert len(rows) == 6  # two amounts of training, three topologies
    for row in rows:
        assert row[0] == trials.loc[row[-1], "topology"]
        assert row[3] == f"{trials.loc[row[-1], 'val_loss']:.4f}"
        assert row[-2] == "0.0625"
    line = drawing.panels[0].figure.axes[0].lines[0]
    assert list(line.get_ydata()) == pytest.approx([0.5, 0.25, 0.5 / 3, 0.125])


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1, 1000, [1, 10, 100, 1000]),
        (3, 120, [3, 10, 30, 100]),
        (0.9, 2.6, [1, 1.5, 2, 2.5]),
        (4.0, 5.0, [4.0, 4.2, 4.4, 4.6, 4.8, 5.0]),
        (50_300, 56_100, [52_000, 54_000, 56_000]),
    ],
)
def test_ticks_are_round_and_inside(low, high, wanted):
    assert ticks(low, high) == pytest.approx(wanted)


def test_ticks_of_bytes_are_powers_of_two():
    assert ticks(3 * 2**16, 2**21, 2) == [2**18, 2**19, 2**20, 2**21]
    assert len(ticks(1, 2**40, 2)) <= 5
    assert ticks(300, 800, 2) == [384, 512, 768]  # one power alone is no axis


def test_every_figure_says_what_it_shows_and_its_limit(drawings):
    for drawing in drawings.values():
        assert drawing.panels or drawing.table, drawing.title
        assert not drawing.lacks
        assert len(drawing.caption) > 60, drawing.title
