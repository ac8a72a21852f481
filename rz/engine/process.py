"""An engine in a process of its own: sampling and learning at the same time, with weights in shared memory."""

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rz.batch import Request, Rollout
from rz.engine.interface import Engine
from rz.engine.record import check_publish, check_request

UNANSWERED = 64  # answers that may wait in the pipe


class ProcessEngine:
    """rz.engine.interface.Engine over another one, which runs in a child process.

    The masters are copied once, into memory that both processes map; the child casts them into its own parameters
    between two of its steps. Ctrl-C is left to this process.

    Args:
        make: (params, version) -> Engine; called in the child, so a module-level function or a partial of one.
        params: float32 masters by name; published as `version`.
        threads: >= 1, of the child's torch.
        limit_s: > 0, seconds that a call may take (start-up included) before the child counts as hung.
    Raises: what the child raises, with its traceback as the cause; RuntimeError if it dies; TimeoutError if it hangs:
        then, as after a Ctrl-C during a call, it is killed and the engine is closed.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Tensor], int], Engine],
        params: Mapping[str, Tensor],
        *,
        version: int = 0,
        threads: int = 1,
        limit_s: float = 600.0,
    ) -> None:
        import torch.multiprocessing

        self._shapes = {name: value.shape for name, value in params.items()}
        self._shared = {name: value.detach().clone().share_memory_() for name, value in params.items()}
        self._limit_s, self.version = limit_s, version
        self._requests: dict[tuple[int, int], Request] = {}
        self._unanswered: list[tuple[int, int]] = []  # requests submitted, whose answers have not been read
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        work = (theirs, make, self._shared, version, threads)
        self._child = context.Process(target=_serve, args=work, daemon=True)
        self._child.start()
        theirs.close()
        try:
            self._sizes, error = self._receive("start")
        except BaseException:
            self._child.kill()
            raise
        if error is not None:
            self._child.kill()
            raise error

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        """As Engine.submit, but without waiting: what the engine alone can refuse is raised by the next call,
        which is then not made."""
        check_request(request, sampled, self._requests, **self._sizes)
        self._send("submit", request, None if sampled is None else _packed(sampled))
        self._requests[request.id] = request
        self._unanswered.append(request.id)
        if len(self._unanswered) == UNANSWERED:
            self._settle("submit")

    def step(self) -> list[Rollout]:
        finished = [_unpacked(self._requests[part[0]], part) for part in self._call("step")]
        for rollout in finished:
            del self._requests[rollout.prompt_index, rollout.sample]
        return finished

    def running(self) -> list[Rollout]:
        return [_unpacked(self._requests[part[0]], part) for part in self._call("running")]

    def publish(self, params: Mapping[str, Tensor], version: int) -> None:
        check_publish(self._shapes, params, self.version, version)
        with torch.no_grad():
            for name, value in params.items():
                self._shared[name].copy_(value)
        self._call("publish", version)
        self.version = version

    def abort(self, ids: Iterable[tuple[int, int]]) -> None:
        ids = list(ids)
        self._call("abort", ids)
        for request_id in ids:
            self._requests.pop(request_id, None)

    def close(self) -> None:
        if self._child.is_alive():
            try:
                self._call("close")
                self._child.join(10)
            except (RuntimeError, TimeoutError):
                pass
        self._child.kill()
        self._child.join()
        self._pipe.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._settle(name)
        self._send(name, *arguments)
        value, error = self._receive(name)
        if error is not None:
            raise error
        return value

    def _send(self, name: str, *arguments: Any) -> None:
        if self._pipe.closed:
            raise RuntimeError("engine must be open, got one that was closed")
        try:
            self._pipe.send_bytes(pickle.dumps((name, arguments)))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(name) from None

    def _settle(self, name: str) -> None:
        """Read the answers to what was submitted; raise the first error, after all of them."""
        waiting, self._unanswered, errors = self._unanswered, [], []
        for request_id in waiting:
            _, error = self._receive(name)
            if error is not None:
                del self._requests[request_id]
                errors.append(error)
        if errors:
            raise errors[0]

    def _receive(self, name: str) -> tuple[Any, Exception | None]:
        """One answer of the child: (value, the error that it raised)."""
        try:
            if not self._pipe.poll(self._limit_s):
                raise TimeoutError(f"engine process must answer {name} within {self._limit_s} s, got nothing")
            message = self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise self._death(name) from None
        except BaseException:  # its answer, should it come, would be taken for that of the next call
            self._child.kill()
            self._pipe.close()
            raise
        value, error, trace = pickle.loads(message)
        if error is not None:
            error.__cause__ = RuntimeError(f"in the engine process:\n{trace}")
        return value, error

    def _death(self, name: str) -> RuntimeError:
        self._child.join(1)
        code = self._child.exitcode
        if code is not None and code < 0:
            reason = f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
        else:
            reason = f"exit status {code}"
        return RuntimeError(f"engine process must live as long as the run, got its end during {name}: {reason}")


def _packed(rollout: Rollout) -> tuple:
    """A response as plain numbers, which travel faster than tensors."""
    logprobs, versions = rollout.behaviour_logprobs.tolist(), rollout.policy_versions.tolist()
    return (rollout.prompt_index, rollout.sample), rollout.response_ids, logprobs, versions, rollout.stop_reason


def _unpacked(request: Request, part: tuple) -> Rollout:
    _, tokens, logprobs, versions, stop_reason = part
    return Rollout(
        prompt_index=request.prompt_index,
        sample=request.sample,
        prompt_ids=request.prompt_ids,
        response_ids=tokens,
        behaviour_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        policy_versions=torch.tensor(versions, dtype=torch.int64),
        stop_reason=stop_reason,
        seed=request.seed,
        temperature=request.temperature,
    )


def _serve(pipe, make: Callable[..., Engine], shared: Mapping[str, Tensor], version: int, threads: int) -> None:
    """The child: answers calls, each with (value, error, traceback), until the pipe or the engine is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def answer(value: Any = None, error: BaseException | None = None) -> None:
        trace = "" if error is None else "".join(traceback.format_exception(error))
        try:
            message = pickle.dumps((value, error, trace))
            error is None or pickle.loads(message)
        except Exception:  # an error that cannot travel, or not arrive, is told by its text
            message = pickle.dumps((None, RuntimeError(repr(error)), trace))
        pipe.send_bytes(message)

    def submit(request: Request, part: tuple | None) -> None:
        engine.submit(request, None if part is None else _unpacked(request, part))

    try:
        engine = make(shared, version)
    except Exception as error:
        answer(error=error)
        return
    calls = {
        "submit": submit,
        "step": lambda: [_packed(rollout) for rollout in engine.step()],
        "running": lambda: [_packed(rollout) for rollout in engine.running()],
        "publish": lambda new: engine.publish(shared, new),
        "abort": engine.abort,
        "close": engine.close,
    }
    answer({"vocab_size": engine.config.vocab_size, "max_length": engine.max_length})
    while True:
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the learner's process has ended
            os._exit(0)
        try:
            answer(calls[name](*arguments))
        except Exception as error:
            answer(error=error)
        if name == "close":
            return
