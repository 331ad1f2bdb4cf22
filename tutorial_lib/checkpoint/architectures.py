"""The models that are exchanged with Hugging Face, and how each of their tensors is sharded."""

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig

from ..models.bert import BertForPreTraining
from ..models.gpt import GPT2LMHeadModel
from ..models.gpt_neox import GPTNeoXForCausalLM
from ..models.llama2 import LlamaForCausalLM
from ..parallel_layers import parallel_state
from ..storage import read_json
from .layout import Layout, describe

MODELS = {
    cls.config_class.model_type: cls
    for cls in (BertForPreTraining, GPTNeoXForCausalLM, LlamaForCausalLM, GPT2LMHeadModel)
}


def model_of(config: dict | None) -> type:
    """The parallel model of a Hugging Face configuration.

    Raises:
        ValueError: no configuration, or an architecture that is not known here.
    """
    kind = (config or {}).get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(MODELS)}")
    return MODELS[kind]


def read_config(folder: str | Path) -> PretrainedConfig:
    """The configuration of a Hugging Face folder, with fields that are left at their defaults.

    Raises:
        FileNotFoundError, ValueError: it is missing or broken, or of an unknown architecture.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    try:
        model_of(config)
        given = {name: value for name, value in config.items() if name != "model_type"}
        return AutoConfig.for_model(config["model_type"], **given)
    except Exception as error:  # a validation of values has error classes of its own
        raise ValueError(f"{path}: {str(error) or type(error).__name__}") from error


def layout_at(name: str, layout: Layout, tp: int, config: dict | None, pad: bool = False) -> Layout:
    """A model's tensor at another tensor-parallel degree, no attention head divided.

    Raises:
        ValueError: the degree does not fit, with the tensor and the numbers.
    """
    heads, queries = (), None
    if (config or {}).get("model_type") in MODELS:
        heads = model_of(config).heads_of(name, config)
        queries = config.get("num_attention_heads") or config.get("n_head")
    try:
        if layout.partition and heads and heads[0] == queries and queries % tp:
            raise ValueError(f"{queries} attention heads are not divisible by {tp}")
        return layout.at(tp, pad, heads)
    except ValueError as error:
        hint = "" if pad or heads else " (a vocabulary can be padded: --pad)"
        raise ValueError(
            f"{name} of full shape {layout.shape} at tensor-parallel size {tp}: {error}{hint}"
        ) from error


def describe_model(
    config: PretrainedConfig, options: dict, tp: int = 1, pad: bool = False
) -> tuple[dict[str, Layout], list[list[str]]]:
    """Layouts and ties of the parallel model of a configuration; nothing is allocated.

    Args:
        options: further arguments of the model's class, such as `shard_vocabulary=True`.

    Raises:
        ValueError: the class does not take these options; the degree does not fit.
    """
    found = config.to_dict()
    cls = model_of(found)
    if unknown := sorted(options.keys() - set(cls.options())):
        known = ", ".join(cls.options())
        raise ValueError(
            f"{cls.__name__} does not have the option {', '.join(unknown)}; it takes {known}"
        )
    own_mesh = not parallel_state.model_parallel_is_initialized()
    own_world = not dist.is_initialized()
    if not own_mesh and (size := parallel_state.get_tensor_model_parallel_size()) > 1:
        raise ValueError(f"the tools work in one process, not on a rank of {size}")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a world of this process alone
            layouts, ties = describe(cls(config, **options).state_dict(keep_vars=True))
    finally:
        if own_mesh:
            parallel_state.destroy_model_parallel()
        if own_world and dist.is_initialized():
            dist.destroy_process_group()
    return {name: layout_at(name, x, tp, found, pad) for name, x in layouts.items()}, ties
