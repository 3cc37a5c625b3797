"""A trial on two processes: the numbers of one process, whatever ZeRO does, and its end when one of them fails."""

import itertools
import json
import math
import pickle
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from depthlaw.archs.backbone import Model, SwiGLU, build
from depthlaw.archs.topologies import topology
from depthlaw.archs.topologies.hc import HC
from depthlaw.platform import cadence, checkpoint, engine
from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.export import load, weights_path
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.ranks import Ranks, alone, meeting_point
from depthlaw.platform.schedules import branch_step
from depthlaw.platform.store import Store
from depthlaw.platform.store_lease import Lease, LeaseLostError
from depthlaw.platform.trial import run_trial
from depthlaw.platform.trunk import Trunk, trunk_key

pytestmark = pytest.mark.engine

SWEEP = {
    "name": "ranks",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 4,
    "shape_rule": "small",
    # Five micro-batches of validation: on two ranks one of them has a round with nothing to do.
    "validation": {"times": 5, "windows": 20},
    "log_every": 5,
    "grid": [{"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": [4], "lr": [5e-3]}],
}

# Another process, which starts once: it takes part in one trial after another, as it is told by the lines it reads.
OTHER = """
import pickle, sys
import torch
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.ranks import Ranks, joined
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_rank

torch.set_num_threads(1)
for line in sys.stdin:
    spec, port, store, data, before = pickle.load(open(line.strip(), "rb"))
    exec(before)
    run_rank(spec, Store(store), Dataset(data), Ranks(1, 2, joined("127.0.0.1", port)))
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build_data(parse_config(SWEEP).data, tmp_path_factory.mktemp("data"))


def changed(spec: TrialSpec, **changes) -> TrialSpec:
    return TrialSpec.from_dict(spec.to_dict() | changes)


@pytest.fixture
def spec_of(dataset):
    def spec_of(**changes) -> TrialSpec:
        (spec,) = plan(parse_config(SWEEP), dataset.fingerprint)
        return changed(spec, **changes)

    return spec_of


@pytest.fixture(autouse=True)
def checkpoints_whenever_asked(monkeypatch):
    monkeypatch.setattr(cadence, "SHARE", math.inf)


@pytest.fixture(scope="module")
def others():
    """At most one process at a time; `others()` is a living one."""
    started: list[subprocess.Popen[str]] = []

    def other() -> subprocess.Popen[str]:
        if not started or started[-1].poll() is not None:
            pipe = subprocess.PIPE
            started.append(subprocess.Popen([sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield other
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def two(dataset, tmp_path, others):
    """`two(store)` is a gang: rank 1 is a process beside this one, without Ray. `before` is code that it runs first."""

    def two(store, before=""):
        @contextmanager
        def gang(spec):
            assert spec.ranks == 2
            meeting, port = meeting_point("127.0.0.1")
            told = tmp_path / "told.pickle"
            told.write_bytes(pickle.dumps((spec, port, str(store.path), dataset.path, before)))
            other = others()
            print(told, file=other.stdin, flush=True)
            try:
                yield Ranks(0, 2, meeting, other.kill)
                assert other.stdout.readline() == "done\n"
            except BaseException:
                other.kill()
                other.wait()
                raise
            if before:  # what it changed must not last
                other.kill()
                other.wait()

        return gang

    return two


def curve(store: Store, spec: TrialSpec) -> dict[str, np.ndarray]:
    """Values by name, in the order of their steps."""
    steps = store.steps(trial=spec.hash).sort_values(["name", "step"])
    return {str(name): rows["value"].to_numpy() for name, rows in steps.groupby("name")}


def assert_near(a: dict[str, np.ndarray], b: dict[str, np.ndarray], atol: float) -> None:
    assert a["train_loss"][0] - a["train_loss"][-1] > 0.5  # it learns: the comparison is of a model that moves
    for name in ("train_loss", "val_loss"):
        np.testing.assert_allclose(a[name], b[name], atol=atol, rtol=0)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=10 * atol)


def test_two_ranks_take_the_steps_that_one_takes(dataset, spec_of, two, tmp_path):
    single, both = Store.create(tmp_path / "single"), Store.create(tmp_path / "both")
    one = run_trial(spec_of(), single, dataset)
    row = run_trial(spec_of(ranks=2), both, dataset, gang=two(both))
    assert row["trial"] == one["trial"]
    assert row["tokens_done"] == one["tokens_done"]
    assert_near(curve(single, spec_of()), curve(both, spec_of()), 1e-5)
    assert len(both.trials()) == 1


BREAK_AT_STEP_12 = """
from depthlaw.platform.stepper import Stepper
real = Stepper.train
def train(self, step):
    loss, *others = real(self, step)
    return (loss * float("nan") if step == 12 else loss, *others)
