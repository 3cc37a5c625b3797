"""A trial writes only as long as its lease is its own."""

import pytest

from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.store_lease import Lease, LeaseLostError
from depthlaw.platform.trial import run_trial

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trial(tmp_path_factory, sweep_of):
    config = parse_config(sweep_of(data={"source": "pydoc", "vocab_size": 300}, grid={"lr": [5e-3]}))
    dataset = build_data(config.data, tmp_path_factory.mktemp("data"))
    (spec,) = plan(config, dataset.fingerprint)
    return spec, dataset


@pytest.mark.parametrize("checkpoint_every_s", [0.0, 1e9])
def test_one_that_was_taken_over_writes_neither_its_row_nor_another_part(store, trial, checkpoint_every_s):
    spec, dataset = trial
    spec = TrialSpec.from_dict(spec.to_dict() | {"checkpoint_every_s": checkpoint_every_s})
    before = []

    def taken_over(metrics):
        if "val_loss" in metrics and not before:
            before.append(len(list(store.path.rglob("part-*.parquet"))))
            other = Lease(store._files, spec.hash, 1)
            assert other._take()
            before.append(other)

    with pytest.raises(LeaseLostError, match="was taken over"):
        run_trial(spec, store, dataset, report=taken_over)
    assert len(store.attempts()) == 0
    parts, other = before
    assert len(list(store.path.rglob("part-*.parquet"))) == parts
    other.confirm()  # it is still the other's
    (store.path / other.key).unlink()
    row = run_trial(spec, store, dataset)
    assert row["status"] == "finished"
    assert row["attempt"] == (parts > 0)
    assert list((store.path / "leases").iterdir()) == []


def test_a_trial_tells_in_its_lease_how_far_it_is(store, trial):
    spec, dataset = trial
    seen = []

    def look(metrics):
        with_lease = store.running()
        seen.extend((held.attempt, metrics["step"]) for held in with_lease if held.trial == spec.hash)

    with store.lease(spec.hash) as lease:
        run_trial(spec, store, dataset, report=look, lease=lease)
        assert lease._owner["step"] == spec.steps
        assert lease._owner["wall_s"] > 0
    assert {attempt for attempt, _ in seen} == {0}
    assert max(step for _, step in seen) == spec.steps
