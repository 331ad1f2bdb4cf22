"""Each model over ranks against Hugging Face's in one process: weights, gradients, training."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tutorial_lib.lab.plan.parameters import parameter_count
from tutorial_lib.models import bert, gpt, llama2
from tutorial_lib.models.full_weights import full_tensors, load_full_tensors
from tutorial_lib.parallel_layers.consistency import find_drift
from tutorial_lib.parallel_layers.random import get_rng_state, model_parallel_xla_manual_seed
from tutorial_lib.parallel_layers.sharding import partition_of
from tutorial_lib.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tutorial_lib.trainer.model import checkpoint_modules
from tutorial_lib.training.loop import train
from tutorial_lib.utils.activation_checkpoint import apply_activation_checkpointing

from .parity import (
    assert_messages,
    assert_same,
    hugging_face_loss,
    micro_batch,
    next_token_batch,
    reference,
    train_alone,
    train_together,
)
from .tiny_models import SHARDED, TINY

RECIPE = dict(steps=4, lr=1e-2, max_norm=0.5)


def config(name: str, **changes):
    """A configuration without dropout."""
    still = dict.fromkeys(TINY[name].dropout, 0.0)
    return TINY[name].config(**{**still, "vocab_size": 96, **changes})


def trained(name, changes, options, kind, checkpointing, **recipe):
    model = TINY[name].ours(config(name, **changes), **options).double()
    classes = model.checkpointed[checkpointing]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
    sequence_parallel = options.get("sequence_parallel_enabled", False)
    result = train_together(
        model,
        lambda index: micro_batch(name, kind, index),
        sequence_parallel=sequence_parallel,
        **recipe,
    )
    assert find_drift(model) == []
    return result


def compare(
    ranks, name, tp, dp, changes=None, options=None, kind="whole", checkpointing="none",
    accumulation=1, zero=False,
):  # fmt: skip
    changes, options = changes or {}, options or {}
    torch.manual_seed(0)
    expected = train_alone(
        reference(TINY[name], config(name, **changes)),
        hugging_face_loss,
        lambda index: micro_batch(name, kind, index),
        micro_batches=dp * accumulation,
        **RECIPE,
    )
    for found in ranks(
        trained, name, changes, options, kind, checkpointing, accumulation=accumulation, zero=zero,
        world_size=tp * dp, tp=tp, timeout=180, **RECIPE,
    ):  # fmt: skip
        assert_same(found, expected)


SP, FLASH = dict(sequence_parallel_enabled=True), dict(use_flash_attention=True)
MLP = dict(shard_mlp=True)
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
UNTIED = {"tie_word_embeddings": False}
CASES = {
    "bert": ("bert", 2, 2, {}, {}, dict(zero=True)),
    "bert, mlp": ("bert", 2, 1, {"hidden_act": "gelu_fast"}, MLP, dict(checkpointing="full")),
    "bert, vocabulary": ("bert", 4, 1, {"vocab_size": 97}, SHARDED, dict(accumulation=2)),
    "bert, dp": ("bert", 1, 2, {"attn_implementation": "eager"}, SHARDED, dict(accumulation=2)),
    "bert, untied": ("bert", 2, 1, UNTIED, {}, {}),
    "bert, untied, vocabulary": ("bert", 2, 1, UNTIED, SHARDED, {}),
    "gpt2": ("gpt2", 2, 2, {}, SP, dict(zero=True, kind="targets")),
    "gpt2, dp": ("gpt2", 1, 2, {"activation_function": "relu"}, {}, dict(accumulation=2)),
    "gpt2, 4": ("gpt2", 4, 1, {"scale_attn_by_inverse_layer_idx": True}, SP, dict(kind="right")),
    "gpt2, untied": ("gpt2", 2, 1, UNTIED | {"vocab_size": 384}, FLASH, dict(accumulation=2)),
    "gpt2, packed": ("gpt2", 2, 1, {}, SP, dict(kind="packed", checkpointing="full")),
    "gpt2, packed, fused": ("gpt2", 2, 1, {}, FLASH, dict(kind="packed")),
    "neox": ("gpt_neox", 2, 2, {}, SP, dict(zero=True)),
    "neox, dp": ("gpt_neox", 1, 2, {"hidden_act": "quick_gelu"}, {}, dict(accumulation=2)),
    "neox, 4": ("gpt_neox", 4, 1, {"use_parallel_residual": False}, SP, dict(kind="left")),
    "neox, tied": (
        "gpt_neox", 2, 1, {"tie_word_embeddings": True, "vocab_size": 97, "attention_bias": False},
        {}, dict(kind="right", accumulation=4),
    ),
    "neox, packed": ("gpt_neox", 2, 1, {"rotary_pct": 1.0}, SP, dict(kind="packed")),
    "llama": ("llama", 2, 2, {"num_key_value_heads": 8}, SP, dict(zero=True)),
    "llama, tied": (
        "llama", 2, 1, {"tie_word_embeddings": True, "vocab_size": 97, "head_dim": 6}, {}, {},
    ),
    "llama, biases": (
        "llama", 4, 1, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}, SP,
        dict(checkpointing="full", accumulation=2),
    ),
    "llama, one key": ("llama", 4, 1, {"num_key_value_heads": 1}, {}, dict(kind="left")),
    "llama, zero": ("llama", 2, 2, {"num_key_value_heads": 1}, {}, dict(zero=True)),
    "llama, fused": ("llama", 2, 1, {"num_key_value_heads": 2}, SP | FLASH, {}),
    "llama, rope": ("llama", 2, 1, {"rope_parameters": LINEAR}, FLASH, dict(kind="packed")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(ranks, case):
    name, tp, dp, changes, options, rest = CASES[case]
    compare(ranks, name, tp, dp, changes, options, **rest)


@pytest.mark.grid
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("zero", [False, True], ids=["adamw", "zero1"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("tp, dp", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", TINY)
def test_training_equals_one_process_everywhere(
    ranks, name, tp, dp, accumulation, zero, sequence_parallel
):
    options = SHARDED if name == "bert" else {"sequence_parallel_enabled": sequence_parallel}
    for checkpointing in TINY[name].ours.checkpointed:
        compare(
            ranks, name, tp, dp, options=options, checkpointing=checkpointing,
            accumulation=accumulation, zero=zero,
        )  # fmt: skip


GROUPED = {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "pad_token_id": 3}
VARIANTS = [(name, {}, tp) for name in TINY for tp in (1, 2)]
VARIANTS += [("llama", GROUPED, 4), ("gpt_neox", {"tie_word_embeddings": True}, 4)]
VARIANTS += [("gpt2", UNTIED | {"vocab_size": 384}, 4), ("llama", {"num_key_value_heads": 1}, 2)]


def initial_and_moved(name, changes, full, batch):
    torch.manual_seed(3)
    model = TINY[name].build(config(name, **changes))
    initial = full_tensors(model)
    load_full_tensors(model, full)
    with torch.no_grad():
        output = model.eval()(**batch)
    return initial, full_tensors(model), output[0]


@pytest.mark.parametrize("name, changes, tp", VARIANTS)
def test_hugging_faces_weights_at_first_and_come_and_go_bit_for_bit(ranks, name, changes, tp):
    torch.manual_seed(3)
    reference_model = reference(TINY[name], config(name, **changes), torch.float32)
    initial = {key: p.detach() for key, p in reference_model.named_parameters()}
    model, batch = TINY[name].theirs(config(name, **changes)).eval(), next_token_batch(0)
    del batch["labels"]
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = model(**batch)[0]
    full = {key: p.detach() for key, p in model.named_parameters()}
    found = ranks(initial_and_moved, name, changes, full, batch, world_size=tp, tp=tp)
    for first, weights, _ in found:
        for tensors, right in ((first, initial), (weights, full)):
            assert tensors.keys() == right.keys()
            assert all(torch.equal(value, right[key]) for key, value in tensors.items())
    logits = torch.cat([logits for *_, logits in found], -1)[..., : expected.size(-1)]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def load_wrong(name, full):
    load_full_tensors(TINY[name].build(config(name)), full)


def test_weights_of_another_model_are_refused(ranks):
    full = TINY["llama"].theirs(config("llama")).state_dict()
    less = {key: p for key, p in full.items() if key != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"missing: model.layers.1.mlp.up_proj.weight"):
        ranks(load_wrong, "llama", less, world_size=2, tp=2)
    gate, up = (f"model.layers.1.mlp.{half}_proj.weight" for half in ("gate", "up"))
    both = torch.cat([full[gate], full[up]])  # the right sum of rows, split at the wrong one
    with pytest.raises(ValueError, match=r"gate_proj.weight has shape \(60, 32\), \(64, 32\)"):
        ranks(load_wrong, "llama", full | {gate: both[:60], up: both[60:]}, world_size=2, tp=2)
    full = TINY["gpt_neox"].theirs(config("gpt_neox", vocab_size=90)).state_dict()
    with pytest.raises(ValueError, match="90"):
        ranks(load_wrong, "gpt_neox", full, world_size=2, tp=2)


def recomputed(name, how, options):
    model_parallel_xla_manual_seed(5)
    dropout = dict.fromkeys(TINY[name].dropout, 0.5)
    model = TINY[name].ours(config(name, **dropout), **options).train()
    names = [key for key, _ in model.named_parameters()]
    if how == "switch":
        model.gradient_checkpointing_enable()
    elif how is not None:
        checkpoint_modules(model, how)
    assert [key for key, _ in model.named_parameters()] == names == list(model.state_dict())[
        : len(names)
    ] or name == "bert"
    losses, saved = [], []
    for index in range(2):  # two in a row: what recomputing leaves behind would show in the second
        with saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            losses.append(model(**micro_batch(name, "whole", index)).loss)
        losses[-1].backward()
    state = get_rng_state()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    found = [loss.detach() for loss in losses], gradients, state["torch"], state["tracker"]
    return found, sum(saved)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
@pytest.mark.parametrize("name", TINY)
def test_recomputing_changes_no_bit_and_keeps_less(ranks, name):
    """With dropout; by the classes of `checkpointed`, by "full", by Hugging Face's switch."""
    for options in (SHARDED,) if name == "bert" else ({}, SP):
        where = dict(world_size=2, tp=2)
        expected = ranks(recomputed, name, None, options, **where)
        for how in (*[*TINY[name].ours.checkpointed.values()][1:], "full", "switch"):
            pairs = zip(ranks(recomputed, name, how, options, **where), expected)
            for (found, saved), (right, all_saved) in pairs:
                assert saved < all_saved
                torch.testing.assert_close(found, right, rtol=0, atol=0)


