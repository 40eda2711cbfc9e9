"""Triton reads TRITON_INTERPRET when it is imported: without a GPU its kernels are interpreted, chosen before anything
imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
