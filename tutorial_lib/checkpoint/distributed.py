"""Folders of `torch.distributed.checkpoint`: whole tensors by name, for PyTorch on any mesh.

Their `.metadata` is a pickle, which PyTorch's own reader executes. Here it is read as data: nothing
but the classes that describe tensors is made of it.
"""

import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from ..storage import check_file

METADATA = ".metadata"
_CLASSES = (
    "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"
)
KNOWN = {
    *((metadata.__name__, name) for name in _CLASSES.split()),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((f"pathlib{end}", name) for end in ("", "._local") for name in ("Path", "PosixPath")),
}


def is_distributed(folder: str | Path) -> bool:
    return (Path(folder) / METADATA).is_file()


def read_distributed(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, whole, whatever mesh wrote them.

    Raises:
        FileNotFoundError, ValueError: a file is missing or broken, or names code.
    """
    folder = Path(folder)
    check_file(folder / METADATA)
    try:
        reader = _Reader(folder)
        found = reader.read_metadata().state_dict_metadata.items()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in found
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a single process
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:  # what torch raises for a broken file has many types
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{folder} is not a sound distributed checkpoint: {error}") from error
    return tensors


def write_distributed(tensors: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Writes tensors as one rank does; `.metadata` comes last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated storages, and that it is a single process
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle an enum
            return _member
        raise ValueError(f"{METADATA} names {module}.{name}, which does not describe a tensor")


def _member(kind: type, name: str) -> metadata._MEM_FORMAT_ENCODING:
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise ValueError(f"{METADATA} looks {name} up in {kind}, which does not describe a tensor")
    return kind[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs) -> metadata.Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            return _Unpickler(file).load()
