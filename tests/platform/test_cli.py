"""The command line: exit codes, one line for a user's mistake, and answers equal to those of Python and of a loop."""

import csv
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import depthlaw
from depthlaw.platform.cli import main
from depthlaw.platform.config import parse_config
from depthlaw.platform.store import Store
from depthlaw.scaling.hardware import Workload

YAML = """\
name: small
data: {source: pydoc, vocab_size: 512}
seq_len: 64
batch_tokens: 512
micro_batch_seqs: 4
shape_rule: small
grid:
  - {topologies: [pre_ln], shapes: [[2, 32]], tokens_per_param: [20], lr: [1e-3]}
"""
DEEP = {"n_layers": 2, "d_model": 64, "n_heads": 5, "n_kv_heads": 5, "d_ff": 176}


@pytest.fixture(scope="module")
def law_file(study, tmp_path_factory):
    path = tmp_path_factory.mktemp("law") / "law.json"
    with pytest.raises(SystemExit) as end:
        main(["fit", str(study.store.path), "--out", str(path)])
    assert not end.value.code
    return path


def one_line(result, code=2):
    """The message of a refused command."""
    found, out, err = result
    assert found == code, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert out == ""
    return err


# ---- mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (YAML + "sed: 1\n", ["x.yaml", "unknown key 'sed'", "allowed here: name, data"]),
        (YAML.replace("pre_ln", "resnet"), ["unknown topology 'resnet'", "pre_ln"]),
        (YAML.replace("[2, 32]", json.dumps(DEEP)), ["n_heads 5", "d_model 64"]),
        (YAML.replace("name: small", "name: small\nname: big"), ["'name' is given twice"]),
        ("- 1\n", ["a sweep is a mapping"]),
        ("a: [", ["not YAML"]),
        (None, ["no such file"]),
    ],
)
def test_a_sweep_that_cannot_be_planned_is_one_line_and_code_2_and_leaves_nothing(
    run, tmp_path, monkeypatch, text, words
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "x.yaml").write_text(text)
    before = sorted(tmp_path.iterdir())
    for more in ([], ["--dry-run"]):
        message = one_line(run("sweep", "x.yaml", *more))
        assert all(word in message for word in words), message
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (["depth<=4"], ["unknown budget 'depth'", "params (count), kv_bytes (bytes), tpot (seconds)"]),
        (["params<=4GiB"], ["params<=4GiB", "unit 'GiB'", "count take K, M, B, T"]),
        (["params>=4M"], ["params<=4M"]),
        (["params"], ["'params' is not a budget"]),
        (["params<=4M", "params<=5M"], ["limited twice"]),
        (["tpot<=15"], ["no unit", "15ms"]),
        (["--layers", "x"], ["layers", "'x'", "2:128"]),
        (["--layers", "2:3:4"], ["layers", "'2:3:4'"]),
        (["--layers", "9:2"], ["layers 9 to 2"]),
        (["--layers", "0:2"], ["layers 0 to 2", "at least 1"]),
        (["--context", "0"], ["'0' is not a context length", "32k"]),
        (["--context", "many"], ["'many' is not a context length"]),
        (["--context", "8796093022208M"], ["context is 9223372036854775808", "at most 4294967296"]),
        (["--batch", "99999999999999999999"], ["batch is 99999999999999999999", "at most 4294967296"]),
        (["--batch", "0"], ["batch is 0", "at least 1"]),
        (["--weight-bytes", "nan"], ["weight_bytes is nan"]),
        (["--cache-bytes", "-1"], ["cache_bytes is -1"]),
        (["--hardware", "tpu"], ["unknown hardware 'tpu'", "a100, h100, h200, cpu", ".json"]),
        (["--hardware", "no.json"], ["no.json"]),
        (["--tokens", "8B", "--tokens-per-param", "20"], ["tokens 8e+09", "tokens_per_param 20", "keep one"]),
        (["--tokens", "lots"], ["'lots' is not a quantity"]),
        (["--tokens-per-param", "nan"], ["tokens_per_param is nan"]),
        (["--topology", "resnet"], ["unknown topology 'resnet'"]),
        (["--topology", "full_attnres"], ["not fitted on topology 'full_attnres'", "hc, pre_ln"]),
        (["--topology", "hc(streams=0)"], ["streams is 0"]),
        (["--tensor-parallel", "0"], ["tensor_parallel is 0", "at least 1"]),
        (["--mfu", "1.5"], ["mfu is 1.5", "at most 1"]),
        (["--seq-len", "0"], ["seq_len is 0"]),
        (["--csv", "no/such/x.csv"], ["cannot write no/such/x.csv"]),
        (["--shape-rule", "golden"], ["unknown shape rule 'golden'", "small"]),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line_and_code_2(run, law_file, question, words):
    message = one_line(run("optimum", law_file, *question))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot read the law file", "No such file", "depthlaw fit"]),
        ("not json", ["is not JSON", "depthlaw fit"]),
        ("[]", ["law format", "list"]),
        ("{}", ["law format None", "fit again"]),
        ('{"format": 2}', ["not a complete law file"]),
        ('{"format": 99}', ["law format 99", "reads format 2"]),
    ],
)
def test_a_law_file_that_is_none_is_one_line_and_code_2(run, tmp_path, text, words):
    if text is not None:
        (tmp_path / "law.json").write_text(text)
    message = one_line(run("optimum", tmp_path / "law.json"))
    assert all(word in message for word in ["law.json", *words]), message


