"""What is under this name in `neuronx_distributed`, and is elsewhere here."""

from tutorial_lib.xla_model import mark_step as mark_step
from tutorial_lib.xla_model import master_print as master_print
from tutorial_lib.xla_model import xla_device as get_device  # noqa: F401
