"""What a failed trial's reason says."""

import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from depthlaw.platform.config import parse_config
from depthlaw.platform.plan import plan
from depthlaw.platform.rounds import CUT_SHORT
from depthlaw.platform.store import Store
from depthlaw.platform.trial_row import trial_row
from depthlaw.platform.watcher import _reason, watcher

DEFECT = RayTaskError("f", "Traceback ...", ValueError("a defect\nof two lines"))
LOST = RayActorError("01", "half a page\nof causes")


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (pickle.dumps(DEFECT), "ValueError: a defect of two lines"),
        (pickle.dumps(LOST), "its worker process died: killed, or out of memory"),
        (pickle.dumps(LOST)[:50], "Ray kept no reason: is the disk of its temporary folder full?"),
        (b"", "Ray kept no reason: is the disk of its temporary folder full?"),
    ],
)
def test_a_reason_is_one_line_of_kind_and_message(tmp_path, kept, reason):
    (tmp_path / "error.pkl").write_bytes(kept)
    assert _reason(SimpleNamespace(pickled_error_file=str(tmp_path / "error.pkl"))) == reason


def test_a_worker_that_is_lost_fails_the_trials_of_its_trunk_that_had_not_ended(sweep_of, tmp_path):
    grid = {"tokens_per_backbone_param": [40, 80, 160]}
    raw = sweep_of(schedule={"kind": "wsd", "warmup_steps": 10}, grid=grid | {"lr": [4e-3]})
    specs = plan(parse_config(raw), "0123")
    store, told, problems = Store.create(tmp_path / "store"), [], {}
    row = trial_row(specs[0], 0, "finished", None, val_loss=3.0)
    store.write_trial(row)
    seen = watcher({specs[0].hash: specs}, store, lambda spec, text, routine=False: told.append(spec), problems)
    lost = SimpleNamespace(config={"trial": specs[0].hash}, pickled_error_file=str(tmp_path / "none"))
    seen.on_trial_error(0, [], lost)
    assert [store.statuses()[spec.hash] for spec in specs] == ["finished", "failed", "failed"]
    assert set(problems) == {specs[1].hash, specs[2].hash}
    assert told == specs[1:]
    seen.on_trial_result(0, [], lost, {"trial": specs[2].hash, "step": 9, "status": "finished"})
    seen.on_trial_result(0, [], lost, {"training_iteration": 1})  # Ray's own last word on a trial has none of ours
    assert told == [*specs[1:], specs[2]]


@pytest.mark.parametrize("error", [DEFECT, LOST])
def test_an_error_that_a_full_disk_cut_short_anywhere_is_one_that_a_round_expects(error):
    whole = pickle.dumps(error)
    for length in range(len(whole)):
        with pytest.raises(CUT_SHORT):
            pickle.loads(whole[:length])
