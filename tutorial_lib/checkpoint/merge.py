"""`merge`: the shards of a checkpoint into one safetensors file, or a folder that Hugging Face's
`from_pretrained` opens.
"""

import json
from pathlib import Path

import torch

from .architectures import architecture_of, pieces
from .blocks import full_blocks, overlap
from .files import write_text
from .reader import Reader
from .stream import SafetensorsSink, form
from .tools import check_output, described, open_checkpoint, progress

NAMES = ("auto", "huggingface", "own")
Names = dict[str, tuple[str, ...]]  # of a tensor here → in the file to be


def merge(source: str | Path, output: str | Path, names: str = "auto") -> Path:
    """Merges the weights of a checkpoint.

    Args:
        source: a checkpoint, or a folder of them: the latest.
        output: a file that ends in `.safetensors`, or a folder to be.
        names: `huggingface`, `own`, or `auto`: Hugging Face's for a folder.

    Returns:
        The safetensors file.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`; an architecture that is not
            known, a broken file.
    """
    if names not in NAMES:
        raise ValueError(f"names {names!r} is not one of {', '.join(NAMES)}")
    reader = described(open_checkpoint(source))
    output = check_output(output, source, reader.path)
    is_file = output.suffix == ".safetensors"
    theirs = names == "huggingface" or (names == "auto" and not is_file)
    names_of = architecture_of(reader.metadata["config"]).published if theirs else lambda n: (n,)
    target = output if is_file else output / "model.safetensors"
    names = {name: names_of(name) for name in _once(reader)}
    forms = _forms(reader, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with SafetensorsSink(forms, target) as sink:
            reader.sound(_merge, reader, names, sink)
            if not is_file:
                _write_config(reader, output)  # before the weights take their name
    except BaseException:
        if not is_file:
            (output / "config.json").unlink(missing_ok=True)
        raise
    return target


def _merge(reader: Reader, names: Names, sink: SafetensorsSink) -> None:
    for name, theirs in progress(names.items(), "merge"):
        layout = reader.layouts[name]
        for first, rows in full_blocks(reader, name, layout):
            if len(theirs) == 1:
                sink.put_rows(theirs[0], first, rows)
                continue
            for their, start, length in pieces(layout, theirs):
                if layout.partition.dim:
                    part = rows.narrow(layout.partition.dim, start, length)
                    sink.put_rows(their, first, part)
                    continue
                for row, part in overlap((first, rows), start, length):
                    sink.put_rows(their, row, part)


def _once(reader: Reader) -> list[str]:
    """Each tensor once: of tied ones the first, under which Hugging Face looks for it."""
    others = {name for group in reader.metadata["tied"] for name in group[1:]}
    return [name for name in reader.layouts if name not in others]


def _forms(reader: Reader, names: Names) -> dict[str, torch.Tensor]:
    forms = {}
    for name, theirs in names.items():
        layout = reader.layouts[name]
        if len(theirs) == 1:
            forms[theirs[0]] = form(layout.shape, layout.dtype)
            continue
        for their, _, length in pieces(layout, theirs):
            shape = list(layout.shape)
            shape[layout.partition.dim] = length
            forms[their] = form(shape, layout.dtype)
    return forms


def _write_config(reader: Reader, output: Path) -> None:
    config = dict(reader.metadata["config"])
    config["architectures"] = config.get("architectures") or [reader.metadata["architecture"]]
    write_text(output / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
