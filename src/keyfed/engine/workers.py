"""Worker processes: one thread each, θ and uploads in shared memory, results handed over in client order.

On a CPU two processes of one thread beat one process of two threads, and stacking clients gains nothing. Workers get
numbers (which client, which round, which method) and shared tensors; nothing crosses the process boundary but those
and the scalars that come back.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from keyfed.engine.problem import LocalProblem
from keyfed.engine.task import ClientTask, Finished, run_tasks
from keyfed.errors import KeyfedError, NoMainGuard, RunError
from keyfed.federated.methods import build_method
from keyfed.federated.spec import MethodSpec
from keyfed.federated.types import Params

Answer = tuple[int, Finished | None, str | KeyfedError | None]  # client, its result, or what went wrong


def write_flat(flat: Tensor, params: Params) -> None:
    """Copy named tensors into one flat tensor, in their order."""
    at = 0
    for p in params.values():
        flat[at : at + p.numel()].copy_(p.reshape(-1))
        at += p.numel()


def read_flat(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> Params:
    """View a flat tensor as named tensors; nothing is copied."""
    out, at = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        out[name] = flat[at : at + size].view(shape)
        at += size
    return out


def _work(problem: LocalProblem, shapes: dict[str, tuple[int, ...]], theta: Tensor, slots: Tensor, pipe: Any) -> None:
    """A worker's life: wait for (task, round, method, slot), train, write the upload into the slot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    params = read_flat(theta, shapes)
    while True:
        try:
            task, round, spec, slot = pipe.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        answer: Answer
        try:
            (finished,) = run_tasks(problem, params, [task], build_method(spec), round)
            write_flat(slots[slot], finished.upload)
            answer = (task.client, finished._replace(upload={}), None)  # the upload lies in the slot
        except KeyfedError as e:
            answer = (task.client, None, e)
        except Exception:
            answer = (task.client, None, traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the parent has closed its end: this client is not waited for any more
            return


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside the block, where signals can be set at all (the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


PATIENCE = 0.5  # seconds in which workers may end by themselves; Ctrl-C is answered by then
UNGUARDED = 97  # exit code of a worker whose program would start a run again


def refuse_unguarded() -> None:
    """End a worker process that is still being made: it imports the program, which starts a run without a guard.

    Its exit code says so to the process that waits for it (`WorkerPool`).
    """
    if getattr(mp.current_process(), "_inheriting", False):
        raise SystemExit(UNGUARDED)


class WorkerPool:
    """`workers` processes that train clients one at a time."""

    def __init__(self, problem: LocalProblem, workers: int) -> None:
        self._problem = problem
        self._workers = workers
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self, params: Params) -> None:
        shapes = {name: tuple(p.shape) for name, p in params.items()}
        size = sum(p.numel() for p in params.values())
        dtype = next(iter(params.values())).dtype
        self._shapes = shapes
        self._theta = torch.zeros(size, dtype=dtype).share_memory_()
        # One slot in training and one waiting its task for every worker.
        self._slots = torch.zeros(2 * self._workers, size, dtype=dtype).share_memory_()
        context = mp.get_context("spawn")
        for _ in range(self._workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(self._problem, shapes, self._theta, self._slots, theirs), daemon=True
            )
            with _without_interrupts():  # a child inherits it: Ctrl-C is the parent's business from the first moment
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def solve(self, params: Params, tasks: Sequence[ClientTask], spec: MethodSpec, round: int) -> Iterator[Finished]:
        """Yield every client's result in the order of the tasks; an upload lives until the next result.

        Clients are handed out in order, so the next one to be summed is always in training or done: slots cannot run
        dry.
        """
        if not self._processes:
            self._start(params)
        write_flat(self._theta, params)
        waiting = list(reversed(tasks))
        free = list(range(len(self._slots)))
        busy: dict[Connection, int] = {}  # pipe → slot
        done: dict[int, tuple[int, Finished]] = {}  # client → slot and result

        def hand_out() -> None:
            for pipe in self._pipes:
                if waiting and free and pipe not in busy:
                    busy[pipe] = free.pop()
                    try:
                        pipe.send((waiting.pop(), round, spec, busy[pipe]))
                    except OSError:
                        raise self._died(pipe) from None

        for task in tasks:
            hand_out()
            while task.client not in done:
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    client, finished, failure = self._receive(pipe)
                    if isinstance(failure, KeyfedError):
                        raise failure
                    if finished is None:
                        raise RuntimeError(f"worker failed on client {client}, round {round}:\n{failure}")
                    done[client] = (busy.pop(pipe), finished)
                hand_out()
            slot, finished = done.pop(task.client)
            yield finished._replace(upload=read_flat(self._slots[slot], self._shapes))
            free.append(slot)

    def _receive(self, pipe: Connection) -> Answer:
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            raise self._died(pipe) from None

    def _died(self, pipe: Connection) -> RunError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=1)
        if process.exitcode == UNGUARDED:
            return NoMainGuard(
                "a worker process imports the program that it is started from, and this one trains as soon as it is "
                'imported; put the calls of keyfed under `if __name__ == "__main__":`, or set train.workers to 1'
            )
        return RunError(
            f"a worker process died (exit code {process.exitcode}; -9 is often a lack of memory). The rounds before it "
            "are in the checkpoint: free some memory and go on with --resume"
        )

    def close(self) -> None:
        """End all workers; safe to call twice. One that still trains is ended: nothing waits for its result."""
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + PATIENCE
        for process in self._processes:
            process.join(timeout=max(0.0, until - time.monotonic()))
            if process.is_alive():
                with contextlib.suppress(OSError):
                    process.terminate()
                process.join(timeout=5)
        self._processes, self._pipes = [], []
