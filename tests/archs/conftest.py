"""Every topology, with the options that change its mathematics: a test that takes `variant` runs once for each."""

from depthlaw.archs.topologies import TOPOLOGIES

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
