"""`python -m tutorial_lib.checkpoint`: the tools for checkpoints."""

import argparse
import sys

from . import inspect, merge, reshard, split, verify

CHECKPOINT = "a checkpoint, or a folder of them: the latest"
NEW = "the checkpoint to be, FOLDER/TAG; has to be new"


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    plain = {"true": True, "false": False}
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, plain.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tutorial_lib.checkpoint", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str, source: str = CHECKPOINT, output: str = NEW):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("source", help=source)
        if output:
            command.add_argument("output", help=output)
            about = "of the model's class: NAME=VALUE"
            command.add_argument("--option", type=_option, action="append", default=[], help=about)
        return command

    add("inspect", "what a checkpoint holds, and what is missing", output="")
    add("verify", "is it complete, unaltered, and do its shards agree", output="")
    merge_ = add(
        "merge",
        "to one .safetensors file, or a folder that Hugging Face's from_pretrained opens",
        output="a file that ends in .safetensors, or a folder; has to be new",
    )
    split_ = add("split", "from a Hugging Face folder to a checkpoint", "a Hugging Face folder")
    split_.add_argument("--xser", action="store_true", help="one file a tensor")
    reshard_ = add(
        "reshard", "to other tensor-parallel and data-parallel sizes, optimizer state included"
    )
    about = "data-parallel size, for ZeRO-1; by default as before"
    reshard_.add_argument("--dp", type=int, help=about)
    about = "one file a tensor; by default as before"
    reshard_.add_argument("--xser", action=argparse.BooleanOptionalAction, help=about)
    for command in (split_, reshard_):
        command.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
        about = "pad a vocabulary that does not divide"
        command.add_argument("--pad", action="store_true", help=about)
    about = "the folder of the Hugging Face model, for a checkpoint without metadata"
    for command in (merge_, reshard_):
        command.add_argument("--config", help=about)
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
