"""What a notebook claims: each claim measured in this run, kept in `results.json`, and fatal where
it does not hold.
"""

import operator
from numbers import Real
from pathlib import Path
from typing import Any

from tutorial_lib.backends import only_compiles
from tutorial_lib.training.metrics import Metric, TrainingMetrics, plain

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
        if relation not in ("==", *_BOUNDS) or (tolerance and relation != "=="):
            raise ValueError(
                f"relation {relation!r} with tolerance {tolerance}: give ==, or one of "
                f"{', '.join(_BOUNDS)} without a tolerance"
            )
        measured, expected = plain(measured), plain(expected)
        numbers = isinstance(measured, Real) and isinstance(expected, Real)
        if relation != "==":
            passed = _BOUNDS[relation][1](measured, expected)
        else:
            passed = measured == expected
            if numbers and not passed:
                passed = abs(measured - expected) <= tolerance
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
            message = (
                f"{name}: measured {text(measured)}, expected {_expectation(self._claims[name])}"
            )
            if numbers and relation == "==":
                message += f", off by {abs(measured - expected):.3g}"
            raise ClaimError(message)

    def metric(self, name: str, value: Any, units: str = "", **additional_data: Any) -> None:
        """Adds a measured value that nothing is claimed of."""
        self._file.store_metrics([Metric(name, value, units, additional_data)])

    def table(self) -> Table:
        """Every claim so far."""
        failing = "only compiled" if only_compiles() else "FAILS"
        claims = list(self._claims.values())
        rows = []
        for claim in claims:
            verdict = "holds" if claim["passed"] else failing
            rows.append([claim["name"], text(claim["measured"]), _expectation(claim), verdict])
        failed = {row for row, claim in enumerate(claims) if not claim["passed"]}
        return Table(["claim", "measured", "expected", ""], rows, marked=failed)


def _expectation(claim: dict) -> str:
    expected = text(claim["expected"])
    if "relation" in claim:
        return f"{_BOUNDS[claim['relation']][0]} {expected}"
    return f"{expected} ± {claim['tolerance']:g}" if claim["tolerance"] else expected
