"""Tensor and sequence parallelism, under the names of `neuronx_distributed.parallel_layers`."""

from . import parallel_state as parallel_state
from .checkpointing import load as load
from .checkpointing import save as save
from .grads import clip_grad_norm as clip_grad_norm
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import ParallelEmbedding as ParallelEmbedding
from .layers import RowParallelLinear as RowParallelLinear
from .loss_functions import parallel_cross_entropy as parallel_cross_entropy
from .marks import move_model_to_device as move_model_to_device
from .parallel_state import initialize_model_parallel as initialize_model_parallel
from .random import get_xla_rng_tracker as get_xla_rng_tracker
from .random import model_parallel_xla_manual_seed as model_parallel_xla_manual_seed
