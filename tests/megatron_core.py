"""megatron-core's data sets, what ours are compared with."""

import pytest


def import_megatron():
    """Its modules (indexed_dataset, gpt_dataset, helpers); skips where its wheel is missing."""
    pytest.importorskip("megatron.core", reason="megatron-core has wheels for Linux only")
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset

    return indexed_dataset, gpt_dataset, helpers
