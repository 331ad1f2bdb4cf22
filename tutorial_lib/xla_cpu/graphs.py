"""The collectives of a graph, read from its HLO: what each rank really exchanges in a step."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16}  # other names end in their number of bits
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """Equal collectives of a graph."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute
    reduction: str | None  # add, maximum, minimum, … where something is reduced
    replica_groups: tuple[tuple[int, ...], ...]  # who exchanges with whom; of a permutation the pairs (source, target)
    shape: tuple[int, ...]  # of the input on one rank
    dtype: str  # as HLO spells it: f32, bf16, s64, …
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one input on one rank."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype))
        return math.prod(self.shape) * bits // 8


def find_collectives(hlo_texts: Iterable[str]) -> list[Collective]:
    """The collectives of graphs given as HLO text, in the order of their first appearance.

    torch-xla chains its collectives by a scalar token that travels with an all-reduce as one more operand; it is left
    out here, as it is no part of the model.
    """
    found: Counter[Collective] = Counter()
    for text in hlo_texts:
        shapes, roots, computation = {}, {}, ""
        for line in text.splitlines():
            match = _INSTRUCTION.match(line)
            if not match:
                if line.rstrip().endswith("{"):
                    computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
                continue
            shapes[match["name"]] = match["shape"]
            if line.lstrip().startswith("ROOT"):
                roots[computation] = match["op"]
            if re.fullmatch(_KINDS, match["op"]):
                found.update(_read(match, shapes, roots))
    return [collective._replace(count=count) for collective, count in found.items()]


def _read(match: re.Match, shapes: dict[str, str], roots: dict[str, str]) -> list[Collective]:
    operands = [operand.split()[-1].lstrip("%") for operand in match["operands"].split(", ")]
    if match["op"] == "all-reduce" and len(operands) > 1:
        operands.pop()
    groups = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}", match["rest"])
    members = re.findall(r"\{([\d,]*)\}", groups[1] or "") if groups else []
    reducer = re.search(r"to_apply=%?([\w.-]+)", match["rest"])
    return [
        Collective(
            match["op"].replace("-", "_"),
            roots[reducer[1]] if reducer else None,
            tuple(tuple(int(rank) for rank in group.split(",")) for group in members),
            tuple(int(size) for size in _SHAPE.match(shapes[operand])[2].split(",") if size),
            _SHAPE.match(shapes[operand])[1],
        )
        for operand in operands
    ]
