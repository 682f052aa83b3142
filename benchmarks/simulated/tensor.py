"""Tensors on the simulated accelerator, which hold their values as CPU tensors, and the execution of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.simulated.records import cause_of, record
from benchmarks.simulated.rules import (
    allocates,
    definition_of,
    host_operands,
    is_composite,
    is_copied,
    number_of_launches,
    waits_for,
    written_arguments,
)
from benchmarks.simulated.stream import DEVICE_GENERATORS, STREAM, CaptureError

NAME = "simulated"
HOST = torch.device("cpu")
PINNED: dict[int, Any] = {}  # storages of the host that count as pinned, by address
OBSERVERS: list[Callable[[Any, Sequence[Tensor], Sequence[Tensor]], None]] = []  # called with operands and results


class SimulatedTensor(torch.Tensor):
    """A tensor on the simulated accelerator; `elem` has its values."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor, requires_grad: bool = False) -> SimulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
            layout=elem.layout, device=torch.device(NAME, 0), requires_grad=requires_grad,
        )  # fmt: skip
        tensor.elem = elem.detach()
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return execute(op, *args, **kwargs or {})

    # With these two, nn.Module.to keeps parameters the objects they are, and so keeps tied weights tied.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *rest: Any) -> SimulatedTensor:
        return SimulatedTensor(inner["elem"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.elem})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Tensor = SimulatedTensor(self.elem.clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.elem = value.elem

    def __setitem__(self, index: Any, value: Any) -> None:
        # On CUDA, but not on a backend of Python, torch (2.13) makes numbers tensors of the host. One that is assigned
        # to a single element, as in x[0] = 1, is copied and waited for; a slice is filled without waiting.
        if isinstance(value, bool | int | float):
            value = torch.tensor(value, dtype=self.dtype)
            value.is_number = True
        super().__setitem__(index, value)

    def tolist(self) -> Any:
        return values_on_host(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"cannot convert a tensor on {self.device} to numpy; copy it to the host by .cpu() first")
        return values_on_host(self, "numpy").numpy()


def execute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with operands or results on the device."""
    name = op.overloadpacket.__name__
    if name == "copy_" and is_transfer(*args[:2]):
        return transfer(*args, **kwargs)
    if name == "_to_copy" and getattr(kwargs.get("device"), "type", NAME) == "cpu":
        return to_host(*args, **kwargs)
    if (definition := definition_of(op)) is not None:
        return definition(*args, **kwargs)
    if not is_composite(name, args, kwargs):
        # In inference mode torch leaves it to the tensor to take composite operations apart.
        composed = op.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    check_generator(op, kwargs.get("generator"), name)
    for operand in host_operands(op, args, tensors, str(cause_of(name))):
        copied = is_copied(name, args, operand)
        if STREAM.capture is not None and (copied or not is_number(operand)):
            raise CaptureError(f"{cause_of(name)}: an operand is on the host, and its value would be frozen in a graph")
        if copied:
            record_transfer(operand, "host to device", waits=True)
    if waits_for(op, args, kwargs):
        STREAM.wait(cause_of("item" if name == "_local_scalar_dense" else name))
    if name == "_local_scalar_dense":
        record_transfer(args[0], "device to host", waits=False)
        return args[0].elem.item()
    return compute(op, args, kwargs, tensors)


def compute(op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Return the results of an operation on the CPU as tensors on the device, and record its launches."""
    host_args, host_kwargs = tree_map(values_of, args), tree_map(values_of, kwargs)
    host_kwargs |= {"pin_memory": False} if "pin_memory" in kwargs else {}
    if getattr(kwargs.get("device"), "type", NAME) == "cpu":
        return op(*host_args, **host_kwargs)  # a new tensor on the host, as of new_zeros
    if STREAM.capture is not None:
        STREAM.capture.save(written_arguments(op, host_args, host_kwargs))
    results = op(*host_args, **host_kwargs)
    values = [values_of(tensor) for tensor in tensors]
    inputs = {each.untyped_storage()._cdata for each in values}
    outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    for observe in OBSERVERS:
        observe(op, values, outputs)
    # What shares the memory of an input is a view; an empty result launches nothing.
    new = [each for each in outputs if each.numel() and each.untyped_storage()._cdata not in inputs]
    if (op._schema.is_mutable or new) and not allocates(op):
        record("launches", cause_of(op.overloadpacket.__name__), number_of_launches(op, host_args, host_kwargs))
        if STREAM.capture is not None:
            STREAM.capture.add_operation(op, host_args, host_kwargs, outputs, new)
    if any(tensor.shape != value.shape for tensor, value in zip(tensors, values, strict=True)):
        raise NotImplementedError(f"{cause_of(op.overloadpacket.__name__)} resizes a tensor; allocate it in its size")
    wrappers = dict(zip(map(id, values), tensors, strict=True))  # what an operation in place returns
    # torch takes views of tensors made outside of inference mode for tensors made there too.
    makes_views = not new and any(not tensor.is_inference() for tensor in tensors)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not makes_views):
        return tree_map(lambda part: wrappers.get(id(part)) if id(part) in wrappers else on_device(part), results)


