"""The parameters of one rank, from its model on the meta device, where nothing is allocated."""

import torch
from torch import nn
from transformers import PretrainedConfig

from tutorial_lib.models.configs import kv_multiplier
from tutorial_lib.optimizer.adamw import get_param_groups_by_weight_decay
from tutorial_lib.parallel_layers.parallel_state import initialize_model_parallel
from tutorial_lib.parallel_layers.utils import padding_of

from .runs import MODELS, Run, dry_world

_built: dict[tuple, list[nn.Parameter]] = {}  # by all that they depend on


def parameter_count(config: PretrainedConfig, tp: int = 1, **options: bool) -> int:
    """Parameters of one rank, padding included.

    Args:
        options: further keywords of the model, such as BERT's `shard_mlp`.

    Raises:
        ValueError: sizes that `tp` does not divide.
    """
    return sum(p.numel() for p in parameters(Run(config, tp, sequence=tp, options=options)))


def parameters(run: Run) -> list[nn.Parameter]:
    """In the order in which the optimizer has them: those that it decays first.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    options = sorted(run.options.items())
    key = run.config.to_json_string(), run.tp, run.sequence_parallel, *options
    if key not in _built:
        with dry_world(0, run.tp), torch.device("meta"):
            initialize_model_parallel(tensor_model_parallel_size=run.tp)
            groups = get_param_groups_by_weight_decay(run.model(), weight_decay=0.0)
        _built[key] = [parameter for group in groups for parameter in group["params"]]
    return _built[key]


def vocabulary(run: Run) -> int:
    """Rows of the vocabulary on a rank, padding included."""
    whole, multiple = run.config.vocab_size, MODELS[run.family].vocabulary_multiple
    if not run.shards("vocabulary"):
        return whole
    return (whole + padding_of(whole, run.tp, multiple)) // run.tp


def qkv_features(run: Run) -> tuple[int, int]:
    """Features of the queries, and of the keys (and so the values), on a rank."""
    config, tp = run.config, run.tp
    if run.family != "llama":
        return config.hidden_size // tp, config.hidden_size // tp
    head, copies = config.head_dim, kv_multiplier(config, tp)
    return config.num_attention_heads // tp * head, config.num_key_value_heads * copies // tp * head
