"""`python -m tutorial_lib.checkpoint`: the tools for checkpoints."""

import argparse
import sys

from .convert import convert
from .inspect import inspect
from .merge import merge
from .reshard import reshard
from .split import split
from .verify import verify

TOOLS = {tool.__name__: tool for tool in (inspect, verify, merge, split, convert, reshard)}
SUMMARIES = {
    "inspect": "what a checkpoint holds, and what is missing",
    "verify": "is it complete, unaltered, and do its shards agree",
    "merge": "to one .safetensors file, or a folder that Hugging Face's from_pretrained opens",
    "split": "from a Hugging Face folder to a checkpoint",
    "convert": "to a folder of torch.distributed.checkpoint, or from it with --tp",
    "reshard": "to other tensor-parallel and data-parallel sizes, optimizer state included",
}


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    plain = {"true": True, "false": False}
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, plain.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tutorial_lib.checkpoint", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add = command.add_argument
        source = "a checkpoint, or a folder of them: the latest"
        sources = {"split": "a Hugging Face folder", "convert": f"{source}; or a distributed one"}
        add("source", help=sources.get(name, source))
        if name in ("inspect", "verify"):
            continue
        news = {"merge": "a file that ends in .safetensors, or a folder", "convert": "a folder"}
        new = news.get(name, "FOLDER/TAG")
        add("output", help=f"{new}; has to be new")
        about = "of the model's class: NAME=VALUE"
        add("--option", type=_option, action="append", default=[], help=about)
        if name != "merge":
            add("--tp", type=int, required=name != "convert", help="tensor-parallel size")
            add("--pad", action="store_true", help="pad a vocabulary that does not divide")
            about = "one file a tensor; by default as before"
            add("--xser", action=argparse.BooleanOptionalAction, help=about)
        about = "the folder of the Hugging Face model, for a source that does not describe it"
        add("--config", help=about)
        if name == "reshard":
            add("--dp", type=int, help="data-parallel size, for ZeRO-1; by default as before")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; the exit status is 1 if a checkpoint is not sound or the command cannot be
    done.
    """
    given = vars(parser().parse_args(arguments))
    options = dict(given.pop("option", []))
    if taken := options.keys() & given.keys():
        parser().error(f"--option {min(taken)}: the command has an argument of that name")
    command, source = given.pop("command"), given.pop("source")
    try:
        result = TOOLS[command](source, **given, **options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if command == "verify":
        print("\n".join(result) or f"{source}: sound")
        return 1 if result else 0
    print(result or given["output"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
