"""An engine in a process of its own: sampling and learning at the same time, with weights in shared memory."""

import os
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rz.batch import Request, Rollout
from rz.engine.interface import Engine
from rz.engine.record import check_publish, check_request


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
        self.version = version
        self._requests: dict[tuple[int, int], Request] = {}
        self._queued: dict[tuple[int, int], tuple[Request, tuple | None]] = {}  # submitted, and not yet sent
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._limit(limit_s)
        work = (theirs, make, self._shared, version, threads)
        self._child = context.Process(target=_serve, args=work, daemon=True)
        self._child.start()
        theirs.close()
        try:
            self._sizes = self._answer("start")
        except BaseException:
            self._child.kill()
            raise

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        """As Engine.submit. It travels with the next call; what this engine alone can refuse is raised by that call,
        which then is not made."""
        self._require_open()
        check_request(request, sampled, self._requests, **self._sizes)
        self._queued[request.id] = request, None if sampled is None else _packed(sampled)
        self._requests[request.id] = request

    def step(self) -> list[Rollout]:
        with self._whole():
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
            self._queued.clear()
            with suppress(Exception):
                self._call("close")
                self._child.join(10)
        self._child.kill()
        self._child.join()
        self._pipe.close()

    def _limit(self, seconds: float) -> None:
        """What a call may take, also where the child reads or writes only a part of a message."""
        self._limit_s = seconds
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, option, value)

    def _require_open(self) -> None:
        if self._pipe.closed:
            raise RuntimeError("engine must be open, got one that was closed")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Close the engine if what is done within is cut short by Ctrl-C: the next call would take its answer."""
        try:
            yield
        except KeyboardInterrupt:
            self._end()
            raise

    def _end(self) -> None:
        self._child.kill()
        self._pipe.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._require_open()
        return self._answer(name, pickle.dumps((name, arguments, list(self._queued.values()))))

    def _answer(self, name: str, message: bytes | None = None) -> Any:
        with self._whole():
            value, error, trace, refused = pickle.loads(self._exchange(name, message))
            if refused is None:
                self._queued.clear()
            else:  # the requests before it are in the engine, those after it are still to be sent
                for request_id in list(self._queued)[: refused + 1]:
                    del self._queued[request_id]
                del self._requests[request_id]
        if error is not None:
            raise error from RuntimeError(f"in the engine process:\n{trace}")
        return value

    def _exchange(self, name: str, message: bytes | None) -> bytes:
        try:
            if message is not None:
                self._pipe.send_bytes(message)
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv_bytes()
        except BlockingIOError:  # the limit passed in the middle of a message
            pass
        except (EOFError, OSError):
            raise self._death(name) from None
        self._end()
        raise TimeoutError(f"engine process must answer {name} within {self._limit_s} s, got nothing")

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
    """The child: answers each call with (value, error, traceback, request refused) until pipe or engine is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def answer(value: Any = None, error: BaseException | None = None, refused: int | None = None) -> None:
        """refused: which of the requests that came with the call was, if one was."""
        trace = "" if error is None else "".join(traceback.format_exception(error))
        try:
            message = pickle.dumps((value, error, trace, refused))
            error is None or pickle.loads(message)
        except Exception:  # an error that cannot travel, or not arrive, is told by its text
            message = pickle.dumps((None, RuntimeError(repr(error)), trace, refused))
        pipe.send_bytes(message)

    try:
        engine = make(shared, version)
    except Exception as error:
        answer(error=error)
        return
    calls = {
        "step": lambda: [_packed(rollout) for rollout in engine.step()],
        "running": lambda: [_packed(rollout) for rollout in engine.running()],
        "publish": lambda new: engine.publish(shared, new),
        "abort": engine.abort,
        "close": engine.close,
    }

    def made(name: str, arguments: tuple, queued: list[tuple[Request, tuple | None]]) -> dict[str, Any]:
        """What answer takes: of the requests that came with a call, then of the call."""
        accepted = 0
        try:
            for request, part in queued:
                engine.submit(request, None if part is None else _unpacked(request, part))
                accepted += 1
            return {"value": calls[name](*arguments)}
        except Exception as error:
            return {"error": error, "refused": accepted if accepted < len(queued) else None}

    try:
        answer({"vocab_size": engine.config.vocab_size, "max_length": engine.max_length})
        while True:
            name, arguments, queued = pickle.loads(pipe.recv_bytes())
            answer(**made(name, arguments, queued))
            if name == "close":
                return
    except (EOFError, OSError):  # the learner's process has ended
        os._exit(0)
