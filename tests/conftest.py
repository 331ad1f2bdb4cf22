"""Fixtures for the whole suite."""

import pytest

from .pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """`ranks(function, *args, world_size=2, tp=2, backend="cpu", **kwargs)`: runs it on every rank,
    see `RankPool.run`.
    """
    pools: dict[tuple[int, str], RankPool] = {}

    def run(function, *args, world_size: int, backend: str = "cpu", **kwargs):
        if (world_size, backend) not in pools:
            pools[world_size, backend] = RankPool(world_size, backend)
        return pools[world_size, backend].run(function, *args, **kwargs)

    yield run
    for pool in pools.values():
        pool.stop()
