"""An oracle for float32 numbers that are handed out between steps: a small model trained by hand in plain torch.

Float32 numbers are handed out as entries of ``model.state_dict()``, as ``master_params(optimizer)``, and as parameters
inside ``float32_weights(model)``. The oracle consists of two rules:

- **The meaning of a weight** (:class:`Store`) is a pure function of the weight's own numbers and of what its store
  keeps beside them.
- **A write through a reference** (:class:`Reference`) counts for the elements that differ from what was handed out,
  where the weight has not moved since. Where it has moved, the write is refused (:func:`verdict`).

:class:`ByHand` is a model and its optimizer made of these. :class:`Training` is a model under mpinit beside it.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from loops import poison
from torch import Tensor, nn
from torch.func import functional_call

import mpinit

T = TypeVar("T")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WIDTH = 4


# -- the meaning of a weight ------------------------------------------------------------------------------------------


class Store(ABC):
    """A place for float32 numbers: a weight, and something kept beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def weight_of(self, values: Tensor) -> Tensor:
        """Round float32 ``values`` to the weight's numbers."""

    @abstractmethod
    def beside(self, values: Tensor) -> Tensor:
        """Return what is kept beside the weight of ``values``."""

    @abstractmethod
    def meaning(self, weight: Tensor, beside: Tensor) -> Tensor:
        """Return the float32 numbers that a weight and what is kept beside it mean together."""


