"""`python -m tutorial_lib.checkpoint`: the tools for checkpoints."""

import argparse
import sys

from . import inspect, merge, reshard, split, verify

COMMANDS = {
    "inspect": "what a checkpoint holds, and what is missing",
    "verify": "is it complete, unaltered, and do its shards agree",
    "merge": "to one .safetensors file, or a folder that Hugging Face's from_pretrained opens",
    "split": "from a Hugging Face folder to a checkpoint",
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
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add = command.add_argument
        source = "a checkpoint, or a folder of them: the latest"
        add("source", help="a Hugging Face folder" if name == "split" else source)
        if name in ("inspect", "verify"):
            continue
        new = "a file that ends in .safetensors, or a folder" if name == "merge" else "FOLDER/TAG"
        add("output", help=f"{new}; has to be new")
        about = "of the model's class: NAME=VALUE"
        add("--option", type=_option, action="append", default=[], help=about)
        if name != "merge":
            add("--tp", type=int, required=True, help="tensor-parallel size")
            add("--pad", action="store_true", help="pad a vocabulary that does not divide")
            about = "one file a tensor; by default as before"
            add("--xser", action=argparse.BooleanOptionalAction, help=about)
        if name != "split":
            about = "the folder of the Hugging Face model, for a checkpoint without metadata"
            add("--config", help=about)
        if name == "reshard":
            add("--dp", type=int, help="data-parallel size, for ZeRO-1; by default as before")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; the exit status is 1 if a checkpoint is not sound or the command cannot be
    done.
    """
    given = vars(parser().parse_args(arguments))
    command, options = given.pop("command"), dict(given.pop("option", []))
    try:
        if command == "inspect":
            print(inspect.inspect(given["source"]))
        elif command == "verify":
            problems = verify.verify(given["source"])
            print("\n".join(problems) or f"{given['source']}: sound")
            return 1 if problems else 0
        else:
            tools = {"merge": merge.merge, "split": split.split, "reshard": reshard.reshard}
            print(tools[command](**given, **options) or given["output"])
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