Stepper.train = train
"""


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(dataset, spec_of, two, tmp_path):
    store = Store.create(tmp_path / "store")
    row = run_trial(spec_of(ranks=2), store, dataset, gang=two(store, BREAK_AT_STEP_12))
    assert row["status"] == "diverged"
    assert row["reason"] == "loss nan is not finite, at step 15"  # the report after


def test_what_the_first_rank_decides_alone_ends_all(dataset, spec_of, two, tmp_path):
    store = Store.create(tmp_path / "store")
    spec = spec_of(ranks=2)

    def judge(step, val_loss):
        return "others are better" if step > spec.steps / 2 else None

    row = run_trial(spec, store, dataset, judge=judge, gang=two(store))
    assert (row["status"], row["reason"]) == ("pruned", "others are better")
    assert spec.steps / 2 < row["steps_done"] < spec.steps
    with store.lease(spec.hash) as lease:
        assert lease.attempt == 1  # two processes, one attempt


def test_a_trial_that_was_taken_over_ends_on_all_ranks_and_writes_nothing(dataset, spec_of, two, tmp_path):
    store = Store.create(tmp_path / "store")
    spec = spec_of(ranks=2)

    def taken_over(metrics):
        lease = Lease(store._files, spec.hash, 1)
        lease._take()

    with pytest.raises(LeaseLostError, match="was taken over"):
        run_trial(spec, store, dataset, report=taken_over, gang=two(store))
    assert len(store.attempts()) == 0
    assert not list(store.path.rglob("part-*.parquet"))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_statistics_of_sublayers_are_those_of_what_all_ranks_saw(dataset, spec_of, two, tmp_path, stage):
    single, both = Store.create(tmp_path / "single"), Store.create(tmp_path / "both")
    every = {"layer_stats_every": 5, "tokens": 512 * 20}
    run_trial(spec_of(micro_batch_seqs=16, **every), single, dataset)  # one micro-batch is the whole batch
    spec = spec_of(micro_batch_seqs=8, ranks=2, zero_stage=stage, **every)
    run_trial(spec, both, dataset, gang=two(both))
    a, b = curve(single, spec), curve(both, spec)
    for name in (f"{kind}.{i}" for i in range(4) for kind in ("grad_norm", "weight_norm", "output_rms", "state_rms")):
        assert len(a[name]) == 4
        np.testing.assert_allclose(b[name], a[name], rtol=1e-4)


@pytest.mark.slow
def test_weights_that_are_kept_are_whole_where_each_rank_has_a_part(dataset, spec_of, two, tmp_path, monkeypatch):
    store = Store.create(tmp_path / "store")
    monkeypatch.setattr(engine, "engine_config", engine.engine_config)  # and so put back
    exec(TAKE_ALL_APART, {})
    row = run_trial(spec_of(ranks=2, zero_stage=3), store, dataset, keep=True, gang=two(store, TAKE_ALL_APART))
    model = load(weights_path(store, row["trial"])).model
    inputs, targets = (torch.from_numpy(a) for a in dataset.validation_windows(32, 20))
    with torch.no_grad():
        assert float(model(inputs, targets)) == pytest.approx(row["val_loss"], abs=1e-5)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
def test_a_branch_goes_on_from_a_trunk_that_another_number_of_ranks_left(dataset, two, tmp_path, stage):
    grid = [SWEEP["grid"][0] | {"tokens_per_backbone_param": [3, 5]}]
    wsd = SWEEP | {"grid": grid, "schedule": {"kind": "wsd", "warmup_steps": 5}}
    first, second = (changed(s, zero_stage=stage) for s in plan(parse_config(wsd), dataset.fingerprint))
    calm, store = Store.create(tmp_path / "calm"), Store.create(tmp_path / "store")
    run_trial(second, calm, dataset)
    assert trunk_key(changed(first, ranks=2)) == trunk_key(second)
    folder = store.checkpoint_dir(trunk_key(first))
    run_trial(changed(first, ranks=2), store, dataset, trunk=Trunk(folder, [second]), gang=two(store))
    assert checkpoint.pointer_of(folder)["world"] == 2
    row = run_trial(second, store, dataset, trunk=Trunk(folder, []))
    assert row["train_flops"] == second.flops_of(second.steps - branch_step(first))
    assert_near(curve(calm, second), curve(store, second), 2e-5)


# At 5e-3 the rounding of bf16 alone, with another size of micro-batch, moves these losses by 6e-3.
CALM = {"precision": "bf16", "lr": 2e-3}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, CALM], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("label", ["full_attnres", "hc"])
def test_zero_stages_on_two_ranks_train_as_one_rank_without(dataset, spec_of, two, tmp_path, label, stage, more):
    single, both = Store.create(tmp_path / "single"), Store.create(tmp_path / "both")
    spec = spec_of(topology=label, **more)
    run_trial(spec, single, dataset)
    run_trial(spec_of(topology=label, ranks=2, zero_stage=stage, **more), both, dataset, gang=two(both))
    assert_near(curve(single, spec), curve(both, spec), 1e-3)


# ZeRO 3 leaves parameters below 100 000 numbers whole: without this, tiny models would never be taken apart.
TAKE_ALL_APART = """
from depthlaw.platform import checkpoint, engine
given = engine.engine_config
def all_apart(*args):
    config = given(*args)
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}
    return config
