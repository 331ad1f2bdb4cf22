"""`results.json`: what a run was asked to do and what it measured, in the form of the tutorials'
training scripts.

{"results": {"parameters": {…},
             "metrics": [{"MetricName", "MeasuredValue", "Units", "Timestamp", "AdditionalData"}]}}
"""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutorial_lib.storage import write_text


@dataclass
class Metric:
    """One measured value."""

    name: str
    value: Any
    units: str = ""
    additional_data: dict = field(default_factory=dict)

    def as_json(self) -> dict:
        now = datetime.now(UTC).isoformat()
        return {
            "MetricName": self.name,
            "MeasuredValue": plain(self.value),
            "Units": self.units,
            "Timestamp": now,
            "AdditionalData": plain(self.additional_data),
        }


class TrainingMetrics:
    """Reads, changes and replaces `json_file`; several writers (a notebook and its rank 0) may take
    turns.

    Call it on one rank only.
    """

    def __init__(self, json_file: str | Path):
        self.json_file = Path(json_file)

    def read(self) -> dict:
        """The file's content; without a file, what an empty run would have written.

        Raises:
            ValueError: the file holds something else.
        """
        if not self.json_file.exists():  # a FIFO or a device is refused below
            return {"results": {"parameters": {}, "metrics": []}}
        try:
            content = json.loads(self.json_file.read_text()) if self.json_file.is_file() else None
            results = content["results"]
            fits = isinstance(results["parameters"], dict) and isinstance(results["metrics"], list)
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise ValueError(
                f"{self.json_file} does not hold the results of a run: name another file"
            )
        return content

    def update(self, change: Callable[[dict], Any]) -> None:
        """Lets `change` edit the content. A reader sees the file before or after, whole."""
        self.json_file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.json_file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            content = self.read()
            change(content)
            write_text(self.json_file, json.dumps(content, indent=2, allow_nan=True) + "\n")
        finally:
            os.close(folder)

    def store_parameters(self, parameters: dict[str, Any]) -> None:
        self.update(lambda content: content["results"]["parameters"].update(plain(parameters)))

    def store_metrics(self, metrics: list[Metric]) -> None:
        entries = [metric.as_json() for metric in metrics]
        self.update(lambda content: content["results"]["metrics"].extend(entries))


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tensors and arrays as numbers and lists, the unknown as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
