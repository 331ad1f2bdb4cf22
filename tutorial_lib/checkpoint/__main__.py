"""`python -m tutorial_lib.checkpoint`: the tools for checkpoints."""

import argparse
import sys

from . import convert, inspect, merge, reshard, split, verify


def _option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    plain = {"true": True, "false": False}
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, plain.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m tutorial_lib.checkpoint", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)

    def add(
        name: str,
        summary: str,
        output: str | None = "the checkpoint to be, FOLDER/TAG; has to be new",
        source: str = "a checkpoint, or a folder of them: the latest",
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("source", help=source)
        if output:
            command.add_argument("output", help=output)
        return command

    add("inspect", "what a checkpoint holds, and what is missing", None)
    add("verify", "is it complete, unaltered, and do its shards agree", None)
    command = add(
        "merge",
        "to one .safetensors file, or a folder that Hugging Face's from_pretrained opens",
        "a file that ends in .safetensors, or a folder; has to be new",
    )
    command.add_argument(
        "--names",
        choices=merge.NAMES,
        default="auto",
        help="of the tensors; auto: own for a file, huggingface for a folder",
    )
    command = add(
        "split", "from a Hugging Face folder to a checkpoint", source="a Hugging Face folder"
    )
    command.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
    command.add_argument("--xser", action="store_true", help="one file a tensor")
    command.add_argument("--pad", action="store_true", help="pad a vocabulary that does not divide")
    command.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        help="of the model's class: NAME=VALUE",
    )
    command = add(
        "reshard", "to other tensor-parallel and data-parallel sizes, optimizer state included"
    )
    command.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
    command.add_argument(
        "--dp", type=int, help="data-parallel size, for ZeRO-1; by default as before"
    )
    command.add_argument(
        "--xser",
        action=argparse.BooleanOptionalAction,
        help="one file a tensor; by default as before",
    )
    command.add_argument("--pad", action="store_true", help="pad a vocabulary that does not divide")
    command.add_argument(
        "--vendor",
        action="store_true",
        help="for neuronx_distributed: ZeRO-1's state cut along dim 0; without this, as here",
    )
    command = add("convert", "between one file a shard and one file a tensor (xser)")
    command.add_argument("--to", choices=("plain", "xser"), required=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; the exit status is 1 if a checkpoint is not sound or the command cannot be
    done.
    """
    args = parser().parse_args(arguments)
    try:
        if args.command == "inspect":
            print(inspect.inspect(args.source))
        elif args.command == "verify":
            problems = verify.verify(args.source)
            print("\n".join(problems) or f"{args.source}: sound")
            return 1 if problems else 0
        elif args.command == "merge":
            print(merge.merge(args.source, args.output, args.names))
        elif args.command == "split":
            split.split(args.source, args.output, args.tp, args.xser, args.pad, **dict(args.option))
            print(args.output)
        elif args.command == "reshard":
            reshard.reshard(
                args.source, args.output, args.tp, args.dp, args.xser, args.pad, args.vendor
            )
            print(args.output)
        else:
            convert.convert(args.source, args.output, args.to == "xser")
            print(args.output)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
