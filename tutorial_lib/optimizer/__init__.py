"""Optimizers whose state is float32 at least, and ZeRO-1, under the names of `neuronx_distributed.optimizer`."""


def __getattr__(name: str):
    if (
        name == "NeuronZero1Optimizer"
    ):  # when it is asked for: it imports the checkpoints, which import from here
        from .zero1 import NeuronZero1Optimizer

        return NeuronZero1Optimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
