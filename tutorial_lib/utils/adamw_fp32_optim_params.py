"""Where `neuronx_distributed` has its AdamW."""

from tutorial_lib.optimizer.adamw import AdamW_FP32OptimParams as AdamW_FP32OptimParams
