"""GPT-NeoX over ranks against Hugging Face's GPT-NeoX in one process: weights, loss, gradients, training."""

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox as hf

from tutorial_lib.models.full_weights import full_tensors, load_full_tensors
from tutorial_lib.models.gpt_neox import (
    GPTNeoXForCausalLM,
    ParallelAttention,
    layer_activation_bytes,
    make_config,
    parameter_count,
)
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams
from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.consistency import check_replicated, find_drift
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.training.loop import train
from tutorial_lib.training.memory import SavedActivations, optimizer_bytes

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
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    vocab_size=96, max_position_embeddings=64,
)  # fmt: skip
RECIPE = dict(steps=10, lr=1e-2, max_norm=0.5)


def config(**changes) -> GPTNeoXConfig:
    return GPTNeoXConfig(**{**SIZES, **changes})


def right_padded(index: int) -> dict:
    batch = next_token_batch(index)
    mask = (batch["labels"] != -100).long()
    return {**batch, "attention_mask": mask}


def left_padded(index: int) -> dict:
    batch = right_padded(index)
    mask = batch["attention_mask"].flip(1)
    return {
        **batch,
        "labels": torch.where(mask.bool(), batch["input_ids"], -100),
        "attention_mask": mask,
    }


BATCHES = {"whole": next_token_batch, "left": left_padded, "right": right_padded}


def reference(changes: dict, batches: str = "whole", **recipe):
    torch.manual_seed(0)
    model = hugging_face_reference(hf.GPTNeoXForCausalLM, config(**changes)).double()
    return train_alone(model, next_token_loss, BATCHES[batches], **recipe)


def trained(changes: dict, sequence_parallel: bool, batches: str = "whole", **recipe):
    model = GPTNeoXForCausalLM(config(**changes), sequence_parallel).double()
    result = train_together(model, BATCHES[batches], sequence_parallel=sequence_parallel, **recipe)
    check_replicated(model)
    return result


def compare(
    ranks,
    tp,
    dp,
    accumulation,
    zero,
    sequence_parallel,
    changes=None,
    batches="whole",
    recipe=RECIPE,
):
    changes = changes or {}
    expected = reference(changes, batches, micro_batches=dp * accumulation, **recipe)
    for found in ranks(
        trained, changes, sequence_parallel, batches, zero=zero, accumulation=accumulation, world_size=tp * dp, tp=tp,
        timeout=180, **recipe
    ):  # fmt: skip
        assert_same(found, expected)


QUICK = [
    (1, 2, 1, True, False),
    (2, 1, 4, False, True),
    (2, 2, 1, True, True),
    (4, 1, 1, False, True),
    (2, 2, 1, False, False),
]


@pytest.mark.parametrize("tp, dp, accumulation, zero, sequence_parallel", QUICK)
def test_training_equals_one_process(ranks, tp, dp, accumulation, zero, sequence_parallel):
    compare(ranks, tp, dp, accumulation, zero, sequence_parallel)


@pytest.mark.grid
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("zero", [False, True], ids=["adamw", "zero1"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_training_equals_one_process_everywhere(
    ranks, tp, dp, accumulation, zero, sequence_parallel
):
    compare(ranks, tp, dp, accumulation, zero, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "changes, batches",
    [
        ({}, "right"),
        ({}, "left"),
        ({"tie_word_embeddings": True, "vocab_size": 97}, "whole"),
        ({"vocab_size": 97, "use_parallel_residual": False, "rotary_pct": 1.0}, "whole"),
        (
            {
                "attention_bias": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "whole",
        ),
    ],
    ids=[
        "padded right",
        "padded left",
        "tied, odd vocabulary",
        "serial, full rotary",
        "no bias, another base",
    ],
)
def test_every_variant_equals_one_process(ranks, sequence_parallel, changes, batches):
    compare(
        ranks,
        2,
        1,
        1,
        False,
        sequence_parallel,
        changes,
        batches,
        dict(steps=3, lr=1e-2, max_norm=0.5),
    )


def padded_logits(changes, sequence_parallel):
    batch = left_padded(3)
    model = GPTNeoXForCausalLM(config(**changes), sequence_parallel).eval()
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"]).logits


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_eager_attention_sees_the_same_keys(ranks, sequence_parallel):
    changes, batch = {"attn_implementation": "eager"}, left_padded(3)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = hugging_face_reference(hf.GPTNeoXForCausalLM, config(**changes)).eval()(
            batch["input_ids"], batch["attention_mask"]
        ).logits  # fmt: skip
    found = torch.cat(ranks(padded_logits, changes, sequence_parallel, world_size=2, tp=2), -1)
    real = batch["attention_mask"].bool()
    assert not real.all()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


def moved_weights(changes, full, sequence_parallel):
    model = GPTNeoXForCausalLM(config(**changes), sequence_parallel)
    load_full_tensors(model, full)
    with torch.no_grad():
        logits = model.eval()(next_token_batch(0, length=32)["input_ids"]).logits
    return full_tensors(model), logits


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "vocab_size": 97}], ids=["untied", "tied"]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_hugging_face_weights_come_and_go_bit_for_bit(ranks, tp, changes, sequence_parallel):
    torch.manual_seed(7)
    model = hf.GPTNeoXForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(next_token_batch(0, length=32)["input_ids"]).logits
    full = {
        name.replace("lm_head", "embed_out"): tensor for name, tensor in model.state_dict().items()
    }
    full["gpt_neox.layers.0.attention.bias"] = torch.ones(1)  # as published checkpoints have it
    found = ranks(moved_weights, changes, full, sequence_parallel, world_size=tp, tp=tp)
    for weights, _ in found:
        assert weights.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(value, model.get_parameter(name)) for name, value in weights.items())
    logits = torch.cat([logits for _, logits in found], -1)[..., : expected.size(-1)]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def load_wrong(full):
    load_full_tensors(GPTNeoXForCausalLM(config()), full)


