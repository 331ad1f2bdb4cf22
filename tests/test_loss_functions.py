"""Cross entropy over a sharded vocabulary: values, gradients, smoothing, ignored and padded
entries, errors.
"""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.layers import ColumnParallelLinear
from tutorial_lib.parallel_layers.loss_functions import parallel_cross_entropy
from tutorial_lib.parallel_layers.mappings import gather_from_tensor_model_parallel_region

from .parity import assert_messages


def mine(full):
    size = parallel_state.get_tensor_model_parallel_size()
    return full.chunk(size, -1)[parallel_state.get_tensor_model_parallel_rank()]


def run(logits, target, cotangent=None, **options):
    local = mine(logits).clone().requires_grad_()
    before = local.detach().clone()
    loss = parallel_cross_entropy(local, target, **options)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent, retain_graph=True)
    first = local.grad.clone()
    assert torch.equal(local.detach(), before), "the logits were modified"
    local.grad = None
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent)
    assert torch.equal(local.grad, first), "a second backward differs"
    return loss.detach(), first


def check(dtype, shape, vocabulary, ignored, smoothing):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(vocabulary, shape, generator=generator)
    if ignored:
        target.view(-1)[::3] = -100
    cotangent = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    loss, grad = run(logits, target, cotangent, label_smoothing=smoothing)
    full = logits.clone().requires_grad_()
    options = {"reduction": "none", "label_smoothing": smoothing}
    wanted = F.cross_entropy(full.flatten(0, -2), target.flatten(), **options).view(shape)
    wanted.backward(cotangent)
    bound = 1e-10 if dtype is torch.float64 else 1e-5
    assert loss.dtype is dtype and (loss - wanted).abs().max() <= bound
    assert (grad - mine(full.grad)).abs().max() <= bound
    assert torch.equal(loss, comm.all_reduce("max", loss)), "ranks disagree"


def grid(dtype):
    for shape in ((7,), (2, 3, 4)):
        for vocabulary in (4, 52):
            for ignored, smoothing in itertools.product((False, True), (0.0, 0.1)):
                check(dtype, shape, vocabulary, ignored, smoothing)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_torch(ranks, dtype, size):
    ranks(grid, dtype, world_size=size, tp=size)


def uniform(targets):
    return run(torch.zeros(2, 4), torch.tensor(targets))


def test_a_target_on_another_rank_and_ignored_ones(ranks):
    log4 = math.log(4)
    first, second = ranks(uniform, [0, 3], world_size=2, tp=2)
    assert first[0].tolist() == second[0].tolist() == pytest.approx([log4] * 2)
    assert torch.allclose(first[1], torch.tensor([[-0.75, 0.25], [0.25, 0.25]]))
    assert torch.allclose(second[1], torch.tensor([[0.25, 0.25], [0.25, -0.75]]))
    for loss, grad in ranks(uniform, [0, -100], world_size=2, tp=2):
        assert loss.tolist() == pytest.approx([log4, 0]) and torch.equal(grad[1], torch.zeros(2))
    for loss, grad in ranks(uniform, [-100, -100], world_size=2, tp=2):
        assert torch.equal(loss, torch.zeros(2)) and torch.equal(grad, torch.zeros(2, 2))


def small_targets(dtype, target):
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    return parallel_cross_entropy(mine(logits), torch.tensor(target, dtype=dtype)), logits


@pytest.mark.parametrize(
    "dtype, target",
    [(torch.uint8, [0, 156, 255]), (torch.int16, [0, 399, -100]), (torch.int32, [7, -100, 300])],
)
def test_targets_of_any_integer_dtype(ranks, dtype, target):  # in a byte −100 would be 156
    for loss, logits in ranks(small_targets, dtype, target, world_size=2, tp=2):
        expected = F.cross_entropy(logits, torch.tensor(target), reduction="none")
        torch.testing.assert_close(loss, expected)


def ramp(scale, smoothing):
    return run(scale * torch.arange(8.0)[None], torch.tensor([2]), label_smoothing=smoothing)


@pytest.mark.parametrize("size", [1, 2])
def test_label_smoothing_is_over_the_whole_vocabulary(ranks, size):
    cases = ((1.0, 0.1, 5.308340), (1.0, 0.0, 5.458340), (1000.0, 0.1, 4850))
    for scale, smoothing, expected in cases:
        for loss, grad in ranks(ramp, scale, smoothing, world_size=size, tp=size):
            assert loss.item() == pytest.approx(expected, abs=1e-5) and grad.isfinite().all()


def ignored_infinities():
    return run(torch.tensor([[0.0, math.inf, 0, 0], [0, 0, 0, 0]]), torch.tensor([-100, 1]))


def test_what_is_ignored_cannot_spoil_the_rest(ranks):
    for loss, grad in ranks(ignored_infinities, world_size=2, tp=2):
        assert loss.tolist() == pytest.approx([0, math.log(4)]) and not grad[0].any()


