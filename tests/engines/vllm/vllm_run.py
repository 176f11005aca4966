"""One offline run of vLLM, in a process of its own: `python vllm_run.py JOB.json RESULT.json`.

All prompts are there before the first step and the engine core lives in this process, so every run of a job has the
same schedule: which tokens share a step decides how vLLM rounds. Whether hotsplit takes part is the environment's
doing; nothing here knows of it.

    job     {"model": folder, "prompts": [[token id]], "max_tokens": n, "engine": {LLM argument: value},
             "passes": [[command]], "last": [command]}     a generation of all prompts per pass, after its commands
    result  {"passes": [{"answers": [{"tokens": [id], "logprobs": [{id: hex}]}], "told": {command: [rank's answer]}}],
             "last": {command: [rank's answer]}}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUM_LOGPROBS = 5


def main(job_path: str, result_path: str) -> None:
    """Run a job.

    Args:
        job_path: What to do.
        result_path: Where to write what came out.
    """
    from vllm import LLM

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    # Nothing may remember a pass: the next one must compute the same steps again.
    llm = LLM(model=job["model"], enable_prefix_caching=False, disable_log_stats=True, **job["engine"])
    passes = [_run_pass(llm, job, commands=commands) for commands in job["passes"]]
    last = _tell(llm, job["last"])
    llm.llm_engine.engine_core.shutdown()
    Path(result_path).write_text(json.dumps({"passes": passes, "last": last}), encoding="utf-8")


def _tell(llm: Any, commands: list[str]) -> dict[str, Any]:
    """Commands for the probe, and what every rank answers."""
    return {command: llm.collective_rpc("hotsplit_probe", args=(command,)) for command in commands}


def _run_pass(llm: Any, job: dict[str, Any], *, commands: list[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    told = _tell(llm, commands)
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=NUM_LOGPROBS)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {"told": told, "answers": [_answer(output.outputs[0]) for output in outputs]}


def _answer(output: Any) -> dict[str, Any]:
    """Tokens, and the log-probabilities of the likeliest ones as hexadecimal floats: no digit is lost."""
    chances = [{str(token): chance.logprob.hex() for token, chance in step.items()} for step in output.logprobs]
    return {"tokens": list(output.token_ids), "logprobs": chances}


if __name__ == "__main__":
    main(*sys.argv[1:])
