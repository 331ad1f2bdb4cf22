"""One indexed data set out of several: `python -m data_scripts.merge_datasets`."""

import argparse
from pathlib import Path

from tutorial_lib.data.indexed_dataset_builder import merge_datasets


def main() -> None:
    """The command line; prints what the result holds."""
    parser = argparse.ArgumentParser(prog="data_scripts.merge_datasets", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="prefixes of .bin and .idx files")
    parser.add_argument("--output-prefix", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        merged = merge_datasets(arguments.input, arguments.output_prefix)
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")
    documents = len(merged.document_indices) - 1
    print(f"{merged.prefix}: {documents:,} documents, {merged.num_tokens:,} tokens")


if __name__ == "__main__":
    main()
