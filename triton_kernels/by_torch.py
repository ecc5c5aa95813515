"""Ops whose formulas are a few of torch's own kernels, none of which waits for the GPU: torch serves them."""

from dasllama_torch.ops import elementwise
from dasllama_torch.ops.delta_gates import delta_gates_backward
from dasllama_torch.ops.moe_combine import moe_combine_backward
from dasllama_torch.ops.moe_router import moe_router_backward
from dasllama_torch.ops.query_temperature import query_temperature
from dasllama_torch.ops.registry import count_call, implement


def _serve(op) -> None:
    name = op._schema.name.removeprefix("dasllama::")

    def by_torch(*args):
        count_call(name, "torch")
        return op.reference(*args)

    implement(op, "CUDA")(by_torch)


for _op in (
    elementwise.add,
    elementwise.mul,
    elementwise.copy,
    elementwise.join,
    elementwise.columns,
    query_temperature,
    moe_router_backward,
    moe_combine_backward,
    delta_gates_backward,
):
    _serve(_op)
