"""Optimizers with float32 state, and ZeRO-1; names are those of `neuronx_distributed.optimizer`."""

from .zero1 import NeuronZero1Optimizer as NeuronZero1Optimizer
