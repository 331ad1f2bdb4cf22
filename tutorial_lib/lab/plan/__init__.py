"""What a training run takes before it is started: memory, FLOPs, communication, and a bound on its
speed.

python -m tutorial_lib.lab.plan llama2-7b --instance trn1.32xlarge
"""

from .choices import scaled, smallest_tensor_parallel, switches, with_tensor_parallel
from .instances import INSTANCES, Instance
from .overview import report
from .plan import Plan

__all__ = [
    "INSTANCES", "Instance", "Plan", "report", "scaled", "smallest_tensor_parallel",
    "switches", "with_tensor_parallel",
]  # fmt: skip
