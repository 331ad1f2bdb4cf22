"""What a notebook claims: each claim measured in this run, kept in `results.json`, and fatal where it does not hold."""

import math
import operator
from numbers import Real
from pathlib import Path
from typing import Any

from tutorial_lib.backends import only_compiles
from tutorial_lib.training.metrics import Metric, TrainingMetrics, plain

from .tables import Table, text

_RELATIONS = {"==": "", "<=": "at most ", ">=": "at least ", "<": "below ", ">": "above "}
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


class ClaimError(AssertionError):
    """A claim does not hold; the message has the numbers."""


class Claims:
    """The claims of one run, written to `output_dir/results.json` as they are made.

    Args:
        output_dir: folder of `results.json`; made if missing. A new `Claims` begins a new run: earlier
            claims go.
        parameters: what the run was asked to do.

    Raises:
        ValueError: the folder's `results.json` has no claims, so that something else wrote it.
    """

    def __init__(self, output_dir: str | Path, parameters: dict[str, Any]):
        file = Path(output_dir) / "results.json"
        self._file = TrainingMetrics(file)
        self._claims: dict[str, dict] = {}
        if file.exists() and (not file.is_file() or "claims" not in self._file.read()):
            raise ValueError(f"{file} was not written by a notebook: name another output_dir")
        empty = {"results": {"parameters": plain(parameters), "metrics": []}, "claims": []}
        self._file.update(lambda content: content.update(empty))

    def add(
        self, name: str, measured: Any, expected: Any, tolerance: float = 0.0, relation: str = "=="
    ) -> None:
        """Records that `measured` is `expected`, to an absolute `tolerance`. The same name again replaces a claim.

        Args:
            measured, expected: numbers; or, for `==` without tolerance, anything that compares.
            relation: `==`, or `<=`, `>=`, `<`, `>` for a bound (which takes no tolerance).

        Raises:
            ClaimError: it does not hold, unless graphs are only compiled. The claim is in `results.json` nevertheless.
            ValueError: an unknown relation, or a tolerance where none makes sense.
        """
        if relation not in _RELATIONS:
            raise ValueError(f"relation {relation!r} is not one of {', '.join(_RELATIONS)}")
        if not (isinstance(tolerance, Real) and tolerance >= 0) or (tolerance and relation != "=="):
            raise ValueError(
                f"tolerance {tolerance!r} with relation {relation!r}: give a number ≥ 0, and 0 for a bound"
            )
        measured, expected = plain(measured), plain(expected)
        numbers = all(isinstance(value, Real) for value in (measured, expected))
        if not numbers and (tolerance or relation != "=="):
            raise ValueError(
                f"{measured!r} and {expected!r} are not numbers: they can only be equal, with tolerance 0"
            )
        if relation != "==":
            passed = _COMPARE[relation](measured, expected)
        elif numbers:
            passed = measured == expected or abs(measured - expected) <= tolerance
        else:
            passed = measured == expected
        claim = {
            "name": name,
            "measured": measured,
            "expected": expected,
            "tolerance": tolerance,
            "passed": passed,
        }
        self._claims[name] = claim if relation == "==" else {**claim, "relation": relation}
        claims = list(self._claims.values())
        self._file.update(lambda content: content.update(claims=claims))
        if not passed and not only_compiles():
            distance = (
                f", off by {abs(measured - expected):.3g}" if numbers and relation == "==" else ""
            )
            wanted = _expectation(self._claims[name])
            raise ClaimError(f"{name}: measured {text(measured)}, expected {wanted}{distance}")

    def metric(self, name: str, value: Any, units: str = "", **additional_data: Any) -> None:
        """Adds a measured value that nothing is claimed of."""
        self._file.store_metrics([Metric(name, value, units, additional_data)])

    def table(self) -> Table:
        """Every claim so far."""
        failing = "only compiled" if only_compiles() else "FAILS"
        rows = [
            [
                claim["name"],
                text(claim["measured"]),
                _expectation(claim),
                "holds" if claim["passed"] else failing,
            ]
            for claim in self._claims.values()
        ]
        failed = {row for row, claim in enumerate(self._claims.values()) if not claim["passed"]}
        return Table(["claim", "measured", "expected", ""], rows, marked=failed)


def _expectation(claim: dict) -> str:
    tolerance = (
        f" ± {claim['tolerance']:g}"
        if claim["tolerance"] and math.isfinite(claim["tolerance"])
        else ""
    )
    return f"{_RELATIONS[claim.get('relation', '==')]}{text(claim['expected'])}{tolerance}"
