"""The pipeline: its knobs, and what one can do with it. The loop itself is in `loop.py`."""

from __future__ import annotations

import operator
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import TYPE_CHECKING

from heterolab.device.base import Background, Device
from heterolab.errors import InputError
from heterolab.pipeline.hooks import Hook
from heterolab.pipeline.loop import Loop
from heterolab.pipeline.payload import payload, returns
from heterolab.pipeline.postprocess import Sessions
from heterolab.pipeline.run import Run
from heterolab.workload import COURSE_KEY, Load

if TYPE_CHECKING:
    from heterolab.models.encoder import Encoder


#: Where the host's side of what crosses the link may lie.
MEMORY = ("pageable", "pinned", "mapped", "managed")


@dataclass(frozen=True)
class Settings:
    """A pipeline's knobs; see :class:`Pipeline`."""

    batch: int = 8
    streams: int = 2
    memory: str = "pinned"
    max_delay_ms: float = 2.0
    workers: int = 1
    chunk: int = 16
    payload: str = "ids"
    returns: str = "topk"
    length_aware: bool = True
    ring: int = 2

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("streams", 1), ("chunk", 1), ("ring", 1), ("workers", 0)):
            object.__setattr__(self, name, _whole_number(name, getattr(self, name), least))
        delay = self.max_delay_ms
        if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay < 1e9:
            raise InputError(f"max_delay_ms={delay!r} must be a number of milliseconds, 0 or more.")
        if self.memory not in MEMORY:
            raise InputError(f"memory={self.memory!r} must be one of: {', '.join(MEMORY)}.")

    def code(self) -> str:
        """The settings that differ from the defaults, as one would type them."""
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default or f.name == "batch")
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed)


def _whole_number(name: str, value: object, least: int) -> int:
    """`value` as an int (NumPy's integers included), refused below `least`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InputError(f"{name}={value!r} must be a whole number, {least} or more.")
    return number


class Pipeline:
    """Preprocess → batch → transfer → kernels → postprocess, over any Host and Device.

    Parameters
    ----------
    model
        The encoder, from :func:`heterolab.models.encoder`.
    batch
        Most requests in a batch.
    streams
        Streams on the device; `ring` batches may be in flight on each.
    memory
        Memory for what crosses the link: ``pageable``, ``pinned``, ``mapped`` or ``managed``.
    max_delay_ms
        Longest time a request waits for others to make a batch with.
    workers
        Threads for preprocessing; 0 does it on the host thread itself.
    chunk
        Most requests in one preprocessing job.
    payload
        What goes to the device: ``ids``, ``embeddings``, ``images_uint8``, ``images_float32``.
    returns
        What comes back: ``topk``, ``vectors``, ``logits``.
    length_aware
        Make batches of texts of like length.
    ring
        Sets of buffers (batches in flight) a stream.
    hooks
        Functions called with a :class:`HookEvent` as stages begin and end.
    keys
        API keys that are served.
    sessions
        Where answers are recorded; by default in memory.
    """

    def __init__(
        self,
        model: Encoder,
        *,
        batch: int = 8,
        streams: int = 2,
        memory: str = "pinned",
        max_delay_ms: float = 2.0,
        workers: int = 1,
        chunk: int = 16,
        payload: str = "ids",
        returns: str = "topk",
        length_aware: bool = True,
        ring: int = 2,
        hooks: tuple[Hook, ...] | list[Hook] = (),
        keys: tuple[str, ...] = (COURSE_KEY,),
        sessions: Sessions | None = None,
    ) -> None:
        self.model = model
        memory = getattr(memory, "value", memory)  # Memory.PINNED is as good as "pinned"
        self.settings = Settings(
            batch, streams, memory, max_delay_ms, workers, chunk, payload, returns, length_aware, ring
        )
        self.payload = _payload(payload, model)
        self.returns = _returns(returns, model)
        self.hooks = _hooks(hooks)
        self.keys = _keys(keys)
        self.sessions = sessions or Sessions()

    def run(self, load: Load, *, on: Device) -> Run:
        """Serve `load` on a device; returns when all is answered. Ctrl-C stops admitting, ends
        what is in flight, and returns what there is."""
        loop = _loop(self, load, on)
        try:
            with _interrupt_means(loop.stop):
                while loop.step():
                    pass
            return loop.finish()
        finally:
            loop.close()

    def start(self, load: Load, *, on: Device) -> Live:
        """Serve `load` beside the caller, where the device's host has threads; see :class:`Live`."""
        loop = _loop(self, load, on, live=True)
        return Live(loop, on.host.spawn(loop.step))

    def __repr__(self) -> str:
        return f"Pipeline({self.settings.code()})"


def _hooks(hooks: object) -> tuple[Hook, ...]:
    if not isinstance(hooks, list | tuple) or not all(map(callable, hooks)):
        raise InputError(f"hooks={hooks!r} must be a list of functions, e.g. hooks=[my_hook].")
    return tuple(hooks)


def _keys(keys: object) -> tuple[str, ...]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise InputError(f'keys={keys!r} must be a list of strings, e.g. keys=["my-key"].')
    return tuple(keys)


_payload, _returns = payload, returns  # the constructor's own arguments have these names


def _loop(pipeline: Pipeline, load: Load, device: Device, live: bool = False) -> Loop:
    """A loop over a load and a device that are what they should be."""
    if not isinstance(device, Device):
        raise InputError(f"on={device!r} is not a device. Open one: on=hl.open_device('sim:h200').")
    if not isinstance(load, Load):
        raise InputError(f"{load!r} is not a load. Make one: hl.poisson(rate=300, n=64) or hl.replay(path).")
    return Loop(pipeline, load, device, live)


@contextmanager
def _interrupt_means(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C (or a notebook's interrupt) stops the run in good order instead of tearing it at
    whatever line it was; a second one interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread only
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Live:
    """A run that goes on by itself."""

    def __init__(self, loop: Loop, background: Background) -> None:
        self._loop = loop
        self._background = background
        self._run: Run | None = None

    @property
    def done(self) -> bool:
        return self._background.done

    def stop(self) -> Run:
        """Admit nothing more, end what is in flight, and give the run; the rest is `unserved`."""
        self._loop.stop()
        return self.join()

    def join(self) -> Run:
        """Wait for the end, and give the run. Raises what ended it early."""
        if self._run is None:
            try:
                self._background.join()
                self._run = self._loop.finish()
            finally:
                self._loop.close()
        return self._run

    def snapshot(self) -> Run:
        """The run so far: a Run whose trace and answers grow from call to call."""
        return self._run or self._loop.result()
