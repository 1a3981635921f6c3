"""Hooks of torch: global ones, shared by threads, and those of one model, which its copies do not call.

A global hook is called for all modules or optimizers of the process.

torch iterates over its dictionaries of global hooks without a lock, so a hook that is registered or removed while
another thread builds a module ends that thread with "OrderedDict mutated during iteration". Each global hook here is
therefore registered at its first subscription, when torch has nothing to iterate over, and stays registered;
subscriptions come and go in a tuple that is replaced, never modified.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Callback = Callable[..., None]
Hook = TypeVar("Hook", bound=Callable[..., Any])
Reference = weakref.WeakMethod[Callback]


class GlobalHook:
    """One global hook of torch, which calls its subscribers in the order of their subscriptions.

    Args:
        register: registers a function with torch.
        breaks_graphs: whether a graph that torch.compile captures ends at this hook, which then calls its subscribers.
            Otherwise compiled code does not call them.
    """

    def __init__(self, register: Callable[[Callback], object], *, breaks_graphs: bool) -> None:
        self._register, self._breaks_graphs, self._lock = register, breaks_graphs, threading.Lock()
        self._registered, self._subscribers = False, tuple[Reference, ...]()
        self._unheard = threading.local()  # has an attribute in threads within `unheard`

    def subscribe(self, method: Callback) -> Subscription:
        """Call a bound method of an object from now on, with torch's arguments, until the object is collected or the
        subscription is removed."""
        reference = weakref.WeakMethod(method)
        self.replace(reference)
        return Subscription(self, reference)

    def replace(self, *more: Reference, without: Reference | None = None) -> None:
        with self._lock:
            kept = (each for each in self._subscribers if each is not without and each() is not None)
            self._subscribers = (*kept, *more)
            if more and not self._registered:
                self._register(uncompiled(self._call) if self._breaks_graphs else self._call)
                self._registered = True

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Call no subscriber for what this thread does within the block."""
        self._unheard.now = True
        try:
            yield
        finally:
            del self._unheard.now

    def _call(self, *args: Any) -> None:
        if torch.compiler.is_compiling() or hasattr(self._unheard, "now"):
            return
        for reference in self._subscribers:
            if (method := reference()) is not None:
                method(*args)

    @property
    def subscribers(self) -> int:
        """The number of subscriptions of objects that exist."""
        return sum(reference() is not None for reference in self._subscribers)


class Subscription:
    """A handle to end a subscription. Its copy, as in the copy of a model whose hooks hold it, ends nothing."""

    def __init__(self, hook: GlobalHook | None = None, reference: Reference | None = None) -> None:
        self._hook, self._reference = hook, reference

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.replace(without=self._reference)

    def __reduce__(self) -> tuple[type[Subscription], tuple[()]]:
        return Subscription, ()


def uncompiled(hook: Hook) -> Hook:
    """The hook, excluded from torch.compile: a captured graph ends there, and Python runs the hook and its calls. A
    backward pass within a compiled function would otherwise have each of its hooks compiled."""
    disabled: Hook = torch.compiler.disable(hook, reason="a hook of Gossamer communicates")
    return disabled


class ForwardHook:
    """A hook of one model's forward pass, for all kinds of torch's forward hooks. In copies and pickles of the model a
    hook that does nothing replaces it, so a file of torch.save(model) is read without Gossamer.

    Args:
        method: called with torch's arguments; returns None.
    """

    def __init__(self, method: Callback) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        self._method(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


# Called with (module, name, parameter) and (module, name, child).
PARAMETER_REGISTRATION = GlobalHook(register_module_parameter_registration_hook, breaks_graphs=False)
MODULE_REGISTRATION = GlobalHook(register_module_module_registration_hook, breaks_graphs=False)

# Called with (optimizer, args, kwargs), before and after each step.
OPTIMIZER_STEP = GlobalHook(register_optimizer_step_pre_hook, breaks_graphs=True)
OPTIMIZER_STEPPED = GlobalHook(register_optimizer_step_post_hook, breaks_graphs=True)
