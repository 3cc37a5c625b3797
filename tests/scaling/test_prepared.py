"""Many questions about the same designs answer as each would alone."""

import base64
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from depthlaw.scaling.budgets import BUDGETS, budget
from depthlaw.scaling.hardware import PRESETS, Workload
from depthlaw.scaling.optimum import Infeasible, Prepared, optimise
from depthlaw.scaling.table import Stopped


@pytest.fixture
def designs(make_lattice):
    return [make_lattice(t, range(2, 25), range(32, 385, 32), 3 * i) for i, t in enumerate(("pre_ln", "hc"))]


def answer(ask):
    try:
        return ask().to_dict()
    except Infeasible as no:
        return no.to_dict()


def questions(count):
    """Each differs from the one before in one or two things, as on a page."""
    rng = np.random.default_rng(5)
    asked = {"workload": Workload(), "hardware": "h100", "tokens": 1e8}
    limits = {"params": 2e7}
    for _ in range(count):
        move = rng.integers(6)
        if move == 0:
            asked["workload"] = Workload(int(rng.choice([256, 4096])), int(rng.choice([1, 8])))
        elif move == 1:
            asked["hardware"] = str(rng.choice(list(PRESETS)))
        elif move == 2:
            asked.pop("tokens", None), asked.pop("tokens_per_param", None)
            kind = rng.choice(["tokens", "tokens_per_param", ""])
            asked |= {"tokens": {"tokens": 3e8}, "tokens_per_param": {"tokens_per_param": 30.0}, "": {}}[str(kind)]
        else:
            name = str(rng.choice(["params", "kv_bytes", "train_flops", "device_hours", "peak_memory"]))
            typical = {"params": 1e7, "kv_bytes": 3e8, "train_flops": 1e16, "device_hours": 0.02, "peak_memory": 1e9}
            limits[name] = typical[name] * 10 ** rng.uniform(-2, 1)
            if len(limits) > 3:
                limits.pop(next(iter(limits)))
        yield [f"{name}<={limit!r}" for name, limit in limits.items()], dict(asked)


def test_each_of_many_questions_is_answered_as_if_it_were_the_only_one(noisy_law, designs):
    prepared, kinds = Prepared(noisy_law, designs), set()
    for budgets, asked in questions(40):
        alone = answer(lambda b=budgets, a=asked: optimise(noisy_law, designs, b, **a))
        assert answer(lambda b=budgets, a=asked: prepared.find(b, **a).optimum()) == alone
        kinds.add("infeasible" in alone)
    assert kinds == {True, False}


def test_a_question_that_moves_a_limit_alone_asks_no_budget_again(noisy_law, designs, monkeypatch):
    monkeypatch.setattr("depthlaw.scaling.budgets.BUDGETS", dict(BUDGETS))
    calls = []

    @budget("counted", unit="count")
    def counted(design, workload, hardware):
        calls.append(workload.context)
        return design.params

    prepared = Prepared(noisy_law, designs)
    once = len(designs) + 2  # and whether it counts a time
    sizes = [prepared.find(f"counted<={limit}M").best for limit in (1, 5, 20)]
    assert len(set(sizes)) == 3
    assert calls == [4096] * once
    prepared.find("counted<=5M", workload=Workload(context=256))
    assert calls == [4096] * once + [256] * once


def test_a_count_of_the_draws_that_nobody_waits_for_is_given_up(noisy_law, designs):
    law = replace(noisy_law, draws_base64=base64.b64encode(np.tile(noisy_law.theta, (3, 1)).astype("<f8")).decode())
    found, stop = Prepared(law, designs).find("params<=20M"), Event()
    assert found.wins(stop).draws == 3
    stop.set()
    with pytest.raises(Stopped):
        found.wins(stop)
