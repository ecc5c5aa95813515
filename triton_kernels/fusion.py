"""Several ops of a forward as one launch, where nobody watches what lies between them (`ops.registry.fusing`).

A dispatch mode sees the ops one by one. Those that it knows it does not launch at once: it makes their results, which
nobody can read before, and waits for what comes next.

    products of few rows with one x     one rounding of x; up to three matrices in one launch; a sum behind one
    norm, gated activation, attention   with the rounding that the product behind them wants
    rotations of q and k                with the writing of k and v, and with attention

Any other op, a view aside, launches what is waiting first. Every result is written as ever, whoever may want it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dasllama_torch.ops import ggml_types, kv_codecs
from dasllama_torch.ops.gated_act import gated_act as act_op
from dasllama_torch.ops.kv_write import kv_write as kv_write_op
from dasllama_torch.ops.paged_attention import paged_attention as attention_op
from dasllama_torch.ops.quant_linear import _check_all as check_linear
from dasllama_torch.ops.quant_linear import quant_linear as linear_op
from dasllama_torch.ops.registry import count_call, provide_fusion
from dasllama_torch.ops.rms_norm import rms_norm as norm_op
from dasllama_torch.ops.rope import rope as rope_op
from dasllama_torch.triton_kernels.attend_row import Fresh
from dasllama_torch.triton_kernels.combine_round import can_round, combine_rounded
from dasllama_torch.triton_kernels.few_rows import PARTS, can_mix, few_rows_together
from dasllama_torch.triton_kernels.fused_round import WIDEST, act_rounded, norm_rounded
from dasllama_torch.triton_kernels.gated_act import activate
from dasllama_torch.triton_kernels.kv_write import check_caches
from dasllama_torch.triton_kernels.launch import heads_of, rows_of
from dasllama_torch.triton_kernels.paged_attention import Shared, attend, can_write, is_served
from dasllama_torch.triton_kernels.quant_linear import few
from dasllama_torch.triton_kernels.quantize_activation import Rounded, rounded
from dasllama_torch.triton_kernels.rms_norm import normalize
from dasllama_torch.triton_kernels.rope import rotate
from dasllama_torch.triton_kernels.rope_write import rope_write

_MAY_COPY = {  # views of what is contiguous
    torch.ops.aten.contiguous,
    torch.ops.aten.reshape,
    torch.ops.aten.reshape_as,
    torch.ops.aten.flatten,
}
_MAY_CONVERT = {torch.ops.aten.to, torch.ops.aten.type_as}  # look like views


def _same(a: object, b: Tensor) -> bool:
    """Whether a is the contiguous b, or a view of all of it."""
    return isinstance(a, Tensor) and a.is_contiguous() and (a.data_ptr(), a.numel()) == (b.data_ptr(), b.numel())


def _is_plain(*tensors: object) -> bool:
    return all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in tensors)


@dataclass
class _Products:
    """Products of x, rounded to a, with packed matrices; `total` is the last one's result plus `residual`."""

    x: Tensor
    lattice: int
    a: Rounded
    items: list[tuple[Tensor, int, Tensor | None, Tensor]] = field(default_factory=list)  # qweight, qtype, bias, y
    residual: Tensor | None = None
    total: Tensor | None = None

    def launch(self) -> None:
        run: list[tuple[Tensor, int, Tensor | None, Tensor]] = []
        for item in self.items:
            _, qtype, bias, _ = item
            if run and not (len(run) < PARTS and run[0][2] is bias is None and self._fits(run, qtype)):
                self._launch(run)
                run = []
            run.append(item)
        self._launch(run)

    def _fits(self, run, qtype: int) -> bool:
        """Whether a matrix of this type may follow those of a launch."""
        first, last = run[0][1], run[-1][1]
        return first == last and (first == qtype or can_mix(self.a.rows, first, qtype))

    def _launch(self, run) -> None:
        weights, qtypes, biases, ys = zip(*run, strict=True)
        for _ in run:
            count_call("quant_linear", "triton/few_rows_together" if len(run) > 1 else "triton/few_rows_native")
        last = None if qtypes[0] == qtypes[-1] else qtypes[-1]
        few_rows_together(self.a, weights, qtypes[0], ys, biases[0], self.residual, self.total, last)


@dataclass
class _Roundable:
    """A result that the products behind it may want rounded, as rows of `width`."""

    y: Tensor

    @property
    def width(self) -> int:
        return self.y.shape[-1]

    def can_round(self, lattice: int) -> bool:
        return True


