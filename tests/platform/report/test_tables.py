"""The report of a table and of bundled data: what it draws, what it says a table does not have, and its limits."""

import csv
import html
import re
import shutil

import numpy as np
import pandas as pd
import pytest

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform import bundled as bundling
from depthlaw.platform import report as package
from depthlaw.platform.bundled import Bundled, bundled
from depthlaw.platform.cli import main
from depthlaw.platform.query import fit, optimum
from depthlaw.platform.report import front, held_out, isoflop, provenance, report, shapes
from depthlaw.platform.report import gather as gathering
from depthlaw.platform.report.gather import gather
from depthlaw.platform.report.style import styled
from depthlaw.platform.tables import read_table
from depthlaw.scaling.hardware import Workload, kv_bytes
from depthlaw.scaling.law_file import load_law

NAME = "published-400m"
# Three sizes a factor 4 apart, of the truth that the stores of these tests have, under names of its own.
COLUMNS = {"topology": "kind", "tokens": "seen", "n_layers": "depth", "d_model": "width", "val_loss": "loss"}
SHAPES = [(1, 64), (2, 48), (3, 40), (4, 32), (2, 96), (3, 72), (4, 64), (8, 48), (2, 192), (4, 136), (8, 96), (16, 72)]


@pytest.fixture
def run(capsys):
    def command(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["report", *(str(a) for a in arguments)])
        return end.value.code or 0, *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def published():
    """What the page of the bundled table is drawn from."""
    return gather(bundled(NAME), None, [], None, {"hardware": "h100"}, lambda text: None)


@pytest.fixture(scope="module")
def table(truth):
    rows = []
    for kind in ("pre_ln", "hc"):
        for L, d in SHAPES:
            N = int(Costs(topology(kind), shape_rule("small").shape(L, d, 512)).backbone_params)
            for seen in (5 * N, 20 * N):
                noise = 1 + 1e-3 * np.sin(7.0 * L + d + seen / 1e5)
                rows.append((kind, N, seen, L, d, truth(kind, N, seen, L, d) * noise))
    return pd.DataFrame(rows, columns=["kind", "backbone_params", "seen", "depth", "width", "loss"])


@pytest.fixture(scope="module")
def sized(table):
    law = fit(table, "shape", draws=40, columns=COLUMNS)
    asked = {"hardware": "cpu", "rule": "small", "vocab_size": 512}
    return gather(table, law, [], None, asked, lambda text: None, COLUMNS, "mine.csv")


def words(path):
    text = re.sub(r'src="data:[^"]*"', "", path.read_text(encoding="utf-8"))
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


# ---- bundled data


def test_one_command_gives_the_report_of_a_bundled_table_with_its_limits(run, tmp_path):
    code, out, err = run("--data", NAME, "--out", tmp_path / "r")
    data, text = bundled(NAME), words(tmp_path / "r" / "report.html")
    assert code == 0, err
    assert "report.html and 16 figures" in out
    assert err.splitlines()[0] == f"about {NAME}: {data.limits}"
    assert text.index(data.limits) < text.index("the best design is")
    law = load_law(data.law)
    N, D = law.ranges[""]["N"][1], law.ranges[""]["D"][1]
    best = optimum(law, [f"params<={N:.0f}"], tokens=D, hardware="h100").best
    assert f"{best.topology} with {best.n_layers} layers of width {best.d_model}" in text
    assert f"{best.loss:.4f} nats a token (95 % interval {best.lower:.4f} to {best.upper:.4f})" in text
    assert "Under params at most 414M, trained on 8.28B tokens" in text
    assert law.rows_hash in text
    assert " ".join((data.runs.parent / "SOURCE.md").read_text().split()) in text
    for lacks in (
        "a table does not have the learning rates that were tried",
        "every run is of one size, 399M to 414M parameters, so there are no two sizes to compare at one compute",
        "every run is of one size, 399M to 414M parameters, so nothing here says how far off the law is at the next",
        "a table has no trained models to look into",
        "a table does not have trials, only losses",
        "a table does not have the runs that diverged or failed",
    ):
        assert f"Not here: {lacks}." in text
    assert text.count("Not here:") == 6
    for part in law.doubts():
        assert part in text


