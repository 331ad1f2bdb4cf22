"""Names, order and defaults of arguments are those of `neuronx_distributed` 0.18, where the
tutorials teach it.

Further arguments may follow, as keywords; where an argument has another default, the note says why.
"""

import importlib
import inspect

import pytest

SIGNATURES = {
    "parallel_layers.parallel_state.initialize_model_parallel": "tensor_model_parallel_size=1, "
    "pipeline_model_parallel_size=1, context_parallel_size=1, expert_model_parallel_size=1, "
    "skip_collective_init=False, lnc_size=1, mesh_only=False",
    "parallel_layers.parallel_state.get_tensor_model_parallel_group": "as_list=False",
    "parallel_layers.parallel_state.get_data_parallel_group": "as_list=False",
    "parallel_layers.parallel_state.initialize_kv_group": "kv_shared_group_size=1, "
    "sequential_ranks_in_group=False",
    "parallel_layers.mappings.copy_to_tensor_model_parallel_region": "x, process_group=None",
    "parallel_layers.mappings.reduce_from_tensor_model_parallel_region": "x, process_group=None",
    "parallel_layers.mappings.scatter_to_tensor_model_parallel_region": "x, process_group=None",
    "parallel_layers.mappings.gather_from_tensor_model_parallel_region": "x, process_group=None",
    "parallel_layers.mappings.scatter_to_sequence_parallel_region": "x, sequence_dimension=0, "
    "process_group=None",
    "parallel_layers.mappings.gather_from_sequence_parallel_region": "x, sequence_dimension=0, "
    "to_model_parallel=True, process_group=None, tile_cc=False",
    "parallel_layers.mappings.reduce_scatter_to_sequence_parallel_region": "x, "
    "sequence_dimension=0, process_group=None, dtype=None",
    "parallel_layers.mappings.gather_from_tensor_model_parallel_region_with_dim": "x, gather_dim, "
    "process_group=None",
    "parallel_layers.mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim": "x, "
    "partition_dim, process_group=None",
    "parallel_layers.layers.ParallelEmbedding": "num_embeddings, embedding_dim, padding_idx=None, "
    "max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False, init_method=normal_, "
    "device=None, dtype=float32, shard_across_embedding=False, pad=False, "
    "sequence_parallel_enabled=False, tensor_model_parallel_group=None, use_spmd_rank=False, "
    "sequence_dimension=None, tile_cc=False, rank_ordering=None, collect_output=True",
    "parallel_layers.layers.ColumnParallelLinear": "input_size, output_size, bias=True, "
    "gather_output=True, dtype=float32, device=None, stride=1, init_method=None, "
    "sequence_parallel_enabled=False, sequence_dimension=None, keep_master_weight=False, "
    "skip_bias_add=False, pad=False, pad_alignment_size_per_rank=1, keep_padded_output=False, "
    "tensor_model_parallel_group=None, reduce_dtype=float32, rank_ordering=None",
    "parallel_layers.layers.ColumnParallelLinear.forward": "self, input, slice_indices=None",
    "parallel_layers.layers.RowParallelLinear": "input_size, output_size, bias=True, "
    "input_is_parallel=False, dtype=float32, device=None, stride=1, init_method=None, "
    "sequence_parallel_enabled=False, sequence_dimension=None, keep_master_weight=False, "
    "skip_bias_add=False, pad=False, reduce_output=True, tensor_model_parallel_group=None, "
    "reduce_dtype=float32, tile_cc=False, rank_ordering=None",
    "parallel_layers.layer_norm.LayerNorm": "normalized_shape, eps=1e-05, elementwise_affine=True, "
    "bias=True, device=None, dtype=None, sequence_parallel_enabled=False",
    "modules.rms_norm.RMSNorm": "normalized_shape, eps=1e-05, sequence_parallel_enabled=False",
    "modules.rms_norm.manual_rms_norm": "input, normalized_shape, weight, eps",
    "modules.qkv_linear.GQAQKVColumnParallelLinear": "input_size, output_sizes, bias=True, "
    "gather_output=True, dtype=float32, device=None, init_method=None, "
    "sequence_parallel_enabled=False, keep_master_weight=False, kv_size_multiplier=1, "
    "fuse_qkv=True, reduce_dtype=float32",
    "parallel_layers.loss_functions.parallel_cross_entropy": "vocab_parallel_logits, target, "
    "label_smoothing=0.0",
    "parallel_layers.grads.clip_grad_norm": "parameters, max_norm, norm_type=2, "
    "zero1_optimizer=False, zero1_optimizer_groups=None, force_spmd=True",
    "parallel_layers.grads.clip_grads_with_norm": "parameters, total_norm, max_norm",
    "parallel_layers.grads.bucket_allreduce_gradients": "grads_list, reduce_over_ep_group=False",
    "parallel_layers.grads.allreduce_sequence_parallel_gradients": "optimizer",
    "parallel_layers.checkpointing.save": "checkpoint, output_dir, save_serially=True, "
    "save_xser=False, down_cast_bf16=False, master_dp_only=True",
    # weights_only is False there: code from a file would run
    "parallel_layers.checkpointing.load": "chkpt_path, model=None, model_or_optimizer=None, "
    "model_key='model', load_xser=False, sharded=True, strict=True, master_dp_only=True, "
    "weights_only=True",
    "parallel_layers.random.model_parallel_xla_manual_seed": "seed",
    "parallel_layers.pad.get_number_of_extra_heads": "n_head, tp_degree",
    "parallel_layers.pad.pad_model": "model, tp_degree, n_heads, wrapped_classes=(), "
    "pad_hook_fn=None",
    "parallel_layers.move_model_to_device": "model, device",
    "parallel_layers.set_tensor_model_parallel_attributes": "tensor, is_parallel, dim, stride, "
    "num_partitions=-1, rank_ordering=None",
    "parallel_layers.split_tensor_along_last_dim": "tensor, num_partitions, "
    "contiguous_split_chunks=False",
    "utils.model_utils.move_model_to_device": "model, device",
    "utils.activation_checkpoint.checkpoint_wrapper": "module, checkpoint_impl=NO_REENTRANT",
    "utils.adamw_fp32_optim_params.AdamW_FP32OptimParams": "params, lr=0.001, betas=(0.9, 0.999), "
    "eps=1e-06, weight_decay=0.0, correct_bias=True, no_deprecation_warning=True, "
    "differentiable=False, capturable=False",
    # None for the sizes of buckets is what suits the device, where there 0 is one collective each;
    # save_master_weights is False there: a resumed bfloat16 run would start from rounded weights
    "optimizer.NeuronZero1Optimizer": "params, optimizer_class, optimizer_dtype=None, "
    "grad_clipping=True, max_norm=None, pin_layout=True, sharding_groups=None, "
    "grad_norm_groups=None, lazy_init=False, bucket_cap_mb_all_gather=None, "
    "bucket_cap_mb_reduce_scatter=None, use_grad_acc_hook=False, save_master_weights=True, "
    "higher_cc_precision=False",
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
}  # fmt: skip


