"""What a notebook claims: each claim measured in this run, kept in `results.json`, and fatal where
it does not hold. The file has the form of the tutorials' training scripts, and claims besides:

{"results": {"parameters": {…},
             "metrics": [{"MetricName", "MeasuredValue", "Units", "Timestamp", "AdditionalData"}]},
 "claims": [{"name", "measured", "expected", "tolerance", "passed"}]}
"""

import json
import operator
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from typing import Any

from tutorial_lib.backends import only_compiles
from tutorial_lib.storage import read_json, write_text

from .tables import Table, text

_BOUNDS = {
    "<=": ("at most", operator.le),
    ">=": ("at least", operator.ge),
    "<": ("below", operator.lt),
    ">": ("above", operator.gt),
}


class ClaimError(AssertionError):
    """A claim does not hold; the message has the numbers."""


class Claims:
    """The claims of one run, written to `output_dir/results.json` as they are made.

    Args:
        output_dir: folder of `results.json`; made if missing. A new `Claims` begins a new run:
            earlier claims go.
        parameters: what the run was asked to do.

    Raises:
        ValueError: the folder's `results.json` has no claims, so something else wrote it.
    """

    def __init__(self, output_dir: str | Path, parameters: dict[str, Any]):
        self._file = Path(output_dir) / "results.json"
        if self._file.exists():
            try:
                found = read_json(self._file)
            except (ValueError, OSError):  # not JSON, or not a regular file
                found = {}
            if "claims" not in found:
                raise ValueError(
                    f"{self._file} was not written by a notebook: name another output_dir"
                )
        self._parameters, self._metrics = plain(parameters), []
        self._claims: dict[str, dict] = {}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def _write(self) -> None:
        results = {"parameters": self._parameters, "metrics": self._metrics}
        content = {"results": results, "claims": list(self._claims.values())}
        write_text(self._file, json.dumps(content, indent=2) + "\n")

    def add(
        self, name: str, measured: Any, expected: Any, tolerance: float = 0.0, relation: str = "=="
    ) -> None:
        """Records that `measured` is `expected`, to an absolute `tolerance`. The same name again
        replaces a claim.

        Args:
            measured, expected: numbers; or, for `==` without tolerance, anything that compares.
            relation: `==`, or `<=`, `>=`, `<`, `>` for a bound (which takes no tolerance).

        Raises:
            ClaimError: it does not hold, unless graphs are only compiled. The claim is in
                `results.json` nevertheless.
            ValueError: an unknown relation, or a tolerance where none makes sense.
        """
        measured, expected = plain(measured), plain(expected)
        numbers = isinstance(measured, Real) and isinstance(expected, Real)
        if relation not in ("==", *_BOUNDS) or (tolerance and not (numbers and relation == "==")):
            raise ValueError(
                f"relation {relation!r} with tolerance {tolerance}: give == (with a tolerance for "
                f"numbers only), or one of {', '.join(_BOUNDS)} without a tolerance"
            )
        claim = {"name": name, "measured": measured, "expected": expected, "tolerance": tolerance}
        if relation == "==":
            close = numbers and abs(measured - expected) <= tolerance
            claim["passed"] = measured == expected or close
        else:
            claim["passed"] = _BOUNDS[relation][1](measured, expected)
            claim["relation"] = relation
        self._claims[name] = claim
        self._write()
        if not claim["passed"] and not only_compiles():
            message = f"{name}: measured {text(measured)}, expected {_expectation(claim)}"
            if numbers and relation == "==":
                message += f", off by {abs(measured - expected):.3g}"
            raise ClaimError(message)

    def metric(self, name: str, value: Any, units: str = "", **additional_data: Any) -> None:
        """Records a measured value without a claim about it."""
        metric = {"MetricName": name, "MeasuredValue": plain(value), "Units": units}
        metric["Timestamp"] = datetime.now(UTC).isoformat()
        self._metrics.append(metric | {"AdditionalData": plain(additional_data)})
        self._write()

    def table(self) -> Table:
        """Every claim so far."""
        failing = "only compiled" if only_compiles() else "FAILS"
        rows, failed = [], set()
        for row, claim in enumerate(self._claims.values()):
            verdict = "holds" if claim["passed"] else failing
            rows.append([claim["name"], text(claim["measured"]), _expectation(claim), verdict])
            if not claim["passed"]:
                failed.add(row)
        return Table(["claim", "measured", "expected", ""], rows, marked=failed)


def _expectation(claim: dict) -> str:
    expected = text(claim["expected"])
    if "relation" in claim:
        return f"{_BOUNDS[claim['relation']][0]} {expected}"
    return f"{expected} ± {claim['tolerance']:g}" if claim["tolerance"] else expected


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tensors and arrays as numbers and lists, the unknown as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