@dataclass
class _Norm(_Roundable):
    args: tuple

    def launch(self) -> None:
        count_call("rms_norm", "triton")
        normalize(self.y, *self.args)

    def launch_rounded(self, lattice: int) -> Rounded:
        x, weight, eps = self.args
        count_call("rms_norm", "triton/norm_round")
        return norm_rounded(rows_of(self.y), rows_of(x), weight, eps, lattice)


@dataclass
class _Act(_Roundable):
    args: tuple

    def launch(self) -> None:
        count_call("gated_act", "triton")
        activate(self.y, *self.args)

    def launch_rounded(self, lattice: int) -> Rounded:
        gate, up, act = self.args
        count_call("gated_act", "triton/act_round")
        return act_rounded(rows_of(self.y), rows_of(gate), rows_of(up), act, lattice)


@dataclass
class _Attention(_Roundable):
    """The sum of what programs found that share the keys of rows."""

    shared: Shared

    @property
    def width(self) -> int:
        return self.y.shape[-2] * self.y.shape[-1]

    def can_round(self, lattice: int) -> bool:
        return can_round(self.shared, lattice)

    def launch(self) -> None:
        count_call("paged_attention", "triton/shared")
        self.shared.combine()

    def launch_rounded(self, lattice: int) -> Rounded:
        count_call("paged_attention", "triton/shared_round")
        return combine_rounded(self.shared, lattice)


@dataclass
class _Rotations:
    """One or two rotations by the same tables."""

    cos: Tensor
    sin: Tensor
    items: list[tuple[Tensor, Tensor]]  # x, y

    def launch(self) -> None:
        for x, y in self.items:
            count_call("rope", "triton")
            rotate(y, x, self.cos, self.sin)


