"""Undo what a rank's process inherits of signals, and become the rank's command by exec.

Ray blocks SIGINT in its workers, and a node that a script started in the background (`ray start &`) ignores it. Signal
masks and ignored signals survive exec, so such a rank would never hear of a Ctrl-C that the driver forwards. A program
of its own, because Python can only set handlers in the main thread, and the actor starts ranks in another one. It
imports only the standard library.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})
    os.execvp(sys.argv[1], sys.argv[1:])
