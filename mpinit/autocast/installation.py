"""Installation of O1: wrappers in torch's namespaces while any session lives, and autocast flags of threads."""

import functools
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from ..basics.logs import log
from ..basics.patching import InterruptsDelayed, Undo, UndoStack, undo_when_dropped
from ..config.plan import Plan
from . import cpu_autocast_list, encoder_fast_path
from .cast_lists import APEX_POLICY, COMPOSED_LOSS_ROWS, TORCH_POLICY, Cast, wrapped_on
from .casters import renamed, user_wrapper, without_casts, wrapper
from .float32_sums import FLOAT32_SUMS
from .thread_flags import device_types, is_on, thread_state

_MARK: Final = "+mpinit"
# What a session with 16-bit weights and without O1's casts needs.
_SUMS_ONLY: Final = "sums"


class Registration(NamedTuple):
    """A function registered by name: its namespace, its name there, and how its arguments are cast."""

    owner: Any
    name: str
    cast: Cast


REGISTERED: Final[list[Registration]] = []

# The function in each wrapper, also in those that are not installed any more.
ORIGINALS: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


class Installation:
    """The live sessions of O1 and with 16-bit weights, and the wrappers in torch's namespaces that they need."""

    def __init__(self) -> None:
        # Acquired with Ctrl-C delayed: a KeyboardInterrupt before the release would block all other threads.
        self._lock = threading.RLock()
        # A token for each session -> the cast policy of its functions, or _SUMS_ONLY.
        self._sessions: dict[object, str] = {}
        self._installed: frozenset[str] = frozenset()
        self._undos = UndoStack()
        self._originals: dict[tuple[int, str], Any] = {}
        # The id of an original -> its wrapper.
        self._wrappers: dict[int, Any] = {}

    def wrapper_of(self, function: Any) -> Any:
        """Return the wrapper of one of torch's functions while it is installed; None where it has none."""
        return self._wrappers.get(id(function))

    def original(self, owner: Any, name: str) -> Any:
        """Return the function at ``owner.name`` without mpinit's wrapper, or None."""
        return self._originals.get((id(owner), name), getattr(owner, name, None))

    def add(self, plan: Plan, undos: UndoStack) -> None:
        """Add a session. The undos of several sessions may run in any order."""
        token = object()
        with InterruptsDelayed(), self._lock:
            undos.push(lambda: self._remove(token))
            kind = _SUMS_ONLY if plan.function_dtype is None else plan.cast_policy
            is_first = kind not in self._sessions.values()
            self._sessions[token] = kind
            self._refresh()
            for where, name in self._bound_before(kind) if is_first else ():
                log.warning(
                    "%s was imported from torch before mpinit.initialize and keeps the function without casts: call "
                    "it as %s, or import it after initialize",
                    where,
                    name,
                )

    def _remove(self, token: object) -> None:
        with InterruptsDelayed(), self._lock:
            self._sessions.pop(token, None)
            self._refresh()

    def refresh_registrations(self) -> None:
        """Install again after the list of registered functions has changed."""
        with InterruptsDelayed(), self._lock:
            self._installed = frozenset()
            self._refresh()

    def _refresh(self) -> None:
        """Install the wrappers that the live sessions need; start again after an interrupted call."""
        wanted = frozenset(self._sessions.values())
        if wanted == self._installed and bool(wanted) is bool(self._undos):
            return
        self._installed = frozenset()
        self._undos.unwind()
        self._originals.clear()
        self._wrappers.clear()
        if wanted:
            self._install(wanted)
            self._installed = wanted

    def _install(self, wanted: frozenset[str]) -> None:
        """Install all wrappers. After an interrupted call, the next :meth:`_refresh` removes them."""
        _mark_compile_caches(self._undos)
        casting = wanted - {_SUMS_ONLY}
        for registration in REGISTERED if casting else ():
            self._set(registration.owner, registration.name, _registered_wrapper(registration))
        registered = set(self._originals)  # they have precedence

        def free(names: Iterable[str]) -> Iterator[tuple[str, Any, str, Any]]:
            for name in names:
                owner, attribute = resolve_owner(name)
                if (id(owner), attribute) not in registered:
                    yield name, owner, attribute, getattr(owner, attribute)

        # Inside of the wrappers of O1: inside a forward with 16-bit weights O1's casts are off.
        for name, owner, attribute, original in free(FLOAT32_SUMS) if _SUMS_ONLY in wanted else ():
            self._set(owner, attribute, renamed(FLOAT32_SUMS[name](original), original, name))
        if not casting:
            return
        # With casts on, the backward of operations that ran in float32 would compute in 16 bits. Both backward() and
        # torch.autograd.grad call the engine. After it casts are on again, for a graph of create_graph=True.
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward
        off = functools.wraps(engine)(without_casts(engine))
        self._undos.set_attribute(autograd, "_engine_run_backward", off)
        encoder_fast_path.keep_off(is_on, self._undos)
        cpu_autocast_list.follow_cuda(self._undos)
        # All sessions share torch's functions: if one has apex's policy, it applies to all.
        for row in APEX_POLICY if "apex" in casting else TORCH_POLICY:
            devices = wrapped_on(row, device_types())
            # All names of a function share one wrapper, because torch.compile identifies functions by object.
            shared: dict[int, Callable[..., Any]] = {}
            for name, owner, attribute, original in free(row.wraps) if devices else ():
                if id(original) not in shared:
                    shared[id(original)] = wrapper(row, name, original, devices)
                self._set(owner, attribute, shared[id(original)])

    def _bound_before(self, kind: str) -> Iterator[tuple[str, str]]:
        """Find names in the user's modules that were bound to a function before it was wrapped; skip methods."""
        found: dict[int, str] = {}
        # Losses that have a kernel are wrapped there, whoever calls them.
        for row in COMPOSED_LOSS_ROWS if kind is _SUMS_ONLY else TORCH_POLICY:
            for name in row.wraps if wrapped_on(row, device_types()) else ():
                owner, attribute = resolve_owner(name)
                if (id(owner), attribute) in self._originals and owner is not torch.Tensor:
                    found.setdefault(id(self._originals[id(owner), attribute]), name)
        return bound_elsewhere(found, None, users_only=True)

    def _set(self, owner: Any, name: str, function: Any) -> None:
        original = self._originals.setdefault((id(owner), name), getattr(owner, name))
        if isinstance(function, types.FunctionType):
            self._wrappers[id(original)] = function
            ORIGINALS[function] = original
        _register_with_torchscript(function, original, self._undos)
        self._undos.set_attribute(owner, name, function)


