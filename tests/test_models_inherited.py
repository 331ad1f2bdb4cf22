"""What the sharded models inherit from Hugging Face: equal to it, or refused, and never silently something else."""

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPTNeoXConfig, LlamaConfig
from transformers import LlamaForCausalLM as LlamaHuggingFace
from transformers.models.gpt_neox import modeling_gpt_neox as hf

from tutorial_lib.models.bert import BertForPreTraining
from tutorial_lib.models.gpt import GPT2LMHeadModel
from tutorial_lib.models.gpt_neox import GPTNeoXForCausalLM
from tutorial_lib.models.initialize import hugging_face_reference
from tutorial_lib.models.llama2 import LlamaForCausalLM
from tutorial_lib.parallel_layers.random import model_parallel_xla_manual_seed

from .parity import assert_refused, next_token_batch

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    vocab_size=96, max_position_embeddings=64,
)  # fmt: skip
GPT_SIZES = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, bos_token_id=95, eos_token_id=95)  # fmt: skip
MODELS = {
    "bert": (BertForPreTraining, BertConfig, dict(SIZES, attention_probs_dropout_prob=0.5)),
    "gpt2": (GPT2LMHeadModel, GPT2Config, dict(GPT_SIZES, attn_pdrop=0.5)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, dict(SIZES, attention_dropout=0.5)),
    "llama": (LlamaForCausalLM, LlamaConfig, dict(SIZES, attention_dropout=0.5)),
}
IDS = next_token_batch(0)["input_ids"]


def model_of(name, **changes):
    model, config, sizes = MODELS[name]
    return model(config(**{**sizes, **changes}))


def gradients(name, recomputed):
    model_parallel_xla_manual_seed(0)
    model = model_of(name).train()
    if recomputed:
        model.gradient_checkpointing_enable()
    batch = {"input_ids": IDS, "labels": IDS}
    if name == "bert":
        batch["next_sentence_label"] = torch.zeros(2, dtype=torch.long)
    model(**batch).loss.backward()
    return {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_hugging_faces_switch_for_checkpointing_replays_dropout(ranks, name):
    for kept, again in zip(*(ranks(gradients, name, r, world_size=2, tp=2) for r in (False, True))):
        for key, grad in kept.items():
            assert torch.equal(again[key], grad), key


def reentrant():
    model_of("llama").gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_reentrant_checkpointing_is_refused(ranks):
    assert_refused(ranks, "'use_reentrant': True", reentrant, world_size=1)


def generated(name, sequence_parallel=False):
    model, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = model(config(**sizes), sequence_parallel_enabled=sequence_parallel).eval()
    return model.generate(IDS, max_new_tokens=4, do_sample=False)


def test_generation_is_hugging_faces_or_refused(ranks):
    torch.manual_seed(0)
    expected = hugging_face_reference(hf.GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES)).eval()
    expected = expected.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(ranks(generated, "gpt_neox", world_size=1)[0], expected)
    assert_refused(ranks, "over 2 ranks is for training", generated, "gpt_neox", world_size=2, tp=2)
    for name, sequence_parallel in (("gpt_neox", True), ("llama", False), ("gpt2", False)):
        assert_refused(ranks, "is for training", generated, name, sequence_parallel, world_size=1)


def outputs(**given):
    torch.manual_seed(0)
    model = model_of("gpt_neox", attn_implementation="eager").double().eval()
    return dict(model(IDS, **given))


WANTED = [dict(output_hidden_states=True), dict(output_attentions=True), dict(logits_to_keep=3)]


@pytest.mark.parametrize("given", WANTED, ids=[next(iter(g)) for g in WANTED])
def test_outputs_beside_the_logits_equal_hugging_faces(ranks, given):
    torch.manual_seed(0)
    config = GPTNeoXConfig(**SIZES, attn_implementation="eager")
    right = hugging_face_reference(hf.GPTNeoXForCausalLM, config).double().eval()(IDS, **given)
    parts = ranks(outputs, world_size=2, tp=2, **given)
    torch.testing.assert_close(
        torch.cat([p["logits"] for p in parts], -1), right.logits, rtol=0, atol=1e-10
    )
    for layer, expected in enumerate(right.hidden_states or ()):
        for part in parts:
            torch.testing.assert_close(part["hidden_states"][layer], expected, rtol=0, atol=1e-10)
    for layer, expected in enumerate(right.attentions or ()):
        whole = torch.cat([part["attentions"][layer] for part in parts], 1)  # each its own heads
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


