"""What a notebook shows and asks: tables, pictures, source, claims, predictions and exercises.

All of it runs in the notebook's own process, on values that the ranks have sent.
"""

from .claims import ClaimError, Claims
from .exercises import check_answer
from .pictures import bars, curves, growth, mesh_grid, slices, stacked, strips
from .predict import predict
from .source import source
from .tables import Table, by_rank, compare, size, table
from .timeline import pipeline, timeline

__all__ = [
    "ClaimError", "Claims", "Table", "bars", "by_rank", "check_answer", "compare",
    "curves", "growth", "mesh_grid", "pipeline", "predict", "size", "slices", "source",
    "stacked", "strips", "table", "timeline",
]  # fmt: skip
