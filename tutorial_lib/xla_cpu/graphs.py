"""What is in a graph, read from its HLO: what each rank really exchanges in a step, and which masks
are constants.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16}  # other names end in their number of bits
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """Equal collectives of a graph."""

    kind: str  # one of `_KINDS`, such as all_reduce
    # Who exchanges with whom; of a permutation the pairs (source, target).
    replica_groups: tuple[tuple[int, ...], ...]
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

    torch-xla chains its collectives by a scalar token that travels with an all-reduce as one more
    operand; it is left out here, as it is no part of the model.
    """
    found: Counter[Collective] = Counter()
    for text in hlo_texts:
        shapes = {}
        for match in filter(None, map(_INSTRUCTION.match, text.splitlines())):
            shapes[match["name"]] = match["shape"]
            if re.fullmatch(_KINDS, match["op"]):
                found.update(_read(match, shapes))
    return [collective._replace(count=count) for collective, count in found.items()]


def find_masks(hlo_text: str, length: int) -> dict[tuple[int, ...], bool]:
    """The tensors of truth values `[…, length, length]` of a graph, by shape, and whether they are
    constants.

    A constant one follows from the program alone: no input of the graph has a part in it, so that
    the compiler can compute it once, and nobody has to send it to the device.
    """
    constant: dict[str, bool | list[bool]] = {}  # of a tuple's parts each
    masks: dict[tuple[int, ...], bool] = {}
    for match in filter(None, map(_INSTRUCTION.match, hlo_text.splitlines())):
        operands = filter(None, match["operands"].split(", "))
        parts = [constant.get(operand.split()[-1].lstrip("%"), False) for operand in operands]
        op, name = match["op"], match["name"]
        if op in ("constant", "iota"):
            constant[name] = True
        elif op == "tuple":
            constant[name] = parts
        elif op == "opt-barrier":  # changes nothing, and stands before what is computed again
            constant[name] = parts[0]
        elif op == "get-tuple-element" and isinstance(parts[0], list):
            constant[name] = parts[0][int(re.search(r"index=(\d+)", match["rest"])[1])]
        else:
            constant[name] = op != "parameter" and all(part is True for part in parts)
        dtype, shape = _type_of(match["shape"])
        is_tuple = match["shape"].startswith("(")
        if dtype == "pred" and shape[-2:] == (length, length) and not is_tuple:
            masks[shape] = masks.get(shape, True) and constant[name] is True
    return masks


def _type_of(written: str) -> tuple[str, tuple[int, ...]]:
    """Type of the elements and shape, of a tuple those of its first part."""
    dtype, sizes = _SHAPE.search(written).groups()
    return dtype, tuple(int(size) for size in sizes.split(",") if size)


def _read(match: re.Match, shapes: dict[str, str]) -> list[Collective]:
    operands = [operand.split()[-1].lstrip("%") for operand in match["operands"].split(", ")]
    if match["op"] == "all-reduce" and len(operands) > 1:
        operands.pop()
    groups = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}", match["rest"])
    members = re.findall(r"\{([\d,]*)\}", groups[1] or "") if groups else []
    members = tuple(tuple(int(rank) for rank in group.split(",")) for group in members)
    found = []
    for operand in operands:
        dtype, shape = _type_of(shapes[operand])
        found.append(Collective(match["op"].replace("-", "_"), members, shape, dtype))
    return found