@pytest.mark.parametrize("command", ["status", "fit"])
def test_a_store_or_experiment_that_is_not_there_is_one_line_and_code_2(run, study, tmp_path, command):
    assert "there is no store at" in one_line(run(command, tmp_path / "none"))
    assert "not a store" in one_line(run(command, tmp_path))
    message = one_line(run(command, study.store.path, "--experiment", "other"))
    assert "no experiment 'other'; it has known" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--law", "power"], ["'power'", "chinchilla, iso_size"]),
        (["--pooling", "none"], ["'none'", "shared, separate"]),
        (["--out", "no/such/folder/law.json"], ["cannot write", "no/such/folder/law.json"]),
    ],
)
def test_a_fit_that_cannot_be_made_or_kept_is_one_line_and_code_2(run, study, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    message = one_line(run("fit", study.store.path, *options))
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--batch", "x"], ["--tokens-per-param", "x"], ["--vocab-size", "0"], ["--vocab-size", "9" * 20], ["--nonsense"]],
)
def test_options_that_are_not_of_their_type_are_usage_errors_without_a_traceback(run, law_file, arguments):
    code, out, err = run("optimum", law_file, *arguments)
    assert (code, out) == (2, "")
    assert arguments[0] in err
    assert "Traceback" not in err


# ---- answers that are no


def test_infeasible_budgets_are_code_1_and_name_the_budget_that_cannot_be_met(run, law_file):
    message = one_line(run("optimum", law_file, "params<=400k", "tpot<=1us"), code=1)
    assert "meets tpot alone" in message
    assert "Relax tpot, or allow" in message
    code, out, err = run("optimum", law_file, "params<=400k", "tpot<=1us", "--json")
    answer = json.loads(out)
    assert (code, answer["conflict"], err.count("\n")) == (1, ["tpot"], 1)
    assert answer["ratios"]["params"] <= 1 < answer["ratios"]["tpot"]


def test_a_store_with_too_few_cells_is_refused_with_code_1(run, tmp_path, sweep_of, write_study):
    store = Store.create(tmp_path / "store")
    write_study(store, parse_config(sweep_of(grid={"shapes": [[2, 32], [4, 24]]})))
    message = one_line(run("fit", store.path, "--out", tmp_path / "law.json"), code=1)
    assert "2 usable rows cannot fit" in message
    assert not (tmp_path / "law.json").exists()


def test_a_store_where_nothing_finished_is_refused_with_code_1(run, tmp_path, sweep_of, write_study):
    store = Store.create(tmp_path / "store")
    write_study(store, parse_config(sweep_of()), lambda spec: {"status": "diverged", "reason": "x"})
    message = one_line(run("fit", store.path, "--out", tmp_path / "law.json"), code=1)
    assert "no row of 1 can be fitted; the first: val_loss is not finite" in message


