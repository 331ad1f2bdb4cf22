"""What the exchange with Hugging Face has to know of each architecture: which class here, and which
names there.

An architecture registers itself in `ARCHITECTURES` by the `model_type` of its configuration. Models
keep Hugging Face's names, so that most need no rules. A fused tensor (q, k and v; gate and up) is
several of Hugging Face's. In files a tensor may have an older name, which transformers knows.
"""

import importlib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .layout import Layout, describe


@dataclass(frozen=True)
class Architecture:
    """One model type.

    Attributes:
        model: `module:class` of the parallel model.
        fused: pattern of a name here → Hugging Face's names of its fused matrices, in their order.
        heads: pattern of a name here → the configuration's field for the number of heads in each of
            its matrices.
    """

    model: str
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    heads: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """Hugging Face's names of what is `name` here."""
        for pattern, theirs in self.fused.items():
            if match := re.fullmatch(pattern, name):
                return tuple(match.expand(their) for their in theirs)
        return (name,)

    def published(self, name: str) -> tuple[str, ...]:
        """The names in Hugging Face's files of what is `name` here."""
        rules = [rule.reverse_transform() for rule in reversed(self._renamings())]
        return tuple(_renamed(their, rules) for their in self.names(name))

    def current_name(self, published: str) -> str:
        """Hugging Face's name today of what is called so in a file."""
        return _renamed(published, self._renamings())

    def ignores(self, name: str) -> bool:
        """True for what Hugging Face's class leaves aside in a file: buffers of old versions."""
        patterns = getattr(self.model_class(), "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def model_class(self) -> type:
        module, _, name = self.model.partition(":")
        return getattr(importlib.import_module(module), name)

    def _renamings(self) -> list:
        """Between files and today's models; of the class of the same name."""
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        rules = get_checkpoint_conversion_mapping(self.model.partition(":")[2]) or []
        return [rule for rule in rules if isinstance(rule, WeightRenaming)]


def _renamed(name: str, rules: list) -> str:
    for rule in rules:
        name, _ = rule.rename_source_key(name)
    return name


_Q, _KV, _GPT2 = "num_attention_heads", "num_key_value_heads", "n_head"
ARCHITECTURES = {
    "bert": Architecture(
        "tutorial_lib.models.bert:BertForPreTraining",
        heads={
            r".*\.attention\.(self\.(query|key|value)\.(weight|bias)|output\.dense\.weight)": (_Q,)
        },
    ),
    "gpt_neox": Architecture(
        "tutorial_lib.models.gpt_neox:GPTNeoXForCausalLM",
        heads={r".*\.attention\.(query_key_value\.(weight|bias)|dense\.weight)": (_Q,)},
    ),
    "llama": Architecture(
        "tutorial_lib.models.llama2:LlamaForCausalLM",
        {
            r"(.*)\.qkv_proj\.(weight|bias)(?:_qkv)?": (
                r"\1.q_proj.\2",
                r"\1.k_proj.\2",
                r"\1.v_proj.\2",
            ),
            r"(.*)\.gate_up_proj\.(weight|bias)": (r"\1.gate_proj.\2", r"\1.up_proj.\2"),
        },
        {
            r".*\.qkv_proj\.(weight|bias)(_qkv)?": (_Q, _KV, _KV),
            r".*\.(q_proj\.(weight|bias)|o_proj\.weight)": (_Q,),
            r".*\.[kv]_proj\.(weight|bias)": (_KV,),
        },
    ),
    "gpt2": Architecture(
        "tutorial_lib.models.gpt:GPT2LMHeadModel",
        heads={
            r".*\.attn\.c_attn\.(weight|bias)": (_GPT2, _GPT2, _GPT2),
            r".*\.attn\.c_proj\.weight": (_GPT2,),
        },
    ),
}


def architecture_of(config: dict | None) -> Architecture:
    """The entry for a Hugging Face configuration.

    Raises:
        ValueError: no configuration, or an architecture that is not known here.
    """
    kind = (config or {}).get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def layout_at(name: str, layout: Layout, tp: int, config: dict | None, pad: bool = False) -> Layout:
    """A model's tensor at another tensor-parallel degree, no attention head cut in two.

    Raises:
        ValueError: the degree does not fit, with the tensor and the numbers.
    """
    fields = ()
    if (config or {}).get("model_type") in ARCHITECTURES:
        rules = architecture_of(config).heads.items()
        fields = next((fields for pattern, fields in rules if re.fullmatch(pattern, name)), ())
    heads = tuple(config.get(f) or config[_Q] for f in fields) or None
    try:
        if fields and heads[0] % tp and fields[0] in (_Q, _GPT2):
            raise ValueError(f"{heads[0]} attention heads are not divisible by {tp}")
        return layout.at(tp, pad, heads)
    except ValueError as error:
        hint = "" if pad or fields else " (a vocabulary can be padded: --pad)"
        raise ValueError(
            f"{name} of full shape {layout.shape} at tensor-parallel size {tp}: {error}{hint}"
        ) from error


def pieces(layout: Layout, names: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """`(name, start, length)` along the cut of each of the matrices that a fused tensor holds.

    Raises:
        ValueError: the tensor holds another number of matrices.
    """
    sizes = layout.partition.sizes if layout.partition is not None else ()
    if len(sizes) != len(names):
        raise ValueError(
            f"a tensor of {len(sizes)} fused matrices stands for {len(names)} of Hugging Face's: "
            f"{', '.join(names)}"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return list(zip(names, starts, sizes))


def _configuration(config: dict):
    from transformers import AutoConfig

    given = {name: value for name, value in config.items() if name != "model_type"}
    return AutoConfig.for_model(config["model_type"], **given)


def completed(config: dict) -> dict:
    """Hugging Face's configuration with all of its fields, those left at their defaults too."""
    return json.loads(_configuration(config).to_json_string(use_diff=False))


def describe_model(config: dict, options: dict) -> tuple[dict[str, Layout], list[list[str]]]:
    """Layouts (of one rank) and ties of the parallel model of a configuration; nothing is
    allocated.

    Args:
        config: Hugging Face's.
        options: further arguments of the model's class, such as `shard_vocabulary=True`.

    Raises:
        ValueError: the class does not take these options.
    """
    cls = architecture_of(config).model_class()
    if unknown := sorted(options.keys() - set(cls.options())):
        known = ", ".join(cls.options())
        raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)}; it takes {known}")
    with _world_of_one(), torch.device("meta"):
        model = cls(_configuration(config), **options)
        return describe(model.state_dict(keep_vars=True))


@contextmanager
def _world_of_one() -> Iterator[None]:
    """A mesh of this process alone, gone afterwards; or the one of size 1 that there is."""
    import torch.distributed as dist

    from ..parallel_layers import parallel_state

    if parallel_state.model_parallel_is_initialized():
        if (size := parallel_state.get_tensor_model_parallel_size()) > 1:
            raise ValueError(f"the tools work in one process, not on a rank of {size}")
        yield
        return
    own_world = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_fallback_parallel_state()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if own_world:
            dist.destroy_process_group()
