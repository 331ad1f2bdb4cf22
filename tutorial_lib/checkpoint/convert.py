"""`convert`: to and from `torch.distributed.checkpoint`, in whose folders TorchTitan and other
programs of PyTorch keep their weights. The tensors are whole, under the names that they have in
Hugging Face's model, tied ones once.
"""

from dataclasses import replace
from pathlib import Path

from .architectures import model_of
from .distributed import is_distributed, write_distributed
from .merge import matrices, once, write_config
from .split import split
from .tools import check_output, open_checkpoint, progress


def convert(
    source: str | Path,
    output: str | Path,
    tp: int | None = None,
    xser: bool | None = None,
    pad: bool = False,
    config: str | Path | None = None,
    **options,
) -> None:
    """Converts the weights of a checkpoint into a distributed one, or the other way round.

    Args:
        source: a checkpoint, or a folder of them: the latest; or a distributed checkpoint.
        output: the folder to be, with `config.json`; or the checkpoint to be, `<folder>/<tag>`.
        tp: tensor-parallel size of the checkpoint to be.
        xser, pad, options: of the checkpoint to be, see `split`; options also as in
            `tools.open_checkpoint`.
        config: the folder of the Hugging Face model, where the source does not have it.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: see `tools`, `split` and `distributed`; `tp`
            is missing for a distributed source, or given for another.
    """
    if is_distributed(source) != (tp is not None):
        kind, rule = ("a", "has to") if is_distributed(source) else ("not a", "must not")
        raise ValueError(
            f"tp {tp}: {source} is {kind} folder of torch.distributed.checkpoint, so a "
            f"tensor-parallel size {rule} be given (--tp)"
        )
    if tp is not None:
        split(source, output, tp, bool(xser), pad, config, **options)
        return
    shards = open_checkpoint(source, config, options)
    output = check_output(output, source, shards.path)
    output.mkdir(parents=True, exist_ok=True)
    write_config(shards, output)
    names, tensors = model_of(shards.metadata["config"]).hugging_face_names, {}
    for name in progress(once(shards), "convert"):
        theirs, layout = names(name), replace(shards.layouts[name], partition=None)
        full = shards.to(name, shards.weights(name), layout, 0)
        rows = [shape[0] for shape in matrices(shards.layouts[name], theirs)]
        tensors.update(zip(theirs, full.split(rows), strict=True))
    write_distributed(tensors, output)
