"""GPU kernels in Triton: one operation a file, its checked launcher beside it, its plain reference in reference.py.

Nothing here is imported before a tier in HBM is asked for, so Triton is not needed without a GPU. Under
`TRITON_INTERPRET=1` the same kernels run on CPU tensors, which is how they are tested everywhere.
"""
