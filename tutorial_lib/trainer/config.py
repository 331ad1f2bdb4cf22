"""The configuration: checked, completed by defaults, and the mesh it describes."""

from numbers import Real

import torch.distributed as dist

from tutorial_lib.parallel_layers.parallel_state import initialize_model_parallel, mesh_is
from tutorial_lib.parallel_layers.utils import ensure_positive


def _completed(name: str, given: dict | None, defaults: dict) -> dict:
    """A new dict of the defaults and what was given.

    Raises:
        ValueError: no dict, or a key that the defaults lack.
    """
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {given!r}, not a dict of {', '.join(defaults)}")
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(
            f"{name} has unknown keys {', '.join(unknown)}; it takes {', '.join(defaults)}"
        )
    return {**defaults, **given}


def neuronx_distributed_config(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    context_parallel_size: int = 1,
    pipeline_config: dict | None = None,
    optimizer_config: dict | None = None,
    activation_checkpoint_config=None,
    pad_model: bool = False,
    sequence_parallel: bool = False,
    model_init_config: dict | None = None,
    lora_config=None,
    mixed_precision_config: dict | None = None,
    sequential_move_factor: int = 11,
    lnc_size: int = 1,
) -> dict:
    """The configuration that `initialize_parallel_model` and `initialize_parallel_optimizer` take.

    In a process group it sets up the mesh of these sizes too, unless it is up, so every rank calls
    it.

    Args:
        optimizer_config: `zero_one_enabled` (False), `grad_clipping` (True), `max_grad_norm` (1.0).
        activation_checkpoint_config: a module class, or a list of them, whose activations are
            recomputed in backward; "full" for the blocks that a Hugging Face model names itself.
        sequence_parallel: sum the gradients of what runs on a part of the sequence before each
            step.
        model_init_config: `meta_device_init` (False), `param_init_fn(module, device)` (needed with
            it) and `sequential_move_factor`.
        mixed_precision_config: `use_master_weights`, `use_fp32_grad_acc` and
            `use_master_weights_in_ckpt`, each by default what `zero_one_enabled` is.
        sequential_move_factor: how many ranks of a node build their model at the same time.
        lnc_size: accepted and ignored.

    Returns:
        A dict of all of it, completed. What was passed in is not modified.

    Raises:
        ValueError: unknown keys, values that contradict each other, or sizes that do not fit the
            world.
        NotImplementedError: pipeline parallelism, `pad_model`, `lora_config`: the tutorials teach
            none of them.
    """
    ensure_positive(
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
        expert_parallel_size=expert_parallel_size, context_parallel_size=context_parallel_size,
    )  # fmt: skip
    unsupported = {
        "pipeline_config": pipeline_config,
        "pad_model": pad_model,
        "lora_config": lora_config,
    }
    if pipeline_parallel_size > 1:
        unsupported["pipeline_parallel_size"] = pipeline_parallel_size
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"{name} is not supported (got {value!r})")
    optimizer = _completed(
        "optimizer_config",
        optimizer_config,
        {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    norm = optimizer["max_grad_norm"]
    if not isinstance(norm, Real) or not norm > 0:
        raise ValueError(f"max_grad_norm {norm!r} is not a number above 0")
    zero = optimizer["zero_one_enabled"]
    precision = _completed(
        "mixed_precision_config",
        mixed_precision_config,
        {"use_master_weights": zero, "use_fp32_grad_acc": zero, "use_master_weights_in_ckpt": zero},
    )
    asked = [key for key, value in precision.items() if value]
    if asked and not zero:
        raise ValueError(f"{', '.join(asked)} needs optimizer_config={{'zero_one_enabled': True}}")
    if precision["use_master_weights_in_ckpt"] and not precision["use_master_weights"]:
        if "use_master_weights_in_ckpt" in (mixed_precision_config or {}):
            raise ValueError("use_master_weights_in_ckpt needs use_master_weights")
        precision["use_master_weights_in_ckpt"] = False
    model_init = _completed(
        "model_init_config",
        model_init_config,
        {
            "sequential_move_factor": sequential_move_factor,
            "meta_device_init": False,
            "param_init_fn": None,
        },
    )
    if model_init["meta_device_init"] and model_init["param_init_fn"] is None:
        raise ValueError(
            "meta_device_init needs param_init_fn(module, device), which gives the parameters "
            "their values"
        )
    ensure_positive(sequential_move_factor=model_init["sequential_move_factor"])
    if dist.is_initialized():
        sizes = (
            tensor_parallel_size,
            pipeline_parallel_size,
            context_parallel_size,
            expert_parallel_size,
        )
        # A mesh that is up stays: a new one would lose a model's kv groups.
        if not mesh_is(initialize_model_parallel(*sizes, mesh_only=True)):
            initialize_model_parallel(*sizes)
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "expert_parallel_size": expert_parallel_size,
        "context_parallel_size": context_parallel_size,
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "sequence_parallel": sequence_parallel,
        "model_init_config": model_init,
        "mixed_precision_config": precision,
    }
