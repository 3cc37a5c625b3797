"""A store in a bucket does what a folder does."""

import pickle
import random
from contextlib import suppress

import pytest

from depthlaw.platform import store_lease
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_check import check
from depthlaw.platform.store_compact import compact
from depthlaw.platform.store_export import export
from depthlaw.platform.store_s3 import S3Files

pytestmark = pytest.mark.engine


def fill(store, trial_row, seed=0):
    rng = random.Random(seed)
    for n in range(5):
        for attempt in range(rng.randint(1, 2)):
            for sequence in range(rng.choice([1, 3])):
                rows = [(step, "loss", rng.random()) for step in rng.sample(range(30), 20)]
                store.write_steps(f"e {n % 2}", "hc(streams=2)", f"t{n}", attempt, sequence, rows)
            store.write_trial(trial_row(f"t{n}", attempt, experiment=f"e {n % 2}"))
    store.write_plan("e 0", [{"trial": "t0"}])


def answers(store):
    queries = [store.steps(), store.steps(experiment="e 1"), store.attempts(), store.trials(), store.statuses()]
    return [*queries, store.experiments(), store.plan("e 0"), store.next_attempt("t1")]


def same(a, b):
    return all(x.equals(y) if hasattr(x, "equals") else x == y for x, y in zip(a, b, strict=True))


def test_it_answers_as_a_folder_does_before_and_after_a_compaction(bucket, store, trial_row, tmp_path):
    for each in (bucket, store):
        fill(each, trial_row)
    assert same(answers(bucket), answers(store))
    assert check(bucket).problems == []
    bucket.compact("t1")
    assert same(answers(bucket), answers(store))
    done = compact(bucket)
    assert done.files_after == 2
    assert same(answers(bucket), answers(store))
    assert check(bucket).problems == []
    assert export(bucket, tmp_path / "steps.csv", "steps") == len(store.steps())
    assert same(answers(pickle.loads(pickle.dumps(Store(str(bucket.path))))), answers(store))


def test_a_listing_of_more_than_a_page_is_whole(bucket, monkeypatch):
    real = S3Files._call

    def small(self, operation, **options):
        return real(self, operation, **options | ({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(S3Files, "_call", small)
    for n in range(10):
        bucket._files.write(f"trials/{n}.txt", b"x")
        bucket._files.write(f"steps/{n}/x", b"x")
    assert bucket._files.listing("trials")[1] == [f"{n}.txt" for n in range(10)]
    assert bucket._files.listing("steps")[0] == [str(n) for n in range(10)]
    assert len(bucket._files.ages("trials")) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_compaction_that_is_killed_at_any_call_loses_nothing(bucket, trial_row, monkeypatch, seed):
    class KilledError(Exception):
        pass

    fill(bucket, trial_row, seed)
    before, real = answers(bucket), S3Files._call
    calls, crash = 0, random.Random(seed).randrange(25)

    def dying(self, operation, **options):
        nonlocal calls
        calls += operation in ("put_object", "delete_object")
        if calls > crash:
            raise KilledError
        return real(self, operation, **options)

    with monkeypatch.context() as patch:
        patch.setattr(S3Files, "_call", dying)
        with suppress(KilledError):
            compact(bucket)
    assert same(answers(bucket), before)
    for held in store_lease.leases(bucket._files):  # of a process that lives on, here only
        bucket._files.delete(held.key)
    compact(bucket)
    assert same(answers(bucket), before)


def test_what_is_no_address_no_bucket_or_no_store_is_one_line(environment, address):
    for words, text in (
        ("S3://bucket/x", "is not the address of a bucket"),
        ("gs://bucket/x", "is not the address of a bucket: write s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "is not the address of a bucket"),
        ("s3://no-such-bucket/x", "refused list_objects_v2: NoSuchBucket"),
        (f"{address}/none", "there is no store at"),
    ):
        with pytest.raises(StoreError, match=text):
            Store(words)


def test_without_credentials_it_says_which_variables_to_set(address, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        Store(address)


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_server_that_ignores_conditions_is_refused_before_anything_runs(address, monkeypatch, ignored):
    real = S3Files._call

    def deaf(self, operation, **options):
        options.pop(ignored, None)
        return real(self, operation, **options)

    monkeypatch.setattr(S3Files, "_call", deaf)
    with pytest.raises(StoreError, match="ignores If-None-Match or If-Match"):
        Store.create(address)
    assert S3Files(address, 10).kind() == "missing"


def test_no_credential_is_in_the_store_or_in_an_error(bucket, trial_row, secret):
    fill(bucket, trial_row)
    with bucket.lease("t9"):
        keys = [one["Key"] for one in bucket._files._call("list_objects_v2")["Contents"]]
        texts = [bucket._files._call("get_object", Key=key)["Body"] for key in keys]
    assert len(texts) > 10
    assert not any(secret.encode() in text for text in texts)
    with pytest.raises(StoreError) as refused:
        S3Files("s3://no-such-bucket", 1).write("x", b"")
    assert secret not in str(refused.value)
