"""Optimizers whose state is float32 at least, and ZeRO-1, under the names of `neuronx_distributed.optimizer`."""

from .zero1 import NeuronZero1Optimizer as NeuronZero1Optimizer