def dropped(name, options):
    model_parallel_xla_manual_seed(5)
    rates = dict.fromkeys(TINY[name].dropout, 0.5)
    model = TINY[name].ours(config(name, **rates), **options).train()
    block = model.transformer.h[0] if name == "gpt2" else model.gpt_neox.layers[0]
    mlp = block.mlp if name == "gpt2" else block.post_mlp_dropout
    seen = {}
    mlp.register_forward_hook(lambda m, i, o: seen.update(mlp=o.detach()))
    loss = model(**next_token_batch(0)).loss
    loss.backward()
    named = dict(model.named_parameters()).items()
    whole = {key: p.grad for key, p in named if partition_of(p) is None}
    return seen["mlp"], loss.detach(), whole


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_dropout_is_the_same_where_an_activation_is_and_only_there(ranks, name):
    found = ranks(dropped, name, {}, world_size=2, tp=2)
    (first, loss, gradient), (second, other, theirs) = found
    assert torch.equal(first, second) and torch.equal(loss, other) and loss.isfinite()
    assert 0.4 < (first == 0).float().mean() < 0.6
    assert all(torch.equal(value, theirs[key]) for key, value in gradient.items())
    (first, loss, _), (second, other, _) = ranks(dropped, name, SP, world_size=2, tp=2)
    assert first.shape == (8, 2, 32) and torch.equal(loss, other)
    assert not torch.equal(first == 0, second == 0)


