"""BERT over ranks against Hugging Face's BERT in one process: weights, loss, gradients, training."""

import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertForPreTraining as HuggingFaceBert

from tutorial_lib.models.bert import BertForPreTraining, make_config, model_inputs, parameter_count
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.parallel_layers import comm, parallel_state
from tutorial_lib.parallel_layers.sharding import partition_of
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.loop import train

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    vocab_size=96,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
CHOICES = [(False, False), (True, False), (True, True)]  # shard_mlp, shard_vocabulary


def config(**changes) -> BertConfig:
    return BertConfig(**{**SIZES, **changes})


def micro_batch(index: int, batch: int = 2, length: int = 16, vocabulary: int = 96) -> dict:
    """Predicted tokens differ in number from one micro-batch to the next, so a mean of means would show."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, vocabulary, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 1 - index % 5 :] = 0
    labels = torch.full_like(ids, -100)
    for row in range(batch):
        positions = torch.randperm(length // 2, generator=generator)[: 1 + (index + row) % 4]
        labels[row, positions] = ids[row, positions]
    return model_inputs([ids, (torch.arange(length) >= length // 2).long().expand_as(ids), mask, labels, torch.arange(batch) % 2])


def merged(named: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """Full tensors from this rank's parts of parameters or of their gradients."""
    full = {}
    for name, parameter in model.named_parameters():
        partition, part = partition_of(parameter), named[name]
        if partition is not None:
            gathered = comm.all_gather(part.movedim(partition.dim, 0)).chunk(partition.parts)
            part = partition.merge([g.movedim(0, partition.dim) for g in gathered])
        full[name] = part.detach().clone()
    return full


def initial_weights(choice):
    torch.manual_seed(3)
    model = BertForPreTraining(config(), *choice)
    tied = model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert tied and model.cls.predictions.decoder.bias is model.cls.predictions.bias
    return merged(dict(model.named_parameters()), model)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_weights_are_hugging_faces_bit_for_bit(ranks, tp, choice):
    torch.manual_seed(3)
    expected = dict(hugging_face_reference(HuggingFaceBert, config()).named_parameters())
    for found in ranks(initial_weights, choice, world_size=tp, tp=tp):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def reference(steps: int, micro_batches: int, lr: float, max_norm: float):
    """The same training by hand: Hugging Face's model, torch's AdamW, one batch that holds all micro-batches."""
    torch.manual_seed(0)
    model = hugging_face_reference(HuggingFaceBert, config()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    losses, gradients, norms = [], None, []
    for step in range(steps):
        parts = [micro_batch(step * micro_batches + index) for index in range(micro_batches)]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        loss = model(**whole).loss
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, dict(model.named_parameters())


def trained(choice, zero: bool, steps: int, accumulation: int, lr: float, max_norm: float):
    model = BertForPreTraining(config(), *choice).double()
    nxd_config = neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size(),
        optimizer_config={"zero_one_enabled": zero, "grad_clipping": True, "max_grad_norm": max_norm},
        mixed_precision_config={"use_master_weights": False, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": False},
    )
    optimizer = initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=lr, weight_decay=0.01)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    mine = [micro_batch(index) for index in range(steps * accumulation * dp_size) if index % dp_size == dp_rank]
    first = {}

    def keep_gradients():
        for name, parameter in model.named_parameters():
            first.setdefault(name, parameter.grad.clone())

    original, calls = optimizer.step, []

    def step():
        if not calls:
            group = parallel_state.get_data_parallel_group()
            grads = {n: comm.all_reduce("sum", p.grad, group) / dp_size for n, p in model.named_parameters()}
            first.update(merged(grads, model))
        calls.append(1)
        return original()

    optimizer.step = step
    done = train(model, optimizer, iter(mine), steps=steps, gradient_accumulation_steps=accumulation)
    return [s.loss for s in done], [s.grad_norm for s in done], first, merged(dict(model.named_parameters()), model)


@pytest.mark.parametrize("zero", [False, True], ids=["adamw", "zero1"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tp, dp, accumulation", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 2)])
def test_training_equals_one_process(ranks, tp, dp, accumulation, choice, zero):
    recipe = dict(steps=3, lr=1e-2, max_norm=0.5)
    losses, norms, gradients, weights = reference(micro_batches=dp * accumulation, **recipe)
    for found in ranks(trained, choice, zero, accumulation=accumulation, world_size=tp * dp, tp=tp, **recipe):
        assert found[0] == pytest.approx(losses, abs=1e-10)
        assert found[1] == pytest.approx(norms, abs=1e-10)
        for expected, values in ((gradients, found[2]), (weights, found[3])):
            for name, value in values.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def odd_vocabulary(steps):
    model = BertForPreTraining(config(vocab_size=97), True, True).double()
    optimizer = initialize_parallel_optimizer(neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size()
    ), torch.optim.AdamW, model.parameters(), lr=1e-2)  # fmt: skip
    batches = [micro_batch(index, vocabulary=97) for index in range(steps)]
    losses = [step.loss for step in train(model, optimizer, iter(batches), steps=steps)]
    return losses, merged(dict(model.named_parameters()), model)


def test_a_vocabulary_that_does_not_divide_changes_nothing(ranks):
    losses, weights = ranks(odd_vocabulary, 3, world_size=1, tp=1)[0]
    for found_losses, found in ranks(odd_vocabulary, 3, world_size=4, tp=4):
        assert found_losses == pytest.approx(losses, abs=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert found["cls.predictions.bias"].shape == (97,)


def counted(preset, choice):
    with torch.device("meta"):
        model = BertForPreTraining(make_config(preset, 1), *choice)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_parameters_in_closed_form(ranks, preset, choice):
    for tp in (1, 4):
        expected = parameter_count(make_config(preset, tp, choice[0]), tp, *choice)
        assert ranks(counted, preset, choice, world_size=tp, tp=tp) == [expected] * tp


def build(changes, choice):
    BertForPreTraining(config(**changes), *choice)


@pytest.mark.parametrize(
    "changes, choice, numbers",
    [
        ({"num_attention_heads": 2, "hidden_size": 32}, (False, False), "2 is not divisible by 4"),
        ({"intermediate_size": 66}, (True, False), "66"),
    ],
)
def test_what_does_not_divide_is_named_on_every_rank(ranks, changes, choice, numbers):
    errors = ranks(build, changes, choice, world_size=4, tp=4, return_exceptions=True)
    assert all(isinstance(e, ValueError) and numbers in str(e) for e in errors), errors
