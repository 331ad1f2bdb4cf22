"""GPT over ranks against Hugging Face's GPT-2 in one process: weights, loss, gradients, training,
dropout.
"""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as hf

from tutorial_lib.checkpoint import load_checkpoint, save_checkpoint, tags
from tutorial_lib.checkpoint.__main__ import main
from tutorial_lib.models.full_weights import full_tensors, load_full_tensors
from tutorial_lib.models.gpt import GPT2LMHeadModel, make_config, padded_vocabulary, parameter_count
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.parallel_layers.consistency import check_replicated
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed
from tutorial_lib.storage import xser

from .parity import assert_refused, assert_same, build, train_alone, train_together
from .standin import same, state

SIZES = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=0
)
STILL = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
RECIPE = dict(steps=10, lr=1e-2, max_norm=0.5)


def config(**changes) -> GPT2Config:
    return GPT2Config(**{**SIZES, **STILL, **changes})


def micro_batch(index: int, padding: bool = False) -> dict:
    """Predicted tokens differ in number from one micro-batch to the next, so a mean of means would
    show.
    """
    ids = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(index))
    targets = ids[:, 1:].clone()
    targets[0, 15 - index % 5 :] = -100
    batch = {"input_ids": ids[:, :-1], "targets": targets}
    return batch | {"attention_mask": (targets != -100).long()} if padding else batch


def padded(index: int) -> dict:
    return micro_batch(index, True)


BATCHES = {"whole": micro_batch, "padded": padded}


def hugging_face_loss(model, batch: dict) -> torch.Tensor:
    """Hugging Face's own loss is of float32 logits."""
    batch = dict(batch)
    targets = batch.pop("targets")
    return F.cross_entropy(
        model(**batch).logits.flatten(0, 1), targets.flatten(), ignore_index=-100
    )


def reference(changes: dict, batches: str = "whole", **recipe):
    torch.manual_seed(0)
    model = hugging_face_reference(hf.GPT2LMHeadModel, config(**changes)).double()
    return train_alone(model, hugging_face_loss, BATCHES[batches], **recipe)


