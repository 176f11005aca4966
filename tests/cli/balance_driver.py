"""`hotsplit balance` in a process of its own, which starts the fake server where it would start vLLM's.

python balance_driver.py MODE ARGUMENTS...      MODE as fake_openai.py has it
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from hotsplit.cli import openai_client, serving
from hotsplit.cli.main import main
from patience import LIMIT_S

FAKE = Path(__file__).parent / "fake_openai.py"


def fake_prepare(mode):
    """What stands in for serving.prepare: no vLLM is looked for."""

    def prepare(task, *, find_vllm):
        port = task.flags[task.flags.index("--port") + 1]
        arguments = (sys.executable, str(FAKE), port, str(task.config.state_path), mode)
        return SimpleNamespace(
            model=task.model,
            tp=1,
            pp=1,
            notices=(),
            arguments=arguments,
            environ=dict(task.environ),
            ready_timeout_s=LIMIT_S,
        )

    return prepare


if __name__ == "__main__":
    openai_client._QUESTION_S = LIMIT_S
    serving.prepare = fake_prepare(sys.argv.pop(1))
    main()
