"""``python -W error -m mpinit ...`` or ``-c ...`` in a process forked from one that has imported torch and mpinit.

Starting Python and importing both takes longer than most of what is run then. What a run does to its process ends
with the process, as ever: the one that it is forked from only imports, and waits.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_SERVER: list[subprocess.Popen[str]] = []


def run_mpinit(arguments: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -W error -m mpinit arguments...`` to its end."""
    return _run({"arguments": arguments, "cwd": str(cwd or Path.cwd())})


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -W error -c code`` to its end."""
    return _run({"code": code, "cwd": str(Path.cwd())})


def _run(job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The server starts with the first run."""
    if not _SERVER:
        command = [sys.executable, "-W", "error", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Ends with this process, which closes the pipe.
        _SERVER.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    pipe_in, pipe_out = _SERVER[0].stdin, _SERVER[0].stdout
    assert pipe_in is not None and pipe_out is not None
    with tempfile.TemporaryDirectory() as folder:
        job |= {"out": folder + "/out", "err": folder + "/err"}
        print(json.dumps(job), file=pipe_in, flush=True)
        status = os.waitstatus_to_exitcode(int(pipe_out.readline()))
        out, err = (Path(job[key]).read_text(encoding="utf-8") for key in ("out", "err"))
    return subprocess.CompletedProcess(job, status, out, without_leaks(err))


def without_leaks(words: str) -> str:
    """Without what triton's bindings say of themselves when a process ends, with the builds of torch that have them."""
    leaks = ("nanobind: ", " - leaked ", " - ... skipped ", "See https://nanobind.readthedocs.io")
    return "".join(line for line in words.splitlines(keepends=True) if not line.startswith(leaks))


def serve() -> dict[str, Any] | None:
    """Fork for every job that is read; returns the job in the child, and None in the server, at its end."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)  # type: ignore[no-any-return]
        print(os.waitpid(child, 0)[1], flush=True)
    return None


def begin(job: dict[str, Any]) -> None:
    """What Python does before it runs what it was given."""
    for key, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(job[key], os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"] if "arguments" in job else ""
    sys.argv[:] = ["-m", *job["arguments"]] if "arguments" in job else ["-c"]


if __name__ == "__main__":
    import gc
    import warnings

    import mpinit  # noqa: F401

    with warnings.catch_warnings(action="ignore"):
        # The first optimizer does so, and takes two seconds.
        import torch._dynamo  # noqa: F401

    # No garbage to collect: a run would copy the memory of all of it by looking through it.
    gc.freeze()
    job = serve()
    if job is not None:
        begin(job)
        if "code" in job:
            exec(job["code"], {"__name__": "__main__"})
            sys.exit()
        runpy._run_module_as_main("mpinit")  # type: ignore[attr-defined]