def trained(
    changes: dict, sequence_parallel: bool, flash: bool = False, batches: str = "whole", **recipe
):
    model = GPT2LMHeadModel(config(**changes), sequence_parallel, flash).double()
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
    flash=False,
    changes=None,
    batches="whole",
    recipe=RECIPE,
):
    changes = changes or {}
    expected = reference(changes, batches, micro_batches=dp * accumulation, **recipe)
    for found in ranks(
        trained,
        changes,
        sequence_parallel,
        flash,
        batches,
        zero=zero,
        accumulation=accumulation,
        world_size=tp * dp,
        tp=tp,
        timeout=180,
        **recipe,
    ):
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
@pytest.mark.parametrize("flash", [False, True], ids=["core", "flash"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("zero", [False, True], ids=["adamw", "zero1"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_training_equals_one_process_everywhere(
    ranks, tp, dp, accumulation, zero, sequence_parallel, flash
):
    compare(ranks, tp, dp, accumulation, zero, sequence_parallel, flash)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "changes, batches, flash",
    [
        ({}, "padded", False),
        ({"tie_word_embeddings": False, "vocab_size": 384}, "whole", True),
        (
            {"scale_attn_by_inverse_layer_idx": True, "n_inner": 64, "activation_function": "relu"},
            "padded",
            True,
        ),
    ],
    ids=["padded", "untied, flash", "scaled by layer"],
)
def test_every_variant_equals_one_process(ranks, sequence_parallel, changes, batches, flash):
    compare(
        ranks,
        2,
        1,
        1,
        False,
        sequence_parallel,
        flash,
        changes,
        batches,
        dict(steps=3, lr=1e-2, max_norm=0.5),
    )


def labelled():
    batch = micro_batch(0)
    ids = batch["input_ids"]
    model = GPT2LMHeadModel(config())
    shifted = torch.cat([ids[:, 1:], ids.new_full((2, 1), -100)], 1)
    assert model.count_targets({"labels": ids}) == model.count_targets({"targets": shifted}) == 30
    return model(ids, labels=ids).loss.item(), model(ids, targets=shifted).loss.item()


def test_labels_are_shifted_and_targets_are_not(ranks):
    for by_label, by_target in ranks(labelled, world_size=2, tp=2):
        assert by_label == by_target


def initial():
    torch.manual_seed(11)
    return full_tensors(GPT2LMHeadModel(config()))


def test_initial_weights_are_scaled_and_the_same_at_every_degree(ranks):
    torch.manual_seed(11)
    expected = dict(hugging_face_reference(hf.GPT2LMHeadModel, config()).named_parameters())
    for tp in (1, 2, 4):
        for found in ranks(initial, world_size=tp, tp=tp):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
    deviations = {name: p.std().item() for name, p in expected.items() if p.dim() == 2}
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(
            0.02 / (2 if name.endswith("c_proj.weight") else 1), rel=0.1
        ), name


def moved_weights(changes, full, sequence_parallel):
    model = GPT2LMHeadModel(config(**changes), sequence_parallel)
    load_full_tensors(model, full)
    with torch.no_grad():
        logits = model.eval()(micro_batch(0)["input_ids"]).logits
    return full_tensors(model), logits


def shaken(changes):
    """A Hugging Face model none of whose parameters is constant."""
    torch.manual_seed(7)
    model = hf.GPT2LMHeadModel(config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "vocab_size": 384}], ids=["tied", "untied"]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_hugging_face_weights_come_and_go_bit_for_bit(ranks, tp, changes, sequence_parallel):
    model = shaken(changes)
    with torch.no_grad():
        expected = model(micro_batch(0)["input_ids"]).logits
    full = dict(model.state_dict())
    full["transformer.h.0.attn.bias"] = torch.ones(1)  # as published checkpoints have it
    found = ranks(moved_weights, changes, full, sequence_parallel, world_size=tp, tp=tp)
    for weights, logits in found:
        assert weights.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(value, model.get_parameter(name)) for name, value in weights.items())
        assert logits.size(-1) == padded_vocabulary(model.config.vocab_size, tp) // tp
    logits = torch.cat([logits for _, logits in found], -1)[..., : expected.size(-1)]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def save(folder, changes, full):
    model = GPT2LMHeadModel(config(**changes))
    load_full_tensors(model, full)
    save_checkpoint(folder, "step_7", model)


def load(folder, tag, changes):
    model = GPT2LMHeadModel(config(**changes))
    load_checkpoint(folder, tag, model)
    return full_tensors(model)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "vocab_size": 384}], ids=["tied", "untied"]
)
@pytest.mark.parametrize("tp, other", [(1, 4), (2, 1), (4, 2)])
def test_checkpoints_are_merged_split_and_cut_anew(ranks, tmp_path, tp, other, changes):
    """The padding follows the degree: 300 rows are 384 on one rank, 512 on two or four."""
    model, run = shaken(changes), tmp_path / "run"
    ranks(save, str(run), changes, model.state_dict(), world_size=tp, tp=tp)
    assert main(["merge", str(run), str(tmp_path / "merged")]) == 0
    merged, info = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(state(merged), state(model))
    again = str(tmp_path / "again" / "t")
    assert main(["split", str(tmp_path / "merged"), again, "--tp", str(tp)]) == 0
    for file in (tags.latest(run).path / "model").iterdir():
        assert same(xser.load(file), xser.load(f"{again}/model/{file.name}"))
    assert main(["reshard", f"{run}/step_7", f"{run}/other", "--tp", str(other)]) == 0
    for tag in ("step_7", "other"):
        for found in ranks(load, str(run), tag, changes, world_size=other, tp=other):
            assert all(
                torch.equal(value, model.get_parameter(name)) for name, value in found.items()
            )


def dropped(sequence_parallel, flash):
    model_parallel_xla_manual_seed(5)
    model = GPT2LMHeadModel(
        config(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), sequence_parallel, flash
    )
    seen = {}
    block = model.transformer.h[0]
    kept = {
        "embedding": model.transformer.drop,
        "attention": block.attn,
        "mlp": block.mlp,
        "block": block,
    }
    for name, module in kept.items():
        module.register_forward_hook(
            lambda m, i, o, n=name: seen.update({n: (o[0] if isinstance(o, tuple) else o).detach()})
        )
    block.attn.core_attn.register_forward_hook(lambda m, i, o: seen.update(core=o.detach()))
    loss = model.train()(**micro_batch(0)).loss
    loss.backward()
    gradient = {
        n: p.grad
        for n, p in model.named_parameters()
        if not getattr(p, "tensor_model_parallel", False)
    }
    return seen, loss.detach(), gradient


