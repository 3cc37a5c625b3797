"""From a law to the YAML of its next sweep, and back through the config that `sweep` reads."""

from collections import Counter
from dataclasses import replace

import pytest

import depthlaw
from depthlaw.platform.cli import main
from depthlaw.platform.config import load_config
from depthlaw.platform.next_sweep import next_cells, sweep_yaml
from depthlaw.platform.plan import plan as trials_of
from depthlaw.scaling.next_cells import NextCellsError
from support import partly_installed

COMPUTE, TARGET = 1e15, 2e7


@pytest.fixture(scope="module")
def law(study):
    return depthlaw.fit(study.store, draws=0)


@pytest.fixture(scope="module")
def plan(law):
    return next_cells(law, COMPUTE, TARGET, most=12)


def read(tmp_path, text):
    (tmp_path / "next.yaml").write_text(text)
    return load_config(tmp_path / "next.yaml")


def test_the_yaml_plans_exactly_the_chosen_cells_by_the_recipe_of_the_law(law, plan, study, tmp_path):
    config = read(tmp_path, sweep_yaml(law, plan, "next"))
    same = ("data", "seq_len", "batch_tokens", "shape_rule", "precision")
    assert {name: getattr(config, name) for name in same} == {name: getattr(study.config, name) for name in same}
    trials = trials_of(config)
    found = Counter((t.topology, t.n_layers, t.d_model) for t in trials)
    assert found == Counter((c.topology, c.n_layers, c.d_model) for c in plan.cells)
    assert len(trials) == len(plan.cells) == 12
    assert sum(t.train_flops for t in trials) == pytest.approx(plan.flops, rel=0.02)
    assert plan.flops <= COMPUTE
    by_cell = {(c.topology, c.n_layers, c.d_model, round(c.tokens / t.tokens, 1)) for c in plan.cells for t in trials}
    assert all((t.topology, t.n_layers, t.d_model, 1.0) in by_cell for t in trials)
    counted = {(t.topology, t.n_layers, t.d_model): int(t.costs.backbone_params) for t in trials}
    assert all(counted[c.topology, c.n_layers, c.d_model] == c.N for c in plan.cells)
    assert {t.lr for t in trials} == {8e-3}  # the study's best at every size
    text = sweep_yaml(law, plan, "next")
    assert "micro_batch_seqs 8: the most up to 8" in text
    for label, sd in plan.sd_after.items():
        assert f"{label} {sd:.3g}" in text


def test_no_cell_reads_the_text_of_the_laws_sweep_more_than_once(law, plan):
    longest = max(c.tokens for c in plan.cells)
    known = replace(law, context=law.context | {"corpus_tokens": int(longest / 3)})
    less = next_cells(known, COMPUTE, TARGET, most=12)
    assert 0 < max(c.tokens for c in less.cells) <= longest / 3
    assert f"no cell trains on more than the {int(longest / 3):,} tokens of the law's text" in sweep_yaml(
        known, less, "next"
    )
    with pytest.raises(NextCellsError, match="within the 1,000 tokens of the law's text"):
        next_cells(replace(law, context=law.context | {"corpus_tokens": 1000}), COMPUTE, TARGET)


def test_what_the_law_does_not_know_is_a_default_named_in_a_comment(law, plan, tmp_path):
    bare = replace(law, context={"shape_rule": "small", "vocab_size": 512})
    text = sweep_yaml(bare, plan, "bare")
    config = read(tmp_path, text)
    assert (config.seq_len, config.batch_tokens, config.precision) == (4096, 64 * 4096, "fp32")
    assert config.grid[0].published_lr == "best"
    named = ("seq_len 4096", "batch_tokens 262144", "precision fp32", "published_lr best")
    for words in (*named, "data source offline: the law does not say"):
        assert f"#   {words}" in text
    hub = replace(law, context={**law.context, "data": "HuggingFaceFW/fineweb-edu sample-10BT, bpe vocabulary of 512"})
    text = sweep_yaml(hub, plan, "hub")
    assert "the law was fitted on 'HuggingFaceFW/fineweb-edu sample-10BT" in text
    assert read(tmp_path, text).data.source == "offline"


def test_topologies_with_options_survive_the_file(study, tmp_path, law, plan):
    named = replace(plan, cells=tuple(replace(c, topology="hc(streams=2)") for c in plan.cells if c.topology == "hc"))
    rates = {"hc(streams=2)": law.context["best_lr"]["hc"]}
    config = read(tmp_path, sweep_yaml(replace(law, context={**law.context, "best_lr": rates}), named, "named"))
    assert {t.topology for t in trials_of(config)} == {"hc(streams=2)"}


def test_a_rate_is_that_of_the_nearest_size_fitted(law, plan, tmp_path):
    rates = {t: [[1e4, 0.016], [1e6, 0.004]] for t in ("hc", "pre_ln")}
    config = read(tmp_path, sweep_yaml(replace(law, context={**law.context, "best_lr": rates}), plan, "rates"))
    trials = trials_of(config)
    assert {t.lr for t in trials} == {0.016, 0.004}
    for t in trials:
        assert t.lr == (0.016 if t.costs.backbone_params < 1e5 else 0.004)


def test_a_law_of_one_size_designs_for_no_other():
    law = depthlaw.load_law(depthlaw.bundled("published-400m").law)
    with pytest.raises(NextCellsError, match=r"target 1e\+09: law iso_size holds at the one size .* fit law shape to"):
        next_cells(law, 1e21, 1e9)
    cells = next_cells(law, 1e21, 4e8, most=12).cells
    tokens = [*law.ranges[""]["D"], *(c.tokens for c in cells)]
    assert max(tokens) < 1.5 * min(tokens)  # more than that `fit` refuses


def test_a_topology_that_is_not_installed_is_left_out_of_the_next_sweep_and_named(law, tmp_path, capsys):
    partly_installed(law).save(tmp_path / "law.json")
    with pytest.raises(SystemExit) as ended:
        main(["design", str(tmp_path / "law.json"), "--compute", str(COMPUTE), "--target", str(TARGET)])
    said = capsys.readouterr()
    assert ended.value.code in (None, 0)
    assert "named resnet: left out" in said.err
    assert "hc, " in said.out
    assert "resnet" not in said.out


def test_the_command_writes_a_sweep_that_a_dry_run_takes(law, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    law.save("law.json")

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return end.value.code or 0, *capsys.readouterr()

    code, out, err = run(
        "design", "law.json", "--compute", "1e15", "--target", "20M", "--cells", "12", "--out", "next.yaml"
    )
    assert code == 0, err
    assert "12 runs" in out
    assert "depthlaw sweep next.yaml --dry-run" in err
    code, out, err = run("sweep", "next.yaml", "--dry-run")
    assert code == 0, err
    assert "next: 12 trials" in out
    for bad, words in (
        (("--compute", "10", "--target", "20M"), "pays for no run"),
        (("--compute", "1e15", "--target", "10"), "below the smallest size fitted"),
        (("--compute", "1e15GiB", "--target", "20M"), "FLOPs take FLOPs"),
        (("--compute", "1e15", "--target", "20M", "--out", "no/such/x.yaml"), "cannot write no/such/x.yaml"),
    ):
        code, _, err = run("design", "law.json", *bad)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err


def test_a_law_of_a_frame_designs_by_the_published_rule(law):
    plan = next_cells(replace(law, context={}), 1e18, 1e7, most=6)
    assert all(c.d_model % 32 == 0 for c in plan.cells)
    with pytest.raises(NextCellsError, match="compute is nan"):
        next_cells(law, float("nan"), 1e7)
