"""Where the relative paths of parameters start."""

from pathlib import Path

import tutorial_lib


def resolve(path: str | Path) -> Path:
    """`path` as it stands if absolute, else below the checkout that holds this package.

    A notebook's working directory depends on who runs it (JupyterLab and nbmake: its own folder;
    papermill: the caller's), so the next would not find data that one of them prepared. Where
    the package is installed without a checkout, relative paths start at the working directory.
    """
    root = Path(tutorial_lib.__file__).parent.parent
    return (root if (root / "pyproject.toml").exists() else Path.cwd()) / Path(path).expanduser()
