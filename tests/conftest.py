"""Fixtures for the whole suite."""

import gc

import pytest

from tutorial_lib.backends import is_installed

from .pool import RankPool


def pytest_collection_finish():
    gc.freeze()  # modules and tests: no later collection has to look at them


@pytest.fixture(scope="session")
def ranks():
    """`ranks(function, *args, world_size=2, tp=2, backend="cpu", **kwargs)`: runs it on every rank,
    see `RankPool.run`. Where `xla` is not installed, a test that asks for it is skipped.
    """
    pools: dict[tuple[int, str], RankPool] = {}

    def run(function, *args, world_size: int, backend: str = "cpu", **kwargs):
        if backend == "xla" and not is_installed("torch_xla", "jax"):
            pytest.skip("needs torch-xla and jax")
        if (world_size, backend) not in pools:
            pools[world_size, backend] = RankPool(world_size, backend)
        return pools[world_size, backend].run(function, *args, **kwargs)

    yield run
    for pool in pools.values():
        pool.stop()
