"""What people read: tables of plans and stores, laws and answers in words."""

import math
import re
from dataclasses import replace

import pytest

from depthlaw.platform.answers import FAR, SHOWN, answer_text, design_words
from depthlaw.platform.config import parse_config
from depthlaw.platform.plan import plan
from depthlaw.platform.query import fit, optimum
from depthlaw.platform.show import dry_run_rows, law_lines, plan_table, progress_lines, working
from depthlaw.platform.sweep import Progress
from depthlaw.scaling.pooling import POOLINGS
from support import row_of

FINISHED = {"status": "finished", "val_loss": 3.25, "bits_per_byte": 1.5}


@pytest.fixture(scope="module")
def law(study):
    return fit(study.store)


# ---- plan


def test_a_dry_run_of_a_search_shows_its_first_round_and_what_waits_for_it(sweep_of, tmp_path, monkeypatch, printed):
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    grid = {"shapes": [[2, 32], [4, 24]], "lr_search": {"base_shape": [4, 24]}}
    config = parse_config(sweep_of(grid=grid))
    text = printed(plan_table(config, dry_run_rows(config, tmp_path / "store")))
    assert row_of(text, "pre_ln", 4, 24, "0.004")[-2:] == ["to", "run"]
    assert row_of(text, "pre_ln", 4, 24, "0.008")[-2:] == ["to", "run"]
    assert row_of(text, "pre_ln", 2, 32, "-")[-3:] == ["after", "the", "search"]
    assert "3 to run" in text
    assert "what later rounds run depends on these results" in text
    plain = parse_config(sweep_of())
    assert "later rounds" not in printed(plan_table(plain, dry_run_rows(plain, tmp_path / "store")))


def test_a_dry_run_counts_a_shared_trunk_once(sweep_of, tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    schedule = {"kind": "wsd", "warmup_steps": 10}
    config = parse_config(sweep_of(schedule=schedule, grid={"tokens_per_backbone_param": [20, 40], "lr": [4e-3]}))
    short, long = dry_run_rows(config, tmp_path / "store")
    per_step = short["train_flops"] / short["steps"]
    assert long["train_flops"] == per_step * (long["steps"] - (short["steps"] - round(0.2 * short["steps"])))


def test_a_dry_run_sums_what_is_left_to_run(sweep_of, tmp_path, monkeypatch, printed):
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    config = parse_config(sweep_of(grid={"topologies": ["pre_ln", "hc"]}))
    rows = dry_run_rows(config, tmp_path / "store")
    trials = plan(config)
    assert [r["train_flops"] for r in rows] == [t.train_flops for t in trials]
    assert len(rows) == 4
    text = printed(plan_table(config, rows))
    assert f"4 to run: {sum(t.train_flops for t in trials):.3e} FLOPs" in text
    assert "the data is not built yet" in " ".join(text.split())
    done = [{**rows[0], "status": "finished"}, {**rows[1], "status": "failed"}, *rows[2:]]
    assert "3 to run" in printed(plan_table(config, done))
    assert not (tmp_path / "store").exists()


# ---- law


def test_a_law_in_words_has_its_parameters_and_what_to_doubt(law):
    text = law_lines(law)
    for topology in law.topologies:
        own = law.parameters(topology)
        assert f"{topology}: a {own['a']:.4g}" in text
    assert f"60 cells, objective {law.objective:.4g}" in text
    assert f"worth {law.worth('hc'):.3g} x the parameters of pre_ln" in text
    assert "diverged, so censored and not fitted: 12 of 192 trials" in text
    assert text.count("row left out") == 4
    assert ("do not identify" in text) == bool(law.unidentified)


def test_a_law_in_words_says_how_sure_it_is(law):
    text = law_lines(law)
    low, high = law.profiles["best d/L[hc]"]
    assert low < float(law.best_ratio("hc", law.ranges[""]["N"][1])) < high
    assert f"{float(law.best_ratio('hc', law.ranges['']['N'][1])):.3g} ({low:.3g} to {high:.3g})" in text
    low, high = law.profiles["beta"]
    assert f"beta {low:.3g} to {high:.3g}" in text
    assert len(law.held_out) == 2
    for size in law.held_out:
        assert f"off by {100 * size['error']:.2g} % of the loss in {size['rows']:.0f} cells" in text
    assert f"predictions are {law.inflation:.2f} times as wide" in text
    open_end = law_lines(replace(law, profiles={"alpha": (0.0, float("inf"))}, held_out=()))
    assert "alpha 0 to inf" in open_end
    assert "held out      no size: intervals take the form of the law as true" in open_end
    assert "95 % ranges" not in law_lines(replace(law, profiles={}, held_out=(), draws_base64=""))


def test_a_choice_in_words_lists_the_candidates_best_first_and_marks_the_chosen(study):
    text = law_lines(fit(study.store, pooling="auto", draws=0, starts=8))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("chosen "))
    candidates = lines[at + 1 : at + 4]
    assert {line[14:].split(":")[0] for line in candidates} == {f"shape, {p}" for p in POOLINGS}
    errors = [float(line.split("held-out error ")[1].split(" %")[0]) for line in candidates]
    assert errors == sorted(errors)
    assert sum(line[12] == "*" for line in candidates) == 1
    assert "chosen" not in law_lines(fit(study.store, draws=0, starts=8))


