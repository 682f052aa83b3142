"""Rules of an accelerator for single operations: which launch, which wait for the device, which operands may mix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ctcdraft.fused import OPERATIONS

# Composite operations for which an accelerator has kernels of its own, with their number: a fused attention, a fused
# norm; the two products of a GRU cell and one kernel for the rest. All others are taken apart.
COMPOSITE_LAUNCHES = {"scaled_dot_product_attention": 1, "rms_norm": 1, "gru_cell": 3}
LAUNCHES = {**COMPOSITE_LAUNCHES, "constant_pad_nd": 2}  # of other operations 1
ALLOCATIONS = frozenset(  # and what changes no values
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "detach_"}
)
# Not tagged as pointwise by torch, but they take a host scalar as value all the same.
SCALAR_OPERANDS = frozenset({"masked_fill", "masked_fill_", "fill_", "fill", "where"})
INDEXING = frozenset({"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"})
# Read their value, if it is a tensor on the device, by item().
READ_VALUE = frozenset({"masked_fill", "masked_fill_", "index_fill", "index_fill_"})
WAITING_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class DeviceError(RuntimeError):
    """Operands on two devices."""


# Operations of ctcdraft that are taken apart, as on an accelerator without Triton.
IN_TORCH: set[str] = set()


@contextmanager
def without_kernels(names: Iterable[str]) -> Iterator[None]:
    """Let these operations of ctcdraft run as PyTorch operations in this block."""
    before = set(IN_TORCH)
    IN_TORCH.update(names)
    try:
        yield
    finally:
        IN_TORCH.intersection_update(before)


def definition_of(op: Any) -> Any:
    """Return the function that an operation is taken apart by; None for others than those of `without_kernels`."""
    name = op.overloadpacket.__name__
    return OPERATIONS[name].definition if op.namespace == "ctcdraft" and name in IN_TORCH else None


def number_of_launches(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    name = op.overloadpacket.__name__
    if op.namespace == "ctcdraft":
        return OPERATIONS[name].launches
    if name == "scaled_dot_product_attention":
        mask = attention_mask(args, kwargs)
        # A mask of truth values is converted: a fill, a choice. One of other widths is copied: a fill, a copy.
        return 1 if mask is None else 1 + 2 * (mask.dtype == torch.bool) + 2 * (mask.shape[-1] % 16 > 0)
    if name == "addmm" and args[0].dim() == 2:
        return 2  # a matrix is copied first; the product adds to the copy, or a bias as it is
    return LAUNCHES.get(name, 1)


def attention_mask(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    return args[3] if len(args) > 3 else kwargs.get("attn_mask")


def is_composite(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an accelerator has a kernel for a composite operation, where it is one."""
    if name == "scaled_dot_product_attention" and args[0].shape[1] != args[1].shape[1]:
        return attention_mask(args, kwargs) is None  # masked grouped queries are refused by all fast kernels
    return name in COMPOSITE_LAUNCHES


def allocates(op: Any) -> bool:
    return op.overloadpacket.__name__ in ALLOCATIONS


def waits_for(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the host has to wait for the device to know the result or its shape."""
    name = op.overloadpacket.__name__
    if name in INDEXING:
        return bool(masks_of(args)) and not is_masked_fill(name, args)
    if name in READ_VALUE:
        return isinstance(args[-1], Tensor) and args[-1].device.type != "cpu"
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return any(tag in op.tags for tag in WAITING_TAGS)


def masks_of(args: Sequence[Any]) -> list[Tensor]:
    return [each for each in args[1] if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)]


def is_masked_fill(name: str, args: Sequence[Any]) -> bool:
    """Return whether one value is written under one mask, which needs no indices."""
    return name.startswith("index_put") and len(masks_of(args)) == len(args[1]) == 1 and args[2].numel() == 1


def is_copied(name: str, args: Sequence[Any], operand: Tensor) -> bool:
    """Return whether an operand on the host is copied to the device; otherwise its value goes with the launch."""
    return operand.dim() > 0 or (name in INDEXING and not is_masked_fill(name, args))


def host_operands(op: Any, args: Sequence[Any], tensors: Sequence[Tensor], where: str) -> list[Tensor]:
    """Return the operands on the host beside others on the device; raise DeviceError where no accelerator allows it.

    Allowed are scalars, zero-dimensional tensors, as operands of elementwise operations, and indices.
    """
    host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if not host or len(host) == len(tensors):
        return []
    name = op.overloadpacket.__name__
    takes_scalar = torch.Tag.pointwise in op.tags or name in SCALAR_OPERANDS or name in INDEXING
    for tensor in host:
        is_scalar = takes_scalar and tensor.dim() == 0 and not (op._schema.is_mutable and tensor is args[0])
        is_index = name in INDEXING and tensor is not args[0] and any(tensor is each for each in args[1])
        if not is_scalar and not is_index:
            on_device = next(each for each in tensors if each.device.type != "cpu")
            raise DeviceError(
                f"{where}: operands on {tensor.device} (shape {tuple(tensor.shape)}) and {on_device.device} (shape "
                f"{tuple(on_device.shape)}); make both on one device"
            )
    return host


def written_arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [value] if isinstance(value, Tensor) else list(value or ())
    return found
