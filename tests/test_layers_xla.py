"""The sharded layers and the loss traced by XLA: equal to one process, with no look at a value."""

import pytest
import torch
from torch import nn

from tutorial_lib.modules.qkv_linear import GQAQKVColumnParallelLinear
from tutorial_lib.modules.rms_norm import RMSNorm
from tutorial_lib.parallel_layers import comm, mappings, parallel_state
from tutorial_lib.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.marks import move_model_to_device
from tutorial_lib.parallel_layers.sharding import partition_of

from .pool import needs_xla

pytestmark = needs_xla
HIDDEN, VOCABULARY = 16, 13


class Model(nn.Module):
    """`[S, B]` inside. Every kind of layer once, key and value on both ranks, an odd vocabulary."""

    def __init__(self, sp):
        super().__init__()
        copies = parallel_state.get_tensor_model_parallel_size()
        whole = dict(gather_output=False, sequence_parallel_enabled=sp)
        part = dict(input_is_parallel=True, sequence_parallel_enabled=sp)
        self.embedding = ParallelEmbedding(
            VOCABULARY, HIDDEN, pad=True, sequence_parallel_enabled=sp
        )
        self.norm = RMSNorm(HIDDEN, sequence_parallel_enabled=sp)
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, [16, 8], kv_size_multiplier=copies, **whole)
        self.down = RowParallelLinear(16, HIDDEN, **part)
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, pad=True, **whole)
        self.sp = sp

    def forward(self, ids, target):
        x = self.embedding(ids) if self.sp else self.embedding(ids).transpose(0, 1)
        q, k, v = self.qkv(self.norm(x))
        k, v = (t.repeat(1, 1, q.size(-1) // t.size(-1)) for t in (k, v))
        x = x + self.down(q * torch.sigmoid(k) + v)
        loss = parallel_cross_entropy(self.head(x), target.t())
        return loss.sum() / (target != -100).sum()


def gradient(parameter):
    grad = parameter.grad
    if getattr(parameter, "sequence_parallel_enabled", False):
        grad = comm.all_reduce("sum", grad)
    partition = partition_of(parameter)
    if partition is None:
        return grad
    return partition.merge(comm.all_gather(grad[None], 0).unbind(0))


def step(device, sp):
    torch.manual_seed(0)
    model = move_model_to_device(Model(sp), device)
    generator = torch.Generator().manual_seed(1)
    ids, target = (torch.randint(VOCABULARY, (3, 4), generator=generator) for _ in range(2))
    target[0, 0] = -100
    import torch_xla
    import torch_xla.debug.metrics as metrics

    looked = metrics.counter_value("aten::_local_scalar_dense")  # counts since the process began
    loss = model(ids.to(device), target.to(device))
    loss.backward()
    grads = {name: gradient(p) for name, p in model.named_parameters()}
    if device == "cpu":
        return loss.detach(), grads
    assert metrics.counter_value("aten::_local_scalar_dense") == looked, "a value was looked at"
    torch_xla.sync()
    bad = model.embedding(torch.tensor([[0, VOCABULARY]], device=device)).isnan().all(-1)
    # torch-xla orders collectives by adding zero times a result to the next input: NaN spreads.
    torch_xla.sync()
    lost = parallel_cross_entropy(
        torch.zeros(2, 8, device=device), torch.tensor([0, 16], device=device)
    ).isnan()
    torch_xla.sync()
    if sp:
        bad = mappings.gather_from_sequence_parallel_region(bad.float()).bool().t()
    torch_xla.sync()
    return loss.detach().cpu(), {k: g.cpu() for k, g in grads.items()}, bad.cpu(), lost.cpu()


@pytest.mark.parametrize("sp", [False, True])
def test_a_traced_step_equals_one_process(ranks, sp):
    loss, grads = ranks(step, "cpu", sp, world_size=1, tp=1)[0]
    host = ranks(step, "cpu", sp, world_size=2, tp=2)
    traced = ranks(step, "xla", sp, world_size=2, tp=2, backend="xla", timeout=240)
    for found_loss, found, *_ in host + traced:
        assert abs(found_loss - loss) <= 1e-5
        for name in ("embedding.weight", "norm.weight", "down.weight", "down.bias", "head.weight"):
            assert (found[name] - grads[name]).abs().max() <= 1e-5, name
    for *_, bad, lost in traced:
        assert bad.tolist() == [[False, True]] and lost.tolist() == [False, True]