def test_a_law_in_words_says_how_its_best_rates_are_known_and_what_was_censored(law):
    assert "best rates    vertex of a parabola in ln lr in 60 of 64 cells, its error not known" in law_lines(law)
    context = {**law.context, "lr_found": {"vertex": 40, "edge": 20, "few_rates": 4}, "vertex_ln_lr_sd": 0.0512}
    text = law_lines(replace(law, context={**context, "n_pruned": 9}))
    assert "in 40 of 64 cells, to 5.1 % in the median; edge: 20; few rates: 4" in text
    assert "pruned, so censored and not fitted: 9 of 192 trials" in text
    assert "diverged, so censored and not fitted: 12 of 192 trials" in text
    assert "best rates" not in law_lines(replace(law, context={**context, "lr_found": {"edge": 64}}))


def test_a_law_in_words_says_what_was_not_searched_or_found_at_an_edge(law):
    context = {**law.context, "cells_with_one_lr": 7, "cells_best_lr_at_edge": 3}
    text = law_lines(replace(law, context=context, unidentified={"kappa[hc]": "one shape only"}, at_bound=("beta",)))
    assert "learning rate not searched, one tried: 7 of 64 cells" in text
    assert "best learning rate at the edge of those tried: 3 of 64 cells" in text
    assert "the data do not identify kappa[hc]: one shape only" in text
    assert "beta of the law ended at the bound of its range" in text


# ---- answer


def test_an_answer_names_the_budget_that_binds_with_its_price_and_the_one_that_does_not(law):
    answer = optimum(law, ["params<=400k", "kv_bytes<=1GiB"], tokens=2e6)
    lines = answer_text(answer).splitlines()
    (params,) = [line for line in lines if line.startswith("budgets")]
    (cache,) = [line for line in lines if line.strip().startswith("kv_bytes ")]
    assert any(
        line.endswith("kv_bytes: KV cache of the whole batch at full context, over all devices.") for line in lines
    )
    more = optimum(law, ["params<=440k", "kv_bytes<=1GiB"], tokens=2e6)
    gain = answer.best.loss - more.best.loss
    assert gain > 0
    said = re.search(r"params (\S+) of 400K, binds: 10 % more buys (\S+) nats", params)
    assert said, params
    assert float(said[2]) == pytest.approx(gain, abs=5.1e-5)
    assert float(said[1].rstrip("K")) == pytest.approx(answer.best.params / 1e3, rel=5e-3)
    assert cache.endswith("of 1 GiB, does not bind")
    assert "no budget binds" not in answer_text(answer)


def test_an_answer_says_when_no_budget_binds_and_that_the_lattice_ended_there(law):
    text = answer_text(optimum(law, ["params<=1T"], tokens=2e6, layers=(2, 6), widest=80))
    assert "no budget binds" in text
    assert "d_model 80 is the largest that was tried: a wider range may hold a better design" in text
    assert "n_layers 6 is the largest that was tried" in text


