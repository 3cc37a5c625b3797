import numpy as np
import pytest

from depthlaw.platform.data_build import build
from depthlaw.platform.data_config import DataConfig, DataError
from depthlaw.platform.dataset import permuted

SEQ, BATCH = 512, 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build(DataConfig(source="pydoc", vocab_size=300), tmp_path_factory.mktemp("data"))


def _batch(dataset, step, **changes):
    return dataset.train_batch(step, **{"seq_len": SEQ, "batch_seqs": BATCH, "seed": 3, **changes})


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 255, 257, 1000, 4097])
def test_the_order_is_a_permutation_that_differs_by_seed_and_epoch(count):
    orders = [permuted(np.arange(count), count, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(count))
    if count > 10:
        assert len({order.tobytes() for order in orders}) == len(orders)


def test_every_place_is_equally_likely():
    trials, count = 3000, 5
    seen = np.zeros((count, count))
    for seed in range(trials):
        seen[np.arange(count), permuted(np.arange(count), count, seed, 0)] += 1
    chi2 = ((seen - trials / count) ** 2 / (trials / count)).sum()
    assert chi2 < 40  # 16 degrees of freedom: 1 in 1000


def test_an_epoch_takes_every_window_once_even_across_batches(dataset):
    count = dataset.n_windows("train", SEQ)
    steps = -(-3 * count // BATCH)
    inputs, targets = (np.concatenate(part) for part in zip(*(_batch(dataset, i) for i in range(steps)), strict=True))
    tokens = dataset.tokens("train").astype(np.int64)
    expected = {tokens[i * SEQ : (i + 1) * SEQ].tobytes(): i for i in range(count)}
    assert len(expected) == count
    assert count % BATCH  # a batch holds the end of one epoch and the start of the next
    orders = []
    for epoch in range(3):
        rows = range(epoch * count, (epoch + 1) * count)
        order = [expected[inputs[row].tobytes()] for row in rows]
        assert sorted(order) == list(range(count))
        orders.append(order)
        for row, window in zip(rows, order, strict=True):
            assert np.array_equal(targets[row], tokens[window * SEQ + 1 : (window + 1) * SEQ + 1])
    assert orders[0] != orders[1] != orders[2]


def test_a_batch_depends_on_its_step_alone(dataset):
    forward = [_batch(dataset, i)[0] for i in range(5)]
    for step in (3, 0, 4):
        assert np.array_equal(_batch(dataset, step)[0], forward[step])
    assert not np.array_equal(_batch(dataset, 0, seed=4)[0], forward[0])
    assert _batch(dataset, 10**9)[0].shape == (BATCH, SEQ)  # no walk through the steps before


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_together_hold_the_same_global_batch_at_any_world_size(dataset, world):
    last = dataset.n_windows("train", SEQ) // BATCH  # its batch crosses the end of the epoch
    for step in (0, 1, last):
        whole = _batch(dataset, step)
        parts = [_batch(dataset, step, rank=rank, world=world) for rank in range(world)]
        for k in range(2):
            assert parts[0][k].shape == (BATCH // world, SEQ)
            assert parts[0][k].dtype == np.int64
            assert np.array_equal(np.concatenate([part[k] for part in parts]), whole[k])


@pytest.mark.parametrize("changes", [{"world": 3}, {"rank": 1}, {"rank": -1}, {"batch_seqs": 0}])
def test_a_batch_that_does_not_divide_is_refused(dataset, changes):
    with pytest.raises(DataError, match="allowed are"):
        _batch(dataset, 0, **changes)


def test_validation_windows_are_fixed_distinct_and_spread_evenly(dataset):
    count = dataset.n_windows("validation", 64)
    inputs, targets = dataset.validation_windows(64, 10)
    tokens = dataset.tokens("validation").astype(np.int64)
    for row in range(10):
        start = row * count // 10 * 64
        assert np.array_equal(inputs[row], tokens[start : start + 64])
        assert np.array_equal(targets[row], tokens[start + 1 : start + 65])
    assert len(dataset.validation_windows(64, 10**6)[0]) == count


def test_target_bytes_is_the_length_of_the_decoded_text(dataset):
    _, targets = _batch(dataset, 0)
    words = targets[targets != 0]
    assert dataset.target_bytes(targets) == len(dataset.tokenizer().decode(words.tolist()).encode())
    assert dataset.target_bytes(np.zeros((2, 3), np.int64)) == 0


def test_epochs_counts_passes_over_the_windows(dataset):
    per_epoch = dataset.n_windows("train", SEQ) * SEQ
    assert dataset.epochs(per_epoch, SEQ) == 1.0
    assert dataset.epochs(5 * per_epoch // 2, SEQ) == pytest.approx(2.5)


def test_a_corpus_too_small_for_one_window_says_so(dataset):
    for call in (
        lambda: _batch(dataset, 0, seq_len=10**7),
        lambda: dataset.epochs(1, 10**7),
        lambda: dataset.validation_windows(10**7, 1),
    ):
        with pytest.raises(DataError, match="too few for one window of seq_len=10000000") as error:
            call()
        assert "\n" not in str(error.value)


def test_an_unknown_split_is_refused(dataset):
    with pytest.raises(DataError, match="split='test': allowed are train, validation"):
        dataset.tokens("test")