def resolve_owner(name: str) -> tuple[Any, str]:
    """Split a dotted name below torch into its namespace, an object, and its attribute."""
    _, *path, attribute = name.split(".")
    return functools.reduce(getattr, path, torch), attribute


def _registered_wrapper(registration: Registration) -> Any:
    """Make the wrapper of a registered function; static and class methods stay static and class methods."""
    owner, name = registration.owner, registration.name
    # getattr alone would bind a class method, and unwrap a static one.
    namespaces = map(vars, getattr(owner, "__mro__", (owner,)))
    attribute = next((each[name] for each in namespaces if name in each), getattr(owner, name))
    if isinstance(attribute, (staticmethod, classmethod)):
        return type(attribute)(user_wrapper(registration.cast, attribute.__func__))
    return user_wrapper(registration.cast, attribute)


def _mark_compile_caches(undos: UndoStack) -> None:
    """Make torch.compile recompile code compiled before the names were patched.

    Its caches on disk identify ``exp`` by name. Its table of functions that are allowed in a graph is built once, from
    the functions that the names refer to at that moment.
    """
    config: Any = torch.compiler.config

    def revert() -> None:
        # torch's configuration is per thread: a thread that did not install the wrappers has no mark.
        config.cache_key_tag = config.cache_key_tag.removesuffix(_MARK)
        _clear_function_tables()

    undos.push(revert)
    config.cache_key_tag = config.cache_key_tag.removesuffix(_MARK) + _MARK
    _clear_function_tables()


def _register_with_torchscript(function: Any, original: Any, undos: UndoStack) -> None:
    """Make TorchScript compile the original function in place of a wrapper; it then casts nothing.

    It applies to users who never script, too: torch scripts its own functions for forward-mode derivatives.
    """
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]

    def revert() -> None:
        table.pop(id(function), None)

    undos.push(revert)
    if id(original) in table:
        table[id(function)] = table[id(original)]
    elif isinstance(function, types.FunctionType):
        function.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]


def _clear_function_tables() -> None:
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for table in ("get_torch_obj_rule_map", "get_tensor_method"):
        clear = getattr(getattr(rules, table, None), "cache_clear", None)
        if clear is not None:
            clear()


INSTALLATION: Final = Installation()


def apply(plan: Plan, owner: object = None) -> Undo:
    """Make torch's functions follow the cast policy, and switch casts on in this thread if the plan has it.

    For a plan without casts of functions, whose weights are 16-bit, only ``FLOAT32_SUMS`` are wrapped. At O1 torch's
    own autocast does the casts, and only names that are not on the autocast list of a device present are wrapped. All
    live sessions share the wrappers; the undo of the last session removes them. An exception, Ctrl-C at any line
    included, undoes everything.

    Args:
        plan: the resolved configuration.
        owner: an object whose garbage collection switches the casts off; the next ``initialize`` then removes the
            wrappers. Default None.

    Returns:
        The undo, to be called in the same thread. A second call does nothing, or completes an interrupted one.
    """
    undos = UndoStack()
    thread, session = thread_state.value, object()

    def end() -> None:
        if not thread.end(session):
            log.warning(
                "casts were switched on in another thread (%d) and stay on there until its next backward pass: call "
                "mpinit.undo in the thread that called mpinit.initialize",
                thread.thread_id,
            )

    try:
        INSTALLATION.add(plan, undos)
        # At "model" only forwards switch casts on.
        if plan.function_dtype is not None and plan.properties.patch_torch_functions != "model":
            undos.push(end)
            thread.begin(session, plan.function_dtype)
        at_once = functools.partial(thread.end, session)
        return undos.unwind if owner is None else undo_when_dropped(owner, undos.unwind, at_once=at_once)
    except BaseException:
        undos.unwind()
        raise


# Packages to skip: torch's modules import each other's functions by name, and no user can change that.
_OWN: Final = ("torch", "mpinit")
_INSTALLED: Final = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def bound_elsewhere(functions: Mapping[int, str], skipped: Any, *, users_only: bool) -> Iterator[tuple[str, str]]:
    """Find globals of modules that are bound to one of some functions.

    Args:
        functions: the id of each function -> its name.
        skipped: a module to skip, such as the one that defines the functions; None: none.
        users_only: skip installed packages and the standard library.

    Yields:
        ("module.global", the function's name).
    """
    for module_name, module in list(sys.modules.items()):
        if module is skipped or module_name.partition(".")[0] in _OWN or (users_only and _is_installed(module)):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                yield f"{module_name}.{attribute}", functions[id(value)]


def _is_installed(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    # In an interactive session __main__ has no file. Any other module without a file is built in.
    return path.startswith(_INSTALLED) if isinstance(path, str) else getattr(module, "__name__", "") != "__main__"