def padded(vocabulary):
    return run(torch.zeros(1, 8), torch.tensor([0]), vocab_size=vocabulary)


@pytest.mark.parametrize("vocabulary", [5, 3])
def test_padding_of_the_vocabulary_takes_no_part(ranks, vocabulary):
    results = ranks(padded, vocabulary, world_size=4, tp=4)
    assert all(loss.item() == pytest.approx(math.log(vocabulary)) for loss, _ in results)
    grad = torch.cat([grad for _, grad in results], -1)[0]
    assert not grad[vocabulary:].any() and grad[:vocabulary].all()


def half(dtype):
    logits = (5 * torch.randn(6, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    loss, grad = run(logits, torch.arange(6))
    wanted = F.cross_entropy(logits.float(), torch.arange(6), reduction="none")
    return loss, grad.dtype, (loss.float() - wanted).abs().max() / wanted.abs().max()


def test_half_precision_is_computed_and_returned_in_float32(ranks):
    for loss, grad_dtype, error in ranks(half, torch.bfloat16, world_size=2, tp=2):
        assert loss.dtype is torch.float32 and grad_dtype is torch.bfloat16 and error <= 1e-6


def memory_and_collectives():
    saved = []
    logits = torch.randn(6, 64, requires_grad=True)
    with comm.record() as log:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = parallel_cross_entropy(logits, torch.zeros(6, dtype=torch.long))
        loss.sum().backward()
    large = [t for t in saved if t.numel() == logits.numel()]
    return [t.data_ptr() == logits.data_ptr() for t in large], [(c.kind, c.shape) for c in log]


def test_keeps_no_second_tensor_of_that_size_and_exchanges_once(ranks):
    kept, collectives = ranks(memory_and_collectives, world_size=2, tp=2)[0]
    assert kept == [True] and collectives == [("all_gather", (1, 2, 6))]


def head(gather=True, bias=True):
    return ColumnParallelLinear(4, 8, bias, gather)(torch.ones(2, 3, 4))


def loss_of(logits, **options):
    return parallel_cross_entropy(logits, torch.zeros(logits.shape[:-1]).long(), **options)


def without_gradients():
    with torch.no_grad():
        return loss_of(head())


# As in Hugging Face's losses: in float32, without the last position, and tokens in one dimension.
def shifted(logits):
    return logits.to(torch.float64)[:, :-1].contiguous().view(-1, logits.size(-1))


GATHERED = {
    name: (case, ("were gathered", "gather_output=False"))
    for name, case in {
        "by the layer": lambda: loss_of(head()),
        "without a bias": lambda: loss_of(head(bias=False), vocab_size=8),
        "padded": lambda: loss_of(ColumnParallelLinear(4, 7, pad=True)(torch.ones(3, 4))),
        "and their padding dropped": lambda: loss_of(
            gather_from_tensor_model_parallel_region(head(False))[..., :7]
        ),
        "then shifted and cast": lambda: loss_of(shifted(head())),
        "without gradients": without_gradients,
    }.items()
}


def known_sizes():
    torch.manual_seed(0)
    padded = ColumnParallelLinear(4, 7, gather_output=False, pad=True, dtype=torch.float64)
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 7, dtype=torch.float64)
    wanted = F.cross_entropy(plain(torch.ones(1, 4, dtype=torch.float64)), torch.tensor([0]))
    again = mine(gather_from_tensor_model_parallel_region(head(False)))
    loss_of(again)  # gathered, and sharded once more: allowed
    return (loss_of(padded(torch.ones(1, 4, dtype=torch.float64))) - wanted).abs().item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_padded_head_needs_no_vocab_size(ranks, size):
    assert max(ranks(known_sizes, world_size=size, tp=size)) <= 1e-10


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_logits_are_refused_on_all_ranks(ranks, size):
    assert_messages(ranks, __name__, "GATHERED", size=size)


def bad(shape, target, **options):
    return lambda: parallel_cross_entropy(mine(torch.zeros(shape)), torch.tensor(target), **options)


BAD = {
    "target": (bad((2, 4), [0, 4]), ("4",)),
    "negative target": (bad((2, 4), [0, -1]), ("-1", "4")),
    "padded target": (bad((2, 4), [0, 3], vocab_size=3), ("3",)),
    "target that is not an id": (bad((2, 4), [0.0, 1.0]), ("float32",)),
    "shape": (bad((2, 4), [0]), ("(2,)", "(1,)")),
    "vocabulary": (bad((1, 4), [0], vocab_size=9), ("9", "4")),
}


@pytest.mark.parametrize("size", [1, 2])
def test_errors_name_the_numbers_on_all_ranks(ranks, size):
    assert_messages(ranks, __name__, "BAD", size=size)
