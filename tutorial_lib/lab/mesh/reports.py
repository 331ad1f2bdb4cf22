"""How a rank describes an error, or the place where it is: plain data for the kernel."""

import os
import sys
import traceback
from types import FrameType

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_FRAMES = 12  # lines of a traceback that a reader is shown
# Errors of a collective whose peer is missing: gloo, NCCL and the store have no exception for it.
_WAITING = (
    "Connection closed by peer", "Connection reset", "Timed out waiting", "wait timeout",
    "Broken pipe", "Socket closed", "failed to recv", "could not finish its step",
    "Watchdog caught collective operation timeout",
)  # fmt: skip
# An asynchronous collective waits in C++, with no frame of torch.distributed: the one of `comm`
# tells.
_COLLECTIVES = (os.path.join(PACKAGE_DIR, "parallel_layers", "comm.py"), "/torch/distributed/")


def report(error: BaseException) -> dict:
    """An exception: its text, the reader's frames, and the collective that waited in vain, if one
    did.

    Returns:
        `error`, its kind and message; `frames`, lines of a traceback; `line`, the last one of a
        cell; `waited_in`, the name of a collective, or None; `tensor`, its shape and type.
    """
    described = _describe(list(traceback.walk_tb(error.__traceback__)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and _is_cell(error.filename or ""):
        line = (error.text or "").strip()
        text = f"{type(error).__name__}: {error.msg}"
        described |= {"frames": [f"cell, line {error.lineno}: {line}"], "line": line}
    if not any(sign in str(error) for sign in _WAITING):
        described["waited_in"] = None
    if error.__cause__ is not None:
        described["frames"].append(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    return described | {"error": text}


def describe_thread(thread: int) -> dict:
    """Where a thread is, in the form of `report`, without an error."""
    return _describe(list(traceback.walk_stack(sys._current_frames()[thread]))[::-1])


def without_place(error: str | None, line: str | None = None) -> dict:
    """A report of a rank that cannot say where it is."""
    return {"error": error, "frames": [], "line": line, "waited_in": None, "tensor": None}


def _describe(stack: list[tuple[FrameType, int]]) -> dict:
    frames = traceback.StackSummary.extract(stack)
    in_cells = [i for i, frame in enumerate(frames) if _is_cell(frame.filename)]
    first = in_cells[0] if in_cells else len(frames) - 1
    described = without_place(None, frames[in_cells[-1]].line if in_cells else None)
    for (frame, _), shown in zip(stack[first:], frames[first:]):
        if shown.name != "wrapper" and any(place in shown.filename for place in _COLLECTIVES):
            described |= {"waited_in": shown.name, "tensor": _tensor_in(frame)}
            break
    own = os.path.join(PACKAGE_DIR, "xla_cpu", "")
    xla = [os.path.basename(f.filename) for f in frames[first:] if f.filename.startswith(own)]
    if "client.py" in xla and "compiler.py" not in xla:  # in the graph, with the other ranks
        described["waited_in"] = described["waited_in"] or "mark_step"
    return described | {"frames": _lines(frames[first:])}


def _tensor_in(frame: FrameType) -> str | None:
    """The shape and type of the first tensor that a function was given."""
    torch = sys.modules["torch"]
    for value in frame.f_locals.values():
        if isinstance(value, torch.Tensor):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return None


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    """The frames that are the reader's or this package's, and the last one."""
    lines = []
    for frame in frames:
        own = _is_cell(frame.filename) or frame.filename.startswith(PACKAGE_DIR)
        if frame.line and (own or frame is frames[-1]):
            function = "" if frame.name == "<module>" else f" in {frame.name}"
            lines.append(f"{_short(frame.filename)}, line {frame.lineno}{function}: {frame.line}")
    if len(lines) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        lines[half:-half] = [f"… {len(lines) - 2 * half} more frames"]
    return lines


def _is_cell(filename: str) -> bool:
    return filename.startswith("<ipython-input")


def _short(filename: str) -> str:
    """A path without what is particular to this machine."""
    if _is_cell(filename):
        return "cell"
    if filename.startswith(PACKAGE_DIR):
        return os.path.relpath(filename, os.path.dirname(PACKAGE_DIR))
    _, found, below = filename.rpartition("site-packages/")
    return below if found else os.path.basename(filename)