def by_configuration():
    torch.manual_seed(0)
    return model_of("gpt_neox", output_hidden_states=True).eval()(IDS).hidden_states


def test_a_configuration_may_ask_for_outputs(ranks):
    assert [len(found) for found in ranks(by_configuration, world_size=1)] == [3]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
def test_outputs_that_a_model_does_not_give_are_refused(ranks, name, what):
    changes = {what: True, "attn_implementation": "eager"}
    assert_refused(ranks, f"{what}=True is not supported", model_of, name, world_size=1, **changes)


@pytest.mark.parametrize("name", ["bert", "gpt_neox"])
def test_an_attention_kernel_that_reads_masks_otherwise_is_refused(ranks, name):
    changes = {"attn_implementation": "flex_attention"}
    assert_refused(ranks, "'flex_attention' is not one of", model_of, name, world_size=1, **changes)


POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8], list(range(16))])


def packed(name, sequence_parallel=False, given={}, **options):
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    model = model(config(**sizes, **given), sequence_parallel, **options).double().eval()
    return model(IDS, position_ids=POSITIONS).logits


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama", {}), ("llama", {"use_flash_attention": True}), ("llama", {"sequence_parallel": True}),
        ("gpt_neox", {}), ("gpt_neox", {"sequence_parallel": True}),
        ("gpt_neox", {"given": {"attn_implementation": "eager"}}),
        ("gpt_neox", {"given": {"output_hidden_states": True}}),
    ],
)  # fmt: skip
def test_documents_that_positions_separate_do_not_see_each_other(ranks, name, options):
    torch.manual_seed(0)
    whole = {"llama": LlamaHuggingFace, "gpt_neox": hf.GPTNeoXForCausalLM}[name]
    whole = hugging_face_reference(whole, MODELS[name][1](**SIZES)).double().eval()
    right = whole(IDS, position_ids=POSITIONS, use_cache=False).logits
    apart = whole(IDS[:1, 4:7], use_cache=False).logits
    torch.testing.assert_close(right[:1, 4:7], apart, rtol=0, atol=1e-6)
    found = torch.cat(ranks(packed, name, world_size=2, tp=2, **options), -1)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6)  # Hugging Face's norm is in float32


def misshaped(name, **given):
    model_of(name).eval()(IDS, **given)


@pytest.mark.parametrize(
    "name, given, shape",
    [
        (
            "llama",
            {"attention_mask": torch.ones(2, 1, 16, 16)},
            "attention_mask of shape (2, 1, 16, 16)",
        ),
        ("llama", {"position_ids": torch.arange(16)}, "position_ids of shape (16,)"),
        ("gpt_neox", {"position_ids": torch.arange(15)[None]}, "position_ids of shape (1, 15)"),
    ],
)
def test_a_mask_or_positions_of_another_shape_are_refused(ranks, name, given, shape):
    assert_refused(ranks, f"{shape} is not [B, S]", misshaped, name, world_size=1, **given)


def counted(name):
    model = model_of(name).eval()
    with torch.no_grad():
        return [
            model(IDS, labels=IDS, num_items_in_batch=n).loss.item() for n in (7, torch.tensor(7))
        ]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_the_number_of_targets_may_be_a_plain_number(ranks, name):
    plain, tensor = ranks(counted, name, world_size=1)[0]
    assert plain == tensor


def saved(name, folder):
    torch.manual_seed(0)
    model_of(name).save_pretrained(folder)


def test_files_of_hugging_face_are_right_or_refused(ranks, tmp_path):
    ranks(saved, "gpt_neox", tmp_path, world_size=1)
    torch.manual_seed(0)
    whole = hugging_face_reference(hf.GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES)).state_dict()
    loaded = hf.GPTNeoXForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in whole.items())
    for name in ("gpt_neox", "bert"):
        assert_refused(ranks, "to save it", saved, name, tmp_path, world_size=2, tp=2)
    for name in ("llama", "gpt2"):
        assert_refused(ranks, "to save it", saved, name, tmp_path, world_size=1)


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_would_lose_their_marks_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="load_full_tensors"):
        MODELS[name][0].from_pretrained(tmp_path)
