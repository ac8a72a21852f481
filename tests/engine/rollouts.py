"""Requests, and what becomes of them."""

import contextlib
import os
import signal
import threading

import torch

from rz.audit import AuditResult, replay
from rz.batch import Request
from rz.engine.plain import PlainEngine


def prompt(length, seed=0):
    """Token ids of the 96-token vocabulary, a function of (length, seed)."""
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(1000 * length + seed)).tolist()


def ask(index, prompt_ids, **changes):
    settings = dict(prompt_index=index, sample=0, prompt_ids=prompt_ids, seed=index + 7, max_tokens=12) | changes
    return Request(**settings)


def mixed(count=12):
    """Requests of many lengths at two temperatures; several prompts are longer than a step's budget."""
    return [
        ask(i, prompt((1, 5, 64, 129, 300, 17)[i % 6], i), max_tokens=1 + 9 * i % 40, temperature=(1.0, 0.6)[i % 2])
        for i in range(count)
    ]


def finish(engine, requests=()):
    """{id: rollout} of these requests and whatever else runs, at their end."""
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.running():
        done |= {(rollout.prompt_index, rollout.sample): rollout for rollout in engine.step()}
    return done


def bits(rollout):
    """All that a response is, comparable: token ids, bits of logprobs, why it stopped."""
    return rollout.response_ids, rollout.behaviour_logprobs.view(torch.int32).tolist(), rollout.stop_reason


def all_bits(done):
    return {key: bits(rollout) for key, rollout in done.items()}


def audit(weights, config, rollouts, dtype=torch.float32):
    """The replay of rollouts whose version v was sampled under weights[v]."""
    parts = [replay(params, config, rollouts, version=version, dtype=dtype) for version, params in weights.items()]
    return sum(parts, AuditResult())


def plain_engine(config, params, version, **settings):
    """To be made in another process."""
    return PlainEngine(config, params, dtype=torch.float32, version=version, **settings)


class Hanging(PlainEngine):
    def step(self):
        threading.Event().wait()


def hanging_engine(config, params, version, **settings):
    return Hanging(config, params, dtype=torch.float32, version=version, **settings)


class Half(PlainEngine):
    """Writes the beginning of an answer to the one socket of its process, then ends or hangs."""

    def step(self):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    os.write(int(name), (1000).to_bytes(4, "big") + b"half")
        if self.then == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def half_engine(config, params, version, then, **settings):
    engine = Half(config, params, dtype=torch.float32, version=version, **settings)
    engine.then = then
    return engine


class Picky(PlainEngine):
    """Refuses what only it knows it cannot run."""

    def submit(self, request, sampled=None):
        if request.prompt_index % 2 == 0:
            raise ValueError(f"index must be no multiple of 2, got {request.prompt_index}")
        super().submit(request, sampled)


def picky_engine(config, params, version, **settings):
    return Picky(config, params, dtype=torch.float32, version=version, **settings)


def no_engine(params, version):
    raise ValueError("slots must be >= 1, got 0")


class Demanding(Exception):
    """Can be pickled, but not unpickled: its one argument is not what it is made of."""

    def __init__(self, reason, place):
        super().__init__(reason)


def demanding_engine(params, version):
    raise Demanding("no room", "here")


def vllm_engine(folder, config, params, version, **settings):
    from rz.engine.vllm import VllmEngine

    return VllmEngine(folder, config, params, dtype=torch.float32, version=version, **settings)
