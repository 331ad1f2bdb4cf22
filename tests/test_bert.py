"""BERT over ranks against Hugging Face's BERT in one process: weights, loss, gradients, training."""

import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertForPreTraining as HuggingFaceBert

from tutorial_lib.models.bert import BertForPreTraining, make_config, model_inputs, parameter_count
from tutorial_lib.models.full_weights import full_tensors
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.loop import train

from .parity import assert_refused, assert_same, build, train_alone, train_together

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
    return model_inputs(
        [
            ids,
            (torch.arange(length) >= length // 2).long().expand_as(ids),
            mask,
            labels,
            torch.arange(batch) % 2,
        ]
    )


def initial_weights(choice):
    torch.manual_seed(3)
    model = BertForPreTraining(config(), *choice)
    tied = model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert tied and model.cls.predictions.decoder.bias is model.cls.predictions.bias
    return full_tensors(model)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_weights_are_hugging_faces_bit_for_bit(ranks, tp, choice):
    torch.manual_seed(3)
    expected = dict(hugging_face_reference(HuggingFaceBert, config()).named_parameters())
    for found in ranks(initial_weights, choice, world_size=tp, tp=tp):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def reference(**recipe):
    torch.manual_seed(0)
    return train_alone(
        hugging_face_reference(HuggingFaceBert, config()).double(),
        lambda m, b: m(**b).loss,
        micro_batch,
        **recipe,
    )


def trained(choice, **recipe):
    return train_together(BertForPreTraining(config(), *choice).double(), micro_batch, **recipe)


@pytest.mark.parametrize("zero", [False, True], ids=["adamw", "zero1"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tp, dp, accumulation", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 2)])
def test_training_equals_one_process(ranks, tp, dp, accumulation, choice, zero):
    recipe = dict(steps=3, lr=1e-2, max_norm=0.5)
    expected = reference(micro_batches=dp * accumulation, **recipe)
    for found in ranks(
        trained, choice, zero=zero, accumulation=accumulation, world_size=tp * dp, tp=tp, **recipe
    ):
        assert_same(found, expected)


def odd_vocabulary(steps):
    model = BertForPreTraining(config(vocab_size=97), True, True).double()
    optimizer = initialize_parallel_optimizer(neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size()
    ), torch.optim.AdamW, model.parameters(), lr=1e-2)  # fmt: skip
    batches = [micro_batch(index, vocabulary=97) for index in range(steps)]
    losses = [step.loss for step in train(model, optimizer, iter(batches), steps=steps)]
    return losses, full_tensors(model)


def test_a_vocabulary_that_does_not_divide_changes_nothing(ranks):
    losses, weights = ranks(odd_vocabulary, 3, world_size=1, tp=1)[0]
    for found_losses, found in ranks(odd_vocabulary, 3, world_size=4, tp=4):
        assert found_losses == pytest.approx(losses, abs=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(
                value, weights[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert found["cls.predictions.bias"].shape == (97,)


def gradients(model):
    loss = model.double()(**micro_batch(0)).loss
    loss.backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return loss.item(), found


def untied(choice):
    torch.manual_seed(3)
    model = BertForPreTraining(config(tie_word_embeddings=False), *choice)
    loss, found = gradients(model)
    return loss, full_tensors(model, found)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_head_of_its_own_equals_hugging_faces(ranks, choice):
    torch.manual_seed(3)
    loss, expected = gradients(
        hugging_face_reference(HuggingFaceBert, config(tie_word_embeddings=False))
    )
    for found_loss, found in ranks(untied, choice, world_size=2, tp=2):
        assert found_loss == pytest.approx(loss, abs=1e-10) and found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(
                value, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def loss_in_bfloat16(choice, tokens):
    torch.manual_seed(0)
    model = BertForPreTraining(config(), *choice).to(torch.bfloat16).eval()
    return model(**micro_batch(0), num_items_in_batch=torch.tensor([tokens, 2**20])).loss.item()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_bfloat16_models_loss_is_divided_by_the_exact_count(ranks, choice):
    # 1001 is no bfloat16, 1000 is.
    losses = [ranks(loss_in_bfloat16, choice, tokens, world_size=1)[0] for tokens in (1000, 1001)]
    assert losses[0] / losses[1] == pytest.approx(1.001, abs=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("preset, tied", [("tiny", True), ("full", True), ("tiny", False)])
def test_parameters_in_closed_form(ranks, preset, choice, tied):
    for tp in (1, 4):
        cfg = make_config(preset, tp, choice[0], tie_word_embeddings=tied)
        expected = parameter_count(cfg, tp, *choice)
        assert (
            ranks(build, BertForPreTraining, cfg, *choice, world_size=tp, tp=tp) == [expected] * tp
        )


@pytest.mark.parametrize(
    "changes, choice, numbers",
    [
        ({"num_attention_heads": 2, "hidden_size": 32}, (False, False), "2 is not divisible by 4"),
        ({"intermediate_size": 66}, (True, False), "66"),
        ({"is_decoder": True}, (False, False), "is_decoder"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(ranks, changes, choice, numbers):
    assert_refused(
        ranks, numbers, build, BertForPreTraining, config(**changes), *choice, world_size=4, tp=4
    )


def next_sentences(labels):
    torch.manual_seed(3)
    batch = {**micro_batch(0), "next_sentence_label": torch.tensor(labels)}
    return BertForPreTraining(config()).double()(**batch).loss.item()


@pytest.mark.parametrize("labels", [[1, -100], [-100, 0]])
def test_a_sequence_without_a_label_counts_for_nothing(ranks, labels):
    torch.manual_seed(3)
    model = hugging_face_reference(HuggingFaceBert, config()).double()
    expected = model(**{**micro_batch(0), "next_sentence_label": torch.tensor(labels)}).loss.item()
    assert ranks(next_sentences, labels, world_size=1) == pytest.approx([expected], abs=1e-10)
