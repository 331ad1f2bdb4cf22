"""How a run is ended from outside: Ctrl-C, SIGTERM and SIGUSR1 stop all ranks after the step under
way; a rank whose launcher was killed ends at once.
"""

import os
import signal
import threading
import time

import psutil

from tutorial_lib.parallel_layers.ranks import gather

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Inside the block these signals are noted, not obeyed, and `agreed` tells all ranks.

    They reach some ranks or all, in different steps. A second signal has its usual effect. SIGUSR1
    is for schedulers that signal all processes of a job: given SIGTERM, `torchrun` would forward it
    as a second one, and kill the ranks after 30 seconds. Outside of the main thread, where Python
    allows no handler to be installed, signals keep theirs.
    """

    def __init__(self):
        self.signal: int | None = None  # the one that this rank got
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _) -> None:
        self.signal = number
        self._restore()

    def agreed(self) -> str | None:
        """The name of the signal that any rank got by now, the same on every rank, or None.

        Every rank calls it at the same point, once a step.
        """
        found = next((number for number in gather(self.signal) if number is not None), None)
        return None if found is None else signal.Signals(found).name


def end_with_parent() -> None:
    """Ends this process within a second after its parent, from a thread of its own.

    Nothing else ends the ranks of a `torchrun` that was killed: they would go on training and
    saving, unseen, beside the run that takes their place. What a save had not completed by then is
    incomplete, like after any other kill.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent == 1 and "python" not in " ".join(psutil.Process(1).cmdline()):
        os._exit(1)  # the parent was killed before we looked
    threading.Thread(target=watch, daemon=True).start()
