"""The configuration: checked, completed by defaults, and the mesh it describes."""

from numbers import Real

import torch.distributed as dist

from tutorial_lib.parallel_layers import parallel_state
from tutorial_lib.parallel_layers.utils import ensure_positive

OPTIMIZER = dict(zero_one_enabled=False, grad_clipping=True, max_grad_norm=1.0)
MODEL_INIT = dict(meta_device_init=False, param_init_fn=None)
PRECISION = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")


def _completed(name: str, given: dict | None, defaults: dict) -> dict:
    """A new dict of the defaults and what was given.

    Raises:
        ValueError: not a dict, or a key that has no default.
    """
    given = {} if given is None else given
    if not isinstance(given, dict) or not given.keys() <= defaults.keys():
        raise ValueError(f"{name} is {given!r}, not a dict of {', '.join(defaults)}")
    return defaults | given


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

    In a process group it also sets up this mesh, unless it is up already: every rank calls it.

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
        NotImplementedError: pipeline, context and expert parallelism, `pad_model`, `lora_config`:
            the tutorials teach none of them.
    """
    sizes = dict(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_parallel_size=expert_parallel_size,
    )
    ensure_positive(**sizes)
    others = {axis: n for axis, n in sizes.items() if n > 1 and axis != "tensor_parallel_size"}
    unsupported = others | dict(
        pipeline_config=pipeline_config, pad_model=pad_model, lora_config=lora_config
    )
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"{name} is not supported (got {value!r})")
    optimizer = _completed("optimizer_config", optimizer_config, OPTIMIZER)
    norm, zero = optimizer["max_grad_norm"], optimizer["zero_one_enabled"]
    if not isinstance(norm, Real) or not norm > 0:
        raise ValueError(f"max_grad_norm is {norm!r}, must be a number above 0")
    default = dict.fromkeys(PRECISION, zero)
    precision = _completed("mixed_precision_config", mixed_precision_config, default)
    if any(precision.values()) and not zero:
        asked = ", ".join(key for key, value in precision.items() if value)
        raise ValueError(f"{asked} needs optimizer_config={{'zero_one_enabled': True}}")
    default = MODEL_INIT | {"sequential_move_factor": sequential_move_factor}
    model_init = _completed("model_init_config", model_init_config, default)
    ensure_positive(sequential_move_factor=model_init["sequential_move_factor"])
    if model_init["meta_device_init"] and model_init["param_init_fn"] is None:
        raise ValueError("meta_device_init needs param_init_fn(module, device) for the weights")
    # A mesh that is up stays: a new one would lose a model's kv groups.
    up = parallel_state.model_parallel_is_initialized()
    same = up and tensor_parallel_size == parallel_state.get_tensor_model_parallel_size()
    if dist.is_initialized() and not same:
        parallel_state.initialize_model_parallel(tensor_parallel_size)
    return {
        **sizes,
        "optimizer_config": optimizer,
        "activation_checkpoint_config": activation_checkpoint_config,
        "sequence_parallel": sequence_parallel,
        "model_init_config": model_init,
        "mixed_precision_config": precision,
    }
