"""Work in a process of its own, by a fork: what may end a process ends that one."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hotsplit.errors import HotsplitError


def apart(work: Callable[[], Any], *, limit_s: int = 10) -> Any:
    """What work returns, or the error of ours that it raises; else how it ended: a signal as a negative number, or a code.

    NOTE: faulthandler goes, and with it, until the next begin(), every handler that came after it.

    Args:
        work: To be done.
        limit_s: SIGALRM ends it then.
    """
    out, into = os.pipe()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not follow, and are not needed there
        process = os.fork()
    if process == 0:
        os.close(out)
        faulthandler.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        torch.set_num_threads(1)
        try:
            try:
                result = work()
            except HotsplitError as error:
                result = error
            except BaseException:  # noqa: BLE001 - it fails in the test's own process
                result = traceback.format_exc()
            os.write(into, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as stream:
        result = stream.read()
    _, status = os.waitpid(process, 0)
    return pickle.loads(result) if result else os.waitstatus_to_exitcode(status)
