"""O1 installed: wrappers in torch's namespaces from the first session to the last, and casts on where a session is."""

import functools
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..basics.logs import log
from ..basics.patching import InterruptsHeld, Undo, UndoStack
from ..plan import Plan
from ..torch_internals import cpu_autocast_list, encoder_fast_path
from ..torch_internals.native_autocast import ThreadCasts, call_without_casts, device_types, is_on
from .cast_lists import APEX_POLICY, TORCH_POLICY, Cast, wrapped_on
from .casters import user_wrapper, wrapper

_MARK: Final = "+mpinit"

# Where torch.autograd.backward and .grad, however they were imported, enter the engine; themselves where it is not.
_ENGINE: Final = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")


@dataclass(frozen=True)
class Registration:
    """A function registered by name: where it stands and what happens to its arguments."""

    owner: Any
    name: str
    cast: Cast


REGISTERED: Final[list[Registration]] = []


# What one session needs, or all live sessions together: whether it is apex's policy, and whether banned functions run.
_Needs = tuple[bool, bool]


class Installation:
    """Which sessions are live, and what stands in torch's namespaces for them."""

    def __init__(self) -> None:
        # Taken with interrupts held: one behind a block's last line would leave it taken, and other threads waiting.
        self._lock = threading.RLock()
        self._sessions: dict[object, _Needs] = {}
        self._installed: _Needs | None = None
        self._undos = UndoStack()
        self._originals: dict[tuple[int, str], Any] = {}

    def original(self, owner: Any, name: str) -> Any:
        """Return the function at ``owner.name`` without mpinit's wrapper; None where there is none."""
        return self._originals.get((id(owner), name), getattr(owner, name, None))

    def add(self, plan: Plan, undos: UndoStack) -> None:
        """Add a session; the undos of several sessions may run in any order."""
        token = object()
        with InterruptsHeld(), self._lock:
            undos.push(lambda: self._remove(token))
            self._sessions[token] = plan.properties.cast_policy == "apex", plan.properties.allow_banned
            self._refresh()
            for where, name in self._bound_before() if len(self._sessions) == 1 else ():
                log.warning(
                    "%s was imported from torch before mpinit.initialize and keeps the function without casts: call "
                    "it as %s, or import it after initialize",
                    where,
                    name,
                )

    def _remove(self, token: object) -> None:
        with InterruptsHeld(), self._lock:
            self._sessions.pop(token, None)
            self._refresh()

    def refresh_registrations(self) -> None:
        """Install anew for a changed list of registered functions."""
        with InterruptsHeld(), self._lock:
            self._installed = None
            self._refresh()

    def _refresh(self) -> None:
        """Install what the live sessions need in torch's namespaces; start anew after an interrupted call."""
        sessions = self._sessions.values()
        # The namespaces are one: the stricter policy and the wider permission hold for all.
        needs = any(is_apex for is_apex, _ in sessions), any(allows for _, allows in sessions)
        is_installed = needs == self._installed if sessions else not self._undos
        if is_installed:
            return
        self._installed = None
        self._undos.unwind()
        self._originals.clear()
        if sessions:
            self._install(needs)
            self._installed = needs

    def _install(self, needs: _Needs) -> None:
        """Install all wrappers; the next :meth:`_refresh` removes those of an interrupted call."""
        _mark_compile_caches(self._undos)
        _keep_casts_out_of_backward(self._undos)
        encoder_fast_path.keep_off(is_on, self._undos)
        cpu_autocast_list.follow_cuda(self._undos)
        for registration in REGISTERED:
            self._set(registration.owner, registration.name, _registered_wrapper(registration))
        for owner, name, function in _wrappers(needs):
            if (id(owner), name) not in self._originals:  # a registration has precedence
                self._set(owner, name, function)

    def _bound_before(self) -> Iterator[tuple[str, str]]:
        """Find names in the user's modules that are bound to functions (not methods) which are wrapped now."""
        found: dict[int, str] = {}
        for row in TORCH_POLICY:
            for name in row.wraps if wrapped_on(row, device_types()) else ():
                owner, attribute = resolve_owner(name)
                if (id(owner), attribute) in self._originals and owner is not torch.Tensor:
                    found.setdefault(id(self._originals[id(owner), attribute]), name)
        return bound_elsewhere(found, None, users_only=True)

    def _set(self, owner: Any, name: str, function: Any) -> None:
        original = getattr(owner, name)
        self._originals[id(owner), name] = original
        _tell_torchscript(function, original, self._undos)
        self._undos.set_attribute(owner, name, function)