@final
class Full(Store):
    """A float32 master beside a 16-bit weight: the master counts wherever the weight is its rounding.

    A frozen weight is stored in the same way: its original float32 numbers are kept.
    """

    def weight_of(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def beside(self, values: Tensor) -> Tensor:
        return values.clone()

    def meaning(self, weight: Tensor, beside: Tensor) -> Tensor:
        return torch.where(beside.to(self.dtype) == weight, beside, weight.float())


@final
class Split(Store):
    """The lower 16 bits beside the upper 16 bits: a written 0 or inf alone counts without them."""

    def weight_of(self, values: Tensor) -> Tensor:
        return self._upper(values).to(torch.int16).view(BF16)

    def beside(self, values: Tensor) -> Tensor:
        return values.view(torch.int32) - (self._upper(values) << 16)

    def meaning(self, weight: Tensor, beside: Tensor) -> Tensor:
        wide = weight.float()
        joined = (wide.view(torch.int32) + beside).view(F32)
        return torch.where((weight == 0) | weight.isinf(), wide, joined)

    @staticmethod
    def _upper(values: Tensor) -> Tensor:
        """Return the upper halves, rounded half away from zero."""
        return (values.contiguous().view(torch.int32) + 0x8000) >> 16


@final
class Alone(Store):
    """Nothing beside the weight: a float32 parameter (``master_weights="model"``), or the 16-bit weight of O3."""

    def weight_of(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).clone()

    def beside(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values)

    def meaning(self, weight: Tensor, beside: Tensor) -> Tensor:
        return weight.float()


@dataclass(frozen=True)
class Kind:
    """One of the four stores as a user asks for it.

    Attributes:
        half: the dtype that forwards compute in.
        trained, frozen: the stores of weights that an optimizer has, and of others.
        masters: whether ``master_params`` yields other tensors than the model's parameters.
        copies: whether entries of a state dict are copies.
    """

    keywords: dict[str, Any]
    half: torch.dtype
    trained: Store
    frozen: Store
    masters: bool
    copies: bool


KINDS = {
    "full": Kind({"opt_level": "O5"}, BF16, Full(BF16), Full(BF16), masters=True, copies=True),
    "full16": Kind({"opt_level": "O2", "loss_scale": 8.0}, F16, Full(F16), Full(F16), masters=True, copies=True),
    "split": Kind(
        {"opt_level": "O5", "master_weights": "split"}, BF16, Split(BF16), Full(BF16), masters=False, copies=True
    ),
    "model": Kind(
        {"opt_level": "O5", "master_weights": "model"}, BF16, Alone(F32), Alone(F32), masters=False, copies=False
    ),
    "O3": Kind(
        {"opt_level": "O3", "cast_model_type": BF16, "master_weights": False},
        BF16,
        Alone(BF16),
        Full(BF16),
        masters=False,
        copies=True,
    ),
}


class Weight:
    """One weight by hand.

    Attributes:
        now: its own numbers, 16-bit but for the store "model".
        beside: what its store keeps beside them. More than one where the specification allows several: low bits of an
            element that was written to, given out in float32, and written back, may be there again or be gone.
        moves: how often it has moved, so that a write through an older reference may be refused.
    """

    def __init__(self, store: Store, values: Tensor) -> None:
        self.store = store
        self.moves = -1
        self.assign(values)

    @property
    def meanings(self) -> list[Tensor]:
        """The float32 numbers that the weight may mean: one, but for the case above."""
        return _distinct(self.store.meaning(self.now, beside) for beside in self.beside)

    @property
    def meaning(self) -> Tensor:
        return self.meanings[0]

    def assign(self, values: Tensor) -> None:
        """Set all numbers, as a step and ``load_state_dict`` do."""
        self.now = self.store.weight_of(values)
        self.beside = [self.store.beside(values)]
        self.moves += 1

    def assign_where(self, chosen: Tensor, values: Tensor) -> None:
        """Set some elements, as a write through a reference does."""
        self.follow()
        self.now = torch.where(chosen, self.store.weight_of(values), self.now)
        self.beside = [torch.where(chosen, self.store.beside(values), beside) for beside in self.beside]
        self.moves += 1

    def write(self, now: Tensor) -> None:
        """Set the weight's own numbers, as a user's write to the parameter does: what is beside them stays."""
        self.now = now.detach().clone()
        self.moves += 1

    def follow(self) -> None:
        """Allow that what is kept beside has become that of the meaning."""
        self.beside = _distinct([*self.beside, *map(self.store.beside, self.meanings)])

    def check(self, values: Tensor, what: str) -> None:
        """Assert that float32 ``values`` are a meaning of this weight, and remember which."""
        values = values.detach()
        assert values.dtype is F32, f"{what} is {values.dtype}"
        fitting = [beside for beside in self.beside if torch.equal(self.store.meaning(self.now, beside), values)]
        if fitting:
            self.beside = fitting
            return
        each = torch.stack([meaning == values for meaning in self.meanings]).any(0)
        assert bool(each.all()), f"{what}: {values.flatten()[:8]} instead of {self.meaning.flatten()[:8]}"
        self.beside = [*map(self.store.beside, [values]), *self.beside]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for tensor in tensors:
        if not any(torch.equal(tensor, other) for other in found):
            found.append(tensor)
    return found


# -- a write through a reference --------------------------------------------------------------------------------------


@dataclass
class Reference:
    """A float32 tensor in the user's hands: an entry of a state dict, or a master.

    Attributes:
        before: its numbers when it was handed out, or when a write to it counted last.
        moves: how often the weight had moved by then.
        wrote: what a read that is about to begin finds in it: masters are live, and a step moves them.
    """

    name: str
    tensor: Tensor
    is_master: bool
    before: Tensor = field(init=False)
    moves: int = field(init=False)
    wrote: Tensor = field(init=False)
    version: int = field(init=False)

    def hand_out(self, weight: Weight) -> None:
        """Remember what is handed out now."""
        self.before, self.moves = self.tensor.detach().clone(), weight.moves
        self.version = self.tensor._version

    @property
    def is_touched(self) -> bool:
        """Tell whether it was written to, also with the numbers that it had: an old one may be refused for that."""
        return self.tensor._version != self.version or bool(self.written.any())

    @property
    def written(self) -> Tensor:
        """The elements that the user has written through this reference: a mask."""
        return self.tensor.detach() != self.before


@dataclass(frozen=True)
class Verdict:
    """Name what a read does about writes through references to one weight: may refuse, must, or neither."""

    may_refuse: bool
    must_refuse: bool


def verdict(weight: Weight, references: list[Reference]) -> Verdict:
    """Judge the writes through ``references`` to ``weight`` that no read has seen yet."""
    may = must = False
    for reference in references:
        numbers = reference.tensor.detach()
        may |= reference.moves != weight.moves
        is_lost = []
        for meaning in weight.meanings:
            moved = reference.before != meaning
            may |= bool(moved.any())
            differs = weight.store.weight_of(numbers) != weight.now if reference.is_master else numbers != meaning
            is_lost.append(bool((reference.written & moved & differs).any()))
        must |= all(is_lost)
    for one, other in itertools.combinations(references, 2):
        may |= one.is_master != other.is_master
        both = one.written & other.written
        must |= bool((both & (one.tensor.detach() != other.tensor.detach())).any())
    return Verdict(may or must, must)


# -- a model and its optimizer by hand --------------------------------------------------------------------------------


class Net(nn.Module):
    """A Linear whose weight is tied to another one's, a LayerNorm, and a frozen Linear."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        out: Tensor = self.last(self.tied(self.norm(self.first(x))))
        return out


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=2.0**-4)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=2.0**-4)


def batch(number: int) -> Tensor:
    """The inputs of an iteration."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(output: Tensor) -> Tensor:
    """A loss whose gradients are neither large nor 0."""
    return (output.float() - 1).square().mean()


class ByHand:
    """The weights of a model by their first names, their gradients, and torch's optimizer over float32 parameters.

    Attributes:
        weights: the oracle of each weight.
        first_name: for every name, the first one of the same tensor.
        gradients: float32; None where there is none.
    """

    def __init__(self, model: nn.Module, kind: Kind, make: Any) -> None:
        self.kind = kind
        self.plain = copy.deepcopy(model)
        names: dict[nn.Parameter, str] = {}
        self.first_name = {
            name: names.setdefault(parameter, name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.weights: dict[str, Weight] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.gradients: dict[str, Tensor | None] = {}
        for name, parameter in model.named_parameters():
            store = kind.trained if parameter.requires_grad else kind.frozen
            self.weights[name] = Weight(store, parameter.detach())
            if parameter.requires_grad:
                self.parameters[name] = nn.Parameter(parameter.detach().to(self._step_dtype, copy=True))
                self.gradients[name] = None
        self.optimizer = make(self.parameters.values())

    @property
    def _step_dtype(self) -> torch.dtype:
        """The dtype that a step computes in: at O3 the weights' own."""
        return BF16 if isinstance(self.kind.trained, Alone) and self.kind.trained.dtype is BF16 else F32

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Compute in 16 bits of the weights' own numbers; in float32 of what they mean."""
        return functional_call(self.plain, self._tensors(dtype or self.kind.half), (x.to(dtype or self.kind.half),))

    def _tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: (weight.meaning if dtype is F32 else weight.now).to(dtype, copy=True)
            for name, weight in self.weights.items()
        }

    def backward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gradients of one batch, up to rounding: the order of sums is the model's."""
        tensors = {name: tensor.requires_grad_() for name, tensor in self._tensors(self.kind.half).items()}
        output = functional_call(self.plain, tensors, (x.to(self.kind.half),))
        wanted = [tensors[name] for name in self.gradients]
        found = torch.autograd.grad(loss_of(output.float()), wanted)
        return {name: gradient.float() for name, gradient in zip(self.gradients, found, strict=True)}

    def step(self) -> None:
        """Step in float32, of what weights mean; at O3 in the weights' own dtype."""
        for name, parameter in self.parameters.items():
            weight, gradient = self.weights[name], self.gradients[name]
            parameter.data = weight.meaning.to(self._step_dtype, copy=True)
            parameter.grad = None if gradient is None else gradient.to(self._step_dtype)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            if self.gradients[name] is None:
                self.weights[name].follow()
            else:
                self.weights[name].assign(parameter.detach().float())

    def train(self, name: str, **options: Any) -> None:
        """Add a weight that was frozen to a group of its own."""
        weight = self.weights[name] = Weight(self.kind.trained, self.weights[name].meaning)
        self.parameters[name] = nn.Parameter(weight.meaning.to(self._step_dtype, copy=True))
        self.gradients[name] = None
        self.optimizer.add_param_group({"params": [self.parameters[name]], **options})


# -- a model under mpinit beside it -----------------------------------------------------------------------------------


class Training:
    """A model under mpinit beside the one by hand.

    Attributes:
        references: all that the user has kept: entries of state dicts, and masters.
    """

    def __init__(self, kind: str, make: Any = sgd, model: nn.Module | None = None, **keywords: Any) -> None:
        self.kind = KINDS[kind]
        self.keywords = {"verbosity": 0} | self.kind.keywords | keywords
        torch.manual_seed(0)
        self.model: Any = Net() if model is None else model
        if kind == "O3":
            # So that the first numbers are those of 16 bits, whichever of them are trained.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(BF16).float()
        self.by_hand = ByHand(self.model, self.kind, make)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = make(trained)
        mpinit.initialize(self.model, self.optimizer, **self.keywords)
        self.references: list[Reference] = []
        self.batches = 0

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of distinct weights."""
        return list(self.by_hand.weights)

    @property
    def trained(self) -> list[str]:
        """Return the weights of the optimizer, in its order."""
        return list(self.by_hand.gradients)

    def weight(self, name: str) -> Any:
        """The model's parameter."""
        return self.model.get_parameter(name)

    def aliases(self, name: str) -> list[str]:
        """All names of one weight."""
        return [alias for alias, first in self.by_hand.first_name.items() if first == name]

    # -- reading ------------------------------------------------------------------------------------------------

    def pending(self, name: str) -> list[Reference]:
        """The references to a weight that were written to since the last read."""
        return [each for each in self.references if each.name == name and each.is_touched]

    def read(self, action: Callable[[], T], then: Callable[[], Any] = lambda: None) -> T:
        """Do what reads weights: writes through references count first, or are refused by name.

        After a refusal, which has changed nothing, ``action`` is done again, as a user would who has seen it.

        Args:
            action: what is done to the model.
            then: the same by hand; called when writes have been counted.
        """
        pending = {name: found for name in self.names if (found := self.pending(name))}
        verdicts = {name: verdict(self.by_hand.weights[name], found) for name, found in pending.items()}
        for reference in (each for found in pending.values() for each in found):
            reference.wrote = reference.tensor.detach().clone()
        refused: set[str] = set()
        try:
            result = action()
        except RuntimeError as error:
            may_refuse = {name for name, each in verdicts.items() if each.may_refuse}
            refused = self._refused(error, may_refuse)
            state = self._read_after_refusal(refused, may_refuse)
            self._judge(pending, verdicts, refused, state)
            result = action()
        else:
            self._judge(pending, verdicts, refused, {})
        then()
        for reference in self.references:
            if reference.is_master:
                reference.hand_out(self.by_hand.weights[reference.name])
        self.check_weights()
        return result

    def _refused(self, error: RuntimeError, allowed: set[str]) -> set[str]:
        """Check the error of a read; return the names of the weights that it refuses to write to."""
        found = {name for name in allowed if any(repr(alias) in str(error) for alias in self.aliases(name))}
        if not found:
            raise error
        if not any(each.is_master for name in found for each in self.pending(name)):
            assert "state_dict()" in str(error), error
            self.check_weights()
        for reference in (each for name in found for each in self.pending(name)):
            if reference.is_master:  # the way out: let it agree with its weight
                with torch.no_grad():
                    reference.tensor.copy_(self.weight(reference.name))
        return found

    def _read_after_refusal(self, refused: set[str], may_refuse: set[str]) -> dict[str, Tensor]:
        """Read until nothing is refused any more: one error may be of one entry, or of several.

        Names of weights that are refused meanwhile are added to ``refused``.
        """
        for _ in range(len(self.references) + 1):
            try:
                state: dict[str, Tensor] = self.model.state_dict()
            except RuntimeError as error:
                refused |= self._refused(error, may_refuse)
            else:
                return state
        raise AssertionError("the refusals do not end")

    def _judge(
        self,
        pending: dict[str, list[Reference]],
        verdicts: dict[str, Verdict],
        refused: set[str],
        state: dict[str, Tensor],
    ) -> None:
        for name, found in pending.items():
            weight = self.by_hand.weights[name]
            if name in refused:
                self._adopt(name, found, state[name])
                continue
            assert not verdicts[name].must_refuse, f"a write to {name} was lost, or old numbers came back, silently"
            for reference in found:
                weight.assign_where(reference.wrote != reference.before, reference.wrote)
            for reference in found:
                reference.hand_out(weight)

    def _adopt(self, name: str, found: list[Reference], real: Tensor) -> None:
        """After a refusal entries are dropped; what was there counts, or what one of several entries wrote."""
        weight = self.by_hand.weights[name]
        entries = [each for each in found if not each.is_master]
        self.references = [each for each in self.references if not any(each is entry for entry in entries)]
        allowed = [*weight.meanings, weight.now.float()]
        allowed += [torch.where(each.written, each.tensor, weight.meaning) for each in entries]
        # A master that was written to as well may count, where an entry is refused because of it.
        masters = [each for each in found if each.is_master]
        allowed += [torch.where(each.wrote != each.before, each.wrote, weight.meaning) for each in masters]
        each_element = torch.stack([values == real for values in allowed]).any(0)
        assert bool(each_element.all()), f"{name} after a refusal: {real} is none of {allowed}"
        weight.follow()
        if not any(torch.equal(real, meaning) for meaning in weight.meanings):
            weight.assign_where(real != weight.meaning, real)
        weight.moves += 1

    # -- comparing ----------------------------------------------------------------------------------------------

    def check_weights(self) -> None:
        """Compare the model's own parameters, without a read."""
        for name, weight in self.by_hand.weights.items():
            real = self.weight(name).detach()
            assert real.dtype is weight.store.dtype, f"{name} is {real.dtype}"
            assert torch.equal(real, weight.now), f"weight {name}: {real.flatten()} instead of {weight.now.flatten()}"

    def check(self) -> None:
        """Compare a state dict, and the model's own parameters."""
        self.state_dict()

    def state_dict(self, keep: bool = False) -> dict[str, Tensor]:
        """A state dict that was compared; ``keep``: writes to it are going to be judged."""
        state: dict[str, Tensor] = self.read(self.model.state_dict)
        for name, first in self.by_hand.first_name.items():
            self.by_hand.weights[first].check(state[name], f"entry {name}")
            aliases = state[name].data_ptr() == self.weight(first).data_ptr()
            assert aliases != self.kind.copies, "entries are copies, but where parameters are float32"
        if keep and self.kind.copies:
            self.keep({first: state[first] for first in self.names}, is_master=False)
        return state

    def masters(self) -> list[Any]:
        """The list of ``master_params``, compared, whose writes are going to be judged."""
        given = self.read(lambda: list(mpinit.master_params(self.optimizer)))
        for name, master in zip(self.trained, given, strict=True):
            weight = self.by_hand.weights[name]
            if self.kind.masters:
                weight.check(master, f"master {name}")
                weight.follow()
            else:
                assert master is self.weight(name)
            assert master.grad is self.weight(name).grad, f"gradient of master {name}"
        if self.kind.masters and not any(each.is_master for each in self.references):
            self.keep(dict(zip(self.trained, given, strict=True)), is_master=True)
        return given

    def keep(self, tensors: dict[str, Tensor], is_master: bool) -> None:
        """Judge writes to these from now on."""
        for name, tensor in tensors.items():
            reference = Reference(name, tensor, is_master)
            reference.hand_out(self.by_hand.weights[name])
            self.references.append(reference)

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self) -> Tensor:
        """A forward of the next batch, compared."""
        self.batches += 1
        x = batch(self.batches)
        output: Tensor = self.read(lambda: self.model(x))
        expected = self.by_hand.forward(x).float()
        assert torch.equal(output.float(), expected), f"forward: {output} instead of {expected}"
        return output

    def backward(self, overflows: bool = False, plainly: bool = False) -> None:
        """A backward pass; gradients are the model's from here on, where they are about those by hand."""
        loss = loss_of(self.forward())
        expected = self.by_hand.backward(batch(self.batches))
        if overflows:
            loss = poison(loss, self.weight(self.trained[0]))
        if plainly:
            loss.backward()
        else:
            with mpinit.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        if overflows:
            return
        for name, gradient in expected.items():
            before, real = self.by_hand.gradients[name], self.weight(name).grad.detach().float()
            whole = gradient if before is None else before + gradient
            close = 2**-4 * max(gradient.abs().max().item(), whole.abs().max().item())
            torch.testing.assert_close(real, whole, rtol=0, atol=close, msg=f"gradient of {name}: {real}, {whole}")
            self.by_hand.gradients[name] = real.clone()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.optimizer.zero_grad()
        self.by_hand.gradients = dict.fromkeys(self.by_hand.gradients)

    def step(self) -> None:
        """A step; the gradients that it used are compared."""
        self.read(self.optimizer.step, then=self._step_by_hand)

    def _step_by_hand(self) -> None:
        self.check_gradients()
        self.by_hand.step()

    def check_gradients(self) -> None:
        """Compare the gradients of the model's own parameters."""
        for name, gradient in self.by_hand.gradients.items():
            real = self.weight(name).grad
            assert (real is None) == (gradient is None), f"gradient of {name}: {real} instead of {gradient}"
            assert real is None or gradient is None or torch.equal(real.float(), gradient), f"gradient of {name}"

    def iterate(self) -> None:
        """One iteration."""
        self.zero_grad()
        self.backward()
        self.step()

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, name: str, how: Callable[[Any], Any]) -> None:
        """Write to a weight."""
        with torch.no_grad():
            how(self.weight(name))
        self.wrote(name)

    def wrote(self, name: str) -> None:
        """A weight was written to."""
        self.by_hand.weights[name].write(self.weight(name))