# What scripts import or call that has no arguments to compare, older spellings among it.
NAMES = {
    "": "parallel_state has_checkpoint finalize_checkpoint",
    "parallel_layers": """
        parallel_state load save clip_grad_norm ColumnParallelLinear RowParallelLinear
        ParallelEmbedding parallel_cross_entropy initialize_model_parallel get_xla_rng_tracker
        model_parallel_xla_manual_seed copy_tensor_model_parallel_attributes PARALLEL_MODULES
        set_defaults_if_not_set_tensor_model_parallel_attributes PARALLEL_FUNCTIONS layers mappings
        comm grads loss_functions layer_norm checkpointing random pad utils layers_utils
    """,
    "parallel_layers.parallel_state": """
        get_tensor_model_parallel_replica_groups get_tensor_model_parallel_size
        get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank
        get_tensor_model_parallel_world_size get_tensor_parallel_size get_tensor_parallel_rank
        get_data_parallel_replica_groups get_data_parallel_size get_data_parallel_rank
        get_data_parallel_world_size get_data_parallel_src_rank get_pipeline_model_parallel_size
        get_pipeline_model_parallel_rank get_context_model_parallel_size get_zero1_sharding_groups
        get_expert_model_parallel_size destroy_model_parallel model_parallel_is_initialized rmsg
        is_global_rank_zero get_world_group gather_python_object get_kv_shared_group
    """,
    "trainer": "neuronx_distributed_config initialize_parallel_model initialize_parallel_optimizer",
    "trainer.model": "NxDModel",
    "trainer.optimizer": "NxDOptimizer",
    "utils": "mark_step master_print get_device",
}


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
    parameters = inspect.signature(find(name)).parameters.values()
    ours = [words(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    theirs = SIGNATURES[name]
    assert ", ".join(ours).startswith(theirs), ", ".join(ours)


@pytest.mark.parametrize("module", NAMES)
def test_what_scripts_import_is_where_they_look(module):
    for name in NAMES[module].split():
        find(f"{module}.{name}".lstrip("."))