def test_the_answer_says_that_its_shape_is_past_the_runs_and_names_its_own_unknowns_only(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", list)
    run("--data", NAME, "--out", tmp_path / "a.html")
    text = words(tmp_path / "a.html")
    assert "It lies d/L 2x past the runs of hc: this is an extrapolation." in text
    unknown = load_law(bundled(NAME).law).unidentified
    assert f"the data do not identify kappa[hc], rho[hc] and {len(unknown) - 2} others of the law" in text
    assert "No budget binds among designs of the one size that the law holds for." in text
    run("--data", NAME, "--out", tmp_path / "a.html", "--budget", "kv_bytes<=512MiB", "--topology", "hc")
    assert "extrapolation" not in words(tmp_path / "a.html")


def test_the_function_takes_what_bundled_gives_and_writes_the_same_bytes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", lambda: [shapes.loss_by_shape])
    run("--data", NAME, "--out", tmp_path / "a.html")
    written = report(bundled(NAME), None, tmp_path / "b.html", hardware="h100")
    assert written.answered
    assert written.page.read_bytes() == (tmp_path / "a.html").read_bytes()


def test_every_row_of_the_table_is_a_point(published):
    with styled():
        drawing = shapes.loss_by_shape(published)
    with bundled(NAME).runs.open() as file:
        rows = list(csv.DictReader(file))
    for panel, label in zip(drawing.panels, sorted({r["topology"] for r in rows}), strict=True):
        ax = panel.figure.axes[0]
        assert ax.get_title(loc="left") == f"{label}, N about 406M"
        (points,) = [x for x in ax.lines if x.get_linestyle() == "None" and len(x.get_xdata())]
        wanted = [
            (int(r["d_model"]) / int(r["n_layers"]), float(r["val_loss"])) for r in rows if r["topology"] == label
        ]
        assert sorted(zip(points.get_xdata(), points.get_ydata(), strict=True)) == sorted(wanted)
        low, high = min(wanted)[0], max(wanted)[0]
        curve = next(x for x in ax.lines if len(x.get_xdata()) == shapes.POINTS)
        assert (min(curve.get_xdata()), max(curve.get_xdata())) == pytest.approx((low, high))
        assert "parameters" in panel.alt
        assert "backbone" not in panel.alt


def test_the_sweep_of_budgets_stays_at_the_size_of_the_law_and_within_what_the_runs_use(published):
    least, most = published.law.ranges[""]["N"]
    swept = published.swept
    assert set(swept["budget"]) == {"kv_bytes", "tpot"}
    assert swept["N"].between(least, most).all()
    assert "Of params the runs use about the same" in published.no_sweep
    rule, load = shape_rule("published"), Workload()
    used = [
        float(kv_bytes(design, load))
        for r in published.cells.itertuples()
        for design in [Costs(topology(r.topology), rule.shape(int(r.n_layers), int(r.d_model), 50280))]
        if least <= int(design.params) <= most  # what a topology adds takes some of them past the law's own range
    ]
    limits = swept.loc[swept["budget"] == "kv_bytes", "limit"]
    assert (limits.min(), limits.max()) == pytest.approx((min(used), max(used)))


def test_a_limit_beyond_the_size_of_the_law_is_not_swept_to():
    m = gather(bundled(NAME), None, ["params<=900M"], None, {"hardware": "h100"}, lambda text: None)
    assert "params" not in set(m.swept["budget"])
    assert m.answer.best.params <= m.law.ranges[""]["N"][1]


def test_trade_offs_past_the_runs_are_hollow_or_counted_and_left_out(published):
    with styled():
        drawing = front.pareto_front(published)
    inside, near, far = [], [], []
    for c in published.answer.pareto:
        low, high = published.law.ranges[c.topology]["R"]
        ratio = c.d_model / c.n_layers
        (inside if low <= ratio <= high else near if low / 2 <= ratio <= 2 * high else far).append(c)
    assert min(len(inside), len(near), len(far)) > 0
    lines = [x for x in drawing.panels[0].figure.axes[0].lines if len(x.get_xdata())]
    hollow = sum(len(x.get_xdata()) for x in lines if x.get_markerfacecolor() == "white")
    assert hollow == len(near)
    assert sum(len(x.get_xdata()) for x in lines) - hollow == len(inside)
    assert f"Not shown: {len(far)} whose d/L or size" in drawing.caption
    assert all(row[3].endswith("*") == (f"{row[1]} x {row[2]}" in {f"{c.n_layers} x {c.d_model}" for c in near})
               for row in drawing.table[1])  # fmt: skip


def test_a_bundled_store_is_reported_as_a_store_with_its_own_law_and_limits(run, made, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", lambda: [provenance.data])
    home = tmp_path / "tiny"
    shutil.copytree(made.store.path, home / "store")
    made.law.save(home / "law.json")
    (home / "SOURCE.md").write_text("Trained here,\non nothing <b>real</b>.\n")
    monkeypatch.setitem(bundling.DATA, "tiny", Bundled("tiny", home / "store", "small models of nothing."))
    code, _, err = run("--data", "tiny", "--out", tmp_path / "r", "--hardware", "cpu")
    text = words(tmp_path / "r" / "report.html")
    assert code == 0, err
    assert err.startswith("about tiny: small models of nothing.\n")
    assert "About tiny: small models of nothing." in text
    assert "Trained here, on nothing <b>real</b>." in text
    best = optimum(made.law, [f"backbone_params<={made.law.ranges['']['N'][1]:.0f}"], topologies=["pre_ln", "hc"],
                   tokens=made.law.ranges[""]["D"][1], hardware="cpu").best  # fmt: skip
    assert f"{best.topology} with {best.n_layers} layer" in text
    assert "corpus fingerprint" in text


# ---- tables of one's own


def test_a_table_of_several_sizes_has_its_held_out_sizes_and_lines_of_equal_compute(table, sized):
    law = fit(table[table["backbone_params"] < 6e5], "shape", columns=COLUMNS)
    held = sized.held_out
    largest = table[table["backbone_params"] > 6e5]
    assert len(held) == len(largest)
    for r in largest.itertuples():
        (at,) = held.index[(held["topology"] == r.kind) & np.isclose(held["observed"], r.loss, rtol=1e-12)]
        wanted = float(law.predict(r.kind, r.backbone_params, r.seen, r.depth, r.width))
        assert held.loc[at, "predicted"] == pytest.approx(wanted, rel=2e-3)  # fewer starts there
    with styled():
        assert len(held_out.held_out(sized).panels) == 2
        drawing = isoflop.iso_flop(sized)
    assert len(drawing.panels) == 2
    assert "taken as 6 N D" in drawing.caption
    flops = (6 * table["backbone_params"] * table["seen"]).to_numpy(float)
    for level in isoflop._levels(sized.cells):
        assert np.abs(np.log(flops / level)).min() < np.log(isoflop.WITHIN)
    assert set(sized.swept["budget"]) == {"backbone_params", "kv_bytes", "tpot"}


def test_the_page_of_a_table_names_its_file_its_columns_and_the_rows_left_out(run, table, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", lambda: [provenance.data])
    bad = pd.concat([table, table.iloc[:1].assign(loss=np.nan)])
    bad.to_csv(tmp_path / "mine.csv", index=False)
    law = fit(read_table(tmp_path / "mine.csv"), "shape", draws=20, columns=COLUMNS)
    law.save(tmp_path / "law.json")
    given = [part for name, at in COLUMNS.items() for part in ("--column", f"{name}={at}")]
    options = ("--law", tmp_path / "law.json", "--hardware", "cpu", "--shape-rule", "small", "--vocab-size", "512")
    code, _, err = run(tmp_path / "mine.csv", *given, *options, "--out", tmp_path / "r")
    text = words(tmp_path / "r" / "report.html")
    assert code == 0, err
    assert "depthlaw report: mine.csv" in text
    assert "topology=kind, tokens=seen, n_layers=depth, d_model=width, val_loss=loss, all others by" in text
    assert f"{len(table)} fitted, 1 left out" in text
    assert "Row left out (pre_ln): val_loss is not finite (nan)" in text
    assert law.rows_hash in text
    assert "One run a shape" in text
    assert "The law was not fitted on" not in text
    assert str(tmp_path) not in text


def test_a_law_of_other_rows_is_remarked_and_one_that_counts_otherwise_is_refused(run, table, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", list)
    law = fit(table.iloc[1:], "shape", draws=0, columns=COLUMNS)
    asked = {"hardware": "cpu", "rule": "small", "vocab_size": 512}
    done = report(table, law, tmp_path / "a.html", columns=COLUMNS, name="t.csv", **asked)
    assert f"it rests on {len(table) - 1} rows, and this table has {len(table)}" in words(done.page)
    table.rename(columns={at: name for name, at in COLUMNS.items()}).to_csv(tmp_path / "t.csv", index=False)
    code, out, err = run(tmp_path / "t.csv", "--law", bundled(NAME).law, "--out", tmp_path / "r")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: the law's N is params and the table's is backbone_params: fit a law")


def test_without_a_law_one_is_chosen_as_fit_does(table, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", list)
    asked = []
    known = fit(table, "shape", draws=0, columns=COLUMNS)
    monkeypatch.setattr(gathering, "fit", lambda frame, law, **options: asked.append((law, options)) or known)
    assert report(
        table, out=tmp_path / "a.html", columns=COLUMNS, hardware="cpu", rule="small", vocab_size=512
    ).answered
    assert asked == [("auto", {"pooling": "auto", "columns": COLUMNS})]


def test_a_table_with_no_row_that_can_be_fitted_still_gives_a_page(run, tmp_path):
    (tmp_path / "t.csv").write_text("topology,params,tokens,n_layers,d_model,val_loss\npre_ln,1e6,1e7,4,64,\n")
    code, out, _ = run(tmp_path / "t.csv", "--out", tmp_path / "r")
    text = words(tmp_path / "r" / "report.html")
    assert (code, out.endswith("0 figures in report_figures\n")) == (0, True)
    assert "There is no answer: no row of 1 can be fitted; the first: val_loss is not finite (nan)" in text
    assert text.count("Not here: ") == 11


# ---- what cannot be asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of the two: a store or a table, or --data published-400m"),
        (["runs", "--data", NAME], "give one of the two: a store or a table, or --data published-400m"),
        (["--data", "published"], "no bundled data set 'published'; choose one of published-400m"),
        (["--data", NAME, "--column", "tokens=D"], "leave --column out"),
        (["--data", NAME, "--experiment", "e"], "is a table, which has no experiments: leave --experiment out"),
        (["/nowhere/runs.csv"], "cannot read the table /nowhere/runs.csv"),
        ([bundled(NAME).runs, "--experiment", "e"], "is a table, which has no experiments: leave --experiment out"),
        ([bundled(NAME).runs, "--column", "tokens=D"], "the table has no column D"),
        ([bundled(NAME).runs, "--column", "tokens"], "column is 'tokens'; write NAME=COLUMN"),
    ],
)
def test_what_cannot_be_asked_is_one_line(run, tmp_path, arguments, said):
    code, out, err = run(*arguments, "--out", tmp_path / "r")
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert said in last
    assert not (tmp_path / "r").exists()


def test_a_store_has_its_own_columns(run, made, tmp_path):
    code, _, err = run(made.store.path, "--column", "tokens=D", "--out", tmp_path / "r")
    assert code == 2
    assert err == f"error: {made.store.path} has its own columns: leave --column out, which is for a table of yours\n"
