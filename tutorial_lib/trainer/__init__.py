"""One configuration for model and optimizer, under the names of `neuronx_distributed.trainer`."""

from .config import neuronx_distributed_config as neuronx_distributed_config
from .model import NxDModel as NxDModel
from .model import initialize_parallel_model as initialize_parallel_model
from .optimizer import NxDOptimizer as NxDOptimizer
from .optimizer import initialize_parallel_optimizer as initialize_parallel_optimizer
