"""Tensor and sequence parallelism, under the names of `neuronx_distributed.parallel_layers`."""

from . import parallel_state as parallel_state
from .checkpointing import load as load
from .checkpointing import save as save
from .grads import clip_grad_norm as clip_grad_norm
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import ParallelEmbedding as ParallelEmbedding
from .layers import RowParallelLinear as RowParallelLinear
from .loss_functions import parallel_cross_entropy as parallel_cross_entropy
from .mappings import copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region
from .mappings import (
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
)
from .mappings import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from .mappings import (
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
)
from .parallel_state import initialize_model_parallel as initialize_model_parallel
from .random import get_xla_rng_tracker as get_xla_rng_tracker
from .random import model_parallel_xla_manual_seed as model_parallel_xla_manual_seed
from .utils import copy_tensor_model_parallel_attributes as copy_tensor_model_parallel_attributes
from .utils import move_model_to_device as move_model_to_device
from .utils import (
    set_defaults_if_not_set_tensor_model_parallel_attributes as set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from .utils import set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes
from .utils import split_tensor_along_last_dim as split_tensor_along_last_dim

# What a tool that walks a model (pipeline parallelism) has to treat as one piece.
PARALLEL_MODULES = [
    ColumnParallelLinear,
    RowParallelLinear,
    ParallelEmbedding,
]
PARALLEL_FUNCTIONS = [
    parallel_cross_entropy,
]
