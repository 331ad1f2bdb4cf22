"""Where `neuronx_distributed` moves a model to a device."""

from tutorial_lib.parallel_layers.marks import move_model_to_device as move_model_to_device