@pytest.mark.parametrize("flash", [False, True], ids=["core", "flash"])
def test_dropout_leaves_replicated_activations_replicated(ranks, flash):
    (first, loss, gradient), (second, other, theirs) = ranks(
        dropped, False, flash, world_size=2, tp=2
    )
    assert torch.equal(loss, other) and loss.isfinite()
    for name in ("embedding", "attention", "mlp", "block"):
        assert torch.equal(first[name], second[name]), name
    for name in ("embedding", "attention", "mlp"):
        assert 0.4 < (first[name] == 0).float().mean() < 0.6, name
    assert all(torch.equal(value, theirs[name]) for name, value in gradient.items())
    again = ranks(dropped, False, flash, world_size=2, tp=2)
    for run, before in zip(again, [(first, loss, gradient), (second, other, theirs)]):
        assert (
            same(run[0], before[0]) and torch.equal(run[1], before[1]) and same(run[2], before[2])
        )


def test_each_chunk_drops_out_by_itself(ranks):
    (first, loss, _), (second, other, _) = ranks(dropped, True, False, world_size=2, tp=2)
    assert torch.equal(loss, other)
    for name in ("embedding", "attention", "mlp"):
        assert first[name].shape == (8, 2, 32)
        assert not torch.equal(first[name] == 0, second[name] == 0), name


def heads_dropped():
    """Masks of the heads of two ranks, whose heads are the same."""
    model_parallel_xla_manual_seed(5)
    model = GPT2LMHeadModel(config(attn_pdrop=0.5)).train()
    core = model.transformer.h[0].attn.core_attn
    query = torch.ones(1, 2, 16, 8)
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return core(query, query, torch.arange(16.0)[None, None, :, None].expand(1, 2, 16, 8), later)


def test_each_rank_drops_out_of_its_own_heads(ranks):
    first, second = ranks(heads_dropped, world_size=2, tp=2)
    assert not torch.equal(first, second)


def labelled_twice():
    batch = micro_batch(0)
    GPT2LMHeadModel(config())(**batch, labels=batch["targets"])


def test_labels_and_targets_exclude_each_other(ranks):
    with pytest.raises(ValueError, match="labels and targets"):
        ranks(labelled_twice, world_size=1)


def too_long(sequence_parallel, length):
    ids = torch.zeros(1, length, dtype=torch.long)
    return GPT2LMHeadModel(config(), sequence_parallel)(ids).logits.shape


@pytest.mark.parametrize(
    "sequence_parallel, length, text",
    [(False, 33, "33 tokens.*32 positions"), (True, 5, "5 is not divisible by 2")],
)
def test_a_length_that_does_not_fit_is_named_on_every_rank(ranks, sequence_parallel, length, text):
    with pytest.raises(ValueError, match=text):
        ranks(too_long, sequence_parallel, length, world_size=2, tp=2)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"n_head": 2}, "2 is not divisible by 4"),
        ({"n_inner": 66}, "66 is not divisible by 4"),
        ({"n_head": 3}, "(got `embed_dim`: 32 and `num_heads`: 3)"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(ranks, changes, text):
    assert_refused(ranks, text, build, GPT2LMHeadModel, config(**changes), world_size=4, tp=4)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "vocab_size": 8193}, {"n_inner": 512}]
)
@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_parameters_in_closed_form(ranks, preset, changes):
    for tp in (1, 4):
        cfg = make_config(preset, tp, **changes)
        expected = [parameter_count(cfg, tp)] * tp
        assert ranks(build, GPT2LMHeadModel, cfg, world_size=tp, tp=tp) == expected


def test_the_published_vocabulary_is_padded_as_megatron_does():
    assert padded_vocabulary(50257, 8) == 51200
    assert padded_vocabulary(8192, 2) == 8192
