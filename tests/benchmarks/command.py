"""The command line of a benchmark."""

import argparse


def parser(description: str, **defaults: int | float | str) -> argparse.ArgumentParser:
    """One that shows the module's docstring, with an option for each of these."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        found.add_argument(f"--{name}", type=type(default), default=default)
    return found