@dataclass
class _Written:
    """Rotations of q and k, and the writing of k and v."""

    fresh: Fresh
    k_cache: Tensor
    v_cache: Tensor

    def launch(self) -> None:
        self._count("triton/rope_write")
        f = self.fresh
        rope_write(f.q_out, f.q, f.k_out, f.k, f.cos, f.sin, f.v, self.k_cache, self.v_cache, f.slots)

    def attended(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *others) -> tuple[Tensor, Shared | None]:
        """With attention, in one launch."""
        self._count("triton/attend_row")
        return attend(q, k_cache, v_cache, *others, fresh=self.fresh)

    def meets(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> bool:
        """Whether attention to these caches is what follows."""
        mine = k_cache.data_ptr() == self.k_cache.data_ptr() and v_cache.data_ptr() == self.v_cache.data_ptr()
        return mine and can_write(self.fresh, q, k_cache, v_cache, block_table)

    def _count(self, kernel: str) -> None:
        for name in ("rope", "rope", "kv_write"):
            count_call(name, kernel)


class Fusion(TorchDispatchMode):
    """See the top of this file."""

    def __init__(self):
        super().__init__()
        self._waiting: _Products | _Roundable | _Rotations | _Written | None = None
        self._rounded: tuple[Tensor, int, Rounded] | None = None  # the last x that was rounded: nobody writes to it
        self._handlers = {
            linear_op: self._linear,
            torch.ops.aten.add.Tensor: self._add,
            norm_op: self._norm,
            act_op: self._act,
            rope_op: self._rope,
            kv_write_op: self._kv_write,
            attention_op: self._attend,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch when the class is made: True would import torch._dynamo, for seconds, at the first use."""
        return False

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0] is None:
            self._launch()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if func.is_view and packet not in _MAY_CONVERT and (packet not in _MAY_COPY or args[0].is_contiguous()):
            return func(*args, **(kwargs or {}))
        handler = None if kwargs else self._handlers.get(func)
        handled, result = handler(*args) if handler else (False, None)
        if not handled:
            self._launch()
            if func.namespace != "dasllama" and func._schema.is_mutable:
                self._rounded = None  # what was rounded may be another thing now
            result = func(*args, **(kwargs or {}))
        return result

    def _launch(self, then=None) -> None:
        waiting, self._waiting = self._waiting, then
        if waiting is not None:
            waiting.launch()

    # ---- each gives whether the op is taken care of, and its result -------------------------------------------------

    def _linear(self, x, qweight, qtype, bias, native):
        kind = ggml_types.GGML_TYPES[qtype]
        fits = native and not kind.is_float and _is_plain(x) and x.is_contiguous() and qweight.is_contiguous()
        M = x.numel() // max(x.shape[-1], 1)
        if not fits or not 0 < M <= few(qtype) or not len(qweight) or qweight.data_ptr() % 16:
            return False, None
        N, waiting = check_linear(x, qweight, qtype, bias), self._waiting
        fits = isinstance(waiting, _Products) and waiting.total is None and waiting.lattice == kind.lattice
        if not (fits and _same(x, waiting.x) and x.shape[-1] == waiting.x.shape[-1]):
            waiting = _Products(x, kind.lattice, self._round(x, kind.lattice))
            self._launch(waiting)
        y = x.new_empty((*x.shape[:-1], N))
        waiting.items.append((qweight, qtype, bias if bias is None else bias.contiguous(), y))
        return True, y

    def _round(self, x: Tensor, lattice: int) -> Rounded:
        waiting, last = self._waiting, self._rounded
        fits = isinstance(waiting, _Roundable) and waiting.can_round(lattice)
        if fits and _same(x, waiting.y) and x.shape[-1] == waiting.width:
            self._waiting = None
            a = waiting.launch_rounded(lattice)
        elif last is not None and _same(x, last[0]) and x.shape[-1] == last[0].shape[-1] and lattice == last[1]:
            a = last[2]
        else:
            self._launch()
            a = rounded(rows_of(x), lattice)
        self._rounded = x, lattice, a
        return a

    def _add(self, a, b):
        waiting = self._waiting
        if not isinstance(waiting, _Products) or len(waiting.items) > 1 or waiting.total is not None:
            return False, None
        if not _is_plain(a, b) or a.shape != b.shape or not a.is_contiguous() or not b.is_contiguous():
            return False, None
        y = waiting.items[0][3]
        if _same(a, y) == _same(b, y):
            return False, None
        waiting.residual, waiting.total = (b if _same(a, y) else a), torch.empty_like(a)
        return True, waiting.total

    def _norm(self, x, weight, eps):
        if not _is_plain(x) or not x.is_contiguous() or not 0 < x.shape[-1] <= WIDEST:
            return False, None
        if weight is not None and (weight.shape != x.shape[-1:] or not _is_plain(weight) or weight.stride(0) != 1):
            return False, None
        self._launch(_Norm(torch.empty_like(x), (x, weight, eps)))
        return True, self._waiting.y

    def _act(self, gate, up, act):
        if not _is_plain(gate, up) or gate.shape != up.shape:
            return False, None
        self._launch(_Act(gate.new_empty(gate.shape), (gate, up, act)))
        return True, self._waiting.y

    def _attend(self, *args):
        q, v_codec = args[0], args[12]
        if not _is_plain(q) or kv_codecs.CODECS[v_codec].rotated or not is_served(*args):
            return False, None
        waiting = self._waiting
        if isinstance(waiting, _Written) and waiting.meets(*args[:4]):
            self._waiting = None
            y, shared = waiting.attended(*args)
        else:
            self._launch()
            y, shared = attend(*args)
        if shared is None:
            count_call("paged_attention", "triton")
        else:
            self._waiting = _Attention(y, shared)
        return True, y

    def _rope(self, x, cos, sin):
        (T, half), D = cos.shape, x.shape[-1]
        if not _is_plain(x, cos, sin) or not cos.is_contiguous() or not sin.is_contiguous() or 2 * half > D:
            return False, None
        if x.dim() < 3 or x.numel() != T * x.shape[-2] * D or cos.shape != sin.shape:
            return False, None
        waiting, y = self._waiting, x.new_empty(x.shape)
        if isinstance(waiting, _Rotations) and len(waiting.items) == 1 and _same(cos, waiting.cos):
            waiting.items.append((x, y))
        else:
            self._launch(_Rotations(cos, sin, [(x, y)]))
        return True, y

    def _kv_write(self, k, v, k_cache, v_cache, slots, k_codec, v_codec):
        waiting = self._waiting
        if not isinstance(waiting, _Rotations) or len(waiting.items) != 2 or not _same(k, waiting.items[1][1]):
            return False, None
        (q, q_out), (k, k_out) = waiting.items
        blocks_of = [kv_codecs.CODECS[codec].block_bytes for codec in (k_codec, v_codec)]
        T, heads = len(waiting.cos), [heads_of(t) for t in (q, k, v)]
        alike = heads[0].shape[2] == heads[1].shape[2] and heads[1].shape[1] == heads[2].shape[1] == k_cache.shape[1]
        if any(blocks_of) or not _is_plain(v) or len(heads[2]) != T or not alike:
            return False, None
        if slots.shape != (T,) or slots.dtype != torch.int64:
            return False, None
        check_caches("kv_write", k_cache, v_cache, k_codec, v_codec, k.shape[-1], v.shape[-1])
        fresh = Fresh(
            heads[0], heads[1], heads[2], heads_of(q_out), heads_of(k_out), waiting.cos, waiting.sin, slots.contiguous()
        )
        self._waiting = _Written(fresh, k_cache, v_cache)
        return True, None


provide_fusion("cuda", Fusion)
