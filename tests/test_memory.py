"""What is counted as saved for backward, and that counting keeps nothing."""

import gc

import torch

from tutorial_lib.training.memory import SavedActivations


def test_each_piece_of_memory_counts_once_and_what_is_held_anyway_does_not():
    linear, x, held = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True), torch.ones(2, 4)
    with SavedActivations(linear, [held]) as saved:
        y = linear(x)  # saves x and the weight
        y * held, x.view(8) * y.view(8), y.exp()  # y, x again, through a view, and the result
    assert [(s.shape, s.nbytes) for s in saved.tensors] == [((2, 4), 32), ((8,), 32), ((2, 4), 32)]
    assert saved.nbytes == 96


def test_an_operation_that_saves_its_own_result_goes_with_it():
    x = torch.ones(3, 17, requires_grad=True)
    with SavedActivations(torch.nn.Module()):
        y = x.softmax(-1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 17))
    with SavedActivations(torch.nn.Module()):
        x.softmax(-1)
    x.grad = y = None
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (3, 17)]
    assert len(alive) == 1 and alive[0] is x