def test_weights_of_another_model_are_refused(ranks):
    full = hf.GPTNeoXForCausalLM(config()).state_dict()
    full["surplus"] = full.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"without lm_head.weight, and with surplus"):
        ranks(load_wrong, full, world_size=2, tp=2)
    full = hf.GPTNeoXForCausalLM(config(vocab_size=90)).state_dict()
    with pytest.raises(ValueError, match="90"):
        ranks(load_wrong, full, world_size=2, tp=2)


def fused_rows():
    attention = ParallelAttention(
        config(hidden_size=4, num_attention_heads=2, attn_implementation="sdpa"), 0, False
    )
    labels = torch.arange(12.0)
    attention.query_key_value.draw_("bias", lambda full: full.copy_(labels))
    return attention.query_key_value.bias.reshape(-1, 3, 2).unbind(1)


def test_a_rank_gets_whole_heads(ranks):
    ((query, key, value),) = ranks(fused_rows, world_size=1, tp=1)
    assert query.flatten().tolist() == [0, 1, 6, 7] and key.flatten().tolist() == [2, 3, 8, 9]
    assert value.flatten().tolist() == [4, 5, 10, 11]
    for rank, parts in enumerate(ranks(fused_rows, world_size=2, tp=2)):
        assert [part.flatten().tolist() for part in parts] == [
            p[rank].tolist() for p in (query, key, value)
        ]


def test_rotary_turns_a_part_of_each_head_and_keeps_its_precision():
    cfg = config(hidden_size=32, num_attention_heads=4, rotary_pct=0.25)
    model = GPTNeoXForCausalLM(cfg)
    q = torch.randn(1, 4, 8, 8)
    turned, _ = hf.apply_rotary_pos_emb(q, q, *model.gpt_neox.rotary_emb(q, torch.arange(8)[None]))
    assert torch.equal(turned[..., 2:], q[..., 2:]) and not torch.equal(
        turned[..., 7, :2], q[..., 7, :2]
    )
    c, s = torch.tensor(7.0).cos(), torch.tensor(7.0).sin()
    x, y = q[..., 7, 0], q[..., 7, 1]
    torch.testing.assert_close(turned[..., 7, :2], torch.stack([x * c - y * s, y * c + x * s], -1))
    wide = config(hidden_size=128, num_attention_heads=4, rotary_pct=1.0)
    exact, _ = GPTNeoXForCausalLM(wide).gpt_neox.rotary_emb(q, torch.arange(2048)[None])
    rough, _ = (
        GPTNeoXForCausalLM(wide)
        .bfloat16()
        .gpt_neox.rotary_emb(q.bfloat16(), torch.arange(2048)[None])
    )
    assert rough.dtype is torch.bfloat16 and (rough.float() - exact).abs().max() < 0.01


def forgetful(remember: bool):
    model = GPTNeoXForCausalLM(config(), sequence_parallel_enabled=True)
    nxd_config = neuronx_distributed_config(tensor_parallel_size=2, sequence_parallel=remember)
    optimizer = initialize_parallel_optimizer(
        nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2
    )
    train(model, optimizer, iter([next_token_batch(index) for index in range(3)]), steps=3)
    return find_drift(model)


def test_norms_drift_if_their_gradients_are_not_summed(ranks):
    drifted = ranks(forgetful, False, world_size=2, tp=2)[0]
    # two norms and two row biases a layer, of two layers, and the last norm
    assert len(drifted) == 2 * (2 * 2 + 2) + 2 and all("norm" in d or "dense" in d for d in drifted)
    assert ranks(forgetful, True, world_size=2, tp=2) == [[], []]


def bf16_curve(dtype, sequence_parallel):
    model = GPTNeoXForCausalLM(config(), sequence_parallel).to(dtype)
    nxd_config = neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size(),
        optimizer_config={"zero_one_enabled": True},
        sequence_parallel=sequence_parallel,
    )
    optimizer = initialize_parallel_optimizer(
        nxd_config, AdamW_FP32OptimParams, model.parameters(), lr=3e-3
    )
    done = train(
        model, optimizer, iter([next_token_batch(index % 2) for index in range(30)]), steps=30
    )
    assert all(p.dtype is dtype for p in model.parameters())
    return [step.loss for step in done]


