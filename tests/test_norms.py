"""LayerNorm and RMSNorm: equal to torch's and Hugging Face's, also on shards of the sequence."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tutorial_lib.modules.rms_norm import RMSNorm
from tutorial_lib.parallel_layers.layer_norm import LayerNorm

from .parity import noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_hugging_faces(dtype):
    ours, theirs = RMSNorm(16, 1e-6, dtype=dtype), LlamaRMSNorm(16, 1e-6).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(noise(16, seed=1))
        theirs.weight.copy_(ours.weight)
    xs = [(10 * noise(3, 5, 16, dtype=dtype)).requires_grad_() for _ in range(2)]
    cotangent = noise(3, 5, 16, dtype=dtype, seed=2)
    outputs = [norm(x) for norm, x in zip((ours, theirs), xs)]
    assert torch.equal(*outputs) and outputs[0].dtype is dtype
    for output in outputs:
        output.backward(cotangent)
    bound = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for found, wanted in ((xs[0].grad, xs[1].grad), (ours.weight.grad, theirs.weight.grad)):
        assert found.dtype is dtype
        assert (found - wanted).abs().max() <= bound * max(1, wanted.abs().max())


def test_rms_norm_stays_in_float64():
    norm, x = RMSNorm(6, dtype=torch.float64), noise(3, 4, 6, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        norm.weight.copy_(noise(6, dtype=torch.float64, seed=1))
    wanted = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(x) - wanted).abs().max() <= 1e-12
    for rows in (x, x[0, 0].detach().requires_grad_()):
        assert torch.autograd.gradcheck(lambda *a: norm(a[0]), (rows, norm.weight))


def test_rms_norm_keeps_its_input_and_no_float32_copy():
    saved = []
    norm = RMSNorm(16, dtype=torch.bfloat16)
    x = noise(4, 16, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(x)
    assert [(tuple(t.shape), t.dtype) for t in saved if t is not norm.weight] == [
        ((4, 16), torch.bfloat16), ((4, 1), torch.float32)
    ]  # fmt: skip


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float64])
def test_layer_norm_gives_the_inputs_dtype(inputs, weights):
    x = noise(3, 8, dtype=inputs)
    found = LayerNorm(8, dtype=weights)(x)
    wanted = nn.functional.layer_norm(x.double(), (8,)).to(inputs)
    assert found.dtype is inputs
    bound = 2e-2 if torch.bfloat16 in (inputs, weights) else 1e-6
    assert (found.double() - wanted.double()).abs().max() <= bound


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 4\).*8 features"):
        RMSNorm(8)(torch.ones(2, 4))
