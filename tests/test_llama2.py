"""Llama over ranks against Hugging Face's Llama in one process: weights, loss, gradients, training, and what is saved."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as hf

from tutorial_lib.models.full_weights import full_tensors, load_full_tensors
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.models.llama2 import LlamaForCausalLM, make_config, parameter_count
from tutorial_lib.models.llama2_activations import CHECKPOINTED, checkpoint_activations, saved_bytes
from tutorial_lib.parallel_layers.consistency import check_replicated
from tutorial_lib.parallel_layers.random import get_rng_state, model_parallel_xla_manual_seed
from tutorial_lib.training.memory import SavedActivations

from .parity import (
    assert_refused,
    assert_same,
    build,
    next_token_batch,
    next_token_loss,
    train_alone,
    train_together,
)

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=64,
    vocab_size=96, max_position_embeddings=64,
)  # fmt: skip
RECIPE = dict(steps=3, lr=1e-2, max_norm=0.5)


def config(**changes) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


def left_padded(index: int) -> dict:
    batch = next_token_batch(index)
    mask, labels = torch.ones_like(batch["input_ids"]), batch["input_ids"].clone()
    mask[0, : 1 + index % 5] = 0
    labels[0, : 2 + index % 5] = -100  # the first token too, as it would be predicted from padding
    return {**batch, "attention_mask": mask, "labels": labels}


BATCHES = {"whole": next_token_batch, "left": left_padded}


def reference(changes: dict, batches: str, **recipe):
    torch.manual_seed(0)
    model = hugging_face_reference(hf.LlamaForCausalLM, config(**changes)).double()
    for module in model.modules():  # Hugging Face's norm computes in float32, whatever comes in
        if isinstance(module, hf.LlamaRMSNorm):
            module.forward = partial(
                F.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    return train_alone(model, next_token_loss, BATCHES[batches], **recipe)


def trained(changes: dict, batches: str, sequence_parallel: bool, flash: bool, mode: str, **recipe):
    model = LlamaForCausalLM(config(**changes), sequence_parallel, flash).double()
    checkpoint_activations(model, mode)
    result = train_together(model, BATCHES[batches], sequence_parallel=sequence_parallel, **recipe)
    check_replicated(model)
    return result


def compare(
    ranks,
    tp,
    dp,
    sequence_parallel,
    mode,
    changes,
    batches="whole",
    flash=False,
    accumulation=1,
    zero=True,
):
    expected = reference(changes, batches, micro_batches=dp * accumulation, **RECIPE)
    for found in ranks(
        trained, changes, batches, sequence_parallel, flash, mode, zero=zero, accumulation=accumulation,
        world_size=tp * dp, tp=tp, timeout=180, **RECIPE,
    ):  # fmt: skip
        assert_same(found, expected)


@pytest.mark.parametrize(
    "tp, dp, sequence_parallel, mode, changes, rest",
    [
        (2, 2, True, "selective+mlp", {"num_key_value_heads": 8}, {}),
        (
            2,
            1,
            False,
            "none",
            {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 97},
            {"zero": False},
        ),
        (
            4,
            1,
            True,
            "full",
            {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
            {"accumulation": 2},
        ),
        (4, 1, False, "selective", {"num_key_value_heads": 1}, {"batches": "left"}),
        (2, 1, True, "none", {"num_key_value_heads": 2}, {"flash": True}),
        (2, 1, False, "none", {"num_key_value_heads": 8}, {"flash": True, "batches": "left"}),
        (
            2,
            1,
            True,
            "none",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
            {},
        ),
    ],
)
def test_training_equals_one_process(ranks, tp, dp, sequence_parallel, mode, changes, rest):
    compare(ranks, tp, dp, sequence_parallel, mode, changes, **rest)


@pytest.mark.grid
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", CHECKPOINTED)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp, dp", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_training_equals_one_process_everywhere(ranks, tp, dp, sequence_parallel, mode, kv_heads):
    compare(ranks, tp, dp, sequence_parallel, mode, {"num_key_value_heads": kv_heads})


def initial_weights(changes, sequence_parallel):
    torch.manual_seed(3)
    return full_tensors(LlamaForCausalLM(config(**changes), sequence_parallel))


WEIGHTS = [
    {},
    {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 97,
        "head_dim": 6,
        "pad_token_id": 3,
    },
]


@pytest.mark.parametrize("changes", WEIGHTS, ids=["plain", "biases", "tied"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_weights_are_hugging_faces_bit_for_bit(ranks, tp, changes):
    torch.manual_seed(3)
    expected = dict(
        hugging_face_reference(hf.LlamaForCausalLM, config(**changes)).named_parameters()
    )
    for found in ranks(initial_weights, changes, tp == 2, world_size=tp, tp=tp):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def moved_weights(changes, full, sequence_parallel, mode):
    model = LlamaForCausalLM(config(**changes), sequence_parallel)
    checkpoint_activations(model, mode)
    load_full_tensors(model, full)
    with torch.no_grad():
        logits = model.eval()(next_token_batch(0, length=32)["input_ids"]).logits
    return full_tensors(model), logits


@pytest.mark.parametrize("changes", WEIGHTS, ids=["plain", "biases", "tied"])
@pytest.mark.parametrize(
    "tp, mode",
    [(1, "none"), (2, "full"), (4, "selective"), pytest.param(8, "none", marks=pytest.mark.grid)],
)
def test_hugging_face_weights_come_and_go_bit_for_bit(ranks, tp, mode, changes):
    torch.manual_seed(7)
    model = hf.LlamaForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(next_token_batch(0, length=32)["input_ids"]).logits
    full = {name: p.detach() for name, p in model.named_parameters()}
    found = ranks(moved_weights, changes, full, tp == 4, mode, world_size=tp, tp=tp)
    for weights, _ in found:
        assert weights.keys() == full.keys()
        assert all(torch.equal(value, full[name]) for name, value in weights.items())
    logits = torch.cat([logits for _, logits in found], -1)[..., : expected.size(-1)]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def load_wrong(full):
    load_full_tensors(LlamaForCausalLM(config()), full)


def test_weights_of_another_model_are_refused(ranks):
    full = dict(hf.LlamaForCausalLM(config()).state_dict())
    del full["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"without model.layers.1.mlp.up_proj.weight, and with nothing"
    ):
        ranks(load_wrong, full, world_size=2, tp=2)
    full = dict(hf.LlamaForCausalLM(config()).state_dict())
    gate, up = (full[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    both = torch.cat([gate, up])  # the right sum of rows, cut at the wrong one
    full["model.layers.1.mlp.gate_proj.weight"], full["model.layers.1.mlp.up_proj.weight"] = (
        both[:60],
        both[60:],
    )
    with pytest.raises(ValueError, match=r"gate_proj.weight: shape \(60, 32\) should have 64"):
        ranks(load_wrong, full, world_size=2, tp=2)


def recomputed(mode, sequence_parallel, kv_heads):
    model_parallel_xla_manual_seed(5)
    model = LlamaForCausalLM(
        config(attention_dropout=0.5, num_key_value_heads=kv_heads), sequence_parallel
    ).train()
    names = [name for name, _ in model.named_parameters()]
    checkpoint_activations(model, mode)
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    losses = []
    for index in range(2):  # two in a row: what recomputing leaves behind would show in the second
        losses.append(model(**next_token_batch(index)).loss)
        losses[-1].backward()
    state = get_rng_state()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return [loss.detach() for loss in losses], gradients, state["torch"], state["tracker"]


def no_dropout(kv_heads):
    return (
        LlamaForCausalLM(config(num_key_value_heads=kv_heads))
        .train()(**next_token_batch(0))
        .loss.detach()
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp, kv_heads", [(1, 8), (2, 8), (4, 2)])
def test_recomputing_changes_no_bit(ranks, tp, kv_heads, sequence_parallel):
    expected = ranks(recomputed, "none", sequence_parallel, kv_heads, world_size=tp, tp=tp)
    assert not torch.equal(expected[0][0][0], ranks(no_dropout, kv_heads, world_size=tp, tp=tp)[0])
    for mode in list(CHECKPOINTED)[1:]:
        for found, right in zip(
            ranks(recomputed, mode, sequence_parallel, kv_heads, world_size=tp, tp=tp), expected
        ):
            torch.testing.assert_close(found, right, rtol=0, atol=0)


def saved_per_layer(mode, sequence_parallel, changes, dtype, batch, length, flash=False):
    total = {}
    for layers in (1, 3):
        cfg = make_config("tiny", 1, num_hidden_layers=layers, vocab_size=96, **changes)
        model = LlamaForCausalLM(cfg, sequence_parallel, flash).to(dtype).train()
        model_parallel_xla_manual_seed(5)
        checkpoint_activations(model, mode)
        inputs = next_token_batch(0, batch, length)
        with SavedActivations(model, inputs.values()) as saved:
            loss = model(**inputs).loss
        total[layers] = saved.nbytes
        loss.backward()
    return (total[3] - total[1]) / 2


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.grid)])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.grid)])
def test_saved_bytes_in_closed_form(ranks, tp, sequence_parallel, batch):
    for mode in CHECKPOINTED:
        for changes in ({}, {"num_key_value_heads": 2}, {"attention_dropout": 0.1}):
            expected = saved_bytes(
                make_config("tiny", tp, **changes), batch, 64, tp, sequence_parallel, mode
            )
            args = (mode, sequence_parallel, changes, torch.bfloat16, batch, 64)
            for found in ranks(saved_per_layer, *args, world_size=tp, tp=tp):
                assert found == pytest.approx(sum(expected.values()), rel=0.02), (mode, changes)


def test_flash_attention_leaves_nothing_to_recompute(ranks):
    for mode in ("none", "selective"):
        (found,) = ranks(
            saved_per_layer, mode, False, {}, torch.bfloat16, 2, 64, True, world_size=1, tp=1
        )
        expected = sum(saved_bytes(make_config("tiny"), 2, 64, 1, False, "selective").values())
        assert expected <= found < 1.04 * expected, mode  # a number a row of the attention matrix


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "vocab_size": 8191},
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    ],
)
@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_parameters_in_closed_form(ranks, preset, changes):
    for tp in (1, 4):
        cfg = make_config(preset, tp, num_hidden_layers=3, **changes)
        assert (
            ranks(build, LlamaForCausalLM, cfg, world_size=tp, tp=tp)
            == [parameter_count(cfg, tp)] * tp
        )
    assert parameter_count(make_config("full"), 1) == 6_738_415_616  # Llama 2 7B as published


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"num_attention_heads": 2}, "2 is not divisible by 4"),
        ({"intermediate_size": 66}, "66 is not divisible by 4"),
        ({"attention_dropout": -0.1}, "dropout -0.1"),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 6},
            "6 is not divisible by 4",
        ),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 3},
            "4 is not divisible by 3",
        ),
    ],
)
def test_what_does_not_divide_is_named_on_every_rank(ranks, changes, numbers):
    assert_refused(ranks, numbers, build, LlamaForCausalLM, config(**changes), world_size=4, tp=4)


def rotary_table(dtype, scaling):
    parameters = {"rope_type": "default", "rope_theta": 1e4, **scaling}
    model = LlamaForCausalLM(
        config(num_attention_heads=1, rope_parameters=parameters, max_position_embeddings=64)
    ).to(dtype)
    hidden, positions = torch.zeros(1, 1, 32, dtype=dtype), torch.arange(2048)[None]
    return model.model.rotary_emb(hidden, positions)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "dynamic", "factor": 2.0}])
def test_rotary_angles_keep_their_precision(ranks, scaling):
    exact, rough = (
        ranks(rotary_table, d, scaling, world_size=1)[0] for d in (torch.float32, torch.bfloat16)
    )
    for right, found in zip(exact, rough):
        assert found.dtype is torch.bfloat16 and (found.float() - right).abs().max() < 0.01


def odd_length():
    LlamaForCausalLM(config(), sequence_parallel_enabled=True)(**next_token_batch(0, length=5))


def test_a_length_that_does_not_divide_is_named_on_every_rank(ranks):
    assert_refused(ranks, "5 is not divisible by 2", odd_length, world_size=2, tp=2)
    with pytest.raises(ValueError, match="'most' is not one of none, selective"):
        checkpoint_activations(torch.nn.Module(), "most")