engine.engine_config = all_apart
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "again"),
    [("mhc", False), ("full_attnres", True), ("moda", True), ("moda", False), ("hybrid(blocks=1)", False)],
)  # fmt: skip
def test_zero_3_finds_the_tensors_that_topologies_and_the_model_use_themselves(
    dataset, spec_of, two, tmp_path, monkeypatch, label, again
):
    single, both = Store.create(tmp_path / "single"), Store.create(tmp_path / "both")
    spec = spec_of(topology=label)
    run_trial(spec, single, dataset)
    monkeypatch.setattr(engine, "engine_config", engine.engine_config)  # and so put back
    exec(TAKE_ALL_APART, {})
    apart = []
    real = Model.forward

    def forward(model, *batch):
        apart.append({name for name, p in model.named_parameters() if p.ds_tensor.numel() == -(-p.ds_numel // 2)})
        return real(model, *batch)

    monkeypatch.setattr(Model, "forward", forward)
    parted = spec_of(topology=label, ranks=2, zero_stage=3, activation_checkpointing=again)
    run_trial(parted, both, dataset, gang=two(both, TAKE_ALL_APART))
    model = build(spec.shape, topology(label), 0)
    assert apart[0] == {name for name, _ in model.named_parameters()}  # each rank holds half of each
    assert_near(curve(single, spec), curve(both, spec), 1e-3)


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(1, 0), *(pytest.param(2, stage, marks=pytest.mark.slow) for stage in (1, 2, 3))],
)  # fmt: skip
def test_autocast_keeps_a_small_update_of_a_routing_scalar(dataset, spec_of, two, tmp_path, monkeypatch, ranks, stage):
    """An update of 1e-4 on 1.0, which bf16 parameters would round away: their spacing below 1 is 0.004."""
    assert torch.tensor(1 - 1e-4, dtype=torch.bfloat16) == 1
    spec = spec_of(topology="hc", precision="bf16", lr=1e-4, tokens=512 * 4, ranks=ranks, zero_stage=stage,
                   schedule={"warmup": 0.0, "final": 1.0})  # fmt: skip
    seen = []
    real = HC.read

    def read(self, i, p, state):
        found = real(self, i, p, state)
        if i == 1 and torch.is_grad_enabled():
            seen.append(p.write_mix[0].item())
        return found

    monkeypatch.setattr(HC, "read", read)
    store = Store.create(tmp_path / "store")
    run_trial(spec, store, dataset, gang=two(store) if ranks == 2 else alone)
    per_step = spec.rank_seqs // spec.micro_batch_seqs
    values = seen[::per_step]
    assert values[0] == 1.0
    # AdamW's first step has the size of the rate.
    assert abs(values[1] - 1.0) == pytest.approx(1e-4, rel=0.02)


def fail_above(sequences: int, after: int = 0):
    """A feed-forward that has no memory for more sequences than these, from its call `after` on."""
    real, calls = SwiGLU.forward, itertools.count()

    def forward(self, x_BTD, context):
        if next(calls) >= after and len(x_BTD) > sequences:
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
        return real(self, x_BTD, context)

    return forward


@pytest.mark.parametrize("after", [0, 300])
def test_out_of_memory_halves_the_micro_batch_and_goes_on(dataset, spec_of, tmp_path, monkeypatch, after):
    few, store = Store.create(tmp_path / "few"), Store.create(tmp_path / "store")
    run_trial(spec_of(micro_batch_seqs=2), few, dataset)
    reports = []
    with monkeypatch.context() as patch:
        patch.setattr(SwiGLU, "forward", fail_above(2, after))
        run_trial(spec_of(checkpoint_every_s=1e-9), store, dataset, report=reports.append)
    (row,) = store.trials().to_dict("records")
    assert row["status"] == "finished"
    assert row["reason"] == "out of memory with 4 sequences at once on a rank, done with 2"
    assert json.loads(row["spec"])["micro_batch_seqs"] == 2
    if after:  # what it had is kept: no step is reported twice
        steps = [r["step"] for r in reports if "val_loss" in r]
        assert steps == sorted(set(steps))
        assert set(store.steps(trial=row["trial"])["attempt"]) == {0}  # all under one lease
    assert_near(curve(few, spec_of()), curve(store, spec_of()), 1e-5)


def test_a_trial_of_which_one_sequence_does_not_fit_is_kept_as_out_of_memory(dataset, spec_of, tmp_path, monkeypatch):
    store = Store.create(tmp_path / "store")
    monkeypatch.setattr(SwiGLU, "forward", fail_above(0))
    run_trial(spec_of(), store, dataset)
    (row,) = store.trials().to_dict("records")
    assert row["status"] == "oom"
    assert row["reason"] == "one sequence at once on a rank: tried to allocate 1.00 GiB"
    assert not store.checkpoint_dir(row["trial"]).exists()


class InterruptedHereError(Exception):
    pass


@pytest.mark.parametrize(
    ("stage", "first"),
    [(0, 2), *(pytest.param(stage, first, marks=pytest.mark.slow) for stage in (1, 2, 3) for first in (2, 1))],
)  # fmt: skip
def test_a_trial_goes_on_with_another_number_of_ranks(dataset, spec_of, two, tmp_path, stage, first):
    """Interrupted on `first` ranks, finished on the other number: by DeepSpeed's universal checkpoint."""
    calm, rough = Store.create(tmp_path / "calm"), Store.create(tmp_path / "rough")
    undisturbed = run_trial(spec_of(zero_stage=stage), calm, dataset)

    def interrupt(metrics):
        if metrics["step"] > spec.steps * 0.4:
            raise InterruptedHereError

    def gang(ranks):
        return two(rough) if ranks == 2 else alone

    spec = spec_of(zero_stage=stage, checkpoint_every_s=1e-9, ranks=first)
    with pytest.raises(InterruptedHereError):
        run_trial(spec, rough, dataset, report=interrupt, gang=gang(first))
    done = int(checkpoint.pointer_of(rough.checkpoint_dir(spec.hash))["tag"].removeprefix("step"))
    assert 0 < done < spec.steps
    reports = []
    row = run_trial(
        spec_of(zero_stage=stage, ranks=3 - first), rough, dataset, report=reports.append, gang=gang(3 - first)
    )
    assert row["trial"] == undisturbed["trial"]
    assert reports[0]["step"] > done  # it went on and did not start over
    steps = rough.steps(trial=spec.hash)
    assert steps.set_index(["step", "name"]).index.is_unique
    # Tight enough to see one of the optimiser's moments missing, or a weight decay on tensors that have none.
    assert_near(curve(calm, spec), curve(rough, spec), 2e-5)


@pytest.mark.slow
def test_a_process_that_has_trained_before_goes_together_with_one_that_has_not(dataset, spec_of, two, others, tmp_path):
    """ZeRO 3 numbers modules and compares the numbers over ranks; it would count on from the engine before."""
    for name in ("first", "second"):
        others().kill()
        others().wait()
        store = Store.create(tmp_path / name)
        run_trial(spec_of(ranks=2, zero_stage=3, tokens=512 * 12), store, dataset, gang=two(store))
        assert set(store.statuses().values()) == {"finished"}
