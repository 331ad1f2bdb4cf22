"""The names of `neuronx_distributed` 0.18 that the tutorials' texts, their scripts and the
notebooks use: they exist, with its spelling, order and defaults, and take the calls of the scripts;
modules with its names hold nothing else but what is listed here as ours.
"""

import importlib
import inspect

import pytest
import torch

# The arguments that such code may pass. Others of ours come as keywords behind them; where a
# default differs, the note says why.
SIGNATURES = {
    "parallel_layers.parallel_state.initialize_model_parallel": "tensor_model_parallel_size=1, "
    "pipeline_model_parallel_size=1, context_parallel_size=1, expert_model_parallel_size=1",
    "parallel_layers.parallel_state.get_tensor_model_parallel_group": "as_list=False",
    "parallel_layers.parallel_state.get_data_parallel_group": "as_list=False",
    "parallel_layers.mappings.scatter_to_sequence_parallel_region": "x, sequence_dimension=0",
    "parallel_layers.mappings.gather_from_sequence_parallel_region": "x, sequence_dimension=0, "
    "to_model_parallel=True",
    "parallel_layers.mappings.reduce_scatter_to_sequence_parallel_region": "x, "
    "sequence_dimension=0",
    "parallel_layers.layers.ParallelEmbedding": "num_embeddings, embedding_dim, padding_idx=None, "
    "init_method=normal_, device=None, dtype=float32, pad=False, sequence_parallel_enabled=False",
    "parallel_layers.layers.ColumnParallelLinear": "input_size, output_size, bias=True, "
    "gather_output=True, dtype=float32, device=None, stride=1, init_method=None, "
    "sequence_parallel_enabled=False, pad=False, pad_alignment_size_per_rank=1",
    "parallel_layers.layers.RowParallelLinear": "input_size, output_size, bias=True, "
    "input_is_parallel=False, dtype=float32, device=None, init_method=None, "
    "sequence_parallel_enabled=False",
    "modules.rms_norm.RMSNorm": "normalized_shape, eps=1e-05, sequence_parallel_enabled=False",
    "modules.qkv_linear.GQAQKVColumnParallelLinear": "input_size, output_sizes, bias=True, "
    "gather_output=True, dtype=float32, device=None, init_method=None, "
    "sequence_parallel_enabled=False, kv_size_multiplier=1, fuse_qkv=True",
    "parallel_layers.loss_functions.parallel_cross_entropy": "vocab_parallel_logits, target, "
    "label_smoothing=0.0",
    "parallel_layers.grads.clip_grad_norm": "parameters, max_norm",
    "parallel_layers.grads.bucket_allreduce_gradients": "grads_list",
    "parallel_layers.grads.allreduce_sequence_parallel_gradients": "optimizer",
    "parallel_layers.checkpointing.save": "checkpoint, output_dir, down_cast_bf16=False",
    "parallel_layers.checkpointing.load": "chkpt_path, model=None",
    "parallel_layers.random.model_parallel_xla_manual_seed": "seed",
    "parallel_layers.move_model_to_device": "model, device",
    "utils.model_utils.move_model_to_device": "model, device",
    "utils.activation_checkpoint.checkpoint_wrapper": "module",
    "utils.adamw_fp32_optim_params.AdamW_FP32OptimParams": "params, lr=0.001, betas=(0.9, 0.999), "
    "eps=1e-06, weight_decay=0.0, correct_bias=True",
    "optimizer.NeuronZero1Optimizer": "params, optimizer_class",
    "neuronx_distributed_config": "tensor_parallel_size=1, pipeline_parallel_size=1, "
    "expert_parallel_size=1, context_parallel_size=1, pipeline_config=None, optimizer_config=None, "
    "activation_checkpoint_config=None, pad_model=False, sequence_parallel=False, "
    "model_init_config=None, lora_config=None, mixed_precision_config=None, "
    "sequential_move_factor=11, lnc_size=1",
    "initialize_parallel_model": "nxd_config, model_fn, include_buffers=False",
    "initialize_parallel_optimizer": "nxd_config, optimizer_class, parameters",
    "save_checkpoint": "checkpoint_dir_str, tag, model=None, optimizer=None, scheduler=None, "
    "user_content=None, num_workers=8, use_xser=False, num_kept_ckpts=None, async_save=False, "
    "zero1_optimizer=False, use_zero1_dcp=False, avoid_saving_lower_precision_weights=False",
    "load_checkpoint": "path, tag=None, model=None, optimizer=None, scheduler=None, num_workers=8, "
    "strict=True, use_zero1_dcp=False",
}

