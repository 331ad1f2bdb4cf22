"""Moves and copies of a model: ties and marks survive."""

import pytest
import torch
from torch import nn

from tutorial_lib.parallel_layers.marks import (
    KeepsParameterMarks,
    is_tensor_parallel,
    move_model_to_device,
    set_tensor_model_parallel_attributes,
)


class Norm(KeepsParameterMarks, nn.LayerNorm):
    def __init__(self):
        super().__init__(4)
        self.weight.sequence_parallel_enabled = True


class Inner(nn.Module):
    """A tie between two sub-modules, one level down, and one between buffers."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), Norm()
        set_tensor_model_parallel_attributes(self.embed.weight, True, 0, 1)
        self.embed.weight.of_ones_own = "kept"
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2))
        self.norm.register_buffer("same_mask", self.mask)


def build():
    model = nn.ModuleDict({"inner": Inner(), "other": nn.Linear(4, 4)})
    model["other"].weight = model["inner"].head.weight
    return model


def check(model):
    inner, weight = model["inner"], model["inner"].embed.weight
    assert inner.head.weight is weight and model["other"].weight is weight
    assert is_tensor_parallel(weight) and weight.partition_dim == 0
    assert weight.of_ones_own == "kept"
    assert inner.norm.weight.sequence_parallel_enabled
    assert inner.norm.same_mask is inner.mask
    assert not hasattr(inner.norm.bias, "sequence_parallel_enabled")
    assert len(list(model.parameters())) == 4


@pytest.fixture
def replacing_parameters():
    """`to` makes new parameters, as on XLA."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_ties_and_marks_survive_where_parameters_are_replaced(replacing_parameters):
    model = build()
    before = model["inner"].embed.weight
    assert move_model_to_device(model, "cpu") is model
    assert model["inner"].embed.weight is not before, "the test is to replace parameters"
    check(model)