def heads_dropped():
    """What is left of the values of two ranks, whose heads are the same."""
    model_parallel_xla_manual_seed(5)
    core = gpt.GPT2LMHeadModel(config("gpt2", attn_pdrop=0.5)).train().transformer.h[0].attn
    query, values = torch.ones(1, 4, 16, 4), torch.arange(16.0)[:, None].expand(1, 4, 16, 4)
    return core.core_attn(query, query, values, torch.ones(16, 16, dtype=torch.bool).triu(1))


def test_each_rank_drops_probabilities_of_its_own_heads(ranks):
    first, second = ranks(heads_dropped, world_size=2, tp=2)
    assert not torch.equal(first, second)


def angles(name, dtype, rope):
    changes = {"num_attention_heads": 1, "num_key_value_heads": 1, "rope_parameters": rope}
    if name == "gpt_neox":
        changes.pop("num_key_value_heads")
    model = TINY[name].ours(config(name, **changes)).to(dtype)
    return model.base_model.rotary_emb(torch.zeros(1, 1, 32, dtype=dtype), torch.arange(2048)[None])


@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "dynamic", "factor": 2.0}])
def test_rotary_angles_keep_their_precision(ranks, name, scaling):
    rope = {"rope_type": "default", "rope_theta": 1e4, **scaling}
    exact, rough = (
        ranks(angles, name, dtype, rope, world_size=1)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for right, found in zip(exact, rough):
        assert found.dtype is torch.bfloat16 and (found.float() - right).abs().max() < 0.01


def forgetful(name, remember: bool):
    model = TINY[name].ours(config(name), sequence_parallel_enabled=True)
    nxd_config = neuronx_distributed_config(tensor_parallel_size=2, sequence_parallel=remember)
    optimizer = initialize_parallel_optimizer(
        nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2
    )
    train(model, optimizer, iter([next_token_batch(index) for index in range(3)]), steps=3)
    return find_drift(model)


# GPT-NeoX: two norms and two row biases a layer, of two layers, and the last norm. GPT: positions
# too.
@pytest.mark.parametrize("name, shares", [("gpt_neox", 14), ("gpt2", 15), ("llama", 5)])
def test_what_sees_a_chunk_drifts_if_its_gradients_are_not_summed(ranks, name, shares):
    assert len(ranks(forgetful, name, False, world_size=2, tp=2)[0]) == shares
    assert ranks(forgetful, name, True, world_size=2, tp=2) == [[], []]


def test_published_counts_and_paddings():
    assert parameter_count(llama2.make_config("full")) == 6_738_415_616  # Llama 2 7B
    one, eight = (parameter_count(gpt.make_config("full"), tp) for tp in (1, 8))
    whole = 2048 * 4096 + 32 * (6 * 4096) + 2 * 4096  # positions, norms and biases behind rows
    # 50257 padded by Megatron-LM
    assert one - whole == 8 * (eight - whole) - (51200 - 50304) * 4096


def refused(name, *given, **changes):
    def call():
        model = TINY[name].ours(config(name, **changes))
        for method, arguments in given:
            getattr(model, method)(**arguments)

    return call


IDS = next_token_batch(0)["input_ids"]
BOTH = dict(input_ids=IDS, labels=IDS, targets=IDS)
MASK = dict(input_ids=IDS, attention_mask=torch.ones(2, 1, 16, 16))
REENTRANT = dict(gradient_checkpointing_kwargs={"use_reentrant": True})
NEOX, TWELVE = TINY["gpt_neox"].ours, dict(num_attention_heads=12, hidden_size=48)
REFUSED = {
    "bert heads": (refused("bert", num_attention_heads=2), ["2 is not divisible by 4"]),
    "bert decoder": (refused("bert", is_decoder=True), ["is_decoder=True"]),
    "bert kernel": (refused("bert", attn_implementation="flex_attention"), ["'flex_attention'"]),
    "gpt heads": (
        refused("gpt2", num_attention_heads=3, hidden_size=33),
        ["3 is not divisible by 4"],
    ),
    "gpt sizes": (refused("gpt2", n_inner=66), ["66 is not divisible by 4"]),
    "gpt uneven": (refused("gpt2", hidden_size=36), ["36 is not divisible by 8"]),
    "gpt cross": (refused("gpt2", add_cross_attention=True), ["add_cross_attention=True"]),
    "gpt upcast": (refused("gpt2", reorder_and_upcast_attn=True), ["reorder_and_upcast_attn"]),
    "neox sizes": (refused("gpt_neox", intermediate_size=66), ["66 is not divisible by 4"]),
    "neox kernel": (refused("gpt_neox", attn_implementation="eager"), ["'eager'", "sdpa"]),
    "llama keys": (refused("llama", **TWELVE, num_key_value_heads=6), ["6 is not"]),
    "llama ranks": (refused("llama", **TWELVE, num_key_value_heads=3), ["4 is not"]),
    "llama dropout": (refused("llama", attention_dropout=-0.1), ["dropout -0.1"]),
    "outputs": (refused("llama", output_hidden_states=True), ["output_hidden_states=True"]),
    "attentions": (refused("gpt_neox", output_attentions=True, attn_implementation="eager"), [
        "output_attentions=True"]),
    "prelu": (refused("gpt_neox", hidden_act="prelu"), ["'prelu' has parameters"]),
    "xielu": (refused("bert", hidden_act="xielu"), ["'xielu' has parameters"]),
    "function": (refused("llama", hidden_act="gulp"), ["'gulp' is not one of gelu"]),
    "generate": (refused("llama", ("generate", {})), ["is for training", "generate"]),
    "save": (refused("bert", ("save_pretrained", {})), ["is for training", "save"]),
    "load": (refused("gpt2", ("from_pretrained", {})), ["load_full_tensors"]),
    "reentrant": (refused("llama", ("gradient_checkpointing_enable", REENTRANT)), ["reentrant"]),
    "both": (refused("gpt2", ("forward", BOTH)), ["labels and targets"]),
    "mask": (refused("llama", ("forward", MASK)), ["attention_mask of shape (2, 1, 16, 16)"]),
    "positions": (
        refused("gpt_neox", ("forward", dict(input_ids=IDS, position_ids=torch.arange(15)[None]))),
        ["position_ids of shape (1, 15) is not [B, S]"],
    ),
    "length": (
        lambda: NEOX(config("gpt_neox"), sequence_parallel_enabled=True)(IDS[:, :5]),
        ["5 is not divisible by 4"],
    ),
    "too long": (
        refused("gpt2", ("forward", dict(input_ids=torch.zeros(1, 33, dtype=torch.long)))),
        ["33 tokens", "32 positions"],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_what_does_not_fit_is_named_on_every_rank(ranks):
    assert_messages(ranks, __name__, "REFUSED", size=4)


def bert_loss(dtype, **changes):
    torch.manual_seed(0)
    model = bert.BertForPreTraining(config("bert"), **SHARDED).to(dtype).eval()
    batch = {**micro_batch("bert", "whole", 0), **changes}
    return model(**batch).loss.item()


def test_a_bfloat16_models_loss_is_divided_by_the_exact_count(ranks):
    # 1001 is not a bfloat16, 1000 is.
    counts = [{"num_items_in_batch": torch.tensor([tokens, 2**20])} for tokens in (1000, 1001)]
    even, odd = (ranks(bert_loss, torch.bfloat16, **each, world_size=1)[0] for each in counts)
    assert even / odd == pytest.approx(1.001, abs=1e-5)


@pytest.mark.parametrize("labels", [[1, -100], [-100, 0]])
def test_a_sequence_without_a_label_counts_for_nothing(ranks, labels):
    torch.manual_seed(0)
    changes = {"next_sentence_label": torch.tensor(labels)}
    batch = {**micro_batch("bert", "whole", 0), **changes}
    expected = reference(TINY["bert"], config("bert")).eval()(**batch).loss.item()
    found = ranks(bert_loss, torch.float64, **changes, world_size=1)
    assert found == pytest.approx([expected], abs=1e-10)