def test_an_answer_beyond_what_was_fitted_says_how_far(law):
    answer = optimum(law, ["params<=40M"], tokens=1e9)
    text = answer_text(answer)
    fitted = law.ranges[answer.best.topology]
    assert answer.best.backbone_params > fitted["N"][1]
    assert f"is {answer.best.backbone_params / fitted['N'][1]:.3g}x above the largest N fitted" in text
    assert f"is {1e9 / fitted['D'][1]:.3g}x above the largest D fitted" in text


def test_designs_far_past_the_runs_are_marked_and_left_out_of_the_trade_offs(law):
    answer = optimum(law, ["params<=400k"], tokens=2e6)
    lines = answer_text(answer).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("trade-offs"))
    far = [c for c in answer.pareto[1:] if c.beyond > FAR]
    assert far
    assert f"; {len(far)} others lie more than 2x past the runs" in lines[at]
    shown = [line.strip() for line in lines[at + 1 : at + 1 + SHOWN]]
    for c in far:
        factors = {"N": c.size_beyond, "d/L": c.ratio_beyond}
        assert design_words(c).endswith(
            f", {' and '.join(f'{n} {x:.2g}x' for n, x in factors.items() if x >= 1.05)} past the runs"
        )
        assert not any(line.endswith(design_words(c)) for line in shown)
    assert design_words(replace(far[0], size_beyond=1.01, ratio_beyond=1.0)).endswith(")")
    only = replace(answer, pareto=(answer.best, *far))
    assert f"{1 + len(far)} designs that no other beats" in answer_text(only)


def test_an_answer_of_a_law_with_unidentified_parameters_says_so(law):
    doubtful = replace(law, status="unidentified", unidentified={"alpha": "one size only", "kappa[hc]": "one shape"})
    for topologies, said in ((["hc"], True), (["pre_ln"], False)):
        text = answer_text(optimum(doubtful, ["params<=400k"], tokens=2e6, topologies=topologies))
        assert f"the data do not identify alpha{', kappa[hc]' if said else ''} of the law" in text


def test_an_answer_about_speed_names_the_hardware_and_what_is_assumed_of_it(law):
    asked = optimum(law, ["params<=400k", "tpot<=1ms"], tokens=2e6, hardware="h200")
    assert "h200: data sheet of the H200" in answer_text(asked)
    # The trade-offs show times too; a single design has none.
    assert "times of h200: data sheet" in answer_text(optimum(law, ["params<=400k"], tokens=2e6, hardware="h200"))
    alone = optimum(law, topologies=["hc"], layers=(7, 7), widest=8, tokens=2e6, hardware="h200")
    assert "data sheet" not in answer_text(alone)


def test_the_best_of_each_topology_is_listed_from_the_least_loss_up(law):
    answer = optimum(law, ["params<=400k"], tokens=2e6)
    text = answer_text(answer)
    listed = [float(m) for m in re.findall(r"width \d+ \(d/L \S+\): (\S+), least in", text, re.MULTILINE)]
    assert listed == sorted(listed)
    assert len(listed) == 2
    assert listed[0] == pytest.approx(answer.best.loss, abs=5.1e-5)
    assert math.isfinite(listed[1])


def test_away_from_a_terminal_routine_lines_are_thinned_and_no_other_is_lost(capsys):
    with progress_lines("sweep") as listener:
        for message, routine in [("started", False), ("step 1", True), ("worker died", False), ("step 2", True)]:
            listener(Progress(1, 4, 3.0, 10.0, message, routine))
    assert capsys.readouterr().err == "[1/4, 30%] started\n[1/4, 30%] worker died\n"


def test_a_fit_says_what_it_is_at_on_a_terminal_only(monkeypatch, capsys):
    for forced, shown in (("1", True), ("", False)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        with working("fit") as progress:
            progress("bootstrap, 40 of 1000 draws")
        out, err = capsys.readouterr()
        assert out == ""
        assert ("bootstrap, 40 of 1000 draws" in err) == shown
        assert bool(err) == shown
