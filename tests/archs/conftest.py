"""Every topology, with the options that change its mathematics: a test that takes `variant` runs once for each."""

import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import TOPOLOGIES, topology

VARIANTS = [
    *sorted(TOPOLOGIES.keys() - {"hybrid"}),
    "hc(streams=2)",
    "mhc(streams=2, gap=2.0)",
    "mhc(free=0.5)",
    "block_attnres(blocks=3)",
    "block_attnres(grows=True)",
    "block_attnres(length=1)",
    "moda(rotated=True)",
    "hybrid(blocks=2)",
    "hybrid(blocks=3, first='moda', then='hc')",
    "hybrid(blocks=1, first='full_attnres', then='keel')",
]


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS)


SHAPE = Shape(4, 24, 3, 3, 64, 40)


def make_random(name, shape=SHAPE, spread=0.3, seed=0):
    """A model in float64 with random parameters, none at its start."""
    model = build(shape, topology(name), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=spread)
    return model


@pytest.fixture(scope="session")
def random_model():
    return make_random


@pytest.fixture(scope="session")
def batches():
    """Two batches of inputs and targets, of different sizes, for a vocabulary of 40."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 40, (2, B, 9), generator=generator)) for B in (3, 2)]