# ---- answers


def test_fit_takes_how_many_draws_and_leaves_them_out_at_none(run, study, tmp_path):
    path = tmp_path / "law.json"
    assert run("fit", study.store.path, "--out", path, "--draws", 20)[0] == 0
    assert depthlaw.load_law(path).draws.shape[0] == 20
    assert run("fit", study.store.path, "--out", path, "--draws", 0)[0] == 0
    assert depthlaw.load_law(path).draws is None


def test_fit_then_optimum_answer_as_python_does_and_as_a_loop_over_every_design(run, study, tmp_path):
    path = tmp_path / "law.json"
    code, out, _ = run("fit", study.store.path, "--out", path, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(path.read_text())
    in_python = depthlaw.fit(study.store)
    assert depthlaw.load_law(path) == in_python

    assert in_python.draws.shape == (1000, len(in_python.names))

    budgets = ["params<=400k", "kv_bytes<=1MiB", "tpot<=1ms"]
    options = [
        "--tokens",
        "2M",
        "--context",
        "1k",
        "--batch",
        "2",
        "--weight-bytes",
        "4",
        "--hardware",
        "cpu",
        "--layers",
        "2:24",
    ]
    code, out, err = run("optimum", path, *budgets, *options, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    load = Workload(context=1024, batch=2, weight_bytes=4, cache_bytes=2)
    same = depthlaw.optimum(in_python, budgets, tokens=2e6, workload=load, hardware="cpu", layers=(2, 24))
    assert answer == json.loads(json.dumps(same.to_dict()))

    found = []
    for topology in ("pre_ln", "hc"):
        p = in_python.parameters(topology)
        for L in range(2, 25):
            for d in range(8, 1025, 8):
                d_ff, mixing = -(-8 * d // 48) * 16, 2 * L * (26 + 6 * d) if topology == "hc" else 0
                N = L * (4 * d * d + 3 * d * d_ff + 2 * d) + d + mixing
                kv = 2 * 1024 * 2 * 2 * L * d
                read = 4 * (N + 512 * d) + kv
                flops = 2 * 2 * (N + 512 * d) + 2 * 4 * 1024 * L * d
                step = max(read / 40e9, flops / 107e9) + 2 * L * 48e-6 + 50e-6
                # Without hc's own FLOPs: memory, not compute, is the roof of these designs.
                if N + 1024 * d <= 400e3 and kv <= 2**20 and step <= 1e-3:
                    n, y, q = math.log(N / in_python.N0), math.log(2e6 / in_python.D0), math.log(d / L) - p["rho0"]
                    q -= p["rho1"] * n
                    size = math.exp(p["a"] - p["alpha"] * n + p["kappa"] * q * q)
                    found.append((math.exp(p["e"]) + size + math.exp(p["b"] - p["beta"] * y), topology, L, d))
    loss, *where = min(found)
    best = answer["best"]
    assert [best["topology"], best["n_layers"], best["d_model"]] == where
    assert best["loss"] == pytest.approx(loss, rel=1e-12)
    assert answer["feasible"] == len(found)


def test_every_answer_of_a_question_is_also_in_words(run, law_file):
    code, out, err = run("optimum", law_file, "params<=400k", "--tokens", "2M", "--context", "32k")
    answer = json.loads(run("optimum", law_file, "params<=400k", "--tokens", "2M", "--context", "32k", "--json")[1])
    best = answer["best"]
    assert (code, err) == (0, "")
    assert f"{best['topology']}, {best['n_layers']} layers of width {best['d_model']}" in out
    assert f"{best['loss']:.4f} nats a token ({best['lower']:.4f} to {best['upper']:.4f}" in out
    assert "context 32768" in out


def test_a_flop_budget_a_table_of_designs_and_the_draws_come_out_of_the_command_line(run, law_file, tmp_path):
    question = ["train_flops<=1e13", "peak_memory<=4MiB", "device_hours<=1h"]
    options = ["--hardware", "cpu", "--mfu", "0.2", "--seq-len", "128", "--weight-bytes", "4", "--layers", "2:24"]
    code, out, err = run("optimum", law_file, *question, *options, "--csv", tmp_path / "designs.csv", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    same = depthlaw.optimum(
        depthlaw.load_law(law_file), question, hardware="cpu", mfu=0.2, seq_len=128, layers=(2, 24),
        workload=Workload(weight_bytes=4),
    )  # fmt: skip
    assert answer == json.loads(json.dumps(same.to_dict()))
    best = answer["best"]
    assert best["uses"]["device_hours"] == pytest.approx(best["uses"]["train_flops"] / (0.2 * 107e9) / 3600)
    assert 0.99e13 < best["uses"]["train_flops"] <= 1e13
    assert (answer["draws"], round(sum(answer["topology_shares"].values()), 9)) == (1000, 1.0)
    with (tmp_path / "designs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [rows[0][k] for k in ("topology", "n_layers", "d_model")] == [
        best["topology"], str(best["n_layers"]), str(best["d_model"])
    ]  # fmt: skip
    assert sum(row["pareto"] == "True" for row in rows) == len(answer["pareto"])
    code, words, _ = run("optimum", law_file, *question, *options, "--tensor-parallel", "2")
    assert "over 2 devices" in words
    assert "D = 1e+13 FLOPs / FLOPs a token of each design, at 128 tokens a sequence" in words
    assert "training at 20% of the peak of cpu" in words
    assert "bootstrap draws)" in words
    assert "no other beats in loss, tpot and KV memory together" in words


def test_compare_answers_as_python_does_in_words_and_in_json(run, law_file):
    from depthlaw.scaling.compare import compare

    code, out, err = run("compare", law_file, "--json")
    found = compare(depthlaw.load_law(law_file))
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(found.to_dict()))
    code, words, _ = run("compare", law_file)
    for row in found.topologies:
        assert any(line.split()[:2] == [row.topology, f"{row.worth:.3g}"] for line in words.splitlines())
    assert "intervals from 1000 bootstrap draws" in words
    assert "'keel'; it knows hc, pre_ln" in one_line(run("compare", law_file, "--reference", "keel"))


def test_status_as_json_has_every_cell_planned_with_what_was_run_of_it(run, study):
    code, out, err = run("status", study.store.path, "--json")
    answer = json.loads(out)
    assert (code, err, answer["store"]) == (0, "", str(study.store.path))
    cells = answer["cells"]
    assert len(cells) == 17 * 2 * 2
    assert sum(c["n_planned"] for c in cells) == len(study.specs) == 204
    assert Counter(c["n_finished"] for c in cells) == {3: 60, 0: 8}
    by_shape = {(c["n_layers"], c["d_model"]): c for c in cells}
    assert (by_shape[1, 136]["n_diverged"], by_shape[1, 136]["val_loss"]) == (3, None)
    assert (by_shape[32, 48]["n_planned"], by_shape[32, 48]["n_trials"], by_shape[32, 48]["val_loss"]) == (3, 0, None)
    assert by_shape[2, 48]["lr"] == 8e-3
    assert run("status", study.store.path, "--experiment", "known", "--json")[1] == out


def test_a_dry_run_of_the_400m_suite_has_its_exact_rows_and_starts_nothing(run, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    config = request.config.rootpath / "tune_configs/depthbench_400m.yaml"
    code, out, err = run("sweep", config, "--dry-run", "--json")
    answer = json.loads(out)
    assert (code, err, answer["name"]) == (0, "", "depthbench_400m")
    plain = {(r["n_layers"], r["d_model"]): r["params"] for r in answer["trials"] if r["topology"] == "pre_ln"}
    assert plain == {  # DepthBench's table
        (16, 1216): 406534336, (20, 1120): 414087520, (24, 1024): 405406720, (28, 960): 406249920,
        (32, 896): 399358848, (42, 800): 404151200, (70, 640): 409229440,
    }  # fmt: skip
    seven, five = (
        ("pre_ln", "hc", "full_attnres"),
        ("sandwich_ln", "lns", "deepnorm", "keel", "mhc", "block_attnres", "moda"),
    )
    assert Counter(r["topology"] for r in answer["trials"]) == dict.fromkeys(seven, 7) | dict.fromkeys(five, 5)
    for r in answer["trials"]:
        L, d = r["n_layers"], r["d_model"]
        more = {
            "pre_ln": 0, "lns": 0, "deepnorm": 0, "sandwich_ln": 2 * L * d, "keel": (2 * L - 1) * d,
            "hc": 2 * L * (26 + 6 * d), "mhc": 2 * L * (4 * d * 24 + 24 + 3),
            "full_attnres": 4 * L * d, "block_attnres": 4 * L * d, "moda": 2 * d * d * (L - 1),
        }[r["topology"]]  # fmt: skip
        assert r["lr"] == {"lns": 1e-2, "deepnorm": 1e-3}.get(r["topology"], 2e-3)
        assert r["params"] == plain[L, d] + more
        assert r["backbone_params"] == r["params"] - 2 * 50280 * d
        assert r["tokens"] == r["steps"] * 1048576
        assert abs(r["tokens"] - 20 * plain[L, d]) <= 1048576 / 2
        assert r["device_hours"] == pytest.approx(r["train_flops"] / (989e12 * 0.4) / 3600)
        assert (r["status"], r["trial"], r["epochs"]) == ("to run", None, None)
    code, out, err = run("sweep", config, "--dry-run")
    assert (code, err) == (0, "")
    assert "56 to run" in out
    assert "414,087,520" in out
    assert list(tmp_path.iterdir()) == []


SHIPPED = sorted(path.name for path in (Path(__file__).parents[2] / "tune_configs").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dry_run_of_each_shipped_sweep_shows_its_trials_and_starts_nothing(run, request, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    config = request.config.rootpath / "tune_configs" / name
    code, out, err = run("sweep", config, "--dry-run", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["trials"]
    asked = {(r["topology"], r["n_layers"], r["d_model"], r["lr"], r["tokens"], r["seed"]) for r in rows}
    assert len(asked) == len(rows) > 1
    assert all(r["train_flops"] > 0 and r["status"] in ("to run", "after the search") for r in rows)
    code, out, err = run("sweep", config, "--dry-run")
    assert (code, err) == (0, "")
    assert f"{len(rows)} to run" in out
    assert list(tmp_path.iterdir()) == []


# ---- start-up


def test_a_question_from_a_cold_start_loads_no_heavy_library(law_file, record_property):
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'ray', 'deepspeed', 'pandas', 'scipy', 'pyarrow', 'datasets', 'yaml')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from depthlaw.platform.cli import main; main(sys.argv[1:])"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "optimum", str(law_file), "params<=400k", "tpot<=5ms", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = os.times()
    # Of the process itself: what others do on the machine is not the question's.
    took = after.children_user + after.children_system - before.children_user - before.children_system
    record_property("seconds", took)
    assert json.loads(done.stdout)["best"]["params"] <= 400_000
    assert done.stderr.strip() == "[]"
    assert took < 1.5


def test_the_module_runs_as_a_program_and_a_mistake_shows_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "depthlaw", "status", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert one_line((done.returncode, done.stdout, done.stderr))


# ---- stopped by Ctrl-C


@pytest.mark.parametrize(
    ("words", "resumes"),
    [(["sweep", "x.yaml", "--dry-run"], True), (["optimum", "law.json"], False), (["compare", "law.json"], False)],
)
def test_only_commands_that_go_on_where_they_were_stopped_say_so(run, monkeypatch, words, resumes):
    def stop(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthlaw.platform.config.load_config", stop)
    monkeypatch.setattr("depthlaw.scaling.law_file.load_law", stop)
    monkeypatch.setattr("depthlaw.platform.cli.signal.signal", lambda *given: None)  # the tests' own Ctrl-C stays
    again = "; run the same command again to go on" if resumes else ""
    code, _, err = run(*words)
    assert (code, err.splitlines()[-1]) == (130, f"stopped by Ctrl-C{again}")