# The public names of modules, one line of the vendor's and one of ours.
MODULES = {
    "parallel_layers.parallel_state": """
        initialize_model_parallel destroy_model_parallel model_parallel_is_initialized rmsg
        get_tensor_model_parallel_group get_tensor_model_parallel_replica_groups
        get_tensor_model_parallel_size get_tensor_model_parallel_rank get_tensor_parallel_size
        get_data_parallel_group get_data_parallel_replica_groups get_data_parallel_size
        get_data_parallel_rank get_data_parallel_world_size
        get_pipeline_model_parallel_size get_pipeline_model_parallel_rank
        get_context_model_parallel_size get_world_group is_global_rank_zero gather_python_object
        initialize_kv_group get_kv_shared_replica_groups get_kv_shared_group_size
        initialize_fallback_parallel_state

        layout axis_of
    """,
    "parallel_layers.mappings": """
        copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region
        scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region
        scatter_to_sequence_parallel_region gather_from_sequence_parallel_region
        reduce_scatter_to_sequence_parallel_region
    """,
    "parallel_layers.layers": """
        ColumnParallelLinear RowParallelLinear

        ParallelLinear kaiming check_features
    """,
    "parallel_layers.loss_functions": "parallel_cross_entropy",
    "parallel_layers.layer_norm": "LayerNorm",
    "modules.rms_norm": "RMSNorm",
    "modules.qkv_linear": "GQAQKVColumnParallelLinear",
}

# Where scripts import names from that are defined elsewhere, or have no arguments to compare.
PLACES = """
    parallel_state has_checkpoint finalize_checkpoint parallel_layers.parallel_state
    parallel_layers.load parallel_layers.save parallel_layers.clip_grad_norm
    parallel_layers.ColumnParallelLinear parallel_layers.RowParallelLinear
    parallel_layers.ParallelEmbedding parallel_layers.parallel_cross_entropy
    parallel_layers.initialize_model_parallel parallel_layers.get_xla_rng_tracker
    parallel_layers.model_parallel_xla_manual_seed parallel_layers.layers.ParallelEmbedding
    parallel_layers.comm parallel_layers.grads parallel_layers.checkpointing
    parallel_layers.layer_norm parallel_layers.mappings parallel_layers.utils.divide
    trainer.neuronx_distributed_config trainer.initialize_parallel_model
    trainer.initialize_parallel_optimizer trainer.model.NxDModel trainer.optimizer.NxDOptimizer
    utils.mark_step utils.master_print utils.get_device optimizer.NeuronZero1Optimizer.init_zero
"""


def find(name: str):
    """The object under its dotted name, each part imported or looked up."""
    found, path = importlib.import_module("tutorial_lib"), "tutorial_lib"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(path)
    return found


def words(parameter: inspect.Parameter) -> str:
    """`name` or `name=default`, functions and dtypes and choices by their last name."""
    if parameter.default is parameter.empty:
        return parameter.name
    default = getattr(parameter.default, "__name__", getattr(parameter.default, "name", None))
    return f"{parameter.name}={default or repr(parameter.default).removeprefix('torch.')}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_written_for_the_vendors_library_fits(name):
    theirs = SIGNATURES[name]
    listed = {one.split("=")[0] for one in theirs.split(", ")}
    ours = [
        words(parameter)
        for parameter in inspect.signature(find(name)).parameters.values()
        if parameter.name in listed or parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(ours) == theirs


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_exactly_these(module):
    found = find(module)
    public = {
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == found.__name__
    }
    assert public == set(MODULES[module].split())


@pytest.mark.parametrize("name", PLACES.split())
def test_what_scripts_import_is_where_they_look(name):
    assert find(name) is not None


def build():
    """The layers as the scripts for GPT-NeoX and Llama 2 build them."""
    column, row, embedding = (
        find(f"parallel_layers.{name}")
        for name in ("ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding")
    )
    qkv = find("modules.qkv_linear.GQAQKVColumnParallelLinear")
    init, bf16 = torch.nn.init.normal_, torch.bfloat16
    common = dict(init_method=init, sequence_parallel_enabled=True)
    column(8, 24, stride=3, gather_output=False, **common)
    column(8, 16, stride=2, bias=False, gather_output=False, dtype=bf16, **common)
    row(8, 8, bias=False, input_is_parallel=True, dtype=bf16, **common)
    embedding(16, 8, init_method=init)
    embedding(16, 8, 0, init_method=init, dtype=torch.float32)
    fused = dict(kv_size_multiplier=1, fuse_qkv=True)
    qkv(8, [8, 4], bias=False, gather_output=False, dtype=bf16, **fused, **common)
    find("modules.rms_norm.RMSNorm")(8, eps=1e-6, sequence_parallel_enabled=True)
    find("parallel_layers.layer_norm.LayerNorm")(8, eps=1e-5, sequence_parallel_enabled=True)


def test_layers_are_built_as_the_scripts_build_them(ranks):
    ranks(build, world_size=2, tp=2)
