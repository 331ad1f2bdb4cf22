"""Checkpoints that are complete or absent: saved, loaded, merged, resharded, exchanged with Hugging
Face.

`python -m tutorial_lib.checkpoint --help` lists the tools.
"""

from .background import finalize_checkpoint as finalize_checkpoint
from .load import has_checkpoint as has_checkpoint
from .load import load_checkpoint as load_checkpoint
from .save import save_checkpoint as save_checkpoint