def _wrappers(needs: _Needs) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(owner, attribute, wrapper) for every name that needs one on the devices present.

    Names of one function share one wrapper, so that who knows it under one name (torch.compile) knows it under all.
    """
    (is_apex, allows_banned), present = needs, device_types()
    for row in APEX_POLICY if is_apex else TORCH_POLICY:
        devices = wrapped_on(row, present)
        shared: dict[int, Callable[..., Any]] = {}
        for name in row.wraps if devices else ():
            owner, attribute = resolve_owner(name)
            original = getattr(owner, attribute)
            if id(original) not in shared:
                shared[id(original)] = wrapper(row, name, original, devices, allows_banned)
            yield owner, attribute, shared[id(original)]


def resolve_owner(name: str) -> tuple[Any, str]:
    """The namespace and the attribute of a dotted name below torch."""
    _, *path, attribute = name.split(".")
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _registered_wrapper(registration: Registration) -> Any:
    """The wrapper for a registered function; that of a static or class method is one too."""
    owner, name = registration.owner, registration.name
    homes = map(vars, getattr(owner, "__mro__", (owner,)))
    standing = next((home[name] for home in homes if name in home), getattr(owner, name))
    if isinstance(standing, (staticmethod, classmethod)):
        return type(standing)(user_wrapper(registration.cast, standing.__func__))
    return user_wrapper(registration.cast, standing)


def _keep_casts_out_of_backward(undos: UndoStack) -> None:
    """Switch casts off while autograd's engine runs, for ``backward()`` and ``torch.autograd.grad`` alike.

    A backward pass under casts would compute what ran in float32 in 16 bits. A graph made by ``create_graph=True`` is
    the caller's to use: casts are back on when the call returns.
    """
    for name in _ENGINE:
        undos.set_attribute(torch.autograd, name, _without_casts(getattr(torch.autograd, name)))


def _without_casts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def engine_call(*args: Any, **kwargs: Any) -> Any:
        return call_without_casts(original, *args, **kwargs)

    return engine_call


def _mark_compile_caches(undos: UndoStack) -> None:
    """Tell torch.compile that names mean other functions now.

    Its caches on disk know ``exp`` by name, and its table of functions that may stand in a graph is built once, from
    what the names mean at that moment.
    """
    config: Any = torch.compiler.config

    def revert() -> None:
        # torch keeps its settings per thread: in another thread than the one that installed there is no mark.
        config.cache_key_tag = config.cache_key_tag.removesuffix(_MARK)
        _forget_function_tables()

    undos.push(revert)
    config.cache_key_tag = config.cache_key_tag.removesuffix(_MARK) + _MARK
    _forget_function_tables()


def _tell_torchscript(function: Any, original: Any, undos: UndoStack) -> None:
    """Let TorchScript take a wrapper for what it stands for: it compiles by its own table, and casts nothing.

    torch scripts functions of its own for forward-mode derivatives, so this matters to those who never script.
    """
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    before = table.get(id(function))

    def revert() -> None:
        table.pop(id(function), None)
        if before is not None:
            table[id(function)] = before

    undos.push(revert)
    if id(original) in table:
        table[id(function)] = table[id(original)]
    elif isinstance(function, types.FunctionType):
        function.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]


def _forget_function_tables() -> None:
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for table in ("get_torch_obj_rule_map", "get_tensor_method"):
        forget = getattr(getattr(rules, table, None), "cache_clear", None)
        if forget is not None:
            forget()


INSTALLATION: Final = Installation()

# What sessions that were dropped without undo have left in the namespaces: taken out by the next one.
_dropped: Final[list[Undo]] = []


def apply(plan: Plan, owner: object = None) -> Undo:
    """Make torch's functions follow the cast policy, and switch casts on for this thread where the plan says so.

    The engine is torch's own autocast; wrappers are put only around names that a device present does not have on its
    own list. They are shared by all live sessions: the namespaces are as they were when the last one is undone. An
    exception on the way, Ctrl-C at any line included, leaves everything as it was.

    Where ``owner`` is dropped without the undo, the casts go off, and what is in the namespaces at the next call. The
    undo is to be called in the same thread; called again it does nothing, or completes what was interrupted.
    """
    while _dropped:
        left_over = _dropped[0]
        left_over()
        _dropped.remove(left_over)
    undos = UndoStack()
    casts = ThreadCasts()
    try:
        INSTALLATION.add(plan, undos)
        if plan.properties.cast_scope == "thread":
            undos.push(functools.partial(_end, casts))
            casts.begin(plan.function_dtype)
        return undos.unwind if owner is None else _until_dropped(owner, casts, undos.unwind)
    except BaseException:
        undos.unwind()
        raise


def _end(casts: ThreadCasts) -> None:
    if not casts.end():
        log.warning(
            "casts were switched on in another thread (%d) and stay on there until its next backward pass: call "
            "mpinit.undo in the thread that called mpinit.initialize",
            casts.thread_id,
        )


def _until_dropped(owner: object, casts: ThreadCasts, undo: Undo) -> Undo:
    """``undo``; casts go off when ``owner`` is dropped without it.

    Namespaces are left to the next session: the garbage collector comes at any time, in any thread, in the middle of
    another installation for one.
    """

    def dropped() -> None:
        casts.end()
        _dropped.append(undo)

    finalizer = weakref.finalize(owner, dropped)
    finalizer.atexit = False

    def undo_now() -> None:
        finalizer.detach()
        undo()

    return undo_now


# torch's own modules bind each other's functions all over: these are no early imports of a user's.
_OWN: Final = ("torch", "mpinit")
_INSTALLED: Final = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def bound_elsewhere(functions: Mapping[int, str], home: Any, *, users_only: bool) -> Iterator[tuple[str, str]]:
    """Find module globals that are one of these functions, known by id: ("module.name", what it is called).

    ``home`` is not looked into, nor, with ``users_only``, installed packages and the standard library.
    """
    for module_name, module in list(sys.modules.items()):
        if module is home or module_name.partition(".")[0] in _OWN or (users_only and _is_installed(module)):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                yield f"{module_name}.{attribute}", functions[id(value)]


def _is_installed(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    # __main__ has no file in an interactive session; any other module without one is built in.
    return path.startswith(_INSTALLED) if isinstance(path, str) else getattr(module, "__name__", "") != "__main__"