def test_bfloat16_with_masters_follows_float32(ranks):
    exact = torch.tensor(ranks(bf16_curve, torch.float32, True, world_size=2, tp=2)[0])
    rough = torch.tensor(ranks(bf16_curve, torch.bfloat16, True, world_size=2, tp=2)[0])
    assert exact[-1] < exact[0] - 1
    assert (rough - exact).abs().max() < 0.05


def dropped(sequence_parallel):
    model_parallel_xla_manual_seed(5)
    model = GPTNeoXForCausalLM(config(hidden_dropout=0.5), sequence_parallel)
    seen = []
    model.gpt_neox.layers[0].post_mlp_dropout.register_forward_hook(
        lambda m, i, o: seen.append(o.detach())
    )
    loss = model.train()(**next_token_batch(0)).loss
    return seen[0] == 0, loss.detach()


def test_each_chunk_drops_out_by_itself(ranks):
    (first, loss), (second, other) = ranks(dropped, True, world_size=2, tp=2)
    assert first.shape == (8, 2, 32) and not torch.equal(first, second) and torch.equal(loss, other)
    (first, loss), (second, other) = ranks(dropped, False, world_size=2, tp=2)
    assert first.shape == (2, 16, 32) and torch.equal(first, second) and torch.equal(loss, other)


def odd_length(sequence_parallel):
    return GPTNeoXForCausalLM(config(), sequence_parallel)(
        **next_token_batch(0, length=5)
    ).loss.item()


def test_a_length_that_does_not_divide_is_named_on_every_rank(ranks):
    assert_refused(ranks, "5 is not divisible by 2", odd_length, True, world_size=2, tp=2)
    assert len(set(ranks(odd_length, False, world_size=2, tp=2))) == 1


def sequence_parallel_with(**given):
    GPTNeoXForCausalLM(config(), sequence_parallel_enabled=True)(
        next_token_batch(0)["input_ids"], **given
    )


@pytest.mark.parametrize("name", ["use_cache", "output_hidden_states"])
def test_what_sequence_parallel_does_not_take_is_named(ranks, name):
    text = f"it does not take {name}"
    assert_refused(ranks, text, sequence_parallel_with, world_size=2, tp=2, **{name: True})


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"num_attention_heads": 2}, "2 is not divisible by 4"),
        ({"intermediate_size": 66}, "66 is not divisible by 4"),
    ],
)
def test_what_does_not_divide_is_named_on_every_rank(ranks, changes, numbers):
    assert_refused(ranks, numbers, build, GPTNeoXForCausalLM, config(**changes), world_size=4, tp=4)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "vocab_size": 8191}, {"attention_bias": False}]
)
@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_parameters_in_closed_form(ranks, preset, changes):
    for tp in (1, 4):
        cfg = make_config(preset, tp, **changes)
        assert (
            ranks(build, GPTNeoXForCausalLM, cfg, world_size=tp, tp=tp)
            == [parameter_count(cfg, tp)] * tp
        )


def saved_by_a_layer(preset, dtype, sequence_parallel, batch=2, length=128):
    tp_size = parallel_state.get_tensor_model_parallel_size()
    cfg = make_config(preset, tp_size)
    model = GPTNeoXForCausalLM(cfg, sequence_parallel).to(dtype)
    shape = (length // tp_size, batch) if sequence_parallel else (batch, length)
    hidden = torch.randn(*shape, cfg.hidden_size, dtype=dtype, requires_grad=True)
    angles = model.gpt_neox.rotary_emb(hidden, torch.arange(length)[None])
    with SavedActivations(model, angles) as saved:
        model.gpt_neox.layers[0](hidden, position_embeddings=angles)
    return saved.nbytes, layer_activation_bytes(
        cfg, batch, length, tp_size, sequence_parallel, dtype.itemsize
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_activations_in_closed_form(ranks, dtype, sequence_parallel):
    for measured, expected in ranks(
        saved_by_a_layer, "small", dtype, sequence_parallel, world_size=4, tp=4
    ):
        assert measured == pytest.approx(expected, rel=0.02)


def state_bytes(zero):
    model = GPTNeoXForCausalLM(make_config("tiny"))
    nxd_config = neuronx_distributed_config(
        tensor_parallel_size=2, optimizer_config={"zero_one_enabled": zero}
    )
    optimizer = initialize_parallel_optimizer(
        nxd_config, AdamW_FP32OptimParams, model.parameters(), lr=1e-3
    )
    train(model, optimizer, iter([next_token_batch(0)]), steps=1)
    return optimizer_bytes(optimizer) / parameter_count(model.config, 2)


def test_bytes_of_the_optimizer(ranks):
    assert ranks(state_bytes, False, world_size=4, tp=2) == pytest.approx(
        [8] * 4, rel=0.01
    )  # two moments
    assert ranks(state_bytes, True, world_size=4, tp=2) == pytest.approx(
        [12 / 2] * 4, rel=0.01
    )  # and the weight
