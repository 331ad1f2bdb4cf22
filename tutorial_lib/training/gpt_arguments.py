"""The arguments of GPT pretraining, under Megatron-LM's names, for command line and notebook.

Each field of `GPTArguments` is an option: `train_iters` is `--train-iters`. To check them needs no
rank and allocates nothing.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from transformers import GPT2Config, HfArgumentParser

from tutorial_lib.backends import BACKENDS
from tutorial_lib.models.configs import check_config
from tutorial_lib.parallel_layers.utils import divide

from .schedules import STYLES, Schedule

# Each with its least value and an exclusive bound.
Count = Annotated[int, 1, math.inf]
Whole = Annotated[int, 0, math.inf]
Amount = Annotated[float, 0, math.inf]
Share = Annotated[float, 0, 1]
Seed = Annotated[int, 0, 2**32]  # as NumPy's

# Megatron-LM's switches for kernels that do not exist here. They are accepted, so that the
# published command line works, and change nothing; weights are always drawn on the host.
WITHOUT_EFFECT = (
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-async-tensor-model-parallel-allreduce",
    "--no-contiguous-buffers-in-local-ddp",
    "--use-cpu-initialization",
)


def option(default, help: str):
    """A field with the text of its option."""
    return field(default=default, metadata={"help": help})


@dataclass
class GPTArguments:
    """What a run is asked to do. Sizes and rates have no default that would suit all."""

    # model
    num_layers: Count = option(MISSING, "transformer layers, L")
    hidden_size: Count = option(MISSING, "H")
    num_attention_heads: Count = option(MISSING, "N")
    seq_length: Count = option(MISSING, "tokens of a sample, S")
    max_position_embeddings: int = option(MISSING, "positions that the model knows, S at least")
    # training
    micro_batch_size: Count = option(MISSING, "samples of a micro-batch on each data-parallel rank")
    train_iters: Count = option(MISSING, "optimizer steps in all")
    lr: float = option(MISSING, "the highest learning rate")
    data_path: str = option(MISSING, "prefix of the .bin and .idx files")
    vocab_file: str = option(MISSING, "the tokenizer's vocab.json")
    merge_file: str | None = option(None, "the tokenizer's merges.txt, to go with the model")

    hidden_dropout: Share = option(0.1, "of embeddings and of what joins the residual stream")
    attention_dropout: Share = option(0.1, "of attention probabilities")
    init_method_std: Amount = option(0.02, "standard deviation of the initial weights")
    use_flash_attn: bool = option(False, "PyTorch's fused kernel for attention")
    recompute_activations: bool = option(False, "compute attention again in backward")

    global_batch_size: Count | None = option(None, "samples of a step; default a micro-batch each")
    seed: Seed = option(1234, "of weights, dropout and data order")
    bf16: bool = option(False, "bfloat16 weights; needs --use-distributed-optimizer")
    use_distributed_optimizer: bool = option(False, "ZeRO-1, with float32 masters for --bf16")
    weight_decay: Amount = option(0.01, "of all but biases and norms")
    clip_grad: Amount = option(1.0, "largest norm of the gradient; 0 for no clipping")
    adam_beta2: Share = option(0.999, "of the second moment")
    min_lr: float = option(0.0, "the lowest learning rate, after the decay")
    lr_decay_style: Literal[STYLES] = option("linear", "shape of the decay")
    lr_decay_iters: Count | None = option(None, "steps of warm-up and decay; default all")
    lr_warmup_fraction: float = option(0.0, "warm-up as a fraction of --lr-decay-iters")
    override_lr_scheduler: bool = option(False, "keep this schedule, not the checkpoint's")
    use_checkpoint_lr_scheduler: bool = option(False, "take the checkpoint's schedule")

    # ranks
    distributed_backend: Literal[BACKENDS] = option("cpu", "what the ranks compute on")
    tensor_model_parallel_size: Count = option(1, "ranks that share a layer, T")
    sequence_parallel: bool = option(False, "shard norms and dropout along the sequence")

    # data
    split: str = option("969,30,1", "weights of training, validation and test documents")
    data_impl: Literal["mmap"] = option("mmap", "of the data set")
    data_cache_path: str | None = option(None, "folder of the sample index; default the data's")
    num_workers: Whole = option(0, "processes that read ahead, for each rank")

    # checkpoints
    save: str | None = option(None, "folder of checkpoints, one file for each shard")
    save_xser: str | None = option(None, "folder of checkpoints, tensor by tensor")
    save_interval: Count | None = option(None, "steps from one checkpoint to the next")
    keep_last_checkpoint_only: bool = option(False, "remove a checkpoint once a later is complete")
    load: str | None = option(None, "folder to go on from; none in it: start anew")
    load_xser: str | None = option(None, "the same: the form is recognised")
    exit_interval: Count | None = option(None, "end after a step that this divides")

    # logs
    log_interval: Count = option(100, "steps from one line to the next")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard's events")
    tensorboard_log_interval: Count = option(1, "steps from one point to the next")
    eval_interval: Count = option(1000, "steps from one validation to the next")
    eval_iters: Whole = option(100, "global batches of a validation; 0 for none")

    @property
    def save_dir(self) -> str | None:
        return self.save or self.save_xser

    @property
    def load_dir(self) -> str | None:
        return self.load or self.load_xser

    @property
    def scheduler_mismatch(self) -> str:
        """What to do where the checkpoint has another schedule; see `SampleScheduler`."""
        if self.override_lr_scheduler:
            return "keep"
        return "load" if self.use_checkpoint_lr_scheduler else "raise"

    def check(self, world_size: int) -> None:
        """Whether the arguments fit together, and the number of ranks.

        Raises:
            ValueError: they do not; with the values and the rule.
        """
        for name, hint in get_type_hints(GPTArguments, include_extras=True).items():
            _check_value(_flag(name), getattr(self, name), hint)
        for first, second in (
            ("save", "save_xser"),
            ("load", "load_xser"),
            ("override_lr_scheduler", "use_checkpoint_lr_scheduler"),
        ):
            if getattr(self, first) and getattr(self, second):
                raise ValueError(f"{_flag(first)} and {_flag(second)} exclude each other")
        if self.save_dir and self.save_interval is None:
            raise ValueError("--save and --save-xser need --save-interval")
        if self.keep_last_checkpoint_only and not self.save_dir:
            raise ValueError("--keep-last-checkpoint-only needs --save or --save-xser")
        if self.max_position_embeddings < self.seq_length:
            raise ValueError(
                f"--max-position-embeddings {self.max_position_embeddings} is below "
                f"--seq-length {self.seq_length}"
            )
        if self.bf16 and not self.use_distributed_optimizer:
            raise ValueError("--bf16 needs --use-distributed-optimizer, which keeps the masters")
        tp = self.tensor_model_parallel_size
        if self.sequence_parallel:
            divide(self.seq_length, tp, "--seq-length over ranks")
        self.accumulation(divide(world_size, tp, "ranks over tensor-parallel size"))
        self.schedule(1)

    def batch(self, dp_size: int) -> int:
        """Samples of a step, over all ranks."""
        return self.global_batch_size or self.micro_batch_size * dp_size

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches of a step on each rank.

        Raises:
            ValueError: the global batch is not a multiple of one micro-batch on each replica.
        """
        return divide(
            self.batch(dp_size),
            self.micro_batch_size * dp_size,
            f"--global-batch-size over {self.micro_batch_size} samples × {dp_size} replicas",
        )

    def schedule(self, batch: int) -> Schedule:
        """The learning rate by samples, for steps of `batch` samples."""
        decay = (self.lr_decay_iters or self.train_iters) * batch
        warmup = self.lr_warmup_fraction * decay
        return Schedule(self.lr, self.min_lr, warmup, decay, self.lr_decay_style)

    def config(self, vocab_size: int, end_of_document: int) -> GPT2Config:
        """Hugging Face's configuration of the model.

        Raises:
            ValueError: sizes that the ranks do not divide.
        """
        config = GPT2Config(
            n_layer=self.num_layers,
            n_embd=self.hidden_size,
            n_head=self.num_attention_heads,
            n_positions=self.max_position_embeddings,
            vocab_size=vocab_size,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), self.hidden_dropout),
            attn_pdrop=self.attention_dropout,
            initializer_range=self.init_method_std,
            **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_document),
        )
        check_config(config, self.tensor_model_parallel_size)
        return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_value(flag: str, value, hint) -> None:
    """A notebook's parameters were not parsed: their types are checked, too."""
    if type(None) in get_args(hint):
        if value is None:
            return
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{flag} is {value!r}, not one of {', '.join(get_args(hint))}")
        return
    kind, *bounds = get_args(hint) or (hint,)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{flag} is {value!r}, must be of type {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{flag} is {value}, must be a finite number")
    if bounds and not bounds[0] <= value < bounds[1]:
        least, below = bounds
        allowed = f"at least {least}" if below == math.inf else f"in [{least}, {below})"
        raise ValueError(f"{flag} is {value}, must be {allowed}")


def parse_arguments(words: list[str] | None = None) -> GPTArguments:
    """The arguments on the command line, or in `words`."""
    parser = HfArgumentParser(
        GPTArguments,
        prog="pretrain_gpt",
        usage="torchrun … -m tutorial_lib.training.pretrain_gpt --num-layers L --hidden-size H …",
        description=__doc__.splitlines()[0],
    )
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help="accepted, without effect here")
    given = vars(parser.parse_args(words))  # which refuses unknown options by name
    return GPTArguments(**{one.name: given[one.name] for one in fields(GPTArguments)})


def command_line(arguments: GPTArguments) -> list[str]:
    """The words that `parse_arguments` makes these arguments of; defaults are left out."""
    words = []
    for one in fields(GPTArguments):
        value = getattr(arguments, one.name)
        if value != one.default:
            words += [_flag(one.name)] if value is True else [_flag(one.name), str(value)]
    return words
