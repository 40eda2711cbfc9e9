"""Layers over jagged histories: `[events, ...]` with the lengths of the users, no padding.

    attention.py       jagged_attention: the function that layers call
    attention_op.py    the torch operators behind it: schemas, shapes for export, gradients
    attention_cpu.py   their CPU implementation: the core's kernel
    attention_cuda.py  their GPU implementation: kernels/attention, imported at the first call
    input_checks.py    checks of shapes, dtypes and lengths, for every implementation
    reference.py       the same in plain torch, a loop over users: what the tests compare with

Imported by models, train and serve. Importing this package registers the operators `hotrow::jagged_attention`,
`hotrow::jagged_attention_forward` and `hotrow::jagged_attention_backward`. Any thread may call them.
"""

from hotrow.nn.jagged.attention import jagged_attention

__all__ = ["jagged_attention"]