def is_transfer(target: Tensor, source: Tensor) -> bool:
    return isinstance(target, SimulatedTensor) != isinstance(source, SimulatedTensor)


def transfer(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values between host and device."""
    if isinstance(target, SimulatedTensor):
        if STREAM.capture is not None:
            cause = cause_of("copy_")
            raise CaptureError(f"{cause}: a copy from the host to the device; make it before the capture")
        record_transfer(source, "host to device", waits=not (non_blocking and is_pinned(source)))
        target.elem.copy_(source)
        return target
    assert isinstance(source, SimulatedTensor)
    if source.dtype != target.dtype or not source.elem.is_contiguous():
        record("launches", cause_of("copy_"))  # into a buffer on the device first
    record_transfer(source, "device to host", waits=not non_blocking)
    if non_blocking:
        STREAM.enqueue_copy(target, source.elem)
    else:
        target.copy_(source.elem)
    return target


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Do what torch asks of a backend where it cannot call the tensor's own `copy_`, as in torch.tensor."""
    return transfer(target, source, non_blocking)


def to_host(source: SimulatedTensor, dtype: torch.dtype | None = None, non_blocking: bool = False, **_: Any) -> Tensor:
    """Return a copy on the host."""
    target = torch.empty_like(source.elem, dtype=dtype)
    if non_blocking:
        PINNED[target.untyped_storage().data_ptr()] = target.untyped_storage()  # as torch allocates it
    return transfer(target, source, non_blocking)


def values_on_host(tensor: SimulatedTensor, operation: str) -> Tensor:
    STREAM.wait(cause_of(operation))
    record_transfer(tensor, "device to host", waits=False)
    return tensor.elem.clone()


def record_transfer(tensor: Tensor, direction: str, waits: bool) -> None:
    cause = cause_of(direction)
    if waits:
        STREAM.wait(cause)
    record("transfers", cause)
    record("bytes", cause, tensor.numel() * tensor.element_size())


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in PINNED


def check_generator(op: Any, generator: Any, name: str) -> None:
    """Raise RuntimeError for a generator of the host with a tensor on the device; a capture restores its state."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return
    if generator is not None and generator._cdata not in DEVICE_GENERATORS:
        raise RuntimeError(f"{cause_of(name)}: the generator is on the host; make it on the tensor's device")
    if STREAM.capture is not None:
        STREAM.capture.save_state(generator or torch.default_generator)


def is_number(operand: Tensor) -> bool:
    """Return whether a tensor on the host was a number of Python, which may be part of a graph."""
    return getattr(operand, "is_number", False)


def values_of(part: Any) -> Any:
    """Return the CPU's counterpart of an operand."""
    if isinstance(part, SimulatedTensor):
        return part.elem
    return HOST if isinstance(part, torch.device) else part


def on_device(part: Any) -> Any:
    return SimulatedTensor(part) if isinstance(part, Tensor) else part
