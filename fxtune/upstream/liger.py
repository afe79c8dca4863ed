"""Private parts of liger-kernel. See the package's docstring for the form of an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


# The backward pass of RMSNorm.
#
# What: rms_norm_backward() with its positional arguments, the number of a way to cast, and the settings of a kernel.
# Why: Liger's public autograd function cannot be traced by torch.compile; kernels/liger_operators.py calls its parts.
# Gone: an ImportError or TypeError in the measurement that techniques.liger.rms_norm=auto takes, which leaves the norm
#   to compiled code; for `on`, that error.


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, casting: str, need_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """(dx, dweight) of an RMSNorm. `x`: [rows, width]. `casting`: "llama" or "gemma"."""
    from liger_kernel.ops import rms_norm_backward as backward
    from liger_kernel.ops.rms_norm import _str_to_casting_mode
    from liger_kernel.ops.utils import calculate_settings

    settings: Any = calculate_settings(x.shape[-1])
    dx, dweight = backward(
        dy,
        x,
        weight,
        scale,
        offset,
        _str_to_casting_mode[casting],
        *settings,
        False,
        None,
        needs_dw=need_dweight,
    )
    return dx, dweight
