"""One configuration for model and optimizer: copies, building on the meta device and in waves, and
the calls of `xla_model`. That a step is that of one process is for the models' tests.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.standin import refused
from tutorial_lib import xla_model as xm
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.marks import set_tensor_model_parallel_attributes
from tutorial_lib.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)

TP, DP = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_data_parallel_rank


def copied(zero):
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero})
    model = nn.Linear(2, 1, bias=False)
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts another `step` in the place of ours
    other_model, other = copy.deepcopy((model, optimizer))
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append("step"))
    before = other_model.weight.detach().clone()
    other_model(torch.ones(1, 2)).sum().backward()
    other.step()
    return (before - other_model.weight).tolist(), torch.equal(before, model.weight), seen


def test_an_optimizer_is_copied_with_its_model_or_not_at_all(ranks):
    clipped = [[pytest.approx(0.5**0.5)] * 2]
    assert ranks(copied, False, world_size=2) == [(clipped, True, ["step"])] * 2
    with pytest.raises(TypeError, match="state_dict"):
        ranks(copied, True, world_size=2)


OPTIMIZER, INIT, PRECISION = "optimizer_config", "model_init_config", "mixed_precision_config"
REFUSED = [
    ({OPTIMIZER: {"zero": True}}, ValueError, "'zero': True.*not a dict of zero_one_enabled"),
    ({OPTIMIZER: {"max_grad_norm": None}}, ValueError, "max_grad_norm is None"),
    ({OPTIMIZER: ["zero_one_enabled"]}, ValueError, "not a dict of zero_one_enabled"),
    ({"tensor_parallel_size": "2"}, ValueError, "tensor_parallel_size is '2'"),
    ({PRECISION: {"use_master_weights": True}}, ValueError, "use_master_weights needs"),
    ({INIT: {"meta_device_init": True}}, ValueError, "param_init_fn"),
    ({INIT: {"sequential_move_factor": 0}}, ValueError, "sequential_move_factor is 0"),
    ({"pipeline_config": {"a": 1}}, NotImplementedError, "pipeline_config"),
    ({"pipeline_parallel_size": 2}, NotImplementedError, "got 2"),
]


@pytest.mark.parametrize("arguments, error, message", REFUSED)
def test_configurations_that_cannot_be_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        neuronx_distributed_config(**arguments)


# --- the model ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, width=4, fail_on=None):
        super().__init__()
        if fail_on is not None and DP() == fail_on:
            raise ValueError(f"rank {fail_on} cannot")
        self.embed, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        set_tensor_model_parallel_attributes(self.embed.weight, True, 0, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, ids):
        return self.head(self.dropout(self.embed(ids))).pow(2).mean()


def fill(module, device):
    for p in module.parameters(recurse=False):
        p.copy_(torch.arange(float(p.numel()), device=device).view(p.shape))


def build(meta, factor):
    how = dict(meta_device_init=meta, param_init_fn=fill, sequential_move_factor=factor)
    config = neuronx_distributed_config(model_init_config=how)
    model = initialize_parallel_model(config, Tied, False, 4)
    inner = model.original_module()
    assert inner.head.weight is inner.embed.weight and inner.embed.weight.partition_dim == 0
    assert model.table.tolist() == [0, 1, 2]
    assert list(model.state_dict()) == list(inner.state_dict())
    assert len(list(model.parameters())) == 1
    model(torch.tensor([1, 2])).backward()
    assert inner.embed.weight.grad is not None
    return inner.embed.weight.detach(), str(inner.embed.weight.device)


@pytest.mark.parametrize("factor", [1, 11])
@pytest.mark.parametrize("meta", [False, True])
def test_models_are_built_in_waves_with_their_ties_marks_and_buffers(ranks, meta, factor):
    found = ranks(build, meta, factor, world_size=2, tp=None)
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == "cpu"
    if meta:
        assert torch.equal(found[0][0], torch.arange(32.0).view(8, 4))


def build_badly(*arguments, **kwargs):
    config = neuronx_distributed_config(model_init_config={"sequential_move_factor": 1})
    initialize_parallel_model(config, Tied, *arguments, **kwargs)


def test_an_error_of_one_rank_is_raised_on_all(ranks):
    refused(ranks, ValueError, ["rank 1 cannot"], partial(build_badly, fail_on=1), tp=None)
    refused(ranks, ValueError, ["include_buffers is 4"], build_badly, 4, tp=None)


# --- xla_model ------------------------------------------------------------------------------------


def developer_guide():
    """Two steps written as in the developer guide."""
    from tutorial_lib.parallel_layers.grads import clip_grad_norm

    device = xm.xla_device()
    weight = nn.Parameter(torch.zeros(2, device=device))
    set_tensor_model_parallel_attributes(weight, True, 0, 1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * (dist.get_rank() + 1)).sum().backward()
    clip_grad_norm([weight], 1000.0)
    xm.optimizer_step(optimizer, groups=parallel_state.get_data_parallel_group(as_list=True))
    optimizer.zero_grad()
    return weight.tolist()


def test_the_average_is_over_the_group_not_the_world(ranks):
    found = ranks(developer_guide, world_size=4, tp=2)
    assert found == [[-2.0] * 2, [-3.0] * 2] * 2


def world_average():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), dist.get_rank() + 1.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    xm.reduce_gradients(optimizer)
    return weight.grad.tolist()


def test_no_groups_means_the_world_unless_that_mixes_weights(ranks):
    assert ranks(world_average, world_size=2) == [[1.5, 1.5]] * 2
    refused(ranks, ValueError, ["tensor-parallel groups of 2"], world_average)
