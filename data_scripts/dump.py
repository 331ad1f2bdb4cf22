"""The default dump: one file of gensim's wheel, which is not installed.

It is a shard of a real English Wikipedia dump with 106 articles. `make` fetches it together with
the environment.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from data_scripts.stages import UNWRITABLE, sha256

NAME = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
DUMP = Path(__file__).resolve().parents[1] / "build" / "dump" / NAME

OWN_DUMP = "Run `make`, or give a dump of your own: python -m data_scripts.prepare --dump FILE"

# Always the same wheel, whatever this Python and machine are: of it only a data file is used.
WHEEL = ["gensim==4.4.0", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
WHEEL += ["--implementation=cp", "--abi=cp311", "--platform=manylinux_2_28_x86_64"]


def default_dump() -> Path:
    """The default dump, fetched with pip (28 MB) where it is missing or damaged.

    Raises:
        FileNotFoundError: pip could not fetch the wheel; its own words follow.
        OSError: the checkout cannot be written to.
        ValueError: the wheel's file is not the one that is known.
    """
    if not (DUMP.is_file() and sha256(DUMP) == SHA256):
        try:
            DUMP.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=DUMP.parent) as folder:
                _fetch(Path(folder)).replace(DUMP)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            message = f"{error.strerror}: the default dump goes there. {OWN_DUMP}"
            raise OSError(error.errno, message, str(DUMP.parent)) from error
    return DUMP


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", *WHEEL, f"--dest={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise FileNotFoundError(
            f"the default dump could not be fetched. {OWN_DUMP}\n"
            f"{' '.join(command)}\n{done.stderr.strip()[-2000:]}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        fetched = Path(archive.extract(f"gensim/test/test_data/{NAME}", folder))
    if (found := sha256(fetched)) != SHA256:
        raise ValueError(f"{NAME} of {wheel.name} has SHA-256 {found}, expected {SHA256}")
    return fetched


if __name__ == "__main__":
    print(f"The dump that is trained on: {default_dump()}")
